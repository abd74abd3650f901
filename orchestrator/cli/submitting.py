"""The command that starts it all."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.arguments import PricesOption, ScaleOption, SetOption, StoreOption, SweepFile, Yes, scale_name
from orchestrator.cli.output import DocumentForm, DocumentOption
from orchestrator.services.settings_sources import Code


def submit(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepFile,
    *,
    yes: Yes = False,
    wait: Annotated[bool, typer.Option(help="Follow until the sweep ends; Ctrl-C detaches.")] = True,
    foreground: Annotated[bool, typer.Option("--foreground", help="Run Ray inside this command.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Adopt an unfinished sweep of another cluster.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also if the sweep belongs to somebody else.")] = False,
    priority: Annotated[
        str, typer.Option(help="low, normal, high, urgent, or a whole number, instead of the file's.")
    ] = "",
    code: Annotated[
        Code | None,
        typer.Option(help="Through a dashboard: run what is installed there, or send this code as a wheel."),
    ] = None,
    prices: PricesOption = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Plan a sweep, run it, and print its answer."""
    from orchestrator.cli.steer import parse_priority
    from orchestrator.cli.submit import SubmitOptions, submit_sweep

    options = SubmitOptions(
        yes=yes,
        wait=wait,
        foreground=foreground,
        take_over=take_over,
        force=force,
        priority=parse_priority(priority) if priority else None,
        prices=prices,
        code=code,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
        form=output,
    )
    raise typer.Exit(submit_sweep(sweep, options))
