"""Seeds of torch generators, from the streams that ``workloads.data.streams`` names."""

from __future__ import annotations

import numpy as np
import torch

from workloads.data.streams import Purpose, Stage, seed_sequence


def torch_seed(seed: int, stage: Stage, purpose: Purpose, *details: int) -> int:
    """A 64-bit seed for a torch generator (of which torch's CPU generator uses the lower 32)."""
    return int(seed_sequence(seed, stage, purpose, *details).generate_state(1, np.uint64)[0])


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that random layers on this device draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
