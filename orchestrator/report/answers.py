"""The answer of every transfer in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.report.numbers import (
    MISSING,
    count,
    difference_interval,
    fixed,
    is_fraction,
    mean_and_std,
    number,
    p_text,
    plus_minus,
    probability,
)
from orchestrator.report.results import Report, Row, Table
from orchestrator.report.statistics import PairedDifference
from orchestrator.report.text import describe_transfer

_NUM_PROBABLE = 3
_FEW_SEEDS = 5
"""Below, what the bootstrap calls 95 % is the truth in 87 to 93 % (simulated; see ``docs/report.md``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one transfer says: the best label space, the best of every other entry, and how sure that is."""

    title: str
    sentences: tuple[str, ...]


def answers(report: Report) -> tuple[Answer, ...]:
    """The answer of every transfer of final weights on all labels."""
    return tuple(Answer(title=describe_transfer(table), sentences=_sentences(table)) for table in report.headlines)


def _sentences(table: Table) -> tuple[str, ...]:
    if not table.ranked:
        return ("no result yet", *_one_pass(table))
    best = table.ranked[0]
    others: dict[str, Row] = {}
    for row in table.ranked:
        if row.series != best.series:
            others.setdefault(row.series, row)
    rivals = [f"best of {row.series}: {_sentence(row, table)}" for row in others.values()]
    return (f"best: {_sentence(best, table)}", *rivals, *_certainty(table), *_one_pass(table))


def _sentence(row: Row, table: Table) -> str:
    unit = " %" if is_fraction(table.metric) else ""
    classes = "" if row.granularity is None else f" (G = {row.granularity})"
    lacks = "" if row.is_complete else f" from {count(row)}"
    value = MISSING if row.summary is None else plus_minus(row.summary, table.metric)
    return f"{row.label_space}{classes}, {table.metric} {value}{unit}{lacks}{_verdict(row, table)}"


def _verdict(row: Row, table: Table) -> str:
    if row.label_space == table.baseline:
        return ", the baseline itself"
    if row.improvement is None:
        return ""
    direction = "lower" if row.improvement >= 0 else "higher"
    verdict = f", {fixed(100 * abs(row.improvement), 1)} % {direction} than the baseline {table.baseline}"
    return verdict + _confidence(row.difference)


def _confidence(difference: PairedDifference | None) -> str:
    if difference is None or difference.low is None:
        return ""
    percent = fixed(100 * difference.confidence, 0)
    if difference.excludes_zero:
        return f" ({percent} % CI of the paired difference excludes 0)"
    return f" (not distinguishable: {percent} % CI of the paired difference contains 0)"


def _certainty(table: Table) -> list[str]:
    """How sure the choice of the best row is."""
    likely = sorted(
        (row for row in table.rows if row.probability_best), key=lambda row: row.probability_best or 0.0, reverse=True
    )
    if not likely:
        return []
    shares = [f"{row.label_space} {probability(row.probability_best)} %" for row in likely[:_NUM_PROBABLE]]
    num_seeds = max(row.summary.num_pretrain_seeds for row in likely if row.summary)
    seeds = f"{num_seeds} pretrain seed{'s' * (num_seeds > 1)}"
    doubt = ", too sure for so few" if num_seeds < _FEW_SEEDS else ""
    sentence = f"chance of being the best (bootstrap over {seeds}{doubt}): {', '.join(shares)}"
    return [sentence, *_to_the_next(table)]


def _to_the_next(table: Table) -> list[str]:
    """The best row against the second, corrected for having looked at all pairs."""
    if len(table.ranked) < 2:
        return []
    names = tuple(row.label_space for row in table.ranked[:2])
    for pair in table.comparisons:
        if {pair.first, pair.second} == set(names) and pair.difference.p_holm is not None:
            found = pair.difference if pair.first == names[0] else pair.difference.turned
            unit = " points" if is_fraction(table.metric) else ""
            mean, ends = number(found.mean, table.metric, sign="+"), difference_interval(found, table.metric)
            pairs = f"{len(table.comparisons)} pair{'s' * (len(table.comparisons) > 1)}"
            p_value = f"p = {p_text(found.p_holm)} after Holm's correction for {pairs}"
            return [f"{names[0]} against the next, {names[1]}: {mean}{unit}, 95 % CI {ends}, {p_value}"]
    return []


def _one_pass(table: Table) -> list[str]:
    found = table.one_pass
    if found is None or (found.summary is None and found.published is None):
        return []
    unit = " %" if is_fraction(table.metric) else ""
    ours = MISSING if found.summary is None else f"{plus_minus(found.summary, table.metric)}{unit}"
    printed = ""
    if found.published is not None:
        printed = f" (published {mean_and_std(found.published.value, found.published.std, table.metric)}{unit})"
    return [f"one-pass on {found.label_space}, without transfer: {ours}{printed}"]
