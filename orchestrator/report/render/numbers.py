"""Numbers as people read them. Here, and nowhere before, fractions become percent."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from orchestrator.core.metrics import is_of_backbone, unit_of
from orchestrator.core.units import format_money
from orchestrator.planning.estimate.power import ALPHA, CONFIDENCE, CONFIDENCE_TEXT
from orchestrator.report.results import Row, Table, values_by_seeds
from orchestrator.report.statistics.intervals import RATE, is_fraction
from orchestrator.report.statistics.summaries import PairedDifference, Summary, transfer_seed_effect

MISSING = "-"
MEAN_INTERVAL: Final = f"{CONFIDENCE_TEXT} CI of the mean"
CORRECTED_INTERVAL: Final = f"corrected {CONFIDENCE_TEXT} CI"
"""Headers of intervals."""
TOO_FEW = "too few seeds"
"""In place of a wide interval that reaches beyond what the metric can be, and so says nothing else."""
_SIGNIFICANT_DIGITS = 4
_EXPONENT_FROM = 1e7
_MAX_DECIMALS = 6
"""Of numbers so near to a threshold that their usual decimals would print the threshold itself."""
_SILENT = frozenset({"missing", "pending"})
"""Reasons that "2/3" says already."""
_REASONS = {"nan": "NaN"}
_IS_SHARE_OF_SAMPLES = re.compile(r"(best_)?val_error|val_top5_error|val_level_error_.+|val_k\d+_error")
"""Metrics that are wrong samples over all validation samples."""


def fixed(value: float, digits: int, *, sign: str = "") -> str:
    """A number with some decimals; what rounds to zero is ``0.00``, never ``-0.00`` or ``+0.00``."""
    text = f"{value:{sign}.{digits}f}"
    return text if float(text) else text.lstrip("+-")


def number(value: float, metric: str, *, sign: str = "") -> str:
    """A value of a metric: fractions as percent with two decimals, anything else with four significant digits.

    Large values, such as 12343.7 images/s, have one decimal: a mean and the ends of its interval differ in their last
    digits. From ten million on they have an exponent. ``number`` of ``assets/page.js`` does the same.
    """
    if is_fraction(metric):
        return fixed(100 * value, 2, sign=sign)
    digits = _SIGNIFICANT_DIGITS
    if abs(value) < _EXPONENT_FROM:
        digits = max(digits, len(str(int(abs(value)))) + 1)
    return f"{value:{sign if value else ''}.{digits}g}"


def unit(metric: str, *, of_difference: bool = False) -> str:
    """What is printed behind ``number``: ``%``, of differences ``points``, or the metric's own unit; empty for none."""
    if is_fraction(metric):
        return "points" if of_difference else "%"
    return unit_of(metric)


def in_brackets(metric: str, *, of_difference: bool = False) -> str:
    """``unit`` behind a header: `` [%]``."""
    found = unit(metric, of_difference=of_difference)
    return f" [{found}]" if found else ""


def in_words(metric: str, *, of_difference: bool = False) -> str:
    """``unit`` behind a number: `` %``."""
    found = unit(metric, of_difference=of_difference)
    return f" {found}" if found else ""


def plus_minus(summary: Summary, metric: str) -> str:
    """``9.26 ± 3.99``; without the second number where the spread is unknown."""
    return mean_and_std(summary.mean, summary.std, metric)


def mean_and_std(mean: float, std: float | None, metric: str) -> str:
    """As ``plus_minus``, for numbers that others computed."""
    text = number(mean, metric)
    return text if std is None else f"{text} ± {number(std, metric)}"


def interval(low: float | None, high: float | None, metric: str, *, sign: str = "") -> str:
    """``[-25.96, -0.90]``, or a dash where there is none."""
    if low is None or high is None:
        return MISSING
    return f"[{number(low, metric, sign=sign)}, {number(high, metric, sign=sign)}]"


def mean_interval(summary: Summary, metric: str) -> str:
    """The interval of a mean; where it is all that the metric can be, it says nothing but its reason."""
    if is_fraction(metric) and (summary.low, summary.high) == (RATE.low, RATE.high):
        return TOO_FEW
    return interval(summary.low, summary.high, metric)


def family_interval(difference: PairedDifference, metric: str) -> str:
    """The simultaneous interval of a paired difference."""
    if difference.p_family is not None and difference.family_low is None:
        return TOO_FEW
    low, high = difference.family_low, difference.family_high
    if low is None or high is None or not (difference.is_established and is_fraction(metric)):
        return interval(low, high, metric, sign="+")
    near = 100 * min(abs(low), abs(high))  # an established difference is not printed with an end of 0.00
    digits = next((some for some in range(2, _MAX_DECIMALS + 1) if float(fixed(near, some))), 2)
    return f"[{fixed(100 * low, digits, sign='+')}, {fixed(100 * high, digits, sign='+')}]"


def p_text(p_value: float | None) -> str:
    """``0.031``; ``<0.001`` below; ``0.0497`` where three decimals would print the level itself."""
    if p_value is None:
        return MISSING
    if p_value < 0.0005:
        return "<0.001"
    decimals = range(3, _MAX_DECIMALS + 1)
    texts = [text for digits in decimals if (text := fixed(p_value, digits)) != fixed(ALPHA, digits)]
    return texts[0] if texts else fixed(p_value, 3)


def hours(value: float) -> str:
    """Hours with three significant digits, without an exponent below a million."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 0.001 else ("0" if value == 0 else "<0.001")


def money(amount: float, *, is_at_least: bool) -> str:
    """``1,234.50``; ``≥ 1,234.50`` for a sum that lacks something."""
    return f"{'≥ ' if is_at_least else ''}{format_money(amount)}"


def count(row: Row) -> str:
    """``3``, ``2/3 runs`` or ``1/3 runs, 1 failed, 1 NaN``."""
    if row.is_complete:
        return str(row.num_expected)
    told = [f"{number_of} {_REASONS.get(why, why)}" for why, number_of in row.absent.items() if why not in _SILENT]
    return ", ".join([f"{row.num_values}/{row.num_expected} runs", *told])


def among_complete(rows: Sequence[Row], table: Table) -> str:
    """What belongs behind ``lowest`` where a later one of rows in the order of ``Table.ranked`` is lower; or empty."""
    sign, means = table.better.sign, [row.summary.mean for row in rows if row.summary]
    return " among complete rows" if any(sign * mean < sign * means[0] for mean in means[1:]) else ""


def not_in_intervals(table: Table) -> list[str]:
    """Notes on what the intervals of a table, which are over pretraining seeds, do not cover."""
    found = (_on_these_transfer_seeds(table), _on_these_draws(table), _on_these_images(table))
    return [note for note in found if note]


def _on_these_transfer_seeds(table: Table) -> str:
    """All backbones share the transfer seeds: other seeds would shift differences, for all pretraining seeds alike."""
    if is_of_backbone(table.metric):
        return ""
    values = [values_by_seeds(row.results, table.metric) for row in table.rows]
    seeds = {pair for some in values for pair in some}
    if len({pair.pretrain for pair in seeds}) < 2:
        return ""
    if len({pair.transfer for pair in seeds}) == 1:
        return (
            "all runs have one transfer seed: intervals do not cover the choice of its head, order and labels, which "
            "all backbones share"
        )
    effect = transfer_seed_effect([some for some in values if some])
    if effect is None or effect.p_value >= 1 - CONFIDENCE:
        return ""
    error = f"{number(effect.std_error, table.metric)}{in_words(table.metric, of_difference=True)}"
    return (
        f"differences depend on the transfer seed (p = {effect.p_value:.2g}): intervals hold for these "
        f"{effect.num_transfer_seeds} seeds; for others a difference has a further standard error of {error}"
    )


def _on_these_draws(table: Table) -> str:
    """What several seeds have in common is in no interval, however many there are."""
    is_of_transfers, shared = not is_of_backbone(table.metric), list[str]()
    if table.has_one_draw and is_of_transfers:
        shared.append("all transfer seeds train on the same drawn samples")
    if table.has_one_origin:
        shared.append("the pretrainings of all seeds of a row continue one backbone")
    if table.has_one_search and is_of_transfers:
        shared.append("the transfers of all seeds of a row have the recipe that one search found")
    return f"{', and '.join(shared)}: intervals do not cover the choice of these" if shared else ""


def _on_these_images(table: Table) -> str:
    """Other validation images would give other errors.

    An error p on n images has the binomial standard error sqrt(p (1 - p) / n), which more seeds do not lower.
    """
    ranked, num_val = table.ranked, table.num_val
    if not num_val or not ranked or not _IS_SHARE_OF_SAMPLES.fullmatch(table.metric):
        return ""
    best = ranked[0].summary.mean if ranked[0].summary else math.nan
    error = number(math.sqrt(max(0.0, best * (1 - best)) / num_val), table.metric)
    return (
        f"intervals cover only the variation over seeds, on the same {num_val:,} validation images; with that many "
        f"images, an error of {number(best, table.metric)} % has a binomial standard error of {error} points"
    )
