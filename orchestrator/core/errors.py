"""The tree of errors of both planes.

Every error says what is wrong (with the value), why it matters and what to do. All of them can be pickled, because
Ray sends exceptions between processes: an error keeps its constructor arguments in ``args``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Texts of libtorch 2.15 (gloo, ProcessGroupNCCL.cpp), NCCL 2.30 and of the store at which ranks meet. What a collective
# raises is mostly a plain RuntimeError or DistBackendError: only its text tells who is at fault.
_MACHINE: Final = (
    r"out of memory|CUDA (?:error|driver|failure)|CUDA-capable|CUBLAS_|CUDNN_|cuDNN error|CUSOLVER_|HIP error|\bECC\b"
    r"|\bXid\b|ncclUnhandledCudaError|device-side assert|enforce fail|/dev/shm|shared memory|bus error|no space left"
    r"|allocate memory|bad_alloc"
)
_OWN_TROUBLE = re.compile(rf"{_MACHINE}|ncclInvalid|invalid (?:usage|argument)", re.IGNORECASE)
NO_DEVICE_MEMORY: Final = (
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.{0,8}'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
    r"|torch\.(?:cuda\.)?OutOfMemoryError|CUDNN_STATUS_\w*ALLOC\w*_FAILED|HIP out of memory|MPS backend out of memory"
    r"|unable to find an engine to execute this computation"
)
"""Texts of torch and of GPU libraries when a device has no memory left. torch says the last one if no kernel of a
convolution ran: mostly because none found the memory that it works in, but also if cuDNN does not support the GPU."""
_TROUBLE_OF_MACHINE = re.compile(f"{_MACHINE}|{NO_DEVICE_MEMORY}", re.IGNORECASE)
_TRANSPORT = re.compile(
    r"gloo/(?:transport|rendezvous)/|ncclRemoteError|remote process exited|ncclSystemError|unhandled system error"
    r"|Watchdog caught collective operation timeout|communicator was aborted|operations have failed or timed out"
    r"|Got completion .{0,200}(?:error|status)|connection (?:was likely )?(?:closed|reset|refused)|broken pipe"
    r"|network is unreachable|no route to host|tim(?:ed|e) ?out|NCCL timeout",
    re.IGNORECASE,
)


class FailureKind(StrEnum):
    """Why an attempt failed. ``orchestrator.state.failure_policy`` has a row per kind; its first lines say what else a
    new kind needs.
    """

    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_DATA = "bad_data"
    NUMERICS = "numerics"
    TIMEOUT = "timeout"
    HANG = "hang"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    NO_ROOM = "no_room"
    """It ended before the cluster had room for it: nothing of it ever ran."""
    STORAGE = "storage"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


def is_lost_peer(text: str) -> bool:
    """Whether an error of a collective operation means that another rank, or the connection to it, is lost.

    Out-of-memory and device errors can have similar texts; those are the rank's own failures.
    """
    return _OWN_TROUBLE.search(text) is None and _TRANSPORT.search(text) is not None


def is_trouble_of_machine(text: str) -> bool:
    """Whether an error of a library means a device, memory or disk, so that another attempt or node may not meet it."""
    return _TROUBLE_OF_MACHINE.search(text) is not None


class OrchestratorError(Exception):
    """Base of every error this project raises on purpose."""

    failure_kind: FailureKind = FailureKind.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLocation:
    """A place in a YAML file; ``line`` and ``column`` count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class SpecError(OrchestratorError):
    """A sweep.yaml is wrong. Carries one message per problem found, each starting with ``file:line:column``."""

    failure_kind = FailureKind.USER_ERROR

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class UserError(OrchestratorError):
    """The job can never succeed with these parameters (wrong model name, batch not reachable, ...): no retry."""

    failure_kind = FailureKind.USER_ERROR


class UsageError(UserError):
    """A command or call has invalid arguments, whatever the store contains; commands end with code 2."""


class BadDataError(OrchestratorError):
    """A shard or sample is not what its index says, or cannot be decoded."""

    failure_kind = FailureKind.BAD_DATA


class NumericsError(OrchestratorError):
    """A loss or gradient is NaN or infinite, after ``step`` updates (None = not in training).

    ``rank`` is the only rank of the gang whose own numbers are wrong; None = those of several, or nobody can tell.
    """

    failure_kind = FailureKind.NUMERICS

    def __init__(self, message: str, step: int | None = None, rank: int | None = None) -> None:
        super().__init__(message, step, rank)
        self.step, self.rank = step, rank

    def __str__(self) -> str:
        return str(self.args[0])


class OutOfMemoryError(OrchestratorError):
    """A training step does not fit into the accelerator's memory; ``micro_batch`` is the size tried, 0 if not known."""

    failure_kind = FailureKind.OUT_OF_MEMORY

    def __init__(self, message: str, micro_batch: int = 0) -> None:
        super().__init__(message, micro_batch)
        self.micro_batch = micro_batch

    def __str__(self) -> str:
        return str(self.args[0])


class PreemptedError(OrchestratorError):
    """The attempt was asked to stop, wrote a checkpoint and returned."""

    failure_kind = FailureKind.PREEMPTED


class InfeasibleError(OrchestratorError):
    """A job asks for more than any node of the cluster has."""

    failure_kind = FailureKind.INFEASIBLE


class StorageError(OrchestratorError):
    """Base of the errors of an object store."""

    failure_kind = FailureKind.STORAGE


class NotFoundError(StorageError):
    """No object has this name."""

    failure_kind = FailureKind.BAD_DATA  # as for damaged ones: waiting does not help


class PreconditionFailedError(StorageError):
    """A conditional write lost: the object exists already, or has another etag than expected."""


class StorageDeniedError(StorageError):
    """The store refuses access: no or wrong credentials, no permission, a wrong clock, or a forbidden bucket."""


class CredentialsUnavailableError(StorageDeniedError):
    """The service that gives this machine its credentials failed this time: trying again may succeed."""


class StorageThrottledError(StorageError):
    """The store asks for fewer requests, or to repeat one that collided with another: trying again may succeed."""


class StorageTimeoutError(StorageError):
    """The store gave no useful answer in time. A write that ends so may or may not have happened."""


OUTAGES = (StorageThrottledError, StorageTimeoutError, CredentialsUnavailableError)
"""Errors of a store that is out of reach for a while, so that a later request may succeed."""


class NoSpaceError(StorageError):
    """The store, or the local disk that a download goes to, is full."""


class UnsupportedStoreError(StorageError):
    """The store lacks something that is relied upon, such as conditional writes."""


class CorruptObjectError(StorageError):
    """An object's bytes differ from the size or sha256 that its record or manifest names, or it is no file at all."""

    failure_kind = FailureKind.BAD_DATA


class TooLargeError(CorruptObjectError):
    """An object is larger than any that is written under such a name; it was not read."""


class IdentityMismatchError(StorageError):
    """A committed record under this key holds another identity: a hash collision or a store altered by hand."""

    failure_kind = FailureKind.BAD_DATA


class ControllerError(OrchestratorError):
    """The controller refuses a command (stale epoch, another holder, unknown sweep)."""


class TransitionError(ControllerError):
    """A journal holds an event that the state of its job does not allow."""


class ClusterError(OrchestratorError):
    """The Ray cluster or the local stack cannot be started or reached."""
