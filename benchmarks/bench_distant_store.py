"""What a distant store costs the controller: every request takes 40 ms.

Two arms in one run: requests one after the other with a look into each inbox per second, as it was; and as it is.
Prints; asserts no times.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partialmethod
from typing import Any

import pytest

from benchmarks.bench_controller import METHODS
from orchestrator.backends.ray.service import ACTIVE_PAUSE_S
from orchestrator.controller.controller import Controller
from orchestrator.core.contract import Resources
from orchestrator.storage import request_pool
from orchestrator.sweeps import client, inbox_polling
from orchestrator.testing import Hang, ScriptedBackend
from orchestrator.testing.memory_store import MemoryStore
from tests.builders import make_job, make_plan

LATENCY_S = 0.04
NUM_LAUNCHES, NUM_SWEEPS, NUM_IDLE, WATCHED_S = 512, 50, 200, 15.0


class DistantStore(MemoryStore):
    """A store in memory that answers late, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._uri = f"s3://distant/{self._uri.rpartition('/')[2]}"
        self.num_requests = 0
        self.latency_s = 0.0
        self._inside = threading.local()

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        original = getattr(MemoryStore, method)
        if getattr(self._inside, "is_so", False):
            return original(self, *arguments, **options)
        self.num_requests += 1
        time.sleep(self.latency_s)
        self._inside.is_so = True
        try:
            answer = original(self, *arguments, **options)
            return iter(list(answer)) if method == "list_objects" else answer
        finally:
            self._inside.is_so = False


for _method in METHODS:
    setattr(DistantStore, _method, partialmethod(DistantStore.ask, _method))


@pytest.fixture(params=["one by one", "side by side"])
def arm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(request_pool, "NUM_THREADS", 1)
        monkeypatch.setattr(inbox_polling, "EVERY_S", 1.0)
    return str(request.param)


DISTANT: dict[str, dict[str, float]] = {}


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}")


def say_of_distance(what: str, arm: str, figures: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    say(f"{what}, {LATENCY_S * 1e3:.0f} ms per request, {arm}: {shown}")
    before = DISTANT.setdefault(what, figures)
    if before is not figures:
        ratios = ", ".join(f"{name} {before[name] / value:.1f}" for name, value in figures.items())
        say(f"{what}, before / after: {ratios}")


@pytest.mark.timeout(400)
def test_launches_on_a_distant_store(arm: str) -> None:
    """Asked: 512 launches within 5 s."""
    store = DistantStore()
    jobs = [make_job(f"pretrain/{number}") for number in range(NUM_LAUNCHES)]
    backend = ScriptedBackend(
        store, {job.name: [Hang()] for job in jobs}, total=Resources(cpus=float(NUM_LAUNCHES), memory_gib=1e6)
    )
    controller = Controller(store, backend, "c", "bench")
    controller.tick()
    client.submit(store, make_plan(*jobs, sweep="many", store_uri=store.uri), "", "c")
    controller.wake("many")
    controller._lease.keep()
    store.latency_s, asked = LATENCY_S, store.num_requests
    started_s, cpu_s = time.perf_counter(), time.process_time()
    while len(backend.launched) < NUM_LAUNCHES:
        controller.tick()
    figures = {"seconds": time.perf_counter() - started_s, "CPU s": time.process_time() - cpu_s}
    figures["requests per launch"] = (store.num_requests - asked) / NUM_LAUNCHES
    say_of_distance(f"{NUM_LAUNCHES} launches", arm, figures)


@pytest.mark.parametrize("num_idle", [0, NUM_IDLE])
def test_rounds_of_many_sweeps_on_a_distant_store(arm: str, num_idle: int) -> None:
    """Asked: at most 20 % of the controller's thread at 50 sweeps that train, and no request more for idle ones."""
    store = DistantStore()
    backend = ScriptedBackend(
        store, {f"pretrain/{number}": [Hang()] for number in range(NUM_SWEEPS)}, total=Resources(cpus=64.0)
    )
    controller = Controller(store, backend, "c", "bench")
    for number in range(NUM_SWEEPS + num_idle):
        is_idle = number >= NUM_SWEEPS
        sweep = f"sweep-{number}"
        plan = make_plan(make_job(f"pretrain/{number}"), sweep=sweep, store_uri=store.uri)
        client.submit(store, plan, "", "c")
        if is_idle:
            client.pause(store, sweep)
    for _ in range(3):
        controller.wake()
        controller.tick()
    assert len(backend.live) == NUM_SWEEPS
    store.latency_s, asked, busy_s, cpu_s = LATENCY_S, store.num_requests, 0.0, time.process_time()
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + WATCHED_S:
        started_s = time.perf_counter()
        controller.tick()
        busy_s += time.perf_counter() - started_s
        time.sleep(ACTIVE_PAUSE_S)
    spent_s = time.perf_counter() - began_s
    figures = {"share of the thread": busy_s / spent_s, "requests/s": (store.num_requests - asked) / spent_s}
    figures["CPU share"] = (time.process_time() - cpu_s) / spent_s
    say_of_distance(f"{NUM_SWEEPS} sweeps that train and {num_idle} idle ones", arm, figures)
