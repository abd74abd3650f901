"""The how-to pages, read as a person would: files are written, commands are typed, one block after the other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "howto"
_BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# (?P<name>[\w.-]+\.(?:yaml|py|toml))\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    line: int
    kind: str
    """``sh``: to be run; ``sh cluster``: needs a cluster of one's own; ``yaml``, ``python`` and ``toml``: files."""
    text: str

    @property
    def file(self) -> str:
        """Name of the file that it is, from its first line; empty for others."""
        found = _NAMED.match(self.text)
        return found["name"] if found and self.kind in {"yaml", "python", "toml"} else ""


def blocks(page: Path) -> Iterator[Block]:
    """All blocks in their order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(line=text.count("\n", 0, found.start()) + 1, kind=found["kind"].strip(), text=found["text"])


def follow(page: Path, folder: Path, *, timeout_s: float) -> None:
    """Do all that a page says, in an empty directory and an empty home, with a cache that all pages share.

    Raises:
        AssertionError: with what failed.
    """
    home, place = folder / "home", folder / "place"
    environment = clean_environment(home, folder / "bin")
    place.mkdir()
    try:
        for block in blocks(page):
            if block.file:
                (place / block.file).write_text(block.text, encoding="utf-8")
            elif block.kind == "sh":
                _type(block, page, place, environment, timeout_s)
    finally:
        if (place / ".orchestrator" / "stack.json").exists():  # a block has failed before the page's own `down`
            subprocess.run(
                ["orchestrator", "down"], cwd=place, env=environment, check=False, capture_output=True, timeout=60
            )


def clean_environment(home: Path, programs: Path) -> dict[str, str]:
    """What a new user has: a home, and the programs on the path."""
    home.mkdir()
    programs.mkdir()
    python = shlex.quote(sys.executable)
    for name, command in (("orchestrator", f"{python} -m orchestrator.cli"), ("python", python)):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    # All pages share a cache: else each would build the same networks again to check their arguments, 4 s each.
    cache = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    return {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "USER": "reader", **cache}


def _type(block: Block, page: Path, place: Path, environment: dict[str, str], timeout_s: float) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    told = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{page.name}:{block.line} ended with {done.returncode}:\n{block.text}\n{told}"
