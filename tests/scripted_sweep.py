"""A controller on a fake clock over a scripted backend, and the smallest plan that has everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.controller.controller import Controller
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.testing import FakeClock, ScriptedBackend
from tests.builders import make_job, make_plan

__all__ = ["CLUSTER", "World", "diamond", "make_job", "make_plan"]

CLUSTER = "cluster-a"
MAX_TICKS = 400


def diamond() -> tuple[Job, ...]:
    """One dataset, two backbones, a probe of each."""
    return (
        make_job("dataset/tree"),
        make_job("pretrain/a", "dataset/tree"),
        make_job("pretrain/b", "dataset/tree"),
        make_job("probe/a", "pretrain/a"),
        make_job("probe/b", "pretrain/b"),
    )


class World:
    """A store, a clock, a backend that outlives its controllers, and the controller of the moment."""

    def __init__(self, root: Path, backend: ScriptedBackend | None = None, *, store: ObjectStore | None = None) -> None:
        self.store: ObjectStore = store or LocalStore(root)
        self.clock = FakeClock()
        self.backend = backend or ScriptedBackend(self.store)
        self.num_controllers = 0
        self.last_message: dict[str, str] = {}
        self.controller = self.new_controller()

    def new_controller(self, store: ObjectStore | None = None, *, cluster: str = CLUSTER) -> Controller:
        self.num_controllers += 1
        holder = f"holder-{self.num_controllers}"
        self.controller = Controller(store or self.store, self.backend, cluster, holder, self.clock)
        return self.controller

    def submit(self, *jobs: Job, sweep: str = "sweep", max_failures: int = 3) -> str:
        self.clock.advance(0.001)
        plan = make_plan(*jobs, sweep=sweep, store_uri=self.store.uri, max_failures=max_failures)
        self.last_message[sweep] = client.submit(self.store, plan, f"name: {sweep}\n", CLUSTER, now=self.clock())
        return self.last_message[sweep]

    def cancel(self, sweep: str = "sweep") -> None:
        self.clock.advance(0.001)
        self.last_message[sweep] = client.cancel(self.store, sweep, now=self.clock())

    def snapshot(self, sweep: str = "sweep") -> Snapshot:
        return client.load_snapshot(self.store, sweep)

    def job(self, name: str, sweep: str = "sweep") -> JobView:
        return self.snapshot(sweep).jobs[name]

    def is_running(self, name: str) -> bool:
        return name in {request.job for request in self.backend.live}

    def tick(self) -> bool:
        changed = self.controller.tick()
        self.clock.advance(0.1 if changed else 1.0)
        return changed

    def tick_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_TICKS):
            if condition():
                return
            self.tick()
        message = f"not reached in {MAX_TICKS} ticks; sweeps: {[self.snapshot(s).counts for s in self.sweeps()]}"
        raise AssertionError(message)

    def finish(self, *sweeps: str) -> None:
        """Tick until the sweeps have ended, with what was last asked of each."""
        self.tick_until(lambda: all(self._has_ended(sweep) for sweep in sweeps or ("sweep",)))

    def _has_ended(self, sweep: str) -> bool:
        snapshot = self.snapshot(sweep)
        return snapshot.state.is_final and self.last_message[sweep] in snapshot.handled

    def sweeps(self) -> list[str]:
        return client.list_sweeps(self.store)

    def launches(self) -> list[str]:
        return [request.job for request in self.backend.launched]
