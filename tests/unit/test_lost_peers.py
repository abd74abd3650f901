"""What errors of collective operations mean, in the words of libtorch 2.15, NCCL and CUDA, with their real classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from orchestrator.backends.classify import classify
from orchestrator.core.errors import FailureKind
from orchestrator.state.failure_policy import signature_of
from workloads.runtime.ranks import PeerLostError, Ranks

_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.30.7\n{}"
_NCCL += "\nLast error:\n{}"
_REMOTE = _NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketProgress: Connection closed by remote peer gpu-07.lab<43127>",
)
_SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
_UNREACHABLE = _NCCL.format("unhandled system error", _SYSTEM, "socketStartConnect: Connect to 10.0.0.7<1> failed : {}")
_SHM = _NCCL.format(
    "unhandled system error",
    _SYSTEM,
    "Error while creating shared memory segment /dev/shm/nccl-4kVq2w (size 9637888), error: No space left on device",
)
_CUDA = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
_CALL = "ncclUnhandledCudaError: Call to CUDA function failed."
_NCCL_ECC = _NCCL.format(_CUDA, _CALL, "Cuda failure 214 'uncorrectable ECC error encountered'")
_NCCL_OOM = _NCCL.format(_CUDA, _CALL, "Cuda failure 2 'out of memory'")
_NCCL_FAULT = _NCCL.format(_CUDA, _CALL, "Cuda failure 700 'an illegal memory access was encountered'")
_NCCL_USAGE = _NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
)
_WATCHDOG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8123, OpType=ALLREDUCE, NumelIn=6553600, "
    "NumelOut=6553600, Timeout(ms)=600000) ran for 600031 milliseconds before timing out."
)
_HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
)
_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."
)
_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/{}] {}"
_CLOSED = _GLOO.format(
    "transport/tcp/pair.cc:561",
    "Connection closed by peer [127.0.0.1]:30392. This is typically caused by a remote worker crashing.",
)
_READ = _GLOO.format("transport/tcp/pair.cc:545", "Read error [127.0.0.1]:26511: Connection reset by peer.")
_WAITED = _GLOO.format("transport/tcp/unbound_buffer.cc:78", "Timed out waiting 20000ms for recv operation to complete")
_MESH = _GLOO.format("rendezvous/context.cc:64", "Gloo connectFullMesh failed with ...")
_UNLIKE = (
    "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:464] op.preamble.length <= "
    "op.nbytes. 133336 vs 8. Received data size doesn't match expected size."
)
_XID = "CUDA error: unknown error; NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, GPU has fallen off the bus."

PEER_LOST = [
    dist.DistBackendError(_REMOTE),
    dist.DistBackendError(_UNREACHABLE.format("No route to host")),
    dist.DistBackendError(_WATCHDOG),
    dist.DistBackendError("NCCL communicator was aborted on rank 2. "),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0"),
    RuntimeError(_CLOSED),
    RuntimeError(_READ),
    RuntimeError(_WAITED),
    RuntimeError(_MESH),
]
OWN = [
    (torch.OutOfMemoryError(_OOM), FailureKind.OUT_OF_MEMORY, False),
    (torch.AcceleratorError("CUDA error: out of memory" + _HINT), FailureKind.OUT_OF_MEMORY, False),
    (dist.DistBackendError(_NCCL_OOM), FailureKind.OUT_OF_MEMORY, False),
    (dist.DistBackendError(_SHM), FailureKind.OUT_OF_MEMORY, False),
    (
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered" + _HINT),
        FailureKind.NODE_LOST,
        True,
    ),
    (dist.DistBackendError(_NCCL_ECC), FailureKind.NODE_LOST, True),
    (RuntimeError(_XID), FailureKind.NODE_LOST, True),
    (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + _HINT),
        FailureKind.UNKNOWN,
        False,
    ),
    (torch.AcceleratorError("CUDA error: device-side assert triggered" + _HINT), FailureKind.UNKNOWN, False),
    (dist.DistBackendError(_NCCL_FAULT), FailureKind.UNKNOWN, False),
    (dist.DistBackendError(_NCCL_USAGE), FailureKind.UNKNOWN, False),
    (RuntimeError(_UNLIKE), FailureKind.UNKNOWN, False),
    (RuntimeError("Tensors must be CUDA and dense"), FailureKind.UNKNOWN, False),
    (RuntimeError("No backend type associated with device type cpu"), FailureKind.UNKNOWN, False),
]


def raised_by_a_sum(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Exception:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the test asks
        Ranks(rank=0, world_size=2).sum_(torch.ones(1))
    return caught.value


@pytest.mark.parametrize("error", PEER_LOST, ids=lambda error: str(error)[:50])
def test_transport_error_or_timeout_of_a_collective_is_a_lost_peer(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(raised_by_a_sum(error, monkeypatch), PeerLostError)
    assert classify(error) is FailureKind.NODE_LOST  # where nothing of ours stood between
    found = signature_of(str(error))
    assert found is None or not found.blames_node


@pytest.mark.parametrize(("error", "kind", "blames"), OWN, ids=lambda value: str(value)[:50])
def test_memory_device_and_programming_errors_of_a_collective_stay_what_they_are(
    error: Exception, kind: FailureKind, blames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = raised_by_a_sum(error, monkeypatch)
    assert raised is error
    assert classify(raised) is kind
    found = signature_of(str(raised))
    assert (found is not None and found.blames_node) == blames


def test_rank_reports_why_it_ends_before_it_leaves_its_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others fail as soon as it has left, and the launcher then ends it, whatever it still waits for."""
    order: list[str] = []
    ranks = Ranks(rank=0, world_size=2)
    ranks.activity.on_failure = lambda error: order.append(str(error))
    monkeypatch.setattr(Ranks, "abort", lambda _: order.append("left"))
    with pytest.raises(KeyError), ranks.aborted_on_error():
        raise KeyError("a bug")
    assert order == ["'a bug'", "left"]
