"""Kills everything right after some appends to journals: what is durable then must lead to the same end."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from orchestrator.backends.simulated import Hazards, Turbulence
from tests.simulation.scenario import Scenario
from tests.simulation.storms import Weather
from tests.simulation.world import World

LARGE = 1000
"""Jobs."""


PART = 0.015
"""Of the appends of a small run, those after which a second world begins."""
NUM_PREFIXES = 8
"""Second worlds of a large run, each of which goes on for `LOOK_S`: to the end would take as long as the run itself.
With 10,000 jobs each takes about 4 s; what depends on the place of the cut, runs of 40 jobs show after every append."""
LOOK_S = 120.0


def run_with_recoveries(scenario: Scenario, *, part: float = PART, verbose: bool = False) -> World:
    """Run a scenario; after some of the appends, also a world that begins there with nothing alive.

    ``part`` of the appends, if the run is small; 1.0 = after every one, which takes some fifty times as long.

    Raises:
        Violation: by either.
    """
    world = World(scenario, verbose=verbose)
    random = Random(scenario.seed + 2)  # noqa: S311 - a simulation
    num_jobs = sum(len(sweep.jobs) for sweep in scenario.sweeps)
    is_large = num_jobs >= LARGE
    due = sorted(random.randrange(2 * num_jobs) for _ in range(NUM_PREFIXES)) if is_large else []

    def after_append() -> None:
        if due and world.audit.num_events >= due[0]:
            del due[0]
            recover(world, for_s=LOOK_S)
        elif not is_large and random.random() < part:
            recover(world)

    world.store.after_append = after_append
    world.run()
    return world


def recover(world: World, *, for_s: float | None = None) -> World:
    """A world without faults that starts from what another one has made durable so far."""
    calm = replace(
        world.scenario,
        hazards=Hazards(),
        asks=(),
        incidents=(),
        weather=Weather(),
        turbulence=Turbulence(),
        lost_artifacts=(),
        is_contest=False,  # what is lost waits for its backoff, and starts after others whose turn is later
        is_queue=False,
    )
    world.trace("everything dies in a second world")
    second = World(calm, start_s=world.clock())
    try:
        second.recover(world, for_s=for_s)
    finally:
        second.close()
    return second
