"""``orchestrator schema``: the JSON Schema of the sweep language, for editors."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.sweepfile.json_schema import shipped_schema


class SchemaForm(StrEnum):
    """How the schema is written; it is not a table."""

    JSON = "json"
    YAML = "yaml"


def schema(
    *, output: Annotated[SchemaForm, typer.Option("-o", "--output", help="Output format.")] = SchemaForm.JSON
) -> None:
    """Print the JSON Schema of sweep.yaml (draft-07), with which editors check and complete it."""
    if output is SchemaForm.YAML:
        print_document(json.loads(shipped_schema()), DocumentForm.YAML)
    else:
        sys.stdout.write(shipped_schema())
