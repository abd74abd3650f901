"""What a failure's text says of its cause: the marks that CUDA, NCCL, the kernel and Ray leave. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.core.errors import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known cause."""

    name: str
    kind: FailureKind
    pattern: re.Pattern[str]
    advice: str
    blames_node: bool = False
    """Whether the node's hardware or set-up is at fault, so that others should not be sent there."""


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
        "the node's GPU or driver is broken; the node is left out for a while: drain and reset it (nvidia-smi -q)",
        blames_node=True,
    ),
    _signature(
        "other code",
        FailureKind.NODE_LOST,
        r"runs code (?:[0-9a-f]{16}|of an earlier version), and not [0-9a-f]{16} as the others",
        "deploy one version on all nodes and name its image by digest (image@sha256:...): a tag may mean another image "
        "on a node that starts later. The node is left out for a while",
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
        r"CUDA out of memory|CUDA error: out of memory|Cuda failure.{0,8}'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
        r"|torch\.(?:cuda\.)?OutOfMemoryError|CUDNN_STATUS_ALLOC_FAILED|HIP out of memory|MPS backend out of memory",
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
        "full disk",
        FailureKind.STORAGE,
        r"no space left on device|\bENOSPC\b|disk quota exceeded|\bEDQUOT\b",
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
"""Tried in this order: the first one that matches is the cause."""


@lru_cache(maxsize=2048)  # each round of decisions asks about the same failures again
def signature_of(text: str) -> Signature | None:
    """The known cause that a text shows, if any."""
    return next((signature for signature in SIGNATURES if signature.pattern.search(text)), None)
