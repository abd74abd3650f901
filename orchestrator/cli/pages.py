"""Addresses of MLflow's pages about a sweep, read only from the store."""

from __future__ import annotations

from orchestrator.planning.graph.plan import Plan
from orchestrator.services.settings import Settings
from orchestrator.services.stack_transport import addresses_of, shown_link
from orchestrator.stack.description import read_stack
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.links import find_compare_link


def tracking_and_pages(plan: Plan) -> tuple[str, str]:
    """Tracking URI of a sweep, and the address of its pages: of the server itself, else of the running stack's.

    The second one is empty where nothing serves pages.
    """
    settings = Settings()
    uri = settings.tracking_uri(plan.tracking_uri)
    if uri.startswith(("http://", "https://")):
        return uri, uri
    stack = read_stack(settings.home)
    return uri, stack.mlflow_url if stack is not None and stack.tracking_uri == uri else ""


def address_lines(cluster: str) -> list[str]:
    """``Ray dashboard: http://...`` for each page of this project's running stack, if the stack runs the sweep."""
    settings = Settings()
    stack = read_stack(settings.home)
    if stack is None or cluster not in {"", settings.cluster}:
        return []
    return [f"{name}: {address}" for name, address in addresses_of(stack).items()]


def compare_link(store: ObjectStore, plan: Plan) -> str:
    """The page that compares the levels; empty while nothing is published, and where no page or no level is."""
    if not any("level" in job.facets for job in plan.jobs):
        return ""  # the page would show no run, as of a sweep of simulations alone
    return find_compare_link(store, plan.sweep, *tracking_and_pages(plan))


def compare_line(store: ObjectStore, plan: Plan) -> str:
    """``Compare the levels in MLflow: http://...`` for stdout, or nothing; with the token, or where that is."""
    link = shown = compare_link(store, plan)
    stack, token = read_stack(Settings().home), ""
    if stack is not None and link.startswith(f"{stack.mlflow_url}/"):
        shown = shown_link(stack, link)
        token = f" (its token: {stack.mlflow_token_path})" if stack.mlflow_token_path and shown == link else ""
    return f"Compare the levels in MLflow: {shown}{token}" if link else ""
