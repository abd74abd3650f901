"""Commands about sweep.yaml files themselves: init, validate, schema."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption
from orchestrator.cli.sources import ScaleOption, SetOption, SweepFile, scale_name


class Template(StrEnum):
    """What ``init`` can begin with: the files of ``orchestrator/sweepfile/templates``, as a test checks."""

    SYNTHETIC = "synthetic"
    SHARDS = "shards"
    WORDNET = "wordnet"
    CLUSTERS = "clusters"
    BLOCKS = "blocks"
    TRANSFERS = "transfers"


class SchemaForm(StrEnum):
    """How the schema is written; it is no table."""

    JSON = "json"
    YAML = "yaml"


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the others."""
    app.command()(init)
    app.command()(validate)
    app.command()(schema)


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("sweep.yaml"),
    *,
    template: Annotated[Template, typer.Option(help="What to begin with.")] = Template.SYNTHETIC,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Write a commented sweep.yaml to begin with, and the schema that editors check it by."""
    from orchestrator.cli.init import write_template

    write_template(file, template.value, output, replace=force)


def validate(
    sweep: SweepFile,
    *,
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Say whether a sweep.yaml is right, and if not, where, why and what to do. Changes nothing."""
    from orchestrator.cli.validate import validate_sweep

    validate_sweep(sweep, overrides or (), scale_name(scale), output)


def schema(
    *, output: Annotated[SchemaForm, typer.Option("-o", "--output", help="Form of the schema.")] = SchemaForm.JSON
) -> None:
    """Print the JSON Schema of sweep.yaml (draft-07), which editors check and complete by."""
    from orchestrator.cli.schema import print_schema

    print_schema(DocumentForm(output.value))
