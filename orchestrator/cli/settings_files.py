"""The files that hold settings: ``.env``, the project's ``orchestrator.toml`` and the user's ``config.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.cli.known_settings import RAY_TOKEN, SETTINGS, as_reference
from orchestrator.core.errors import SpecError
from orchestrator.core.security.references import is_reference

PROJECT_FILE = "orchestrator.toml"
DOTENV_FILE = ".env"
CHOICE = "context"
"""Which context counts, in TOML files."""
CONTEXTS = "contexts"
"""Table of contexts in the user's file."""
_USER_FILE = "orchestrator/config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """What a TOML file says."""

    origin: str
    """How it is called in messages."""
    values: Mapping[str, str] = field(default_factory=dict)
    """By name of the setting."""
    choice: str = ""
    """Name of a context; empty = it chooses none."""
    contexts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings by name of the context."""


def user_file(environment: Mapping[str, str]) -> Path:
    """The user's file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".config")
    return Path(base, _USER_FILE)


def read_user_file(path: Path) -> SettingsFile:
    """The user's file: settings, contexts, and the context in use.

    Raises:
        SpecError: it cannot be read, or says something that is no setting.
    """
    content = _read_toml(path)
    origin, tables = str(path), content.pop(CONTEXTS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SpecError((f"{origin}: {CONTEXTS} is not made of tables; write [{CONTEXTS}.NAME] with settings below",))
    choice = _choice(content, origin)
    contexts = {name: _values(table, f"{origin}: {CONTEXTS}.{name}") for name, table in tables.items()}
    return SettingsFile(origin=origin, values=_values(content, origin), choice=choice, contexts=contexts)


def read_project_file(path: Path) -> SettingsFile:
    """The project's file: settings, and perhaps the name of a context of the user.

    It comes with the project, perhaps somebody else's: it may neither define a context nor name a token, which would
    send the user's to a server of its choice.

    Raises:
        SpecError: as ``read_user_file``.
    """
    content = _read_toml(path)
    for name in (CONTEXTS, RAY_TOKEN.name):
        if name in content:
            raise SpecError((f"{path}: {name} belongs into the user's own file, see orchestrator config --help",))
    choice = _choice(content, str(path))
    return SettingsFile(origin=PROJECT_FILE, values=_values(content, str(path)), choice=choice)


def read_dotenv(path: Path) -> dict[str, str]:
    """Variables of a ``.env`` file; none without the file. Raises ``SpecError`` if it cannot be read."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError((f"{path}: cannot be read: {error}",)) from error


def problem_of(name: str, value: object) -> str:
    """What is wrong with a line of a file; empty if nothing is."""
    known = [setting.name for setting in SETTINGS]
    if name not in known:
        from orchestrator.sweepfile.suggest import did_you_mean  # half a second of imports, which --help must not take

        return f"{name!r} is no setting; {did_you_mean(name, known)}"
    if not isinstance(value, str | bool | int | float):
        return f"{name} is {value!r}; write a text, a number, true or false"
    if name == RAY_TOKEN.name and not is_reference(as_reference(str(value))):
        # Never shown: it may well be the token.
        return f"{name} is not file:/PATH or env:NAME; tokens are named, never written down here"
    return ""


def _choice(content: dict[str, Any], origin: str) -> str:
    choice = content.pop(CHOICE, "")
    if not isinstance(choice, str):
        raise SpecError((f"{origin}: {CHOICE} is {choice!r}; write the name of a context",))
    return choice


def _values(content: Mapping[str, Any], origin: str) -> dict[str, str]:
    problems = [problem for name, value in content.items() if (problem := problem_of(name, value))]
    if problems:
        raise SpecError(tuple(f"{origin}: {problem}" for problem in problems))
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in content.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError((f"{path}: cannot be read as TOML: {error}",)) from error
