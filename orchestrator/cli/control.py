"""Commands that act on a running sweep or on this directory's stack."""

from __future__ import annotations

from dataclasses import asdict
from urllib.parse import urlsplit

from rich.table import Table

from orchestrator.cli.connect import addresses_of
from orchestrator.cli.console import stderr_console, stdout_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.cli.settings import Settings
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.stack.start import ensure_stack, stop_stack
from orchestrator.sweeps.client import load_plan
from orchestrator.tracking.publication import Publisher, publish_until_done

_OUTAGE_S = 30.0


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


def start(*, with_s3: bool, form: DocumentForm) -> None:
    """Start the stack, or find it running, and print its addresses."""
    stack = ensure_stack(Settings().home, with_s3=with_s3)
    if form is not DocumentForm.TABLE:
        print_document(asdict(stack), form)
        return
    table = Table(show_header=False)
    for name, address in addresses_of(stack).items():
        table.add_row(name, address)
    stdout_console().print(table)


def stop(form: DocumentForm) -> ExitCode:
    """Stop the stack; running attempts resume from their checkpoints another time."""
    stopped = stop_stack(Settings().home)
    stderr_console().print("Stopped." if stopped else "No stack is running here.")
    if form is not DocumentForm.TABLE:
        print_document({"stopped": stopped}, form)
    return ExitCode.OK
