"""What a finite validation set adds to intervals that are over seeds."""

from __future__ import annotations

import math
import re

from orchestrator.report.numbers import number
from orchestrator.report.results import Table

_IS_SHARE_OF_SAMPLES = re.compile(r"(best_)?val_error|val_top5_error|val_level_error_.+")
"""Metrics that are wrong samples over all validation samples."""


def on_these_images(table: Table) -> str:
    """What the intervals of a table leave out: that other validation images would give other errors; else empty.

    They are of seeds, on one set of images. An error p on n images has the binomial standard error sqrt(p (1 - p) / n)
    beside that, which more seeds do not lower.
    """
    ranked, num_val = table.ranked, table.num_val
    if not num_val or not ranked or not _IS_SHARE_OF_SAMPLES.fullmatch(table.metric):
        return ""
    best = ranked[0].summary.mean if ranked[0].summary else math.nan
    error = number(math.sqrt(max(0.0, best * (1 - best)) / num_val), table.metric)
    return (
        f"intervals cover seeds only, on the same {num_val:,} validation images; at an error of "
        f"{number(best, table.metric)} % so many images have a binomial standard error of {error} points"
    )
