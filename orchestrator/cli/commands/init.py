"""``orchestrator init``: writes a sweep.yaml to start from."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import UsageError, UserError
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import stderr_console
from orchestrator.storage.files import rewrite_text
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
    source: Annotated[
        str,
        typer.Option("--from", metavar="PLACE", help="Your images, or shards: look at them and write a sweep of them."),
    ] = "",
    template: Annotated[Template | None, typer.Option(help="Template to start from; default: synthetic.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Write a commented sweep.yaml to start from, and the JSON Schema with which editors check it."""
    if source and template is not None:
        raise UsageError("--from writes the sweep of your data, --template a shipped one: give one of them")
    chosen = template or Template.SYNTHETIC
    if file.exists() and not force:
        raise UserError(f"{file} is there already and would be lost; name another file, or pass --force")
    text = _of_images(source, file) if source else template_text(chosen.value)
    schema = Settings().home / _SCHEMA
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        schema.parent.mkdir(parents=True, exist_ok=True)
        rewrite_text(schema, shipped_schema())
        relative = os.path.relpath(schema, file.absolute().parent)
        rewrite_text(file, f"# yaml-language-server: $schema={relative}\n{text}")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}; choose another place") from error
    after = f"orchestrator submit {file}" if source else f"orchestrator validate {file}; orchestrator plan {file}"
    stderr_console().print(f"Wrote {file}. Next: {after}", soft_wrap=True)
    if output is not DocumentForm.TABLE:
        print_document({"file": str(file), "schema": str(schema), "template": "" if source else chosen.value}, output)


def _of_images(source: str, file: Path) -> str:
    """The text of a sweep of what lies at a place. Raises ``UserError``: nothing is there that can be read."""
    from orchestrator.core.data_plane import LOOK, LookRequest, NoAnswerError, Terminal, ask
    from orchestrator.services.first_sweep import first_sweep
    from orchestrator.sweepfile.survey import SHARD_FLAG

    try:
        found = ask(LOOK, LookRequest(place=source), terminal=Terminal.SHARED)
    except NoAnswerError as error:
        hint = " (options of `orchestrator data shard`, of whose shards init can write a sweep)"
        raise UserError(f"{error}{hint if SHARD_FLAG.search(str(error)) else ''}") from error
    for note in found["notes"]:
        stderr_console().print(f"note: {note}", soft_wrap=True)
    return first_sweep(found, source, str(file.absolute().parent), str(file), len(os.sched_getaffinity(0)))
