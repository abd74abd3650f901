"""Options of all commands that read a sweep.yaml."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Scale(StrEnum):
    """Blocks of a sweep.yaml that change its size."""

    TINY = "tiny"


SweepFile = Annotated[
    str, typer.Argument(help="A sweep.yaml, or the name of a shipped sweep: quickstart, digits, clusters, paper-...")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change one value (pretrain.recipe.lr=0.1); may be repeated."),
]
ScaleOption = Annotated[
    Scale | None, typer.Option("--scale", help="Merge the file's block of this name over it: tiny, for a rehearsal.")
]


def scale_name(scale: Scale | None) -> str:
    """What ``load_sweep`` takes."""
    return "" if scale is None else scale.value
