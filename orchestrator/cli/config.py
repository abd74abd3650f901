"""What ``orchestrator config`` prints and changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from orchestrator.cli.output import DocumentForm, print_document, stderr_console, stdout_console
from orchestrator.core.errors import SpecError
from orchestrator.services.contexts import contexts_document, parse_changes, set_context, unset_context, use_context
from orchestrator.services.settings import UNKNOWN_STORE, Settings, shown_store
from orchestrator.services.settings_sources import NO_CONTEXT, Resolved, chosen_context, user_file


def show_config(found: Sequence[Resolved], form: DocumentForm, *, with_origin: bool) -> None:
    """Print all settings, passwords hidden."""
    if form is not DocumentForm.TABLE:
        print_document({each.setting.name: _document(each, with_origin=with_origin) for each in found}, form)
        return
    table = Table(title="Settings", title_justify="left")
    for column in ("setting", "value", *(("from",) if with_origin else ()), "meaning"):
        table.add_column(column, overflow="fold")
    for each in found:
        origin = (escape(each.origin),) if with_origin else ()
        table.add_row(each.setting.name, escape(_shown(each)) or "-", *origin, each.setting.meaning)
    stdout_console().print(table)


def show_contexts(form: DocumentForm) -> None:
    """Print the contexts of the user's file."""
    path = user_file(os.environ)
    choice = chosen_context(Path.cwd(), os.environ)
    found = contexts_document(path, choice)
    if form is not DocumentForm.TABLE:
        print_document({"contexts": found, "file": str(path), "chosen_by": choice.place if choice else ""}, form)
        return
    table = Table(title=f"Contexts of {path}", title_justify="left")
    for column in ("", "context", "settings"):
        table.add_column(column, overflow="fold")
    for name, context in found.items():
        settings = "\n".join(f"{setting} = {value}" for setting, value in context["settings"].items())
        table.add_row("*" if context["in_use"] else "", name, escape(settings))
    stdout_console().print(table)
    if choice is not None:
        stderr_console().print(f"{choice.name} counts here: {choice.place} says so.", markup=False)


def put_into_use(name: str, form: DocumentForm) -> None:
    """Let a context count from now on."""
    path = user_file(os.environ)
    use_context(path, name)
    _conclude({"in_use": "" if name == NO_CONTEXT else name, "file": str(path)}, form)
    _say("No context is in use." if name == NO_CONTEXT else f"{name} is in use. See: orchestrator config --origin")
    _warn_if_hidden(name)


def change_context(name: str, settings: Sequence[str], form: DocumentForm, *, puts_into_use: bool) -> None:
    """Make or change a context."""
    path = user_file(os.environ)
    now = set_context(path, name, parse_changes(settings))
    if puts_into_use:
        use_context(path, name)
    _conclude({"context": name, "settings": now, "in_use": puts_into_use, "file": str(path)}, form)
    use = "" if puts_into_use else f" Use it with: --context {name}, or always: orchestrator config use-context {name}"
    _say(f"{name}: {', '.join(f'{setting}={value}' for setting, value in now.items()) or 'no settings'}.{use}")
    if now.keys() & {"cluster"} and not now.keys() & {"store", "ray_address", "dashboard_address"}:
        _say(f"warning: cluster {now['cluster']} is reached through its store, and {name} names none: set store=...")


def remove_context(name: str, form: DocumentForm) -> None:
    """Forget a context."""
    path = user_file(os.environ)
    unset_context(path, name)
    _conclude({"removed": name, "file": str(path)}, form)
    _say(f"{name} is gone from {path}.")


def _conclude(document: Mapping[str, Any], form: DocumentForm) -> None:
    if form is not DocumentForm.TABLE:
        print_document(document, form)


def _say(text: str) -> None:
    stderr_console().print(text, markup=False, soft_wrap=True)


def _warn_if_hidden(name: str) -> None:
    """A context that the user chose may still not count where they are."""
    try:
        choice = chosen_context(Path.cwd(), os.environ)
    except SpecError as error:
        _say(f"note: {error}")
        return
    found = choice.name if choice is not None else NO_CONTEXT
    if found != name and choice is not None:
        _say(f"note: here {choice.name} counts, because {choice.place} says so")


def _shown(resolved: Resolved) -> str:
    """As it says of itself, but of a cluster behind its dashboard only the cluster knows the store."""
    is_elsewhere = resolved.setting.name == "store" and not resolved.value and Settings().store_uri() == UNKNOWN_STORE
    return f"{shown_store(UNKNOWN_STORE)}, not known here" if is_elsewhere else resolved.shown


def _document(resolved: Resolved, *, with_origin: bool) -> object:
    if not with_origin:
        return _value(resolved)
    return {"value": _value(resolved), "origin": resolved.origin, "variable": resolved.setting.variable}


def _value(resolved: Resolved) -> str | None:
    """For programs: what counts; None where nothing is set, or only the cluster knows."""
    if resolved.known:
        return resolved.known
    settings = Settings()
    of_project = {"store": settings.store_uri(), "mlflow_tracking_uri": settings.tracking_uri()}
    found = of_project.get(resolved.setting.name)
    return None if found == UNKNOWN_STORE else found
