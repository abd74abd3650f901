"""Kills everything right after some appends to journals: what is durable then must lead to the same end."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from orchestrator.backends.simulated import Hazards, Turbulence
from tests.simulation.scenario import Scenario
from tests.simulation.storms import Weather
from tests.simulation.world import World


def run_with_recoveries(scenario: Scenario, *, probability: float, verbose: bool = False) -> World:
    """Run a scenario; after each append, with some probability, also a world that begins there with nothing alive.

    Raises:
        Violation: by either.
    """
    world = World(scenario, verbose=verbose)
    random = Random(scenario.seed + 2)  # noqa: S311 - a simulation

    def after_append() -> None:
        if random.random() < probability:
            recover(world)

    world.store.after_append = after_append
    world.run()
    return world


def recover(world: World) -> World:
    """A world without faults that starts from what another one has made durable so far."""
    calm = replace(
        world.scenario,
        hazards=Hazards(),
        asks=(),
        incidents=(),
        weather=Weather(),
        turbulence=Turbulence(),
        lost_artifacts=(),
    )
    world.trace("everything dies in a second world")
    second = World(calm, start_s=world.clock())
    try:
        second.recover(world)
    finally:
        second.close()
    return second
