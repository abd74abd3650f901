"""``orchestrator config``: the settings that count here, and contexts."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption

ContextName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a context.")]

group = typer.Typer(
    help="Show the settings that count here, and name places to act at.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@group.callback(invoke_without_command=True)
def config(
    caller: typer.Context,
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each comes from.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Show the settings that count here: context, environment, .env, orchestrator.toml, the user's file, defaults."""
    if caller.invoked_subcommand is not None:
        return
    from orchestrator.cli.config import show_config
    from orchestrator.services import settings_sources as configuration

    show_config(configuration.applied(), output, with_origin=origin)


@group.command()
def contexts(*, output: DocumentOption = DocumentForm.TABLE) -> None:
    """List the contexts of the user's file; the one that counts here is marked."""
    from orchestrator.cli.config import show_contexts

    show_contexts(output)


@group.command()
def use_context(name: ContextName, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Let a context count from now on, in all directories that choose no other; none: no context."""
    from orchestrator.cli.config import put_into_use

    put_into_use(name, output)


@group.command()
def set_context(
    name: ContextName,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="SETTING=VALUE...", help="Settings as in files; an empty value removes one."),
    ] = None,
    *,
    use: Annotated[bool, typer.Option("--use", help="Also put it into use.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Make or change a context: set-context prod dashboard_address=https://ray:8265 ray_token=file:/home/me/token."""
    from orchestrator.cli.config import change_context

    change_context(name, settings or (), output, puts_into_use=use)


@group.command()
def unset_context(name: ContextName, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Remove a context."""
    from orchestrator.cli.config import remove_context

    remove_context(name, output)
