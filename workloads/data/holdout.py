"""Training samples that are kept out of training, so that a choice can be made on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.streams import Purpose, Stage, random_words, seed_sequence
from workloads.data.subset import SampleView, ranks_in_classes

if TYPE_CHECKING:
    from workloads.data.index import SplitIndex


def hold_out(split: SplitIndex, view: SampleView, share: float, seed: int) -> tuple[SampleView, SampleView]:
    """A view without a share of its samples, and the view of these alone.

    Stratified by leaf class, never by target, so that all label spaces and backbones are judged on the same samples.
    Every class keeps one sample, unless none has a second one; of the others, put in the order of their classes, every
    n-th is held out.

    Args:
        split: whose samples they are.
        view: the samples to divide.
        share: of them, in (0, 0.5]; rounded half up, one at least.
        seed: of the transfer.

    Raises:
        UserError: there is only one sample.
    """
    ordinals = view.ordinals()
    if len(ordinals) < 2:
        message = f"split {split.name!r} has a single sample to train on, so none can be held out to choose by; "
        raise UserError(message + "train on a larger part")
    words = random_words(seed_sequence(seed, Stage.LABELS, Purpose.HOLDOUT), split.num_samples)[ordinals]
    chosen = np.zeros(len(ordinals), dtype=np.bool_)
    chosen[_spread(split.leaves[ordinals], words, share)] = True
    kept, held_out = ordinals[~chosen], ordinals[chosen]
    return SampleView.selecting(split.first_ordinals, kept), SampleView.selecting(split.first_ordinals, held_out)


def _spread(leaves_N: NDArray[np.integer], words_N: NDArray[np.uint64], share: float) -> NDArray[np.int64]:
    """Rows to hold out: evenly spaced among all but the first sample of each class, class after class; one at least."""
    ranks_N, _ = ranks_in_classes(leaves_N, words_N)
    candidates = np.flatnonzero(ranks_N > 0)
    candidates = candidates if len(candidates) else np.arange(len(leaves_N))
    candidates = candidates[np.lexsort((ranks_N[candidates], leaves_N[candidates]))]
    number = min(len(candidates), max(1, int(share * len(leaves_N) + 0.5)))
    # Places (i + 1/2) M / n: of every run of classes as many as its share, within one.
    return candidates[((np.arange(number) + 0.5) * len(candidates) / number).astype(np.int64)]
