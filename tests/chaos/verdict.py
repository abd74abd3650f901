"""The judgement after the last kill, from what the store holds and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.planning.graph.plan import Job
from orchestrator.storage.layout import journal_folder, record_name
from orchestrator.storage.protocol import ObjectStore
from tests.chaos.chain_jobs import count_commits, end_of, expected_ends
from tests.simulation.audit import Audit


def journal_events(store: ObjectStore, sweep: str) -> list[Mapping[str, Any]]:
    """All events of a sweep, straight from its segments, each with the ``holder`` that wrote it."""
    events: list[Mapping[str, Any]] = []
    for name in sorted(stat.name for stat in store.list_objects(journal_folder(sweep))):
        header, *lines = [json.loads(line) for line in store.get(name).decode().splitlines()]
        events += [{**line, "holder_of_segment": header["holder"]} for line in lines]
    return events


def audit_journal(store: ObjectStore, sweep: str, jobs: Sequence[Job]) -> Audit:
    """Judge a sweep's segments by the simulation's rules, which share no code with the program.

    Among them: only who adopted the sweep last appends, epochs never fall, one attempt of a job lives at a time, no
    attempt ends twice, nothing succeeds or is reused without a record, and all jobs are over when the sweep is.

    Raises:
        Violation: something that must never happen did.
    """
    audit = Audit(store, lambda _kind, _number: 0.0)
    for job in jobs:
        name = record_name(job.key)
        if store.exists(name):
            audit.written(name, store.get(name))
    for stat in sorted(store.list_objects(journal_folder(sweep)), key=lambda stat: stat.name):
        audit.written(stat.name, store.get(stat.name))
    return audit


def judge(store: ObjectStore, sweep: str, jobs: Sequence[Job]) -> Audit:
    """Every job done once, with the end that it has undisturbed, committed by one attempt; nobody wrote out of turn."""
    audit = audit_journal(store, sweep, jobs)
    assert audit.sweeps[sweep].state == "succeeded"
    assert audit.sweeps[sweep].num_succeeded == Counter(job.name for job in jobs)
    assert {job.name: end_of(store, job.key) for job in jobs} == expected_ends(jobs)
    assert {job.name: count_commits(store, job.key) for job in jobs if count_commits(store, job.key) > 1} == {}
    successes = [event for event in journal_events(store, sweep) if event["type"] == "attempt_succeeded"]
    assert {event["job"]: event["attempt_id"] for event in successes}.keys() == {job.name for job in jobs}
    return audit
