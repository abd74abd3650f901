"""Which cell of a grid of hyper-parameters speaks for a label space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.report.results import Criterion, Result

SELECT_METRIC = "select_error"
"""Error on the tenth of the training split that runs of a grid hold out, chosen by the samples' keys."""
VALIDATION_METRIC = "val_error"
"""Of the last epoch, whatever the report compares: the best epoch of a run is known only by looking at all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected cell."""

    cell: str
    criterion: Criterion


def select_cell(
    cells: Mapping[str, Sequence[Result]], expected: Mapping[str, int], *, wanted: Criterion | None = None
) -> Selection | None:
    """The cell with the lowest mean error over its runs; cells with all their runs go before cells that lack some.

    Runs that held out a part of their training split are compared on that; where none did, on ``VALIDATION_METRIC``,
    which favours the label space with the larger grid: whoever shows the result must say so (``Criterion``). ``wanted``
    is what the sweep asks for, where it says so. None as long as no run has a result.
    """
    held_out = {
        cell: error
        for cell, results in cells.items()
        if wanted is not Criterion.VALIDATION and (error := mean_metric(results, SELECT_METRIC)) is not None
    }
    criterion = Criterion.TRAIN_HOLDOUT if held_out else Criterion.VALIDATION
    errors = held_out or {
        cell: error for cell, results in cells.items() if (error := mean_metric(results, VALIDATION_METRIC)) is not None
    }
    if not errors:
        return None
    order = list(cells)
    best = min(errors, key=lambda cell: (len(cells[cell]) < expected[cell], errors[cell], order.index(cell)))
    return Selection(cell=best, criterion=criterion)


def mean_metric(results: Sequence[Result], metric: str) -> float | None:
    """Mean over the runs; None if there is no run, or one without a finite value."""
    values = [result.metrics.get(metric, math.nan) for result in results]
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else None
