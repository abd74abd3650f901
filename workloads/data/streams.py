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
    REPLACEMENT = 4
    SUBSET = 5
    MIXTURE = 6
    MERGED_CLASSES = 7
    CHOSEN_CLASSES = 8
    PATHS = 9
    CLUSTERS = 10
    INIT_BACKBONE = 16
    INIT_HEAD = 17
    DROPOUT = 18


def seed_sequence(seed: int, stage: Stage, purpose: Purpose, *details: int) -> np.random.SeedSequence:
    """The stream of one purpose; ``details`` tell its epochs, blocks or classes apart."""
    return np.random.SeedSequence(seed, spawn_key=(int(stage), int(purpose), *details))


def permutation(sequence: np.random.SeedSequence, num_items: int) -> NDArray[np.int64]:
    """A uniform permutation of ``range(num_items)``: the ranks of 64 random bits each (ties keep their order)."""
    return stable_order(random_words(sequence, num_items))


def random_words(sequence: np.random.SeedSequence, num_items: int) -> NDArray[np.uint64]:
    """Random bits [num_items]; item i has the same ones whatever ``num_items`` is."""
    return np.random.PCG64(sequence).random_raw(num_items)


def stable_order(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """``np.argsort(words, kind="stable")`` in half the time, for words whose upper bits seldom agree.

    Positions stand in for the lower bits, so that values can be sorted in place of indices; the few words that agree
    in their upper bits are put in order afterwards.
    """
    low_bits = max(1, (len(words) - 1).bit_length())
    low = np.uint64((1 << low_bits) - 1)
    packed = words & ~low
    packed |= np.arange(len(words), dtype=np.uint64)
    packed.sort()
    uppers = packed >> np.uint64(low_bits)
    packed &= low
    order = packed.view(np.int64)
    agree = np.flatnonzero(uppers[1:] == uppers[:-1])
    if agree.size:
        places = np.union1d(agree, agree + 1)
        members = order[places]
        order[places] = members[np.lexsort((members, words[members]))]
    return order
