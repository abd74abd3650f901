"""``orchestrator quota``: what each user's sweeps may hold at once on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.output import DocumentForm, DocumentOption

if TYPE_CHECKING:
    from orchestrator.cli.quota import Place

group = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

_User = Annotated[str, typer.Argument(metavar="[USER]", help="A user, as sweeps name their owners.")]
_Others = Annotated[bool, typer.Option("--others", help="All users who have no bounds of their own.")]
_Cluster = Annotated[str, typer.Option(help="Name of the cluster in leases; default: this project's.")]


def add_commands(app: typer.Typer) -> None:
    """Add the group to the commands."""
    app.add_typer(group, name="quota", help="Bound what each user's sweeps hold at once on a cluster.")


@group.command()
def show(*, cluster: _Cluster = "", output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Show the bounds of all users, and what their sweeps hold now."""
    from orchestrator.cli.quota import show_quotas

    raise typer.Exit(show_quotas(_place(cluster, store, output)))


@group.command(name="set")
def set_bounds(
    user: _User = "",
    *,
    others: _Others = False,
    max_gpus: Annotated[str, typer.Option(metavar="NUMBER|none", help="GPUs of all that runs; none: any.")] = "",
    max_concurrent: Annotated[
        str, typer.Option(metavar="NUMBER|none", help="Attempts that run at once; none: any.")
    ] = "",
    cluster: _Cluster = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Bound what a user's sweeps hold at once; what is not given stays as it is. Nothing that runs is ended for it."""
    from orchestrator.cli.quota import parse_bounds, set_quota, whose

    named = whose(user, is_others=others)
    bounds = parse_bounds(max_gpus, max_concurrent)
    raise typer.Exit(set_quota(named, bounds, _place(cluster, store, output)))


@group.command()
def clear(
    user: _User = "",
    *,
    others: _Others = False,
    everyone: Annotated[bool, typer.Option("--all", help="All bounds of the cluster.")] = False,
    cluster: _Cluster = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Remove a user's own bounds, so that those of all others count again; or all bounds."""
    from orchestrator.cli.quota import clear_quota, whose

    place = _place(cluster, store, output)
    if everyone and (user or others):
        raise typer.BadParameter("--all means everybody: name nobody beside it")
    raise typer.Exit(
        clear_quota("" if everyone else whose(user, is_others=others, beside=", or --all for everybody"), place)
    )


def _place(cluster: str, store: str, output: DocumentForm) -> Place:
    from orchestrator.cli.quota import Place

    return Place(cluster=cluster, store=store, form=output)
