"""Names of all random streams, and permutations that no numpy release can change.

Every stream is ``SeedSequence(seed, spawn_key=(stage, purpose, ...))``. numpy promises to keep ``SeedSequence`` and the
raw output of its bit generators (NEP 19), but not what ``Generator.permutation`` makes of them; orders must outlive a
numpy release, so they are drawn from raw output.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stage(IntEnum):
    """Who draws; the first element of a spawn key. Values are part of results and never reused."""

    PRETRAIN = 0
    FINETUNE = 1
    PROBE = 2
    DATASET = 3
    LABELS = 4


class Purpose(IntEnum):
    """What is drawn; the second element of a spawn key. Values are part of results and never reused."""

    ORDER = 0
    AUGMENT = 1
    RANDOM_IDS = 2
    VAL_SPLIT = 3
    INIT_BACKBONE = 16
    INIT_HEAD = 17
    DROPOUT = 18


def seed_sequence(seed: int, stage: Stage, purpose: Purpose, *details: int) -> np.random.SeedSequence:
    """The stream of one purpose; ``details`` tell its epochs, blocks or classes apart."""
    return np.random.SeedSequence(seed, spawn_key=(int(stage), int(purpose), *details))


def permutation(sequence: np.random.SeedSequence, num_items: int) -> NDArray[np.int64]:
    """A uniform permutation of ``range(num_items)``: the ranks of 64 random bits each (ties keep their order)."""
    bits = np.random.PCG64(sequence).random_raw(num_items)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
