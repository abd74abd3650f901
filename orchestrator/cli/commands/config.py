"""``orchestrator config``: the settings in effect, and contexts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import SpecError
from orchestrator.services import contexts as context_file
from orchestrator.services.settings import UNKNOWN_STORE, Settings, shown_store
from orchestrator.services.settings_sources import NO_CONTEXT, Resolved, applied, chosen_context, user_file
from orchestrator.services.terminal import say

ContextName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a context.")]

group = typer.Typer(
    help="Show the settings in effect, and manage contexts: named clusters and stores.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@group.callback(invoke_without_command=True)
def config(
    caller: typer.Context,
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each setting comes from.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Show the settings in effect: from context, environment, .env, orchestrator.toml, the user's file, defaults."""
    if caller.invoked_subcommand is not None:
        return
    found = applied()
    if output is not DocumentForm.TABLE:
        print_document({each.setting.name: _document(each, with_origin=origin) for each in found}, output)
        return
    table = Table(title="Settings", title_justify="left")
    for column in ("setting", "value", *(("from",) if origin else ()), "meaning"):
        table.add_column(column, overflow="fold")
    for each in found:
        origin_cell = (each.origin,) if origin else ()
        table.add_row(each.setting.name, _shown(each) or "-", *origin_cell, each.setting.meaning)
    stdout_console().print(table)


@group.command()
def contexts(*, output: DocumentOption = DocumentForm.TABLE) -> None:
    """List the contexts of the user's file; the one in effect is marked."""
    path = user_file(os.environ)
    choice = chosen_context(Path.cwd(), os.environ)
    found = context_file.contexts_document(path, choice)
    if output is not DocumentForm.TABLE:
        print_document({"contexts": found, "file": str(path), "chosen_by": choice.place if choice else ""}, output)
        return
    table = Table(title=f"Contexts of {path}", title_justify="left")
    for column in ("", "context", "settings"):
        table.add_column(column, overflow="fold")
    for name, context in found.items():
        settings = "\n".join(f"{setting} = {value}" for setting, value in context["settings"].items())
        table.add_row("*" if context["in_use"] else "", name, settings)
    stdout_console().print(table)
    if choice is not None:
        say(f"{choice.name} is in effect: {choice.place} names it.")


@group.command()
def use_context(name: ContextName, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Use a context from now on, in all directories that choose no other; none: use no context."""
    path = user_file(os.environ)
    context_file.use_context(path, name)
    _conclude({"in_use": "" if name == NO_CONTEXT else name, "file": str(path)}, output)
    say("No context is in use." if name == NO_CONTEXT else f"{name} is in use. See: orchestrator config --origin")
    _warn_if_hidden(name)


@group.command()
def set_context(
    name: ContextName,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE",
            help="Settings as NAME=VALUE, with the names used in files; an empty value removes a setting.",
        ),
    ] = None,
    *,
    use: Annotated[bool, typer.Option("--use", help="Also start to use it.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Make or change a context: set-context prod dashboard_address=https://ray:8265 ray_token=file:/home/me/token."""
    path = user_file(os.environ)
    now = context_file.set_context(path, name, context_file.parse_changes(settings or ()))
    if use:
        context_file.use_context(path, name)
    _conclude({"context": name, "settings": now, "in_use": use, "file": str(path)}, output)
    how = "" if use else f" Use it with: --context {name}, or always: orchestrator config use-context {name}"
    say(f"{name}: {', '.join(f'{setting}={value}' for setting, value in now.items()) or 'no settings'}.{how}")
    if now.keys() & {"cluster"} and not now.keys() & {"store", "ray_address", "dashboard_address"}:
        say(f"warning: cluster {now['cluster']} is reached through its store, and {name} names none: set store=...")


@group.command()
def unset_context(name: ContextName, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Remove a context."""
    path = user_file(os.environ)
    context_file.unset_context(path, name)
    _conclude({"removed": name, "file": str(path)}, output)
    say(f"{name} is gone from {path}.")


def _conclude(document: Mapping[str, Any], form: DocumentForm) -> None:
    if form is not DocumentForm.TABLE:
        print_document(document, form)


def _warn_if_hidden(name: str) -> None:
    """A context that the user chose may still not count where they are."""
    try:
        choice = chosen_context(Path.cwd(), os.environ)
    except SpecError as error:
        say(f"note: {error}")
        return
    found = choice.name if choice is not None else NO_CONTEXT
    if found != name and choice is not None:
        say(f"note: here {choice.name} counts, because {choice.place} says so")


def _shown(resolved: Resolved) -> str:
    """The value as shown to people; only a cluster behind its dashboard knows its own store."""
    is_elsewhere = resolved.setting.name == "store" and not resolved.value and Settings().store_uri() == UNKNOWN_STORE
    return f"{shown_store(UNKNOWN_STORE)}, not known here" if is_elsewhere else resolved.shown


def _document(resolved: Resolved, *, with_origin: bool) -> object:
    if not with_origin:
        return _value(resolved)
    return {"value": _value(resolved), "origin": resolved.origin, "variable": resolved.setting.variable}


def _value(resolved: Resolved) -> str | None:
    """The value for programs; None where nothing is set, or only the cluster knows it."""
    if resolved.known:
        return resolved.known
    settings = Settings()
    of_project = {"store": settings.store_uri(), "mlflow_tracking_uri": settings.tracking_uri()}
    found = of_project.get(resolved.setting.name)
    return None if found == UNKNOWN_STORE else found
