"""The numerics of this machine: how they are set, and the fingerprint for which results are bit-exact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import groupby

import numpy as np
import PIL
import torch
import torch.utils.deterministic

from orchestrator.core.machine import cpu_model
from workloads.runtime.enums import Precision
from workloads.runtime.ranks import Ranks

Fingerprint = Mapping[str, str | int]
GRAD_REDUCTION = "grad_reduction"
"""In fingerprints of gangs that round gradients before they sum them."""


@contextmanager
def deterministic_numerics(num_threads: int) -> Iterator[None]:
    """Deterministic kernels and a fixed number of threads, for the calling thread, until the body ends.

    Torch's thread count belongs to the thread that sets it, so this must run in the thread that trains.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every fresh tensor guards against reads of uninitialised memory; it is slow and no kernel here reads any.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def numerics_fingerprint(
    device: torch.device,
    *,
    num_threads: int,
    micro_batch: int,
    world_size: int = 1,
    grad_reduction: Precision = Precision.FP32,
) -> dict[str, str | int]:
    """Everything that may change the last bits of a result on equal input.

    ``grad_reduction``: the format in which the ranks sum gradients. Below fp32, their number changes more than the last
    bits.
    """
    rounds = world_size > 1 and grad_reduction is not Precision.FP32
    return {
        "torch": torch.__version__,
        "timm": version("timm"),
        "numpy": np.__version__,
        "pillow": PIL.__version__,  # decoders make the pixels
        "simplejpeg": version("simplejpeg"),
        "device": cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": num_threads,
        "world_size": world_size,
        "micro_batch": micro_batch,
        "optimizer_form": "fused",
        **({GRAD_REDUCTION: f"{grad_reduction.value} of {world_size} workers"} if rounds else {}),
    }


def joined_fingerprint(own: Fingerprint, ranks: Ranks) -> dict[str, str | int]:
    """The fingerprint of a gang, the same on all ranks; an entry in which they differ has all values. A collective."""
    if ranks.is_solo:
        return dict(own)
    told: list[Fingerprint] = [json.loads(text) for text in ranks.gather_text(json.dumps(dict(own)))]
    names = dict.fromkeys(name for one in told for name in one)
    return {name: _joined([one.get(name, "absent") for one in told]) for name in names}


def _joined(values: Sequence[str | int]) -> str | int:
    """The value of all ranks; else theirs in their order, with the number of ranks in a row that have it."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return values[0] if len(runs) == 1 else ", ".join(f"{value} x {length}" for value, length in runs)


def difference(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Readable list of the entries that differ."""
    names = sorted(before.keys() | now.keys())
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]
