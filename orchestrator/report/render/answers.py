"""The answer of every transfer in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.planning.estimate.power import ALPHA, CONFIDENCE_TEXT, MAX_ROWS_ALL_PAIRS
from orchestrator.report.comparisons import has_all_pairs, values_of
from orchestrator.report.render.columns import (
    contrast_text,
    describe_effects,
    describe_transfer,
    is_tied,
    num_comparisons,
)
from orchestrator.report.render.numbers import (
    MISSING,
    among_complete,
    count,
    family_interval,
    fixed,
    in_words,
    mean_and_std,
    number,
    p_text,
    plus_minus,
)
from orchestrator.report.results import EffectTable, FactorReport, FactorTable, OnePass, Report, Row, Table
from orchestrator.report.statistics.corrections import Family, PooledFit
from orchestrator.report.statistics.effects import Effect
from orchestrator.report.statistics.intervals import is_fraction
from orchestrator.report.statistics.summaries import PairedDifference

_MAX_NAMES = 5
_SURELY: Final = f"at {CONFIDENCE_TEXT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    """The result of one transfer: the lowest label space, the lowest of every other entry, and what is established."""

    title: str
    sentences: tuple[str, ...]


def answers(report: Report) -> tuple[ReportAnswer, ...]:
    """The answer of every transfer of final weights on all labels."""
    of_tables = (
        ReportAnswer(title=describe_transfer(table), sentences=_sentences(table)) for table in report.headlines
    )
    effects = report.effects if isinstance(report, FactorReport) else ()
    return (
        *of_tables,
        *(ReportAnswer(title=describe_effects(found), sentences=_of_factors(found)) for found in effects),
    )


def headline(report: Report) -> str:
    """The one sentence of a report: what is established of its first transfer, then which mean is best."""
    table = next((table for table in report.headlines if table.ranked), None)
    if table is None:
        return ""
    sentences, claims = _sentences(table), verdict(table)[:1]
    first = [f"{text[:1].upper()}{text[1:]}." for text in dict.fromkeys([*claims, sentences[0]])]
    return f"{describe_transfer(table)}: {' '.join(first)}"


def verdict(table: Table) -> tuple[str, ...]:
    """All claims about the label spaces of a table; they follow from its one corrected family."""
    family = table.family
    if len(table.ranked) < 2 or family is None:
        return ()
    if _is_equal(table):
        return (_tie(table),)
    if not family.num_comparisons:
        return (_untested(table, family), *_pooled(table, family.pooled))
    return (_established(table, family), *_best(table), *_pooled(table, family.pooled))


def _sentences(table: Table) -> tuple[str, ...]:
    if not table.ranked:
        return ("no result yet", *_one_pass(table))
    if is_tied(table):
        return (*dict.fromkeys((_tie(table), *verdict(table))), *_one_pass(table))
    lowest = table.ranked[0]
    others: dict[str, list[Row]] = {}
    for row in table.ranked:
        if row.series != lowest.series:
            others.setdefault(row.series, []).append(row)
    best = table.better.best
    rivals = [
        f"{best} of {series}{among_complete(rows, table)}: {_sentence(rows[0], table)}"
        for series, rows in others.items()
    ]
    head = f"{best} mean{among_complete(table.ranked, table)}: {_sentence(lowest, table)}{_ties(lowest, table)}"
    return (head, *rivals, *verdict(table), *_one_pass(table))


def _sentence(row: Row, table: Table) -> str:
    unit = in_words(table.metric)
    classes = "" if row.granularity is None else f" (G = {row.granularity})"
    lacks = "" if row.is_complete else f" from {count(row)}"
    value = MISSING if row.summary is None else plus_minus(row.summary, table.metric)
    return f"{row.label_space}{classes}, {table.metric} {value}{unit}{lacks}{_against_baseline(row, table)}"


def _ties(lowest: Row, table: Table) -> str:
    """Rows that print the same value as the lowest."""
    same = [row for row in table.ranked[1:] if _mean(row, table) == _mean(lowest, table)]
    return f"; the same value: {_names(same, lambda row: row.label_space)}" if same else ""


def _mean(row: Row, table: Table) -> str:
    return MISSING if row.summary is None else number(row.summary.mean, table.metric)


def _against_baseline(row: Row, table: Table) -> str:
    if row.label_space == table.baseline:
        return ", the baseline itself"
    if row.improvement is None:
        return ""
    percent = fixed(100 * abs(row.improvement), 1)
    direction = "lower" if table.better.sign * row.improvement >= 0 else "higher"
    what = "the same as" if percent == "0.0" else f"{percent} % {direction} than"
    return f", {what} the baseline {table.baseline}{_certainty(row.difference)}"


def _certainty(difference: PairedDifference | None) -> str:
    if difference is None or difference.p_family is None:
        return " (not tested)"
    verdict_of = "established" if difference.is_established else "not established"
    return f" ({verdict_of}, corrected {_p(difference.p_family)})"


def _p(p_value: float | None) -> str:
    """``p = 0.031`` or ``p < 0.001``."""
    text = p_text(p_value)
    return f"p < {text[1:]}" if text.startswith("<") else f"p = {text}"


def _tie(table: Table) -> str:
    mean, those = _mean(table.ranked[0], table), _those_with_results(table)
    value = f"{table.metric} {mean}{in_words(table.metric)}"
    is_saturated = is_fraction(table.metric) and not float(mean)
    if _is_equal(table):
        why = "the target is saturated and shows no difference between them" if is_saturated else "nothing differs"
        return f"all {those} have {value}: {why}"
    why = ": the target is saturated" if is_saturated else ""
    return f"all {those} print the same mean {value}{why}; none is called the best"


def _is_equal(table: Table) -> bool:
    """Whether all rows have the same value for every seed; rows that are tied may only print the same mean."""
    first, *others = (values_of(row, table.metric) for row in table.ranked)
    return all(found == first for found in others)


def _untested(table: Table, family: Family) -> str:
    is_large = not has_all_pairs(table)
    if is_large and table.baseline_row is None:
        lacks = f"the baseline {table.baseline} has no result" if table.baseline else "there is none (report.baseline)"
        why = f"more than {MAX_ROWS_ALL_PAIRS} {table.noun}s are compared with the baseline only, and {lacks}"
        return f"nothing is tested: {why}"
    if family.max_pretrain_seeds < 2:
        who = f"no {table.noun} shares" if is_large else f"no two {table.noun}s share"
        whom = f" with the baseline {table.baseline}" if is_large else ""
        why = f"{who} two pretrain seeds{whom}{_or_each(pair.difference for pair in table.comparisons)}"
    else:
        why = "every difference is the same for all seeds"
    return f"nothing is tested: {why}, so the noise between seeds is unknown"


def _established(table: Table, family: Family) -> str:
    """Which label spaces differ from the baseline; if nothing is tested against one, how many pairs differ."""
    corrected = f"corrected for {num_comparisons(family)}"
    if not family.num_with_baseline:
        found, total = family.num_established, family.num_comparisons
        untested = (
            "" if table.baseline_row is None else f"no {table.noun} can be tested against {_why_untested(table)}; "
        )
        if not found:
            return f"{untested}no two {table.noun}s are established to differ; {corrected}"
        return f"{untested}{found} of {total} pairs of {table.noun}s differ {_SURELY}; {corrected}"
    others = [row for row in table.ranked if row is not table.baseline_row]
    if num_untested := len(others) - family.num_with_baseline:
        corrected += f"; {num_untested} of {len(others)} {table.noun}s cannot be tested against {_why_untested(table)}"
    rows = [row for row in table.ranked if row.difference and row.difference.is_established]
    if not rows:
        tested = "that is tested " if num_untested else ""
        return f"no {table.noun} {tested}is established to differ from the baseline {table.baseline}; {corrected}"
    lower = [row for row in rows if row.difference and row.difference.mean < 0]
    higher = [row for row in rows if row.difference and row.difference.mean > 0]
    sides = [
        f"{side} than the baseline {table.baseline} {_SURELY}: {_names(some, lambda row: _by_how_much(row, table))}"
        for side, some in (("lower", lower), ("higher", higher))
        if some
    ]
    return f"{'; '.join(sides)}; {corrected}"


def _or_each(differences: Iterable[PairedDifference]) -> str:
    """What independent samples need instead of two pretrain seeds in common; empty where all are pairs."""
    return "" if all(difference.is_paired for difference in differences) else " (independent samples: have two each)"


def _why_untested(table: Table) -> str:
    seeds = f"two pretrain seeds in common{_or_each(pair.difference for pair in table.comparisons)}"
    return f"the baseline {table.baseline}, with fewer than {seeds} or no noise between them"


def _by_how_much(row: Row, table: Table) -> str:
    if row.difference is None:
        return row.label_space
    unit = in_words(table.metric, of_difference=True)
    mean = number(row.difference.mean, table.metric, sign="+")
    return f"{row.label_space} {mean}{unit} {family_interval(row.difference, table.metric)}"


def _best(table: Table) -> list[str]:
    """The confidence set of the best, of which no member is established to be worse than another row.

    Nothing where rows were compared with the baseline alone.
    """
    if all(row.can_be_best is None for row in table.ranked):
        return []
    members = [row for row in table.ranked if row.can_be_best]
    if len(members) == len(table.ranked):
        return [f"no {table.noun} can be excluded as the best {_SURELY}"]
    names, those = _names(members, lambda row: row.label_space), _those_with_results(table)
    if len(members) == 1:
        which = "" if len(table.ranked) == len(table.rows) else f" of the {those}"
        return [f"{names} is the best{which} {_SURELY}"]
    return [f"the best {_SURELY} is among {len(members)} of {those}: {names}"]


def _those_with_results(table: Table) -> str:
    """``5 label spaces``; of more that are planned, ``5 label spaces with results``."""
    more = " with results" if len(table.ranked) < len(table.rows) else ""
    return f"{len(table.ranked)} {table.noun}s{more}"


def _pooled(table: Table, fit: PooledFit | None) -> list[str]:
    """The second analysis, which is no part of the verdict: its assumption comes before its result."""
    if fit is None:
        return []
    p_value = _p(fit.p_equal_variances)
    if fit.is_contradicted:
        return [f"second analysis (pooled over {table.noun}s) left out: their variances over seeds differ, {p_value}"]
    head = (
        f"second analysis, valid only if all {table.noun}s have the same variance over seeds (pooled two-way model, "
        f"{fit.degrees_of_freedom} degrees of freedom; test of equal variances: {p_value})"
    )
    return [f"{head}: {_pooled_finding(table)}"]


def _pooled_finding(table: Table) -> str:
    tested = [row for row in table.ranked if row.difference and row.difference.p_pooled is not None]
    if not tested:
        found = [pair.difference for pair in table.comparisons if pair.difference.p_pooled is not None]
        return f"{sum(_is_pooled(difference) for difference in found)} of {len(found)} pairs would differ"
    rows = [row for row in tested if _is_pooled(row.difference)]
    names = f": {_names(rows, lambda row: row.label_space)}" if rows else ""
    return f"{len(rows)} of {len(tested)} {table.noun}s would differ from the baseline{names}"


def _is_pooled(difference: PairedDifference | None) -> bool:
    return difference is not None and difference.p_pooled is not None and difference.p_pooled < ALPHA


# ---------------------------------------------------------------------------------------------------------- factors


def _of_factors(table: EffectTable) -> tuple[str, ...]:
    """What is established of the factors, from the one family of their effects."""
    tested = [effect for effect in table.contrasts if effect.difference.p_family is not None]
    lacking = _not_compared(table)
    if not tested:
        if not any(_has_matched_cells(table, factor) for factor in table.factors):
            return ("nothing is tested: no two cells with results differ in one factor alone",)
        seeds = f"two pretrain seeds{_or_each(effect.difference for effect in table.contrasts)}"
        why = f"no two values share {seeds}, or their differences are the same for all seeds"
        return (f"nothing is tested: {why}", *lacking)
    corrected = f"corrected for {len(tested)} contrast{'s' * (len(tested) > 1)}"
    main = [effect for effect in tested if len(effect.factors) == 1]
    interactions = [effect for effect in tested if len(effect.factors) > 1]
    is_whole = not lacking and all(effect in tested for effect in table.contrasts if len(effect.factors) == 1)
    none = f"no {'' if is_whole else 'tested '}value of a factor differs from another one {_SURELY}"
    sentences = [f"{_sides(main, table) or none}; {corrected}", *lacking]
    if interactions:
        found = [effect for effect in interactions if effect.difference.is_established]
        told = ", ".join(_effect_size(effect, table) for effect in found[:_MAX_NAMES])
        more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
        sentences.append(f"interactions {_SURELY}: {told}{more}" if found else "no interaction is established")
    partial = [effect for effect in main if effect.num_matched < effect.num_combinations]
    if partial:
        first = partial[0]
        sentences.append(
            f"{len(partial)} contrast{'s' * (len(partial) > 1)} use only matched cells (first: "
            f"{contrast_text(first)}, {first.num_matched} of {first.num_combinations} combinations of other factors)"
        )
    fewer = [effect for effect in main if effect.difference.num_pretrain_seeds < effect.num_seeds]
    if fewer:
        first = fewer[0]
        sentences.append(
            f"{len(fewer)} contrast{'s' * (len(fewer) > 1)} leave out seeds that lack a cell (first: "
            f"{contrast_text(first)}, {first.difference.num_pretrain_seeds} of {first.num_seeds} seeds)"
        )
    unpaired = [contrast_text(effect) for effect in main if not effect.is_paired]
    if unpaired:
        names = ", ".join(unpaired[:_MAX_NAMES])
        sentences.append(f"independent samples, tested by Welch's t (their runs share only the seed number): {names}")
    return tuple(sentences)


def _not_compared(table: EffectTable) -> list[str]:
    """Factors without any main effect, and why."""
    compared = {effect.factors for effect in table.contrasts}
    lacking = [factor for factor in table.factors if (factor,) not in compared]
    alone = [factor for factor in lacking if not _has_matched_cells(table, factor)]
    apart = [factor for factor in lacking if factor not in alone]
    it = "it" if len(alone) == 1 else "one of them"
    reasons = (
        (alone, f"no two cells with results differ in {it} alone"),
        (apart, "no two cells that are compared match and share a pretrain seed"),
    )
    return [f"not tested: {', '.join(factors)} ({why})" for factors, why in reasons if factors]


def _has_matched_cells(table: EffectTable, factor: str) -> bool:
    """Whether two cells with results differ in this factor alone; without such cells it has no effect."""
    place = list(table.factors).index(factor)
    rests = [cell[:place] + cell[place + 1 :] for cell in table.cells]
    return len(set(rests)) < len(rests)


def _sides(effects: Sequence[Effect], table: EffectTable) -> str:
    """Established main effects, lower ones first."""
    found = [effect for effect in effects if effect.difference.is_established]
    lower = [effect for effect in found if effect.difference.mean < 0]
    higher = [effect for effect in found if effect.difference.mean > 0]
    return "; ".join(
        f"{table.metric} is {side} {_SURELY} with {', '.join(_effect_size(effect, table) for effect in some)}"
        for side, some in (("lower", lower), ("higher", higher))
        if some
    )


def _effect_size(effect: Effect, table: EffectTable) -> str:
    unit = in_words(table.metric, of_difference=True)
    mean = number(effect.difference.mean, table.metric, sign="+")
    return f"{contrast_text(effect)} {mean}{unit} {family_interval(effect.difference, table.metric)}"


def _names(rows: Sequence[Row], say: Callable[[Row], str]) -> str:
    more = f" and {len(rows) - _MAX_NAMES} more" if len(rows) > _MAX_NAMES else ""
    return ", ".join(say(row) for row in rows[:_MAX_NAMES]) + more


def _one_pass(table: Table) -> list[str]:
    by_name = table.direct_trainings if isinstance(table, FactorTable) else {"": table.one_pass}
    told = [f"{name} {text}".lstrip() for name, found in by_name.items() if (text := _direct_training(found, table))]
    more = f" and {len(told) - _MAX_NAMES} more" if len(told) > _MAX_NAMES else ""
    values = ", ".join(told[:_MAX_NAMES])
    return [f"direct training on {table.target}, without transfer: {values}{more}"] if told else []


def _direct_training(found: OnePass | None, table: Table) -> str:
    if found is None or (found.summary is None and found.published is None):
        return ""
    unit = in_words(table.metric)
    ours = MISSING if found.summary is None else f"{plus_minus(found.summary, table.metric)}{unit}"
    printed = ""
    if found.published is not None:
        printed = f" (published {mean_and_std(found.published.value, found.published.std, table.metric)}{unit})"
    return f"{ours}{printed}"
