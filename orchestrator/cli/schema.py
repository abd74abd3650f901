"""``orchestrator schema``: the language for editors."""

from __future__ import annotations

import json
import sys

from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.sweepfile.json_schema import shipped_schema


def print_schema(form: DocumentForm) -> None:
    """Print the JSON Schema of sweep.yaml."""
    if form is DocumentForm.YAML:
        print_document(json.loads(shipped_schema()), form)
    else:
        sys.stdout.write(shipped_schema())
