"""What a failed attempt means for its job: the table of failure kinds, and patterns of messages that show a kind. Pure.

A new kind is a member of ``core.errors.FailureKind`` and a row of ``POLICY``. A new way to recognise a kind is a row of
``SIGNATURES`` here (by text) or an entry of ``_KINDS_BY_NAME`` in ``backends.classify`` (by class of exception).
Invariants:

- Budgets are counted from the journal's events alone, so that another controller makes the same decision.
- Every kind has one row. A kind whose charge is the cluster never uses up the job's own failures.
- A wait depends on the attempt's id and not on the clock: it is the same in every process.
- The fold reads ``is_deadly`` and ``may_blame_node``: raise ``state.snapshot.SNAPSHOT_VERSION`` when they change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from orchestrator.core.errors import NO_DEVICE_MEMORY, FailureKind
from orchestrator.state.snapshot import Failure, JobView, Snapshot

MAX_BACKOFF_S = 300.0
JITTER = 0.25
"""A wait is longer or shorter by up to this part, so that jobs that failed together are not retried together."""
LONGEST_BACKOFF_S = MAX_BACKOFF_S * (1.0 + JITTER)
"""A wait that ends later is by a clock that was put back since, and is over."""
MAX_LOSSES = 1000
MAX_GROWTH = 4
"""A limit that grows with the hours of a job grows to so many times its first value."""
_WORKERS_PER_NODE = 4
SAME_STEPS, SAME_PART = 20, 0.01
"""Failures of numerics at most so many steps apart, or this part of the steps so far, count as the same failure."""
FULL_DISK = "full disk"
"""Name of a signature."""
_MAX_QUOTED = 200
"""Characters of a message that a reason quotes."""


# ------------------------------------------------------------------------------------------------------------ the table
class FailureAction(StrEnum):
    """The action after a failure of one kind."""

    RETRY = "retry"
    RETRY_SMALLER = "retry_smaller"
    """With half the micro-batch, in whole norm groups (``Execution.memory_retries``)."""
    RETRY_ELSEWHERE = "retry_elsewhere"
    """On another node if there is one with room."""
    FAIL_JOB = "fail_job"


class Charge(StrEnum):
    """To whom a failure is charged."""

    JOB = "job"
    """Counts towards the policy's ``max_failures``."""
    CLUSTER = "cluster"
    """Not the job's fault: only the limit of the kind counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """One row of the policy. The n-th failure of a kind waits ``backoff_s * 2**(n - 1)``, at most ``MAX_BACKOFF_S``."""

    action: FailureAction = FailureAction.RETRY
    charge: Charge = Charge.JOB
    max_failures_of_kind: int | None = None
    """Failures of this kind after which the job fails; ``None`` = no limit of its own."""
    node_hours_per_failure: float = 0.0
    """Above 0: the limit grows by one for each such run time of the job's attempts, in node-hours."""
    hours_per_failure: float = 0.0
    """The same in hours, whatever the number of nodes: for what all of a gang meet at once. See ``MAX_GROWTH``."""
    backoff_s: float = 0.0
    waits_for: str = ""
    """The external condition for a further attempt; shown with the last message."""
    is_deadly: bool = False
    """Whether such an end comes at any time and loses unsaved work. A preempted attempt saves first."""
    may_blame_node: bool = False
    """Whether the node may be at fault."""
    ends_wait: bool = False
    """Whether an attempt that waits for resources may end in this way, which then is no failure."""


POLICY: dict[FailureKind, FailureRule] = {
    FailureKind.USER_ERROR: FailureRule(action=FailureAction.FAIL_JOB),
    FailureKind.INFEASIBLE: FailureRule(action=FailureAction.FAIL_JOB),
    # One flipped bit of a GPU must not end weeks of training: the next attempt replays the same samples in the same
    # order from the newest checkpoint. See ``_repetition`` for what the replay tells.
    FailureKind.NUMERICS: FailureRule(action=FailureAction.RETRY_ELSEWHERE, backoff_s=1.0),
    FailureKind.OUT_OF_MEMORY: FailureRule(
        action=FailureAction.RETRY_SMALLER, max_failures_of_kind=2, backoff_s=2.0, is_deadly=True
    ),
    # Tried once more: the copy in a node's cache may be bad and the store's good.
    FailureKind.BAD_DATA: FailureRule(action=FailureAction.RETRY_ELSEWHERE, max_failures_of_kind=2, backoff_s=2.0),
    FailureKind.TIMEOUT: FailureRule(
        action=FailureAction.RETRY_ELSEWHERE, backoff_s=1.0, is_deadly=True, may_blame_node=True
    ),
    FailureKind.HANG: FailureRule(
        action=FailureAction.RETRY_ELSEWHERE, backoff_s=1.0, is_deadly=True, may_blame_node=True, ends_wait=True
    ),
    # Neither a full disk nor a store that refuses is the job's fault, and a person needs some minutes to repair both:
    # the seven waits add up to ten. Objects that are missing or damaged are bad data: waiting does not help. A job of
    # weeks meets more than one such time, but a store that stays full must not repeat its long epochs for ever. A
    # full disk blames the node (see ``scheduling.node_exclusion``): such a node is always free, and every ready job
    # would fail there.
    FailureKind.STORAGE: FailureRule(
        charge=Charge.CLUSTER,
        max_failures_of_kind=8,
        hours_per_failure=6.0,
        backoff_s=5.0,
        waits_for="the store (or the disk of a node) to work again",
        is_deadly=True,
    ),
    FailureKind.UNKNOWN: FailureRule(
        action=FailureAction.RETRY_ELSEWHERE, backoff_s=1.0, is_deadly=True, may_blame_node=True
    ),
    # Free of charge, but an attempt that "is preempted" whenever it starts must not come back for ever.
    FailureKind.PREEMPTED: FailureRule(
        charge=Charge.CLUSTER, max_failures_of_kind=100, node_hours_per_failure=1.0, ends_wait=True
    ),
    # Bounded, because a job that kills its own node (host memory, driver) looks just like this. That dies early; a gang
    # on spot nodes dies now and then for weeks: one more for each four node-hours allows for 20 % per node-hour.
    FailureKind.NODE_LOST: FailureRule(
        action=FailureAction.RETRY_ELSEWHERE,
        charge=Charge.CLUSTER,
        max_failures_of_kind=10,
        node_hours_per_failure=4.0,
        backoff_s=0.25,
        is_deadly=True,
        may_blame_node=True,
        ends_wait=True,
    ),
    # Nothing ran, so nothing is charged, and no budget ends it: jobs wait for a node for as long as it takes.
    FailureKind.NO_ROOM: FailureRule(charge=Charge.CLUSTER, backoff_s=1.0, waits_for="room on the cluster"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAt:
    """The job may be retried from ``at_s`` on."""

    at_s: float
    reason: str = ""
    """The attempt's number, the limit, and the condition for which it waits; empty for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The job fails."""

    reason: str


# ---------------------------------------------------------------------------------------------------------- the verdict
def judge(job: JobView, *, max_failures: int, num_workers: int = 1) -> RetryAt | GiveUp:
    """What to do with a pending job, given all its failures since the sweep was last submitted.

    ``num_workers`` are those of the job: a gang runs on more nodes, and loses one of them more often.
    """
    last = job.last_failure
    if last is None or not job.failures:
        return RetryAt(at_s=0.0)
    rule, count = POLICY[last.kind], job.failures.get(last.kind, 0)
    allowed, how = _allowed(job, rule, num_workers)
    charged = sum(n for kind, n in job.failures.items() if POLICY[kind].charge is Charge.JOB)
    spent = _repetition(job, last, count) or _spent_budget(rule, count, allowed, how, charged, max_failures)
    if spent:
        return GiveUp(reason=f"{last.kind}: {last.message} ({spent})")
    wait_s = _backoff_s(rule, count, last.attempt_id)
    reason = f"after {last.kind}"
    reason += f", {count} of at most {allowed}{how}" if allowed is not None else ""
    reason += f"; {charged} of {max_failures} failures (policy.failures) are used" if rule.charge is Charge.JOB else ""
    reason += f"; backoff {wait_s:.3g} s, {_MEANS[rule.action]}"
    if rule.waits_for:
        reason += f"; waits for {rule.waits_for}: {_first_line(last.message)}"
    return RetryAt(at_s=last.at_s + wait_s, reason=reason)


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}..."


_MEANS = {
    FailureAction.RETRY: "tried again",
    FailureAction.RETRY_SMALLER: "tried again with half the micro-batch",
    FailureAction.RETRY_ELSEWHERE: "tried again, on another node if one has room",
    FailureAction.FAIL_JOB: "not tried again",
}


def _allowed(job: JobView, rule: FailureRule, num_workers: int) -> tuple[int | None, str]:
    """Failures of a kind after which a job fails, and how the number was computed."""
    first = rule.max_failures_of_kind
    if first is None or not (rule.node_hours_per_failure or rule.hours_per_failure):
        return first, ""
    each, ran, unit, most = rule.hours_per_failure, job.ran_s / 3600.0, "hours", MAX_GROWTH * first
    if rule.node_hours_per_failure:
        each, unit, most = rule.node_hours_per_failure, "node-hours", MAX_LOSSES
        ran *= max(1.0, num_workers / _WORKERS_PER_NODE)
    return min(most, first + int(ran / each)), f" ({first} + one per {each:g} of {ran:.3g} {unit} run)"


def is_same_step(first: Failure, later: Failure) -> bool:
    """Whether two failures of numerics are the same one: a random bit flip does not repeat at the same step.

    Other GPUs, layouts and micro-batches round differently, which may move a divergence by a few steps. Failures
    without a step, as of L-BFGS fits, always count as the same.
    """
    if first.step is None or later.step is None:
        return first.step == later.step
    return abs(first.step - later.step) <= max(SAME_STEPS, SAME_PART * first.step)


def _repetition(job: JobView, last: Failure, count: int) -> str:
    """Why a failure of numerics is the job's own fault: the replay of its steps reproduced it."""
    if last.kind is not FailureKind.NUMERICS or count < 2 or len(job.numerics) < 2:
        return ""
    first, later = job.numerics[-2:]
    if not is_same_step(first, later):
        return ""
    where = f"step {first.step}" if first.step == later.step else f"steps {first.step} and {later.step}"
    nodes = f" (on {first.node} and {later.node})" if first.node and later.node else ""
    again = "once more from the newest checkpoint" if first.step is not None else "once more"
    at = f" at {where}" if first.step is not None else ""
    return f"the attempt was made {again} and ended so again{at}{nodes}: the data or the recipe is the cause, no node"


def _spent_budget(  # noqa: PLR0917 - the numbers of one sentence
    rule: FailureRule, count: int, allowed: int | None, how: str, charged: int, max_failures: int
) -> str:
    """Why there is no further attempt; empty if there is one."""
    if rule.action is FailureAction.FAIL_JOB:
        return "a failure of this kind is never retried, since it would come back"
    if allowed is not None and count >= allowed:
        return f"attempt {count} that ended so, and at most {allowed}{how} are made"
    if rule.charge is Charge.JOB and charged >= max_failures:
        return (
            f"failed attempt {charged} of max_failures={max_failures} (policy.failures): all are spent; "
            "resubmit the sweep to try again"
        )
    return ""


def _backoff_s(rule: FailureRule, count: int, attempt_id: str) -> float:
    digest = hashlib.sha256(attempt_id.encode()).digest()
    spread = 1.0 + JITTER * (2.0 * int.from_bytes(digest[:4], "big") / 0xFFFFFFFF - 1.0)
    return min(MAX_BACKOFF_S, rule.backoff_s * 2.0 ** min(count - 1, 30)) * spread


# ----------------------------------------------------------------------------------------------------------- signatures
@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known cause."""

    name: str
    kind: FailureKind
    pattern: re.Pattern[str]
    advice: str
    blames_node: bool = False
    """Whether the node's hardware or set-up is at fault, so that the node is excluded."""


def _signature(name: str, kind: FailureKind, pattern: str, advice: str, *, blames_node: bool = False) -> Signature:
    compiled = re.compile(pattern, re.IGNORECASE)
    return Signature(name=name, kind=kind, pattern=compiled, advice=advice, blames_node=blames_node)


SIGNATURES: tuple[Signature, ...] = (
    # Before all others: a broken GPU shows as illegal accesses, NCCL errors or out-of-memory too.
    _signature(
        "broken GPU",
        FailureKind.NODE_LOST,
        r"uncorrectable ECC|\bXid\b.{0,40}\b(?:31|48|61|62|63|64|69|74|79|92|94|95|119|120)\b|double[- ]bit ECC"
        r"|GPU has fallen off the bus|NVLink.{0,20}error|CUDA error: (?:device not ready|hardware stack error)"
        r"|CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected"
        r"|NVML.{0,40}(?:driver/library version mismatch|failed to initialize)",
        "the node's GPU or driver is broken; the node is excluded for a while: drain and reset it (nvidia-smi -q)",
        blames_node=True,
    ),
    _signature(
        "other code",
        FailureKind.NODE_LOST,
        r"runs code (?:[0-9a-f]{16}|of an earlier version), and not [0-9a-f]{16} as the others",
        "deploy one version on all nodes and name its image by digest (image@sha256:...): a tag may mean another image "
        "on a node that starts later. The node is excluded for a while",
        blames_node=True,
    ),
    _signature(
        "full shared memory",
        FailureKind.OUT_OF_MEMORY,
        r"bus error|\bSIGBUS\b|unable to (?:open|allocate|mmap|write to).{0,40}shared memory"
        r"|insufficient shared memory|(?:creating|create|extend).{0,40}(?:shared memory (?:segment|file)|/dev/shm/)",
        "shared memory (/dev/shm) is full: give the container more of it (docker --shm-size, an emptyDir of medium "
        "Memory on Kubernetes), or lower the number of loader workers",
    ),
    _signature(
        "GPU memory",
        FailureKind.OUT_OF_MEMORY,
        NO_DEVICE_MEMORY,
        "the next attempt halves the micro-batch in whole norm groups",
    ),
    _signature(
        "host memory",
        FailureKind.OUT_OF_MEMORY,
        r"can't allocate memory|cannot allocate memory|std::bad_alloc|oom[- ]kill|out of memory: killed process"
        r"|killed due to the node running low on memory|exit(?:ed)? (?:code|status) 137|MemoryError",
        "the node ran out of memory: set memory_gib of the jobs to what they need, so that fewer share a node",
    ),
    _signature(
        FULL_DISK,
        FailureKind.STORAGE,
        r"no space left on device|\bENOSPC\b|disk quota exceeded|\bEDQUOT\b|\bthe disk is full\b"
        r"|the local disk's utilization is over capacity",  # Ray's
        "a disk is full: make room in the cache or scratch directory of that node",
    ),
    _signature(
        "lost peer",
        FailureKind.NODE_LOST,
        # Not every NCCL error: most of the others are this rank's own (see ``errors.is_lost_peer``).
        r"ncclRemoteError|ncclSystemError|unhandled system error.{0,60}NCCL|NCCL timeout|NCCL communicator was aborted"
        r"|remote process exited or there was a network error|connection (?:closed|reset) by peer"
        r"|Watchdog caught collective operation timeout|\[(?!enforce fail)[^\]]*gloo/(?:transport|rendezvous)/"
        r"|gloo.{0,80}(?:timed out|connection)",
        "ranks lost touch with each other: one of them died, or the network between their nodes failed",
    ),
    _signature(
        "corrupt sample",
        FailureKind.BAD_DATA,
        r"cannot identify image file|image file is truncated|broken (?:data stream|PNG)|tarfile\.ReadError"
        r"|unexpected end of data|invalid header|checksum mismatch|sha256 .{0,40}differs",
        "a sample or shard cannot be read; `orchestrator data index` names what is bad in a data set",
    ),
    _signature(
        "diverged",
        FailureKind.NUMERICS,
        r"\b(?:loss|gradient|grad norm|weights?)\b.{0,40}\b(?:nan|inf|infinite|not finite|non-finite)\b"
        r"|Function '\w+' returned nan values",
        "training diverged: lower the learning rate, warm up for longer or clip gradients",
    ),
    _signature(
        "stopped from outside",
        FailureKind.PREEMPTED,
        r"\bSIGTERM\b|received signal 15|preempt(?:ed|ion)|spot (?:instance )?interruption|DrainNode|node is draining",
        "the provider or an administrator took the node back",
    ),
    _signature(
        "died node",
        FailureKind.NODE_LOST,
        r"NodeDied|node .{0,60}(?:died|has been marked dead|was terminated)|raylet.{0,40}died|ActorDied"
        r"|ActorUnavailable|WorkerCrashed|OwnerDied|worker (?:died|crashed)|socket closed|missed too many heartbeats",
        "its process or node is gone",
    ),
)
"""Searched in this order: the first match is the cause."""


@lru_cache(maxsize=2048)  # each round of decisions matches the same failures again
def signature_of(text: str) -> Signature | None:
    """The known cause that matches a text, if any."""
    return next((signature for signature in SIGNATURES if signature.pattern.search(text)), None)


# ----------------------------------------------------------------------------------------------- how often attempts die
@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """How often attempts died, and in how many seconds of running."""

    num_deaths: int
    ran_s: float


def count_deaths(snapshots: Sequence[Snapshot], now: float) -> Deaths:
    """Of all attempts of these sweeps, running ones as far as they are at ``now``."""
    views = [view for snapshot in snapshots for view in snapshot.jobs.values()]
    ran_s = sum(view.ran_s for view in views)
    running = [attempt for snapshot in snapshots for attempt in snapshot.live_attempts]
    ran_s += sum(attempt.ran_s(now) for attempt in running)
    return Deaths(num_deaths=sum(view.num_deaths for view in views), ran_s=ran_s)


def observed_mtbf_s(
    snapshots: Sequence[Snapshot], *, prior_s: float, now: float, former: Iterable[Deaths] = ()
) -> float:
    """Mean time between deaths of an attempt, seconds: what was expected counts as one death after ``prior_s``.

    That is the mean of the rate's posterior under a gamma prior of shape 1, so it moves from the expectation to the
    observation with each death. ``former``: what was counted of further sweeps.
    """
    counted = [count_deaths(snapshots, now), *former]
    return (prior_s + sum(one.ran_s for one in counted)) / (1 + sum(one.num_deaths for one in counted))
