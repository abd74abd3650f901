"""Names of all random streams, seeds of torch's generators, and permutations that no numpy release can change.

Every stream is ``SeedSequence(seed, spawn_key=(stage, purpose, ...))``. numpy promises to keep ``SeedSequence`` and the
raw output of its bit generators (NEP 19), but not what ``Generator.permutation`` makes of them; orders must outlive a
numpy release, so they are drawn from raw output.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Stage(IntEnum):
    """Who draws; the first element of a spawn key. Values are part of results and never reused."""

    PRETRAIN = 0
    FINETUNE = 1
    PROBE = 2
    DATASET = 3
    LABELS = 4
    ANALYZE = 5


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
    HOLDOUT = 11
    INIT_BACKBONE = 16
    INIT_HEAD = 17
    DROPOUT = 18
    CHANCE = 19
    ANALYZED_SAMPLES = 20
    CLUSTER_CHANCE = 21


def seed_sequence(seed: int, stage: Stage, purpose: Purpose, *details: int) -> np.random.SeedSequence:
    """The stream of one purpose; ``details`` tell its epochs, blocks or classes apart."""
    return np.random.SeedSequence(seed, spawn_key=(int(stage), int(purpose), *details))


def permutation(sequence: np.random.SeedSequence, num_items: int) -> NDArray[np.int64]:
    """A uniform permutation of ``range(num_items)``: the ranks of 64 random bits each (ties keep their order)."""
    return stable_order(random_words(sequence, num_items))


def random_words(sequence: np.random.SeedSequence, num_items: int) -> NDArray[np.uint64]:
    """Random bits [num_items]; item i has the same ones whatever ``num_items`` is."""
    return np.random.PCG64(sequence).random_raw(num_items)


def integers_below(words: NDArray[np.uint64], limit: int) -> NDArray[np.int64]:
    """Integers in [0, limit) from the upper half of each word; the bias is below limit / 2**32."""
    return ((words >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


def stable_order(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """``np.argsort(words, kind="stable")`` in half the time, for words whose upper bits seldom agree.

    Positions stand in for the lower bits, so that values can be sorted in place of indices; the few words that agree
    in their upper bits are put in order afterwards.
    """
    packed, low_bits, low = _packed(words)
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


def stable_order_between(words: NDArray[np.uint64], start: int, stop: int) -> NDArray[np.int64]:
    """``stable_order(words)[start:stop]`` for ``0 <= start < stop <= len(words)``, without sorting all the others."""
    packed, low_bits, low = _packed(words)
    # One more on each side: words that agree in their upper bits are neighbours here, in an order yet to be found.
    first, last = max(start - 1, 0), min(stop, len(words) - 1)
    packed.partition([first, last])
    chosen = np.sort(packed[first : last + 1])
    uppers = chosen >> np.uint64(low_bits)
    if (uppers[1:] == uppers[:-1]).any():
        return stable_order(words)[start:stop]
    return (chosen & low)[start - first :][: stop - start].view(np.int64)


def _packed(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], int, np.uint64]:
    """Positions in place of the lower bits of words; how many these are, and their mask."""
    low_bits = max(1, (len(words) - 1).bit_length())
    low = np.uint64((1 << low_bits) - 1)
    packed = words & ~low
    packed |= np.arange(len(words), dtype=np.uint64)
    return packed, low_bits, low


def torch_seed(seed: int, stage: Stage, purpose: Purpose, *details: int) -> int:
    """A 64-bit seed for a torch generator (of which torch's CPU generator uses the lower 32)."""
    return int(seed_sequence(seed, stage, purpose, *details).generate_state(1, np.uint64)[0])


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that random layers on this device draw from."""
    import torch  # a second and 300 MB: what only orders or converts needs none of it

    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
