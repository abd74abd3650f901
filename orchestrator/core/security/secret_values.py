"""The values of the secrets of this process, from all places that its environment names.

These are variables with names that are typical for secrets, passwords inside URIs of any variable, the files to which
such variables point, and the usual files of AWS, Ray, MLflow, Hugging Face and netrc. Only the values are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from orchestrator.core.security.secret_patterns import names_secret, points_to_secret

MIN_CHARACTERS = 8
"""Shorter values are not looked for: they would be found in ordinary words."""
_MAX_FILE_BYTES = 64 * 1024
_WORDS = frozenset({"disabled", "required", "anonymous", "undefined", "localhost", "password"})
_IN_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*:([^\s/@]+)@")
_IN_FILE = re.compile(r"(?im)^\s*[\w.-]*(?:secret|token|password)[\w.-]*\s*=\s*(\S+)\s*$")
_IN_NETRC = re.compile(r"(?m)\bpassword\s+(\S+)")

ReadText = Callable[[Path], str]
"""The text of a small file; empty if it cannot be read."""


def secret_values(environment: Mapping[str, str], read_text: ReadText) -> frozenset[str]:
    """All values, each also as it stands in URIs and in JSON."""
    plain = {value for found in _found(environment, read_text) for value in _lines(found)}
    return frozenset(form for value in plain if _is_telling(value) for form in _written(value))


def read_small(path: Path) -> str:
    """The text of a small regular file; empty if there is none, or it cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _found(environment: Mapping[str, str], read_text: ReadText) -> Iterator[str]:
    for name, value in environment.items():
        if points_to_secret(name):
            if value.startswith(("/", "~", ".")):
                yield read_text(Path(value).expanduser())
        elif names_secret(name):
            yield value
        if "://" in value:
            yield from (part for password in _IN_URI.findall(value) for part in (password, unquote(password)))
    yield from _in_usual_files(environment, read_text)


def _in_usual_files(environment: Mapping[str, str], read_text: ReadText) -> Iterator[str]:
    home = Path(environment.get("HOME") or "/nonexistent")
    hugging_face = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface")
    aws = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    for path in (aws, home / ".mlflow" / "credentials"):
        yield from _IN_FILE.findall(read_text(path))
    yield from _IN_NETRC.findall(read_text(Path(environment.get("NETRC") or home / ".netrc")))
    yield read_text(hugging_face / "token")
    yield read_text(home / ".ray" / "auth_token")


def _lines(value: str) -> Iterator[str]:
    """A value, and of one of several lines (a key file) each line, because logs show lines."""
    stripped = value.strip()
    yield stripped
    if "\n" in stripped:
        yield from (line.strip() for line in stripped.splitlines() if not line.startswith("-----"))


def _is_telling(value: str) -> bool:
    return len(value) >= MIN_CHARACTERS and value.lower() not in _WORDS


def _written(value: str) -> Iterator[str]:
    yield value
    yield quote(value, safe="")
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
