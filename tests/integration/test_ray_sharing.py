"""Sweeps that compete on a real Ray cluster: shares by weight, room for priority, and takeovers by the clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ControllerLink, ensure_controller
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.transitions import SweepState
from orchestrator.sweepfile.values import Policy, PriorityClass
from orchestrator.sweeps.client import load_snapshot, submit
from orchestrator.sweeps.lease import LEASE_DURATION_S
from tests.chaos.chain_jobs import ENTRY_POINT, chain_job, read_traces
from tests.chaos.kills import find_snapshot, has_ended, running_pids
from tests.chaos.verdict import journal_events, judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
CLUSTER = "sharing-cluster"
DEADLINE_S = 200.0
ALL_CPUS = 8.0  # of the cluster that all tests share


@pytest.fixture
def link(store, namespace) -> ControllerLink:
    return ensure_controller(store.uri, CLUSTER, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))


def submit_sweep(store, link: ControllerLink, sweep: str, jobs: tuple[Job, ...], **policy: Any) -> None:
    plan = Plan(
        sweep=sweep, revision=0, store_uri=store.uri, jobs=jobs, baseline="", policy=Policy(breaker=0, **policy)
    )
    submit(store, plan, "", CLUSTER)
    link.wake(sweep)


def short_jobs(sweep: str, number: int) -> tuple[Job, ...]:
    """Each holds a quarter of the cluster for a second or so."""
    return tuple(chain_job(f"{sweep}/{n}", num_steps=10, step_s=0.1, cpus=ALL_CPUS / 4) for n in range(number))


def spans(events: list[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """From the launch to the end of each attempt."""
    launched_s = {event["attempt_id"]: event["at_s"] for event in events if event["type"] == "attempt_launched"}
    for event in events:
        if event["type"] in {"attempt_succeeded", "attempt_failed", "attempt_lost"}:
            yield launched_s[event["attempt_id"]], event["at_s"]


def seconds_within(pieces: list[tuple[float, float]], window: tuple[float, float]) -> float:
    """Job-seconds inside a window."""
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in pieces)


def test_sweeps_of_weights_three_and_one_share_a_busy_cluster_three_to_one(store, link, until):
    submit_sweep(store, link, "warm", short_jobs("warm", 8))
    until(lambda: has_ended(store, "warm"), DEADLINE_S)
    submit_sweep(store, link, "one", short_jobs("one", 40), weight=1.0)
    submit_sweep(store, link, "three", short_jobs("three", 80), weight=3.0)
    for sweep in ("one", "three"):
        until(lambda sweep=sweep: has_ended(store, sweep), DEADLINE_S)
    held = {sweep: list(spans(journal_events(store, sweep))) for sweep in ("one", "three")}
    # Both have work that waits: from when both have started until either has started its last.
    window = (
        max(min(start for start, _ in pieces) for pieces in held.values()),
        min(max(start for start, _ in pieces) for pieces in held.values()),
    )
    one_s, three_s = (seconds_within(held[sweep], window) for sweep in ("one", "three"))
    print(f"job-seconds {three_s:.1f} : {one_s:.1f} = {three_s / one_s:.2f} in {window[1] - window[0]:.1f} s")  # noqa: T201
    assert three_s / (one_s + three_s) == pytest.approx(0.75, rel=0.05)


def test_sweep_of_high_priority_takes_the_room_within_a_step_and_no_work_is_lost(store, link, until):
    step_s = 2.0
    low = chain_job("pretrain/low", num_steps=12, step_s=step_s, every=10**6, cpus=ALL_CPUS)
    high = chain_job("pretrain/high", num_steps=2, step_s=0.1, cpus=ALL_CPUS)
    submit_sweep(store, link, "low", (low,), priority=int(PriorityClass.LOW))
    until(lambda: running_pids(store, "low", lambda _: True, past_step=2), DEADLINE_S)
    submit_sweep(store, link, "high", (high,), priority=int(PriorityClass.HIGH))
    for sweep in ("high", "low"):
        until(lambda sweep=sweep: has_ended(store, sweep), DEADLINE_S)
    judge(store, "high", (high,))
    judge(store, "low", (low,))
    events = journal_events(store, "low")
    (asked,) = [event for event in events if event["type"] == "attempt_preempting"]
    (ended,) = [event for event in events if event["type"] == "attempt_failed"]
    first, second = sorted(
        (trace for trace in read_traces(store, low.key) if trace.end != "started"), key=lambda trace: trace.last_step
    )
    waited_s = ended["at_s"] - asked["at_s"]
    print(f"room {waited_s:.2f} s after it was asked for; a step takes {step_s:g} s")  # noqa: T201
    assert (ended["kind"], first.end) == ("preempted", "preempted")
    assert second.first_step == first.last_step > 0, "it goes on exactly where it was asked to make room"
    assert waited_s < step_s + 2.0
    (high_launch,) = [event for event in journal_events(store, "high") if event["type"] == "attempt_launched"]
    assert high_launch["at_s"] < [event["at_s"] for event in events if event["type"] == "attempt_launched"][1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_takeover_is_within_a_lease_and_two_seconds_and_attempts_lose_no_step(store, link, until, how):
    jobs = (chain_job("pretrain/long", num_steps=150, step_s=0.2, every=10**6),)
    submit_sweep(store, link, "goes-on", jobs)
    until(lambda: running_pids(store, "goes-on", lambda _: True, past_step=2), DEADLINE_S)
    killed_at_s = time.time()
    os.kill(link.pid, how)
    until(lambda: (found := find_snapshot(store, "goes-on")) is not None and found.epoch > link.epoch, DEADLINE_S)
    adoptions = [event["at_s"] for event in journal_events(store, "goes-on") if event["type"] == "sweep_adopted"]
    takeover_s = adoptions[-1] - killed_at_s
    print(f"takeover {takeover_s:.1f} s after {how.name}; the lease is {LEASE_DURATION_S:g} s")  # noqa: T201
    assert takeover_s <= LEASE_DURATION_S + 2.0
    until(lambda: has_ended(store, "goes-on"), DEADLINE_S)
    judge(store, "goes-on", jobs)
    assert load_snapshot(store, "goes-on").state is SweepState.SUCCEEDED
    assert load_snapshot(store, "goes-on").jobs["pretrain/long"].num_attempts == 1
    assert all(earlier < later for earlier, later in pairwise(adoptions))
