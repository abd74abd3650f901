"""The metrics that results are compared by, and which direction is better: one row per metric. Pure.

Records may have other metrics, for instance of plug-ins: their direction follows from a word in the name, else lower
is better.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Better(StrEnum):
    """Which values of a metric are good."""

    LOWER = "lower"
    HIGHER = "higher"

    @property
    def sign(self) -> int:
        """Factor that turns a good value into a small one."""
        return 1 if self is Better.LOWER else -1

    @property
    def best(self) -> str:
        """The best value in words: ``lowest``."""
        return "lowest" if self is Better.LOWER else "highest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMetric:
    """A metric that this project records."""

    better: Better = Better.LOWER
    unit: str = ""
    """Empty for rates, which are printed in percent, and for numbers without one."""
    is_of_backbone: bool = False
    """Whether it measures the cost of the pretraining, which is the same for all transfers of a backbone."""


RECORDED_METRICS: Final[Mapping[str, RecordedMetric]] = {
    "val_error": RecordedMetric(),
    "best_val_error": RecordedMetric(),
    "val_top5_error": RecordedMetric(),
    "val_class_error": RecordedMetric(),
    "val_loss": RecordedMetric(),
    "select_error": RecordedMetric(),
    "select_loss": RecordedMetric(),
    "train_error": RecordedMetric(),
    "train_loss": RecordedMetric(),
    "peak_epoch": RecordedMetric(),
    "num_steps": RecordedMetric(),
    "num_parameters": RecordedMetric(),
    "num_trained_parameters": RecordedMetric(),
    "gpu_hours": RecordedMetric(unit="h", is_of_backbone=True),
    "cpu_hours": RecordedMetric(unit="h", is_of_backbone=True),
    "images_per_s": RecordedMetric(better=Better.HIGHER, unit="images/s", is_of_backbone=True),
}
"""Those that this project records. ``val_error_<subset>`` and other longer names follow their beginning."""
_OF_LEVEL: Final = re.compile(r"val_level_error_(.+)")
METRIC_FAMILIES: Final[Mapping[str, re.Pattern[str]]] = {
    "val_level_error_<level>": _OF_LEVEL,
    "val_k<k>_error": re.compile(r"val_k[1-9][0-9]*_error"),
}
"""Those that are recorded for each level of a hierarchy, and for each number of neighbours. Lower is better."""
_HIGHER_WORDS: Final = frozenset({"accuracy", "acc", "score", "auc", "auroc", "f1", "precision", "recall", "map"})


def is_recorded(metric: str) -> bool:
    """Whether this project records it."""
    return _row(metric) is not None


def level_of(metric: str) -> str:
    """The level of a hierarchy whose errors it is; empty for a metric of another family."""
    found = _OF_LEVEL.fullmatch(metric)
    return found[1] if found else ""


def is_of_backbone(metric: str) -> bool:
    """Whether it measures the cost of the pretraining: all transfers of a backbone have one value."""
    return metric in RECORDED_METRICS and RECORDED_METRICS[metric].is_of_backbone


def better_of(metric: str) -> Better:
    """The direction of a metric: its own row, that of the longest name it begins with, or by a word of its name."""
    if (row := _row(metric)) is not None:
        return row.better
    is_rate = metric.endswith("_per_s")
    return Better.HIGHER if is_rate or _HIGHER_WORDS.intersection(metric.lower().split("_")) else Better.LOWER


def unit_of(metric: str) -> str:
    """The unit of a metric that is no rate; empty where none is known."""
    row = _row(metric)
    return "" if row is None else row.unit


def _row(metric: str) -> RecordedMetric | None:
    if any(family.fullmatch(metric) for family in METRIC_FAMILIES.values()):
        return RecordedMetric()
    begins = [name for name in RECORDED_METRICS if metric == name or metric.startswith(f"{name}_")]
    return RECORDED_METRICS[max(begins, key=len)] if begins else None
