"""The option ``-o`` that commands share, and how they print results on stdout; ``services.terminal`` has the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.services.terminal import plain_console

if TYPE_CHECKING:
    from rich.console import Console


class DocumentForm(StrEnum):
    """Form of a result that is a document."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class TableForm(StrEnum):
    """Form of a result that is tables."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"
    MARKDOWN = "markdown"


TableOption = Annotated[TableForm, typer.Option("-o", "--output", help="Output format.")]
DocumentOption = Annotated[DocumentForm, typer.Option("-o", "--output", help="Output format.")]


def print_document(document: Mapping[str, Any] | Sequence[Any], form: DocumentForm) -> None:
    """Print a plain document or list as JSON or YAML on stdout."""
    if form is DocumentForm.YAML:
        import yaml  # 10 ms that only this form pays

        sys.stdout.write(yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def stdout_console() -> Console:
    """The console for a command's result. It honours NO_COLOR, and prints plain text on a pipe."""
    return plain_console(soft_wrap=True)
