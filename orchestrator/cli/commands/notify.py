"""``orchestrator notify``: shows the notifications of a sweep, and sends test notifications."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.arguments import StoreOption, complete_sweep
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import OrchestratorError, SpecError
from orchestrator.core.security.redaction import redacted
from orchestrator.notifications.channels import deliver, describe_channel
from orchestrator.notifications.messages import trial_notice
from orchestrator.notifications.notifier import DeliveryState, Entry, read_entries
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.storage.logs import format_time
from orchestrator.sweepfile.load import load_sweep, read_text
from orchestrator.sweepfile.notify import check_channel_of_sweep, is_notify_file, parse_notify_file
from orchestrator.sweepfile.values import Channel


def notify(
    sweep: Annotated[
        str, typer.Argument(help="Show the notifications about this sweep.", autocompletion=complete_sweep)
    ] = "",
    *,
    test: Annotated[
        str,
        typer.Option(
            "--test", metavar="FILE", help="Send a test notification to all channels of a sweep.yaml or notify file."
        ),
    ] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show the notifications sent about a sweep, or send a test notification."""
    raise typer.Exit(try_channels(test, output) if test else show_notifications(sweep, store, output))


def show_notifications(sweep: str, store_uri: str, form: DocumentForm) -> ExitCode:
    """The notifications of a sweep that were sent, and those that wait."""
    if not sweep:
        message = "name a sweep, or test channels with --test FILE"
        raise typer.BadParameter(message)
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    entries = read_entries(store, sweep)
    if form is not DocumentForm.TABLE:
        print_document({"sweep": sweep, "notifications": [_document(entry) for entry in entries]}, form)
    else:
        stdout_console().print(_table(sweep, entries))
    has_failed = any(one.state is DeliveryState.GIVEN_UP for entry in entries for one in entry.deliveries)
    return ExitCode.FAILURE if has_failed else ExitCode.OK


def try_channels(file: str, form: DocumentForm) -> ExitCode:
    """Send a test over every channel of a file, from this machine: references are read in this environment."""
    results = []
    channels, check = _channels(file)
    for channel in channels:
        error = ""
        try:
            check(channel)
            deliver(trial_notice(time.time()), channel)
        except OrchestratorError as caught:
            error = redacted(str(caught))
        results.append({"channel": describe_channel(channel), "sent": not error, "error": error})
    if form is not DocumentForm.TABLE:
        print_document({"trials": results}, form)
    else:
        table = Table(title="Test", title_justify="left")
        for column in ("channel", "", "error"):
            table.add_column(column, overflow="fold")
        for result in results:
            verdict = "sent" if result["sent"] else "failed"
            table.add_row(str(result["channel"]), verdict, str(result["error"]))
        stdout_console().print(table)
    return ExitCode.OK if all(result["sent"] for result in results) else ExitCode.FAILURE


def _channels(file: str) -> tuple[Sequence[Channel], Callable[[Channel], None]]:
    """The channels of a file, and what a controller checks of them before it uses them."""
    text = read_text(file, file) if Path(file).is_file() else ""
    is_general = bool(text) and is_notify_file(text, file)
    channels = parse_notify_file(text, file) if is_general else load_sweep(file)[0].notify
    if not channels:
        message = "it has no notify block, or an empty one; add one, see docs/operations.md, Notifications"
        raise SpecError((f"{file}: {message}",))
    return channels, (lambda _: None) if is_general else check_channel_of_sweep


def _document(entry: Entry) -> dict[str, Any]:
    notice = entry.notice
    return {
        "id": notice.notification_id,
        "occasion": notice.occasion.value,
        "at": format_time(notice.at_s),
        "title": notice.title,
        "deliveries": [
            {
                "channel": describe_channel(one.channel),
                "state": one.state.value,
                "tries": one.num_tries,
                "error": one.error,
                "ended_at": format_time(one.ended_at_s) if one.ended_at_s is not None else None,
            }
            for one in entry.deliveries
        ],
    }


def _table(sweep: str, entries: Sequence[Entry]) -> Table:
    table = Table(title=f"Notifications of {sweep}", title_justify="left")
    for column in ("when (UTC)", "what", "to", "", "tries", "latest error"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        for one in entry.deliveries:
            when = format_time(entry.notice.at_s)[:19].replace("T", " ")
            cells = (entry.notice.title, describe_channel(one.channel), one.state.value, str(one.num_tries), one.error)
            table.add_row(when, *cells)
    return table
