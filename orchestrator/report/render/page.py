"""The report as one interactive HTML page, which needs no server, no network and no other file.

The columns of its tables are those of ``render.columns``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from orchestrator.core.job_kinds import RESULT_KINDS
from orchestrator.core.metrics import Better, better_of, unit_of
from orchestrator.planning.estimate.power import ALPHA_TEXT, CONFIDENCE_TEXT
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.factors import FactorLayout
from orchestrator.report.inputs import Curve, Learning
from orchestrator.report.render.analyses import analyses_html
from orchestrator.report.render.answers import answers, headline
from orchestrator.report.render.columns import (
    caveats,
    describe_place,
    effect_table,
    family_caption,
    is_tied,
    page_columns,
)
from orchestrator.report.render.curves import SPREAD
from orchestrator.report.render.files import fields_of, json_text
from orchestrator.report.render.label_efficiency import label_efficiency_html
from orchestrator.report.render.numbers import count, not_in_intervals
from orchestrator.report.render.other_tables import hours_unit, parameter_names, sentences
from orchestrator.report.render.simulations import page_document
from orchestrator.report.render.study import study_facts
from orchestrator.report.results import (
    Ablation,
    AblationCell,
    EffectTable,
    FactorReport,
    FactorTable,
    Report,
    Row,
    SearchReport,
    Table,
    TablePlace,
)
from orchestrator.report.statistics.intervals import is_fraction
from orchestrator.storage.layout import artifact_folder

_FACETS = (
    *("label_space", "pretrain", "pretrain_seed", "transfer", "protocol", "target", "transfer_seed"),
    *("checkpoint", "fraction", "cell"),
)
_SHORT = "%.6g "
"""Significant digits of curves: more than a screen has pixels."""


def render_page(
    report: Report,
    plan: Plan,
    learning: Learning,
    *,
    links: Mapping[str, str] | None = None,
    origin: Sequence[tuple[str, str]] = (),
) -> bytes:
    """The whole page.

    Args:
        report: what it shows.
        plan: what the report was computed from.
        learning: learning curves by job.
        links: address of the tracked run by job name, as far as there is one.
        origin: name and text of what the plan does not say: dates, cost, commit, where its sweep.yaml is.
    """
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # 5 MB of JavaScript: only for this page

    document = _document(report, plan, learning, links or {})
    document["verdict"] = headline(report)
    document["study"] = [*study_facts(report, plan), *origin]
    # "<" never appears inside the script element, so no text in the report can end it.
    embedded = json_text(document, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "@@TITLE@@": escape(f"Report of sweep {report.sweep}"),
        "@@STYLE@@": _asset("page.css"),
        "@@CONFIDENCE@@": CONFIDENCE_TEXT,
        "@@ALPHA@@": ALPHA_TEXT,
        "@@SPREAD@@": SPREAD,
        "@@PLOTLY@@": get_plotlyjs(),
        "@@DATA@@": embedded,
        "@@ANALYSES@@": label_efficiency_html(report) + analyses_html(report),
        "@@SCRIPT@@": _script(report),
    }
    # Split once, before anything is filled in: a mark inside the filled-in text stays what it is.
    pieces: list[str] = re.split(f"({'|'.join(parts)})", _asset("page.html"))
    return "".join(parts.get(piece, piece) for piece in pieces).encode()


def _script(report: Report) -> str:
    script = _asset("page.js").replace("// @@SEARCHES@@", _asset("searches.js"))
    return f"{script}{_asset('simulations.js')}" if report.simulations else script


def _document(report: Report, plan: Plan, learning: Learning, links: Mapping[str, str]) -> dict[str, Any]:
    notes = list(caveats(report))
    if learning.unreadable:
        lost, first = len(learning.unreadable), learning.unreadable[0]
        notes.append(f"metrics of {lost} runs cannot be read (first: {first}); see `orchestrator fsck`")
    curves = learning.curves.items()
    simulations = [page_document(found) for found in report.simulations]
    return {
        **({"simulations": simulations} if simulations else {}),
        "sweep": report.sweep,
        "metric": report.metric,
        "isFraction": is_fraction(report.metric),
        "notes": notes,
        "answers": [{"title": answer.title, "sentences": answer.sentences} for answer in answers(report)],
        "tables": [_table(table) for table in report.tables],
        "ablations": [_ablation(ablation) for ablation in report.ablations],
        "searches": [_search(search) for search in report.searches],
        **({"effects": [_effects(found) for found in report.effects]} if isinstance(report, FactorReport) else {}),
        **({"unit": unit} if (unit := unit_of(report.metric)) else {}),
        **({"isHigherBetter": True} if better_of(report.metric) is Better.HIGHER else {}),
        "runs": _runs(report, plan, links),
        "learning": {job: {name: _curve(curve) for name, curve in some.items()} for job, some in curves},
    }


def _table(table: Table) -> dict[str, Any]:
    places = {row.label_space: index for index, row in enumerate(table.rows)}
    one_pass = table.one_pass
    return {
        **fields_of(table.place),
        "title": describe_place(table.place),
        "isHeadline": table.is_headline,
        "criteria": [criterion.value for criterion in table.criteria],
        "images": "; ".join(not_in_intervals(table)),
        "columns": page_columns(table),
        "rows": [_row(row) for row in table.rows],
        "onePass": one_pass if one_pass and one_pass.summary else None,
        # Label spaces by number, then the first minus the second: a large sweep has tens of thousands of pairs.
        "pairs": [
            [places[pair.first], places[pair.second], pair.difference.mean, int(pair.difference.is_established)]
            for pair in table.comparisons
        ],
        "baseline": table.baseline,
        "caption": "; ".join(family_caption(table)),
        "isTied": is_tied(table),
        **(_factors_of(table) if isinstance(table, FactorTable) else {}),
    }


def _factors_of(table: FactorTable) -> dict[str, Any]:
    """What a table of combinations has besides: by row the values to filter by."""
    return {"factors": table.row_factors, "values": table.row_values}


def _effects(table: EffectTable) -> dict[str, Any]:
    """The table of effects as text: where an interval says only that seeds are too few is decided in one place."""
    text = effect_table(table)
    return {
        "transfer": table.place.transfer,
        "title": text.title,
        "header": text.header,
        "rows": text.rows,
        "established": [int(effect.difference.is_established) for effect in table.contrasts],
        "factors": [effect.factors for effect in table.contrasts],
        "caption": text.caption,
    }


def _row(row: Row) -> dict[str, Any]:
    """What curves, filters and the choice of another cell of a grid need besides the columns."""
    return {
        "labelSpace": row.label_space,
        "series": row.series,
        "granularity": row.granularity,
        "n": count(row),
        "summary": row.summary,
        "published": row.published,
        "cell": row.cell,
    }


def _ablation(ablation: Ablation) -> dict[str, Any]:
    return {
        **fields_of(ablation.place),
        "facet": ablation.facet.value,
        "values": ablation.values,
        "selectedBy": [criterion.value for criterion in ablation.selected_by],
        "rows": [
            {
                "labelSpace": row.label_space,
                "series": row.series,
                "granularity": row.granularity,
                "cells": [_cell(cell) for cell in row.cells],
            }
            for row in ablation.rows
        ],
    }


def _cell(cell: AblationCell) -> dict[str, Any]:
    summary = cell.summary
    return {
        "mean": summary and summary.mean,
        "std": summary and summary.std,
        "n": summary.num_values if summary else 0,
        "expected": cell.num_expected,
        "selectError": cell.select_error,
        "isSelected": cell.is_selected,
    }


def _search(search: SearchReport) -> dict[str, Any]:
    """All of its trials; what is said below them is what the other forms say."""
    unit, each = hours_unit(search)
    return {
        "job": search.job,
        "over": search.over,
        "algorithm": search.algorithm,
        "metric": search.metric,
        "best": search.best,
        "fields": parameter_names(search),
        "unit": f"{unit}-hours",
        "spent": search.spent_hours * each,
        "full": search.full_hours * each,
        "saved": search.saved_share,
        "sentences": sentences(search),
        "trials": [{**fields_of(trial), "hours": trial.hours * each} for trial in search.trials],
    }


def _runs(report: Report, plan: Plan, links: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every backbone and transfer, with or without a result."""
    backbones = {job.key: report.backbones[job.name] for job in plan.jobs if job.name in report.backbones}
    transfers = {
        result.key: result.metrics[report.metric]
        for table in report.tables
        for row in table.rows
        for result in (*row.results, *row.others)
    }
    values = {**backbones, **transfers}
    layout = FactorLayout.of(plan)
    return [
        {
            **{name: job.facets[name] for name in _FACETS if name in job.facets},
            **_row_of(job, layout),
            "job": job.name,
            "kind": job.kind.value,
            "key": job.key,
            "artifact": f"{plan.store_uri.rstrip('/')}/{artifact_folder(job.key)}/",
            "link": links.get(job.name, ""),
            "state": report.absent.get(job.name, "committed"),
            "value": values.get(job.key),
        }
        for job in plan.jobs
        if job.kind in RESULT_KINDS
    ]


def _row_of(job: Job, layout: FactorLayout) -> dict[str, str]:
    """Where rows are combinations: table and row of a run, under the names by which the page finds those of a row."""
    address = layout.address_of(job, TablePlace(transfer="", protocol="", target=""))
    return {} if address is None else {"pretrain": address[0].pretrain, "label_space": address[1]}


def _curve(curve: Curve) -> list[list[float]]:
    return [_short(curve.epochs), _short(curve.values)]


def _short(values: Sequence[float]) -> list[float]:
    # Written and read as one text: a page of ten thousand runs has hundreds of thousands of numbers.
    return [float(number) for number in (_SHORT * len(values) % tuple(values)).split()]


def _asset(name: str) -> str:
    return resources.files("orchestrator.report").joinpath("assets", name).read_text(encoding="utf-8")
