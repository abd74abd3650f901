"""Addresses of MLflow's pages."""

from __future__ import annotations

from urllib.parse import quote

from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.facts import SWEEP_JOB
from orchestrator.tracking.memory import Memory, MemoryFile
from orchestrator.tracking.views import share_key


def compare_url(ui_url: str, experiment_id: str, sweep: str) -> str:
    """The page that compares a sweep's levels: parallel coordinates, error against granularity, learning curves."""
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


def find_run_links(store: ObjectStore, sweep: str, tracking_uri: str, ui_url: str) -> dict[str, str]:
    """``run_url`` by job name, of all jobs that are published; the sweep's own under ``SWEEP_JOB``."""
    memory = _memory(store, sweep, tracking_uri)
    if not ui_url:
        return {}
    return {run.job: run_url(ui_url, memory.experiment_id, run.run_id) for run in memory.runs}


def _memory(store: ObjectStore, sweep: str, tracking_uri: str) -> Memory:
    return MemoryFile(store, sweep, tracking_uri).load()


def _runs_url(ui_url: str, experiment_id: str) -> str:
    return f"{ui_url.rstrip('/')}/#/experiments/{quote(experiment_id, safe='')}/runs"


__all__ = ["SWEEP_JOB", "compare_url", "find_compare_link", "find_run_links", "run_url"]
