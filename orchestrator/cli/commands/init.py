"""``orchestrator init``: a sweep.yaml to begin with."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import UserError
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import stderr_console
from orchestrator.sweepfile.json_schema import shipped_schema
from orchestrator.sweepfile.templates import template_text

_SCHEMA = "sweep.schema.json"


class Template(StrEnum):
    """What ``init`` can begin with: the files of ``orchestrator/sweepfile/templates``, as a test checks."""

    SYNTHETIC = "synthetic"
    SHARDS = "shards"
    WORDNET = "wordnet"
    CLUSTERS = "clusters"
    BLOCKS = "blocks"
    TRANSFERS = "transfers"


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("sweep.yaml"),
    *,
    template: Annotated[Template, typer.Option(help="Template to start from.")] = Template.SYNTHETIC,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Write a commented sweep.yaml to start from, and the JSON Schema with which editors check it."""
    if file.exists() and not force:
        raise UserError(f"{file} is there already and would be lost; name another file, or pass --force")
    schema = Settings().home / _SCHEMA
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        schema.parent.mkdir(parents=True, exist_ok=True)
        schema.write_text(shipped_schema(), encoding="utf-8")
        relative = os.path.relpath(schema, file.absolute().parent)
        file.write_text(
            f"# yaml-language-server: $schema={relative}\n{template_text(template.value)}", encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}; choose another place") from error
    stderr_console().print(
        f"Wrote {file}. Next: orchestrator validate {file}; orchestrator plan {file}", soft_wrap=True
    )
    if output is not DocumentForm.TABLE:
        print_document({"file": str(file), "schema": str(schema), "template": template.value}, output)
