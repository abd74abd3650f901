"""Searches as tables and sentences."""

from __future__ import annotations

from orchestrator.report.numbers import MISSING, fixed, hours
from orchestrator.report.searches import SearchReport
from orchestrator.report.text import TextTable

_MAX_ROWS = 20
"""Trials that are shown, the best ones first; the record of the search has all."""


def search_table(search: SearchReport) -> TextTable:
    """Trials down, their values across; below, what was saved and the risk."""
    fields = parameter_names(search)
    header = ("trial", *fields, "state", "epochs", f"{search.metric} [%]")
    shown = search.trials[:_MAX_ROWS]
    rows = tuple(
        (
            str(trial.number),
            *(_text(trial.params.get(field, MISSING)) for field in fields),
            trial.state,
            f"{trial.epoch:g}",
            MISSING if trial.value is None else fixed(100 * trial.value, 2),
        )
        for trial in shown
    )
    more = len(search.trials) - len(shown)
    caption = " ".join([*sentences(search), *([f"{more} more trials are in its record."] if more else [])])
    best = next((index for index, trial in enumerate(shown) if trial.number == search.best), None)
    title = f"{search.job}: {search.algorithm} over {search.over}, by {search.metric}"
    return TextTable(title=title, header=header, rows=rows, best=best, caption=caption)


def parameter_names(search: SearchReport) -> list[str]:
    """What was searched over, in the order of the search space."""
    return list(dict.fromkeys(name for trial in search.trials for name in trial.params))


def hours_unit(search: SearchReport) -> tuple[str, float]:
    """In which hours its cost is told (``GPU`` or ``CPU``), and how many of them an hour of a trial is."""
    return ("GPU", search.gpus) if search.gpus else ("CPU", search.cpus)


def sentences(search: SearchReport) -> list[str]:
    """Whether the best one is alone, what was saved, and the risk, in words."""
    return [*_ties(search), *_saving(search)]


def _ties(search: SearchReport) -> list[str]:
    """Trials whose value is that of the best one."""
    values = {trial.number: trial.value for trial in search.trials if trial.state == "completed"}
    equal = sorted(number for number, value in values.items() if value is not None and value == values.get(search.best))
    if len(equal) < 2:
        return []
    return [f"{len(equal)} trials tie for the best ({', '.join(map(str, equal))}); {search.best} was taken."]


def _saving(search: SearchReport) -> list[str]:
    unit, each = hours_unit(search)
    stopped = sum(trial.state == "stopped" for trial in search.trials)
    spent, full = hours(search.spent_hours * each), hours(search.full_hours * each)
    if not stopped:
        return [f"All trials ran to their ends: {spent} {unit}-hours."]
    epochs = f"{search.epochs:g} of {search.full_epochs:g} epochs were trained, {spent} {unit}-hours of {full} that "
    saved = f"all trials would have taken: {fixed(100 * search.saved_share, 0)} % saved."
    risk = f"Risk: {stopped} of {len(search.trials)} trials were judged before their ends; one of them might have won."
    told = [epochs + saved, risk]
    for rung in search.risks:
        if rung.num_stopped and rung.num_pairs:
            swapped = f"{rung.num_swapped} of {rung.num_pairs} pairs of trials that came through"
            told.append(f"After epoch {rung.rung:g}, where {rung.num_stopped} ended, {swapped} changed places.")
        elif rung.num_stopped:
            told.append(
                f"At epoch {rung.rung:g} {rung.num_stopped} ended; too few came through to tell how sure it is."
            )
    return told


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
