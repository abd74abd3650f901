"""From what ended an attempt to its kind, and to words that help."""

import errno
import signal
import tarfile

import pytest

from orchestrator.backends.classify import classify, diagnose, diagnose_exit
from orchestrator.core.errors import (
    BadDataError,
    FailureKind,
    NumericsError,
    OrchestratorError,
    PreemptedError,
    StorageTimeoutError,
    UserError,
)
from orchestrator.state.failure_policy import SIGNATURES, signature_of


def foreign(name: str, text: str) -> Exception:
    """An exception of a package that is not imported here."""
    made: Exception = type(name, (Exception,), {})(text)
    return made


def caused(text: str, cause: Exception) -> Exception:
    try:
        raise RuntimeError(text) from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("x"), FailureKind.USER_ERROR),
        (BadDataError("x"), FailureKind.BAD_DATA),
        (NumericsError("x"), FailureKind.NUMERICS),
        (PreemptedError("x"), FailureKind.PREEMPTED),
        (StorageTimeoutError("x"), FailureKind.STORAGE),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (foreign("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("GET was unable to find an engine to execute this computation"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ..."),
            FailureKind.OUT_OF_MEMORY,
        ),
        (OSError(errno.ENOSPC, "No space left on device"), FailureKind.STORAGE),
        (RuntimeError("[Errno 28] No space left on device: '/tmp/x'"), FailureKind.STORAGE),
        (
            RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error, NCCL version 2.21"),
            FailureKind.NODE_LOST,
        ),
        (foreign("DistBackendError", "NCCL communicator was aborted"), FailureKind.NODE_LOST),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FailureKind.NODE_LOST),
        (foreign("NodeDiedError", "Task failed due to the node dying"), FailureKind.NODE_LOST),
        (foreign("WorkerCrashedError", ""), FailureKind.NODE_LOST),
        (foreign("ActorDiedError", "The actor died unexpectedly"), FailureKind.NODE_LOST),
        (foreign("OutOfDiskError", ""), FailureKind.STORAGE),
        (tarfile.ReadError("unexpected end of data"), FailureKind.BAD_DATA),
        (foreign("UnidentifiedImageError", "cannot identify image file <_io.BytesIO>"), FailureKind.BAD_DATA),
        (RuntimeError("Function 'PowBackward0' returned nan values in its 0th output."), FailureKind.NUMERICS),
        (ModuleNotFoundError("No module named 'my_losses'"), FailureKind.USER_ERROR),
        (TimeoutError("timed out"), FailureKind.TIMEOUT),
        (ValueError("shapes do not match"), FailureKind.UNKNOWN),
        (KeyError("preemption"), FailureKind.UNKNOWN),
    ],
)
def test_exception_of_each_cause_is_classified(error: Exception, kind: FailureKind) -> None:
    assert classify(error) is kind


def test_exception_whose_cause_is_known_takes_its_kind() -> None:
    assert classify(caused("the job failed", BadDataError("sample 3"))) is FailureKind.BAD_DATA


def test_own_error_without_a_kind_is_read_by_what_it_quotes() -> None:
    error = OrchestratorError("rank 3 failed: CUDA error: uncorrectable ECC error encountered")
    assert classify(error) is FailureKind.NODE_LOST


def test_own_error_with_a_kind_keeps_it_whatever_its_words() -> None:
    assert classify(UserError("CUDA out of memory is what you asked for")) is FailureKind.USER_ERROR


def test_broken_gpu_is_blamed_before_the_memory_error_that_it_shows_as() -> None:
    found = signature_of("CUDA out of memory\nNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    assert found is not None
    assert found.blames_node
    assert "drain" in diagnose(RuntimeError("uncorrectable ECC error")).advice


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (-signal.SIGTERM, FailureKind.PREEMPTED),
        (128 + signal.SIGTERM, FailureKind.PREEMPTED),
        (-signal.SIGKILL, FailureKind.NODE_LOST),
        (137, FailureKind.NODE_LOST),
        (-signal.SIGBUS, FailureKind.OUT_OF_MEMORY),
        (-signal.SIGSEGV, FailureKind.UNKNOWN),
        (1, FailureKind.UNKNOWN),
    ],
)
def test_exit_status_of_a_signal_is_classified_in_both_spellings(status: int, kind: FailureKind) -> None:
    assert diagnose_exit(status).kind is kind


def test_exit_with_a_log_that_names_the_cause_is_classified_by_it() -> None:
    log = "step 40\n[ 7342.1] Out of memory: Killed process 4242 (python) total-vm:83886080kB"
    found = diagnose_exit(-signal.SIGKILL, log)
    assert found.kind is FailureKind.OUT_OF_MEMORY
    assert "memory_gib" in found.advice


def test_signatures_all_give_advice_under_names_of_their_own() -> None:
    assert all(one.advice for one in SIGNATURES)
    assert len({one.name for one in SIGNATURES}) == len(SIGNATURES)
