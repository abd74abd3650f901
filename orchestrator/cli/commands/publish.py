"""Commands that act on a running sweep or on this directory's stack."""

from __future__ import annotations

from urllib.parse import urlsplit

from orchestrator.cli.arguments import (
    StoreOption,
    SweepName,
)
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stderr_console
from orchestrator.services.settings import Settings
from orchestrator.services.sources import open_existing_store, require_sweep
from orchestrator.sweeps.client import load_plan
from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.publisher import Publisher

_OUTAGE_S = 30.0


def publish(sweep: SweepName, *, output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Bring MLflow up to date with a sweep; safe to repeat."""
    publish_sweep(sweep, store, output)


def publish_sweep(sweep: str, store_uri: str, form: DocumentForm) -> None:
    """Publish what is in the store now; for a running sweep, go on to its end."""
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    uri = Settings().tracking_uri(load_plan(store, sweep).tracking_uri)
    publish_until_done(Publisher(store, uri), sweep, give_up_s=_OUTAGE_S)
    # Never the URI itself, which may hold a password.
    place = urlsplit(uri).hostname or "the local MLflow database"
    stderr_console().print(f"{sweep} is published to {place}")
    if form is not DocumentForm.TABLE:
        print_document({"sweep": sweep, "published_to": place}, form)
