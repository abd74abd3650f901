"""Sweep files to start from."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def template_text(name: str) -> str:
    """The text of a template."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
