"""Judges a run by what is durable: raw journal segments and records, read by rules of its own.

Nothing here uses the product's fold, transitions or scheduler: a bug there must not hide itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.storage.protocol import ObjectStore

_DONE = frozenset({"succeeded", "reused"})
_OVER = frozenset({"succeeded", "reused", "failed", "skipped", "cancelled"})
_REOPENED = frozenset({"failed", "skipped", "cancelled"})
_ENDED = frozenset({"attempt_succeeded", "attempt_failed", "attempt_lost"})
_NEVER_CHARGED = frozenset({"preempted", "node_lost", "storage", "no_room"})
_NEVER_RETRIED = frozenset({"user_error", "infeasible"})
_HELD = frozenset({"paused", "stopping", "cancelling"})


class Violation(BaseException):
    """Something that must never happen did. Not an ``Exception``: no controller may survive it."""


@dataclass(slots=True, kw_only=True)
class JobAudit:
    """One job, as its sweep's journal tells it."""

    name: str
    key: str
    needs: tuple[str, ...]
    gpus: float
    state: str = "pending"
    live: str = ""
    num_launches: int = 0
    last_number: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: tuple[str, float, str] | None = None
    """Kind, time and writer."""
    wrong_steps: list[int | None] = field(default_factory=list)
    """Where its numbers were wrong, since it was last opened."""
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class SweepAudit:
    """One sweep, as its journal tells it."""

    name: str
    state: str = "submitted"
    plan: Mapping[str, Any] = field(default_factory=dict)
    jobs: dict[str, JobAudit] = field(default_factory=dict)
    live: dict[str, JobAudit] = field(default_factory=dict)
    """Jobs by their live attempts; these are few, and the jobs may be many."""
    leaving: dict[str, str] = field(default_factory=dict)
    """Keys by attempt."""
    ends_since_s: float | None = None
    """Since when a client wants what runs to end: the sweep is being cancelled, or paused with checkpoints."""
    next_sequence: int = 0
    holder: str = ""
    cluster: str = ""
    epoch: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    is_tripped: bool = False
    num_succeeded: Counter[str] = field(default_factory=Counter)

    @property
    def max_failures(self) -> int:
        """Charged failures after which a job fails."""
        return int((self.plan.get("policy") or {}).get("max_failures") or self.plan.get("max_failures", 3))


class Audit:
    """Call ``segment`` for each journal segment that is durable, in order; raises ``Violation``."""

    def __init__(self, store: ObjectStore, min_backoff_s: Callable[[str, int], float], skew_s: float = 0.0) -> None:
        self._store = store
        self._min_backoff_s = min_backoff_s
        self._skew_s = skew_s
        self.sweeps: dict[str, SweepAudit] = {}
        self.launched: dict[str, tuple[str, int]] = {}
        """Cluster and epoch by attempt, as journals tell."""
        self.holders: dict[tuple[str, int], str] = {}
        """Controller by cluster and epoch."""
        self.committed: dict[str, str] = {}
        """Attempt by key."""
        self.num_events = 0
        self.broken: dict[str, str] = {}
        """By attempt that a broken GPU ended, its node."""
        self.guilty: set[str] = set()
        self.blames_right = True
        """Whether reports name the node at fault."""

    def take(self, other: Audit) -> None:
        """Know all that another audit knows, about a copy of its store."""
        self.sweeps = {name: _copied(sweep) for name, sweep in other.sweeps.items()}
        self.launched = dict(other.launched)
        self.holders, self.committed = dict(other.holders), dict(other.committed)
        self.broken, self.guilty, self.blames_right = dict(other.broken), set(other.guilty), other.blames_right

    # -------------------------------------------------------------------------------------------------- durable writes
    def written(self, name: str, content: bytes) -> None:
        """An object is durable that was not there before."""
        parts = name.split("/")
        if parts[0] == "sweeps" and parts[2] == "journal":
            self._segment(parts[1], int(parts[3].removesuffix(".jsonl")), content)
        elif parts[0] == "artifacts" and parts[-1] == "record.json":
            record = json.loads(content)
            require(record["key"] not in self.committed, f"{record['key']} is committed twice")
            self.committed[record["key"]] = record["attempt_id"]

    def _segment(self, name: str, sequence: int, content: bytes) -> None:
        sweep = self.sweeps.setdefault(name, SweepAudit(name=name))
        require(sequence == sweep.next_sequence, f"segment {sequence} of {name} is not the next one")
        sweep.next_sequence += 1
        header, *lines = [json.loads(line) for line in content.decode().splitlines()]
        for event in lines:
            self.num_events += 1
            if event["type"] == "sweep_adopted":
                self._adopted(sweep, event)
            require(header["holder"] == sweep.holder, f"{header['holder']} appends to {name} of {sweep.holder}")
            self._event(sweep, event)

    def _adopted(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        place = (event["cluster"], event["epoch"])
        other = self.holders.setdefault(place, event["holder"])
        require(other == event["holder"], f"{other} and {event['holder']} both have epoch {event['epoch']}")
        known = sweep.epochs.get(event["cluster"], 0)
        require(event["epoch"] >= known, f"epoch {event['epoch']} adopts {sweep.name} after {known}")
        sweep.epochs[event["cluster"]] = event["epoch"]
        sweep.holder, sweep.cluster, sweep.epoch = event["holder"], event["cluster"], event["epoch"]

    def _event(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if "message_id" in event:
            require(event["message_id"] not in sweep.settled, f"message {event['message_id']} is settled twice")
            sweep.settled.add(event["message_id"])
        rule = getattr(self, f"_on_{kind}", None)
        if kind in _ENDED:
            self._on_end(sweep, event)
        elif rule is not None:
            rule(sweep, event)

    # -------------------------------------------------------------------------------------------------------- messages
    def _on_plan_accepted(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        plan = json.loads(self._store.get(f"sweeps/{sweep.name}/plan-{event['revision']:04d}.json"))
        kept = {(job.name, job.key): job for job in sweep.jobs.values()}
        new = []
        for line in plan["jobs"]:
            name, key, gpus = line["name"], line["key"], line["resources"]["gpus"]
            fresh = JobAudit(name=name, key=key, needs=tuple(line["needs"]), gpus=gpus)
            new.append(kept.pop((name, key), fresh))
        sweep.leaving.update({job.live: job.key for job in kept.values() if job.live})
        sweep.jobs = {job.name: job for job in new}
        sweep.live = {job.live: job for job in new if job.live}
        sweep.plan = plan
        self._reopen(sweep, event)

    def _on_sweep_reopened(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        self._reopen(sweep, event)

    def _reopen(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        sweep.state, sweep.is_tripped, sweep.ends_since_s = "running", False, None
        for job in sweep.jobs.values():
            if job.state in _REOPENED:
                _renew(job)

    def _on_jobs_retried(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        if sweep.state != "paused":
            sweep.state, sweep.ends_since_s = "running", None
        for name in event["jobs"]:
            require(sweep.jobs[name].state in _REOPENED, f"{name} is retried and {sweep.jobs[name].state}")
            _renew(sweep.jobs[name])

    def _on_jobs_cancelled(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        for name in event["jobs"]:
            job = sweep.jobs[name]
            require(job.state not in _OVER, f"{name} is cancelled and {job.state}")
            if job.live:
                sweep.leaving[job.live] = job.key
                del sweep.live[job.live]
            job.state, job.live = "cancelled", ""

    def _on_cancel_requested(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        if sweep.state == "submitted":
            sweep.state = "cancelled"
        elif not _is_final(sweep):
            sweep.state, sweep.ends_since_s = "cancelling", event["at_s"]

    def _on_sweep_paused(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        sweep.state = "paused"
        sweep.ends_since_s = event["at_s"] if event["running"] == "checkpoint" else None

    def _on_sweep_resumed(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        require(sweep.state == "paused", f"{sweep.name} is resumed and {sweep.state}")
        sweep.state, sweep.ends_since_s = "running", None

    def _on_sweep_stopping(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        sweep.state, sweep.ends_since_s = "stopping", None

    def _on_sweep_tripped(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        sweep.state, sweep.is_tripped, sweep.ends_since_s = "stopping", True, None

    # ------------------------------------------------------------------------------------------------------------ jobs
    def _on_job_reused(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        job = self._pending(sweep, event)
        require(job.key in self.committed, f"{job.name} is reused and not committed")
        job.state = "reused"

    def _on_artifact_missed(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        job = sweep.jobs[event["job"]]
        require(job.state in _DONE, f"the artifact of {job.name} is missed, which is {job.state}")
        require(job.key not in self.committed, f"the artifact of {job.name} is missed and there")
        _renew(job)

    def _on_job_failed(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        job = self._pending(sweep, event)
        job.state, job.reason = "failed", event["reason"]
        charged = sum(number for kind, number in job.failures.items() if kind not in _NEVER_CHARGED)
        is_excused = not job.failures or _NEVER_RETRIED & job.failures.keys() or charged >= 2
        losses = job.failures["node_lost"]
        is_excused = is_excused or losses >= 5 or job.failures["storage"] >= 8
        require(bool(is_excused), f"{job.name} fails after only {dict(job.failures)}: {event['reason']}")

    def _on_job_skipped(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        job = self._pending(sweep, event)
        because = sweep.jobs[event["because"]]
        require(because.name in job.needs, f"{job.name} is skipped because of {because.name}, which it does not need")
        is_hopeless = because.state in _OVER - _DONE
        require(is_hopeless, f"{job.name} is skipped because of {because.name}, which is {because.state}")
        job.state = "skipped"

    def _on_job_cancelled(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        require(sweep.state in {"cancelling", "stopping"}, f"{event['job']} is cancelled and its sweep {sweep.state}")
        self._pending(sweep, event).state = "cancelled"

    def _pending(self, sweep: SweepAudit, event: Mapping[str, Any]) -> JobAudit:
        job = sweep.jobs[event["job"]]
        require(job.state == "pending", f"{event['type']} of {job.name}, which is {job.state}")
        return job

    # -------------------------------------------------------------------------------------------------------- attempts
    def _on_attempt_launched(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        job = self._pending(sweep, event)
        require(event["key"] == job.key, f"{event['attempt_id']} is of {event['key']}, its job of {job.key}")
        require(sweep.state == "running", f"{job.name} is launched and its sweep {sweep.state}")
        require(event["epoch"] == sweep.epoch, f"{job.name} is launched by {event['epoch']}, not {sweep.epoch}")
        require(event["attempt_id"] not in self.launched, f"{event['attempt_id']} is launched twice")
        require(event["number"] > job.last_number, f"attempt {event['number']} of {job.name} after {job.last_number}")
        for need in job.needs:
            found = sweep.jobs[need]
            require(found.state in _DONE, f"{job.name} is launched and needs {need}, which is {found.state}")
            require(found.key in self.committed, f"{job.name} is launched, and {need} is not committed")
        self._may_try(sweep, job, event["at_s"])
        self._check_caps(sweep, job)
        others = [other.name for other in sweep.live.values() if other.key == job.key]
        require(not others, f"{job.name} is launched while {others} work on its key")
        self.launched[event["attempt_id"]] = (sweep.cluster, event["epoch"])
        job.state, job.live = "running", event["attempt_id"]
        sweep.live[job.live] = job
        job.num_launches += 1
        job.last_number = event["number"]

    def _check_caps(self, sweep: SweepAudit, job: JobAudit) -> None:
        policy = sweep.plan.get("policy") or {}
        limit = policy.get("max_concurrent")
        num_live = len(sweep.live) + len(sweep.leaving)
        require(limit is None or num_live < limit, f"{job.name} is launched beside {num_live}; allowed are {limit}")
        limit, gpus = policy.get("max_gpus"), job.gpus + sum(other.gpus for other in sweep.live.values())
        require(limit is None or gpus <= limit + 1e-6, f"{job.name} brings {sweep.name} to {gpus:g} of {limit} GPUs")

    def _may_try(self, sweep: SweepAudit, job: JobAudit, at_s: float) -> None:
        spent = _NEVER_RETRIED & job.failures.keys()
        require(not spent, f"{job.name} is tried again after {sorted(spent)}")
        wrong = job.wrong_steps[-2:]
        require(len(wrong) < 2 or wrong[0] != wrong[1], f"{job.name} is tried again after wrong numbers at {wrong}")
        charged = sum(number for kind, number in job.failures.items() if kind not in _NEVER_CHARGED)
        require(charged < sweep.max_failures, f"{job.name} is tried again after {dict(job.failures)}")
        if job.last_failure is not None and job.failures:
            kind, ended_at_s, writer = job.last_failure
            wait_s = self._min_backoff_s(kind, job.failures[kind])
            slack_s = 1e-6 if writer == sweep.holder else 2.0 * self._skew_s
            waited_s = at_s - ended_at_s
            require(
                waited_s >= wait_s - slack_s, f"{job.name} is tried again {waited_s:g} s after {kind}, not {wait_s:g}"
            )

    def _on_end(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        if sweep.leaving.pop(event["attempt_id"], None) is not None:
            return
        job = sweep.jobs[event["job"]]
        require(job.live == event["attempt_id"], f"{event['attempt_id']} ends, and {job.name} has {job.live!r} live")
        job.live = ""
        del sweep.live[event["attempt_id"]]
        if event["type"] == "attempt_succeeded":
            require(job.key in self.committed, f"{job.name} succeeds and is not committed")
            job.state = "succeeded"
            sweep.num_succeeded[job.name] += 1
            return
        kind = "no_room" if event.get("had_no_room") else event.get("kind", "node_lost")
        if kind == "numerics":
            job.wrong_steps.append(event["step"])
        self._check_blame(event)
        job.state = "pending"
        job.failures[kind] += 1
        job.last_failure = (kind, event["at_s"], sweep.holder)

    def broke(self, attempt_id: str, node: str) -> None:
        """A broken GPU of this node has ended an attempt."""
        self.broken[attempt_id] = node
        self.guilty.add(node)

    def _check_blame(self, event: Mapping[str, Any]) -> None:
        """Where reports tell the truth, the journal blames the node at fault and no other one."""
        node = self.broken.get(event["attempt_id"], event["node"])
        told = f"{event['attempt_id']} failed on {node}, and {event['node'] or 'no node'} is blamed"
        require(event["type"] != "attempt_failed" or event["node"] == node or not self.blames_right, told)

    def _on_node_excluded(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        is_counted = "jobs failed on it" in event["reason"]
        is_guilty = event["node"] in self.guilty
        told = f"{event['node']} is left out, and nothing of it was broken: {event['reason']}"
        require(is_counted or is_guilty or not self.blames_right, told)

    def _on_sweep_finished(self, sweep: SweepAudit, event: Mapping[str, Any]) -> None:
        open_jobs = [job.name for job in sweep.jobs.values() if job.state not in _OVER]
        require(not open_jobs, f"{sweep.name} is finished, and {open_jobs} are not")
        require(not sweep.leaving, f"{sweep.name} is finished, and {sorted(sweep.leaving)} still run")
        all_done = all(job.state in _DONE for job in sweep.jobs.values())
        if event["status"] == "succeeded":
            require(all_done, f"{sweep.name} succeeded, and not all of its jobs are done")
        elif event["status"] == "failed":
            require(not all_done, f"{sweep.name} failed, and all of its jobs are done")
        else:
            require(sweep.state in _HELD, f"{sweep.name} is cancelled, and nobody asked for it")
        sweep.state, sweep.ends_since_s = event["status"], None


def require(condition: bool, text: str) -> None:
    """Raise ``Violation`` unless the condition holds."""
    if not condition:
        raise Violation(text)


def _copied(sweep: SweepAudit) -> SweepAudit:
    """``deepcopy`` takes seconds for 10,000 jobs."""
    jobs = {
        job.name: replace(job, failures=Counter(job.failures), wrong_steps=[*job.wrong_steps])
        for job in sweep.jobs.values()
    }
    return replace(
        sweep,
        jobs=jobs,
        live={attempt_id: jobs[job.name] for attempt_id, job in sweep.live.items()},
        leaving=dict(sweep.leaving),
        epochs=dict(sweep.epochs),
        settled=set(sweep.settled),
        num_succeeded=Counter(sweep.num_succeeded),
    )


def _renew(job: JobAudit) -> None:
    job.state, job.failures, job.reason, job.wrong_steps = "pending", Counter(), "", []


def _is_final(sweep: SweepAudit) -> bool:
    return sweep.state in {"succeeded", "failed", "cancelled"}
