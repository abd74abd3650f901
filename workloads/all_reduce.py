"""One rank that sums a tensor with the others, and measures the time: ``orchestrator.core.data_plane.RANK``.

``python -m workloads.all_reduce PLACE`` is the same for the ranks of one node, which ``workloads.node_check`` starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

NUM_FLOATS = 4 * 1024**2
"""16 MiB: a bucket of gradients."""
_NUM_TIMES = 3


def join(place: Mapping[str, Any]) -> dict[str, Any]:
    """`main` in a process of its own, on one thread."""
    torch.set_num_threads(1)
    return main(place)


def main(place: Mapping[str, Any]) -> dict[str, Any]:
    """Join the others and reduce. Raises whatever torch raises if they do not come together."""
    rank, world_size, is_nccl = int(place["rank"]), int(place["world_size"]), place["backend"] == "nccl"
    device = torch.device("cuda", int(place.get("device", 0))) if is_nccl else torch.device("cpu")
    if is_nccl:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        place["backend"],
        init_method=f"tcp://{place['host']}:{place['port']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(place["limit_s"])),
    )
    try:
        took_s = [_reduce(rank, world_size, device) for _ in range(_NUM_TIMES)]
    finally:
        distributed.destroy_process_group()
    return {"took_s": min(took_s), "num_bytes": 4 * NUM_FLOATS, "world_size": world_size, "torch": torch.__version__}


def _reduce(rank: int, world_size: int, device: torch.device) -> float:
    tensor = torch.full((NUM_FLOATS,), float(rank + 1), device=device)
    distributed.barrier()
    started_s = time.perf_counter()
    distributed.all_reduce(tensor)
    total = float(tensor[-1])  # waits for the device
    took_s = time.perf_counter() - started_s
    expected = world_size * (world_size + 1) / 2
    if total != expected:
        message = f"the sum over {world_size} ranks is {total}, not {expected}: the network or a device alters data"
        raise ArithmeticError(message)
    return took_s


if __name__ == "__main__":
    sys.stdout.write(json.dumps(join(json.loads(sys.argv[1]))) + "\n")
