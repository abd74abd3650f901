"""``orchestrator publish``: updates MLflow with a sweep's results."""

from __future__ import annotations

from urllib.parse import urlsplit

from orchestrator.cli.arguments import (
    StoreOption,
    SweepName,
)
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.services.settings import Settings
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import stderr_console
from orchestrator.sweeps.client import load_plan
from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.publisher import Publisher

_OUTAGE_S = 30.0


def publish(sweep: SweepName, *, output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Publish a sweep's newest results to MLflow; safe to repeat."""
    opened = open_existing_store(store)
    require_sweep(opened, sweep)
    uri = Settings().publishing_uri(load_plan(opened, sweep).tracking_uri)
    # What is in the store now; for a running sweep, this goes on to its end. The server is asked what it has: people
    # publish by hand after it was lost or restored.
    publish_until_done(Publisher(opened, uri, compares=True), sweep, give_up_s=_OUTAGE_S)
    # Never the URI itself, which may hold a password.
    place = urlsplit(uri).hostname or "the local MLflow database"
    stderr_console().print(f"{sweep} is published to {place}")
    if output is not DocumentForm.TABLE:
        print_document({"sweep": sweep, "published_to": place}, output)
