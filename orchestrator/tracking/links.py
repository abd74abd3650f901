"""Addresses of the pages of MLflow, and views of them that compare label spaces and factors.

A view is kept as a tag of the experiment, so that a link opens it. MLflow's pages share views this way themselves: the
state of the page in JSON, in the tag ``mlflow.sharedViewState.KEY``, opened by ``?viewStateShareKey=KEY``. Each sweep
has its own view in its experiment.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from orchestrator.core.metrics import Better, better_of
from orchestrator.planning.graph.design import PlanDesign
from orchestrator.planning.graph.plan import FACTOR_PREFIX, Plan
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.values import BLOCK_FACTOR, LABELS_FACTOR
from orchestrator.tracking.draft import metric_name
from orchestrator.tracking.facts import SUPERSEDED, SWEEP_JOB, SWEEP_RUN, owner_of
from orchestrator.tracking.memory import Memory, MemoryFile

_TAG_PREFIX = "mlflow.sharedViewState."
_MAX_RUNS = 100
"""Shown in one chart."""
_CURVES, _LEVELS = "curves", "levels"
_HEIGHT = 580
"""Pixels of a chart of levels: an image has a square as wide as its chart, half of the page, and is not cut."""
CURVE_IMAGE = "curve"
"""Key of the sweep's run's image: mean error and spread against granularity, which MLflow's own charts cannot draw."""
_PARAMS = {BLOCK_FACTOR: "pretrain"}
"""Of factors that are called otherwise where runs say their values."""
_FACETS = ("transfer", "label_space", "level", "granularity", "pretrain_seed", "transfer_seed")


def share_key(sweep: str) -> str:
    """The key of a sweep's view."""
    return sha256(f"orchestrator {sweep}".encode()).hexdigest()[:32]


def shared_view(plan: Plan) -> dict[str, str]:
    """The tags of the experiment that hold a sweep's view, and have MLflow's pages show trainings, not chats."""
    return {
        f"{_TAG_PREFIX}{share_key(plan.sweep)}": json.dumps(_view(plan)),
        "mlflow.experimentKind": "custom_model_development",
    }


def _view(plan: Plan) -> dict[str, Any]:
    # Runs without the parameter are left out: those of backbones, or of everything but backbones and transfers. The
    # sweep's own run has it too, for its image of the curve.
    num_transfers = sum("transfer" in job.facets for job in plan.jobs)
    compared = "transfer" if num_transfers else "level"
    # The page loads so many runs. The sweep's, which has no error and would be the last by that, started first.
    is_small, metric = num_transfers < _MAX_RUNS, metric_name(plan.metric)
    return {
        "searchFilter": (
            f"tags.sweep = '{plan.sweep}' AND tags.state != '{SUPERSEDED}' AND params.{compared} LIKE '%'"
        ),
        "orderByKey": f"metrics.`{metric}`" if is_small else "attributes.start_time",
        "orderByAsc": better_of(plan.metric) is Better.LOWER or not is_small,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": [
            *(f"params.`{name}`" for name in (*_factor_params(plan), *_FACETS)),
            f"metrics.`{metric}`",
        ],
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": _charts(plan),
        "isAccordionReordered": True,  # else by name
        "compareRunSections": [
            {**_section(_LEVELS, "Factors" if _factor_params(plan) else "Levels"), "columns": 2, "cardHeight": _HEIGHT},
            _section(_CURVES, "Learning curves"),
        ],
    }


def _factor_params(plan: Plan) -> dict[str, bool]:
    """Parameters that say the values of factors of several values, label spaces apart, and whether all are numbers."""
    design = PlanDesign.of(plan)
    named = {factor: _PARAMS.get(factor, f"{FACTOR_PREFIX}{factor}") for factor in design.varied}
    return {name: design.is_ordered(factor) for factor, name in named.items() if factor != LABELS_FACTOR}


def _charts(plan: Plan) -> list[dict[str, Any]]:
    metric = metric_name(plan.metric)
    transfers = {job.facets["transfer"] for job in plan.jobs if "transfer" in job.facets}
    # Not the level: those of random ids are numbers, which MLflow leaves out of an axis of words.
    factors = _factor_params(plan)
    axes = [*(["transfer"] if len(transfers) > 1 else []), *factors, "label_space", "granularity"]
    ordered = next((name for name, is_ordered in factors.items() if is_ordered), "granularity")
    image = _chart("IMAGE", _LEVELS, f"{metric} against granularity")
    image |= {"imageKeys": [CURVE_IMAGE], "step": 0, "showRunParams": False}
    return [
        *([image] if transfers else []),
        {
            **_chart("PARALLEL", _LEVELS, f"{metric} by {'factors' if factors else 'label space'}"),
            "selectedParams": axes,
            "selectedMetrics": [metric],
            "showAllRuns": True,
        },
        {
            **_chart("SCATTER", _LEVELS, f"{metric} against {ordered}"),
            "xaxis": {"key": ordered, "type": "PARAM"},
            "yaxis": {"key": metric, "type": "METRIC"},
        },
        {**_chart("BAR", _LEVELS, metric), "metricKey": metric},
        *(
            {**_chart("LINE", _CURVES, name), "metricKey": name, "selectedMetricKeys": [name], "xAxisKey": "step"}
            for name in (metric, "train_loss")
        ),
    ]


def _chart(kind: str, section: str, title: str) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": f"{section}-{kind.lower()}-{title}",
        "metricSectionId": section,
        "displayName": title,
        "runsCountToCompare": _MAX_RUNS,
        "deleted": False,
        "isGenerated": False,
    }


def _section(uuid: str, name: str) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": True, "isReordered": False, "deleted": False, "isGenerated": False}


def compare_url(ui_url: str, experiment_id: str, sweep: str) -> str:
    """The page that compares a sweep's levels and factors: parallel coordinates, error against one, learning curves."""
    return f"{_runs_url(ui_url, experiment_id)}?viewStateShareKey={share_key(sweep)}&compareRunsMode=CHART"


def run_url(ui_url: str, experiment_id: str, run_id: str) -> str:
    """The page of a run."""
    return f"{_runs_url(ui_url, experiment_id)}/{quote(run_id, safe='')}"


def find_compare_link(store: ObjectStore, sweep: str, tracking_uri: str, ui_url: str) -> str:
    """``compare_url`` of a sweep; empty while nothing of it is published, or without a page.

    Args:
        store: where the publisher remembers what it has published; no server is asked.
        sweep: its name.
        tracking_uri: what the publisher writes to.
        ui_url: address of MLflow's pages; empty if none is known.
    """
    experiment_id = _memory(store, sweep, tracking_uri).experiment_id
    return compare_url(ui_url, experiment_id, sweep) if experiment_id and ui_url else ""


def find_run_links(store: ObjectStore, plan: Plan, tracking_uri: str, ui_url: str) -> dict[str, str]:
    """``run_url`` by job name, of all jobs of the plan that are published; the sweep's own under ``SWEEP_JOB``."""
    memory = _memory(store, plan.sweep, tracking_uri)
    if not ui_url:
        return {}
    # A name also has the runs of the keys that it had in earlier revisions.
    current = {SWEEP_RUN, *((job.name, job.key) for job in plan.jobs)}
    runs = [run for run in memory.runs if owner_of((run.job, run.key)) in current]
    return {run.job: run_url(ui_url, memory.experiment_id, run.run_id) for run in runs}


def _memory(store: ObjectStore, sweep: str, tracking_uri: str) -> Memory:
    return MemoryFile(store, sweep, tracking_uri).load()


def _runs_url(ui_url: str, experiment_id: str) -> str:
    return f"{ui_url.rstrip('/')}/#/experiments/{quote(experiment_id, safe='')}/runs"


__all__ = ["SWEEP_JOB", "compare_url", "find_compare_link", "find_run_links", "run_url"]
