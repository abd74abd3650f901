"""Failure values from exceptions, exit statuses and ends of logs; for all backends."""

from __future__ import annotations

import errno
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.core.contract import JobFailure, JobRequest
from orchestrator.core.errors import FailureKind, NumericsError, OrchestratorError
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import printable
from orchestrator.state.failure_policy import signature_of

# By class name, because the control plane does not import torch, and Ray only in its backend. Ray's errors:
# https://docs.ray.io/en/latest/ray-core/api/exceptions.html
_KINDS_BY_NAME = {
    "MemoryError": FailureKind.OUT_OF_MEMORY,
    "OutOfMemoryError": FailureKind.OUT_OF_MEMORY,  # torch's, Ray's for a worker killed by its memory monitor, and ours
    "ObjectStoreFullError": FailureKind.OUT_OF_MEMORY,
    "OutOfDiskError": FailureKind.STORAGE,
    "PreemptionError": FailureKind.PREEMPTED,
    "NodeDiedError": FailureKind.NODE_LOST,
    "LocalRayletDiedError": FailureKind.NODE_LOST,
    "ActorDiedError": FailureKind.NODE_LOST,
    "ActorUnavailableError": FailureKind.NODE_LOST,
    "WorkerCrashedError": FailureKind.NODE_LOST,
    "OwnerDiedError": FailureKind.NODE_LOST,
    "ObjectLostError": FailureKind.NODE_LOST,
    "DistNetworkError": FailureKind.NODE_LOST,
    "DistStoreError": FailureKind.NODE_LOST,
    "GetTimeoutError": FailureKind.TIMEOUT,
    "TimeoutError": FailureKind.TIMEOUT,
    "ActorPlacementGroupRemoved": FailureKind.NODE_LOST,
    "TaskUnschedulableError": FailureKind.INFEASIBLE,
    "ActorUnschedulableError": FailureKind.INFEASIBLE,
    "RuntimeEnvSetupError": FailureKind.USER_ERROR,
    "ModuleNotFoundError": FailureKind.USER_ERROR,
    "ReadError": FailureKind.BAD_DATA,  # tarfile's
    "UnidentifiedImageError": FailureKind.BAD_DATA,
}
_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a process or job ended: the failure kind, and, where known, what that means and what to do."""

    kind: FailureKind
    advice: str = ""


_SIGNALS = {
    signal.SIGTERM: Diagnosis(
        kind=FailureKind.PREEMPTED, advice="its node is being taken back, or it was ended by hand"
    ),
    signal.SIGINT: Diagnosis(kind=FailureKind.PREEMPTED, advice="somebody interrupted it"),
    signal.SIGKILL: Diagnosis(
        kind=FailureKind.NODE_LOST,
        advice=(
            "something killed it: mostly the kernel for want of host memory (`dmesg` of its node says so; set "
            "memory_gib of the jobs), or the end of its container"
        ),
    ),
    signal.SIGBUS: Diagnosis(
        kind=FailureKind.OUT_OF_MEMORY, advice="shared memory (/dev/shm) is full: give the container more of it"
    ),
    signal.SIGXCPU: Diagnosis(kind=FailureKind.TIMEOUT, advice="its limit of CPU time is over"),
}


def classify(error: BaseException) -> FailureKind:
    """Failure kind of an exception, or of the first of its causes whose kind is known."""
    return diagnose(error).kind


def diagnose(error: BaseException) -> Diagnosis:
    """The diagnosis of an exception by its class, errno or text, or that of the first of its causes."""
    for link in _causes(error):
        found = _diagnose_one(link)
        if found.kind is not FailureKind.UNKNOWN:
            return found
    return Diagnosis(kind=FailureKind.UNKNOWN)


def diagnose_exit(status: int, log_tail: str = "") -> Diagnosis:
    """The diagnosis of how a process ended.

    Args:
        status: as ``subprocess`` returns it: minus a signal's number, or an exit code; shells and containers give 128 +
            signal.
        log_tail: the last lines that the process wrote.
    """
    signature = signature_of(log_tail)
    if signature is not None:
        return Diagnosis(kind=signature.kind, advice=f"{signature.name}: {signature.advice}")
    number = -status if status < 0 else status - 128
    known = next((known for one, known in _SIGNALS.items() if one.value == number), None)
    return known or Diagnosis(kind=FailureKind.UNKNOWN)


def failure_from(error: BaseException, request: JobRequest) -> JobFailure:
    """The failure value of an attempt; the message starts with the exception's class unless it is one of ours."""
    text = str(error) or repr(error)
    message = text if isinstance(error, OrchestratorError) else f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    diagnosis = diagnose(error)
    advice = f"\n{diagnosis.advice}" if diagnosis.advice else ""
    wrong = error if isinstance(error, NumericsError) else None
    return JobFailure(
        attempt_id=request.attempt_id,
        key=request.key,
        kind=diagnosis.kind,
        # First redacted, then cut: half a secret would not be found.
        message=printable(redacted(message))[: _MAX_MESSAGE - len(advice)] + advice,
        traceback=printable(redacted(trace))[-_MAX_TRACEBACK:],
        rank=wrong.rank if wrong else None,
        step=wrong.step if wrong else None,
    )


def _diagnose_one(error: BaseException) -> Diagnosis:
    if isinstance(error, OrchestratorError):
        # Our own errors already say what to do; one without a known kind may quote an error that has one.
        if error.failure_kind is not FailureKind.UNKNOWN:
            return Diagnosis(kind=error.failure_kind)
    elif isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        signature = signature_of(str(error))
        return Diagnosis(kind=FailureKind.STORAGE, advice=signature.advice if signature else "")
    signature = signature_of(str(error))
    if signature is not None and signature.kind is FailureKind.PREEMPTED:
        signature = None  # text alone must not make a failure free of charge: it could be retried for ever
    if signature is not None and signature.blames_node:
        return Diagnosis(kind=signature.kind, advice=f"{signature.name}: {signature.advice}")
    names = [base.__name__ for base in type(error).__mro__]
    kind = next((_KINDS_BY_NAME[name] for name in names if name in _KINDS_BY_NAME), FailureKind.UNKNOWN)
    if signature is not None and kind in {FailureKind.UNKNOWN, signature.kind}:
        return Diagnosis(kind=signature.kind, advice=f"{signature.name}: {signature.advice}")
    return Diagnosis(kind=kind)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
