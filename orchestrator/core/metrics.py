"""The metrics that results are compared by, and which direction is better: one row per metric. Pure.

Records may hold others, of plug-ins for instance: for those a word in the name decides; without one, lower is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Better(StrEnum):
    """Which values of a metric are good."""

    LOWER = "lower"
    HIGHER = "higher"

    @property
    def sign(self) -> int:
        """What makes a good value a small one."""
        return 1 if self is Better.LOWER else -1

    @property
    def best(self) -> str:
        """The best value in words: ``lowest``."""
        return "lowest" if self is Better.LOWER else "highest"


METRICS: Final[Mapping[str, Better]] = {
    "val_error": Better.LOWER,
    "best_val_error": Better.LOWER,
    "val_top5_error": Better.LOWER,
    "val_class_error": Better.LOWER,
    "val_loss": Better.LOWER,
    "select_error": Better.LOWER,
    "select_loss": Better.LOWER,
    "train_error": Better.LOWER,
    "train_loss": Better.LOWER,
    "images_per_s": Better.HIGHER,
}
"""Those that this project records. ``val_error_<subset>`` and other longer names follow their beginning."""
_HIGHER_WORDS: Final = frozenset({"accuracy", "acc", "score", "auc", "auroc", "f1", "precision", "recall", "map"})


def better_of(metric: str) -> Better:
    """The direction of a metric: its own row, that of the longest name it begins with, or by a word of its name."""
    begins = [name for name in METRICS if metric == name or metric.startswith(f"{name}_")]
    if begins:
        return METRICS[max(begins, key=len)]
    is_rate = metric.endswith("_per_s")
    return Better.HIGHER if is_rate or _HIGHER_WORDS.intersection(metric.lower().split("_")) else Better.LOWER
