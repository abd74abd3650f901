"""Addresses of MLflow's pages about a sweep, from the store alone."""

from __future__ import annotations

from orchestrator.cli.settings import Settings
from orchestrator.plan.graph import Plan
from orchestrator.stack.description import read_stack
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.links import find_compare_link


def tracking_and_pages(plan: Plan, settings: Settings | None = None) -> tuple[str, str]:
    """Tracking URI of a sweep, and the address of its pages: of the server itself, else of the running stack's.

    The second one is empty where nothing serves pages.
    """
    settings = settings or Settings()
    uri = settings.tracking_uri(plan.tracking_uri)
    if uri.startswith(("http://", "https://")):
        return uri, uri
    stack = read_stack(settings.home)
    return uri, stack.mlflow_url if stack is not None and stack.tracking_uri == uri else ""


def compare_line(store: ObjectStore, plan: Plan) -> str:
    """``Compare the levels in MLflow: http://...``; empty while nothing is published, or nothing serves pages."""
    uri, pages = tracking_and_pages(plan)
    link = find_compare_link(store, plan.sweep, uri, pages)
    return f"Compare the levels in MLflow: {link}" if link else ""
