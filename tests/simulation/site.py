"""One cluster and its controllers, of which more than one may be awake."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from orchestrator.backends.simulated import SimulatedBackend, Turbulence, VirtualClock
from orchestrator.controller.controller import Controller
from orchestrator.core.errors import OrchestratorError
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.lease import LeaseLostError, StaleLeaseError, read_lease
from orchestrator.testing import SimulatedCrash
from tests.simulation.audit import Violation
from tests.simulation.interrupts import Gate, GatedBackend, GatedStore, Turn
from tests.simulation.scenario import Incident
from tests.simulation.storms import FAIR, StormyStore, Weather
from tests.simulation.watched import WatchedCluster

LEASE_S = 15.0
WATCHDOG_S = 2.0
IDLE_S = 20.0


class Surroundings(Protocol):
    """What a site sees of its world."""

    clock: VirtualClock
    weather: Weather
    turbulence: Turbulence
    num_rounds: int

    @property
    def true_store(self) -> ObjectStore: ...

    @property
    def pace_s(self) -> float: ...

    def trace(self, text: str) -> None: ...
    def skew_s(self, number: int) -> float: ...
    def check(self) -> None: ...


class Life:
    """One incarnation of a controller."""

    def __init__(self, world: Surroundings, cluster: WatchedCluster, number: int, random: Random) -> None:
        self.gate = Gate()
        self.turn: Turn | None = None
        self.name = f"{cluster.name}-{number}"
        self.store = StormyStore(world.true_store, world.clock, random, world.weather)
        self.backend = SimulatedBackend(cluster, random=random, turbulence=world.turbulence, shows_progress=True)
        skew_s = world.skew_s(number)
        store, self.seam = GatedStore(self.store, self.gate), GatedBackend(self.backend, self.gate)
        self.controller = Controller(store, self.seam, cluster.name, self.name, lambda: world.clock() + skew_s)
        self.pause_s = world.pace_s


class Site:
    """Keeps one controller going: a dead one is replaced soon, a silent one when its lease has run out."""

    def __init__(self, world: Surroundings, cluster: WatchedCluster, random: Random) -> None:
        self._world, self.cluster, self._random = world, cluster, random
        self._clock = world.clock
        self._lives: list[Life] = []
        self._pauses_s: list[float] = []
        self.num_lives = 0
        cluster.on_news = self._news

    def begin_life(self) -> None:
        """Start a controller, whoever else is there."""
        life = Life(self._world, self.cluster, self.num_lives, Random(self._random.random()))  # noqa: S311
        self.num_lives += 1
        self._lives.append(life)
        self._world.trace(f"{life.name} starts")
        self._clock.after(0.0, lambda: self._round(life))

    def strike(self, incident: Incident) -> None:
        """Let something befall the newest controller at one of its next accesses."""
        for life in self._lives[-1:]:
            if life.gate.crashes_in or life.gate.pauses_in or life.turn is not None:
                return  # one thing at a time
            life.gate.within = incident.within
            if incident.what == "crash":
                life.gate.crashes_in = incident.nth
            else:
                life.gate.pauses_in = incident.nth
                self._pauses_s.append(incident.pause_s)

    def calm(self) -> None:
        """Nothing befalls controllers any more."""
        self.cluster.calm()
        for life in self._lives:
            life.store.weather, life.backend.turbulence = FAIR, Turbulence()
            life.gate.crashes_in = life.gate.pauses_in = 0

    def close(self) -> None:
        """End the threads of controllers that are suspended."""
        for life in self._lives:
            if life.turn is not None:
                life.gate.is_dead = True
                life.turn.kill()

    def _round(self, life: Life) -> None:
        if life not in self._lives or life.turn is not None:
            return
        self._world.num_rounds += 1
        life.seam.num_looks = 0
        changes: list[bool] = []
        if not life.gate.pauses_in:
            self._settle(life, lambda: changes.append(life.controller.tick()), changes)
            return
        life.turn = life.gate.turn = Turn(lambda: changes.append(life.controller.tick()))
        self._settle(life, lambda: self._resume(life, changes), changes)

    def _resume(self, life: Life, changes: list[bool]) -> None:
        turn = life.turn
        if turn is None or turn.resume():
            life.turn = life.gate.turn = None
            return
        pause_s = self._pauses_s.pop(0)
        self._world.trace(f"{life.name} is suspended for {pause_s:.1f} s")
        self._clock.after(pause_s, lambda: self._wake(life, changes))
        if pause_s > LEASE_S + WATCHDOG_S:
            self._clock.after(LEASE_S + WATCHDOG_S, self.begin_life)

    def _wake(self, life: Life, changes: list[bool]) -> None:
        if life in self._lives:
            self._world.trace(f"{life.name} wakes")
            self._settle(life, lambda: self._resume(life, changes), changes)

    def _settle(self, life: Life, act: Callable[[], None], changes: list[bool]) -> None:
        """One round, or the rest of one, and what its end means."""
        try:
            act()
        except SimulatedCrash:
            self._end_life(life, "dies")
            self._clock.after(self._random.uniform(0.5, 5.0), self.begin_life)
        except LeaseLostError as error:
            self._check_start(life, error)
            self._end_life(life, "has lost its lease")
            if not self._lives:  # that may be a mistake: a watchdog starts another one all the same
                self._clock.after(LEASE_S + WATCHDOG_S, self.begin_life)
        except OrchestratorError:
            life.turn = life.gate.turn = None
        self._world.check()
        if life in self._lives and life.turn is None:
            life.pause_s = self._world.pace_s if any(changes) else min(IDLE_S, 2.0 * life.pause_s)
            self._clock.after(life.pause_s, lambda: self._round(life))

    def _check_start(self, life: Life, error: LeaseLostError) -> None:
        """Whoever has the lease can start: nobody else would ever come."""
        if isinstance(error, StaleLeaseError):
            lease = read_lease(self._world.true_store, self.cluster.name)
            if lease is not None and lease.holder == life.name:
                message = f"{life.name} has the lease of epoch {lease.epoch} and cannot start: {error}"
                raise Violation(message)

    def _end_life(self, life: Life, how: str) -> None:
        self._world.trace(f"{life.name} {how}")
        life.turn = life.gate.turn = None
        if life in self._lives:
            self._lives.remove(life)

    def _news(self) -> None:
        for life in self._lives:
            life.pause_s = self._world.pace_s
