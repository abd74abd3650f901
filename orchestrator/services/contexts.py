"""Contexts: named sets of settings in the user's file, so that one word selects the cluster of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from filelock import FileLock, Timeout
from tomlkit.exceptions import TOMLKitError
from tomlkit.toml_document import TOMLDocument

from orchestrator.core.errors import NotFoundError, SpecError, UserError
from orchestrator.core.security.secret_patterns import secret_form
from orchestrator.core.suggest import did_you_mean
from orchestrator.services.setting_values import problem_of_value, without_password
from orchestrator.services.settings_sources import (
    CHOICE,
    CONTEXTS,
    NO_CONTEXT,
    ChosenContext,
    problem_of,
    read_user_file,
    setting_named,
)
from orchestrator.storage.files import write_private

_LOCK_S = 10.0


def set_context(path: Path, name: str, changes: Mapping[str, str]) -> dict[str, str]:
    """Make or change a context; returns its settings as they are now, without passwords.

    Args:
        path: the user's file; made if it is not there, its comments stay.
        name: of the context.
        changes: values by name of the setting; an empty one removes the setting.

    Raises:
        SpecError: the name or a setting is wrong.
        UserError: the file cannot be written.
    """
    _check_name(name)
    _check_values(changes)
    with _edited(path) as document:
        contexts = document.setdefault(CONTEXTS, tomlkit.table(is_super_table=True))
        table = contexts.setdefault(name, tomlkit.table())
        for setting, value in changes.items():
            if value:
                table[setting] = value
            else:
                table.pop(setting, None)
        return {setting: without_password(str(value)) for setting, value in table.items()}


def unset_context(path: Path, name: str) -> None:
    """Remove a context; if it was in use, none is. Raises ``NotFoundError``."""
    _require(path, name)
    with _edited(path) as document:
        del document[CONTEXTS][name]
        if document.get(CHOICE) == name:
            del document[CHOICE]


def use_context(path: Path, name: str) -> None:
    """Put a context into use, or with ``none`` none. Raises ``NotFoundError``."""
    if name != NO_CONTEXT:
        _require(path, name)
    with _edited(path) as document:
        if name == NO_CONTEXT:
            document.pop(CHOICE, None)
        else:
            document[CHOICE] = name


def contexts_document(path: Path, choice: ChosenContext | None) -> dict[str, dict[str, Any]]:
    """All contexts of a file by name, without passwords, and which of them is in use."""
    return {
        name: {
            "in_use": choice is not None and choice.name == name,
            "settings": {setting: without_password(value) for setting, value in values.items()},
        }
        for name, values in sorted(read_user_file(path).contexts.items())
    }


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """``SETTING=VALUE`` as a mapping. Raises ``SpecError``."""
    changes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SpecError((f"{text!r} is not SETTING=VALUE, such as store=s3://bucket/studies",))
        changes[name] = value
    return changes


def _check_name(name: str) -> None:
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or name == NO_CONTEXT:
        reserved = f" ({NO_CONTEXT!r} means no context)" if name == NO_CONTEXT else ""
        raise SpecError((f"{name!r} cannot name a context{reserved}: use letters, digits, '-' and '_'",))


def _check_values(changes: Mapping[str, str]) -> None:
    for name, value in changes.items():
        if problem := problem_of(name, value or "file:/"):
            raise SpecError((problem,))
        if form := secret_form(value):
            problem = (
                f"{name} holds what looks like {form}, and this file is no place for secrets: name where it is instead "
                "(ray_token by file:/PATH or env:NAME, aws_profile, MLFLOW_TRACKING_USERNAME and _PASSWORD)"
            )
            raise SpecError((problem,))
        setting = setting_named(name)
        if problem := problem_of_value(setting, value) if setting is not None and value else "":
            raise SpecError((problem,))


def _require(path: Path, name: str) -> None:
    known = [*read_user_file(path).contexts]
    if name not in known:
        hint = did_you_mean(name, known) if known else "there is none yet"
        how = "orchestrator config set-context NAME SETTING=VALUE ..."
        raise NotFoundError(f"{path} has no context {name!r}: {hint}; make one with: {how}")


@contextmanager
def _edited(path: Path) -> Iterator[TOMLDocument]:
    """The file's content to be changed; it is written back as a whole, readable for the user only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_S):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            document = tomlkit.parse(text)
            yield document
            write_private(path, tomlkit.dumps(document))
    except (OSError, Timeout, TOMLKitError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be changed: {error}; repair it, or see who else writes it") from error
