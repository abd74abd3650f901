"""The how-to pages, read as a person would: files are written, commands are typed, one block after the other."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where somebody new works: an empty directory, an empty home, and a cache that all pages share."""

    folder: Path
    environment: dict[str, str]
    timeout_s: float

    def follow(self, page: Path, *, after: str = "", without: re.Pattern[str] | None = None) -> None:
        """Do all that a page says.

        It begins with what the commands ``after`` have left here, so these, with which it must begin, are left out; so
        is a line that matches ``without``, which it must have.

        Raises:
            AssertionError: with what failed.
        """
        found = list(blocks(page))
        if after:
            assert found[0].text.startswith(after), f"{page.name} does not begin so: {after}"
            found[0] = replace(found[0], text=found[0].text.removeprefix(after))
        if without is not None:
            said = [block for block in found if block.kind == "sh" and without.search(block.text)]
            assert said, f"{page.name} never says {without.pattern}"
        for block in found:
            if block.file:
                (self.folder / block.file).write_text(block.text, encoding="utf-8")
            elif block.kind == "sh":
                text = block.text if without is None else without.sub("", block.text)
                self.type(text, f"{page.name}:{block.line}")

    def type(self, text: str, source: str) -> None:
        """Commands of a block. Raises ``AssertionError`` with what they print if one fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=self.timeout_s,
        )
        told = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{source} ended with {done.returncode}:\n{text}\n{told}"

    def remove_files(self, *, but: Collection[str] = ()) -> None:
        """All here goes, except what has these names and the project's directory."""
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in {*but, ".orchestrator"}:
                shutil.rmtree(path)
            elif path.name not in {*but, ".orchestrator"}:
                path.unlink()


@contextmanager
def new_place(folder: Path, *, timeout_s: float) -> Iterator[Place]:
    """A place below a folder; a stack that still runs there at the end is stopped."""
    place = folder / "place"
    environment = clean_environment(folder / "home", folder / "bin")
    place.mkdir()
    try:
        yield Place(folder=place, environment=environment, timeout_s=timeout_s)
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
