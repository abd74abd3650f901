"""From an exception that ended an attempt to a failure value; shared by all backends."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator

from orchestrator.contract import JobFailure, JobRequest
from orchestrator.errors import FailureKind, OrchestratorError

# By class name, because the control plane does not import torch.
_OUT_OF_MEMORY_NAMES = {"MemoryError", "OutOfMemoryError"}
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "CUDA out of memory")
_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
_MAX_MESSAGE = 2000
_MAX_TRACEBACK = 20_000


def classify(error: BaseException) -> FailureKind:
    """Kind of an exception, or of the first of its causes that has a known one."""
    for link in _causes(error):
        kind = _classify_one(link)
        if kind is not FailureKind.UNKNOWN:
            return kind
    return FailureKind.UNKNOWN


def failure_from(error: BaseException, request: JobRequest) -> JobFailure:
    """The failure value of an attempt; the message starts with the exception's class unless it is one of ours."""
    text = str(error) or repr(error)
    message = text if isinstance(error, OrchestratorError) else f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    return JobFailure(
        attempt_id=request.attempt_id,
        key=request.key,
        kind=classify(error),
        message=message[:_MAX_MESSAGE],
        traceback=trace[-_MAX_TRACEBACK:],
    )


def _classify_one(error: BaseException) -> FailureKind:
    if isinstance(error, OrchestratorError):
        return error.failure_kind
    names = {base.__name__ for base in type(error).__mro__}
    if names & _OUT_OF_MEMORY_NAMES or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return FailureKind.STORAGE
    return FailureKind.UNKNOWN


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
