"""``orchestrator schema``: the language for editors."""

from __future__ import annotations

import sys

from orchestrator.spec.json_schema import shipped_schema


def print_schema() -> None:
    """Print the JSON Schema of sweep.yaml."""
    sys.stdout.write(shipped_schema())
