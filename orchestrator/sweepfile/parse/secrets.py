"""Refuses text that looks like a password or token: sweeps are stored in object stores and shared. Pure.

Only secrets with a recognisable form are found. No message ever shows the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from orchestrator.core.errors import SpecError
from orchestrator.core.security.references import is_reference
from orchestrator.core.security.secret_patterns import form_of, secret_forms
from orchestrator.sweepfile.parse.tree import Path, Tree

_KEY = re.compile(
    r"(?:(?:aws|s3|mlflow|hf|wandb|github)_?)?(?:password|passwd|secret|secret_?key|secret_?access_?key|access_?key"
    r"|access_?key_?id|api_?key|private_?key|(?:auth|access|api|session)_?token|token|credentials?)",
    re.IGNORECASE,
)
_REMEDY = (
    "sweeps are stored and shared, so it is refused: remove it from the file and revoke it; give it by the environment "
    "of the program that needs it (AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD); machine-dependent places are "
    "${env:NAME}"
)

_REFERENCE = (
    "sweeps are stored and shared, so it is refused: remove it from the file and revoke it; write a reference: "
    "${file:/run/secrets/NAME} or ${env:NAME}, which whoever sends the notifications reads"
)


def refuse_secrets(tree: Tree, text: str) -> None:
    """Check a parsed document and its text, including comments.

    Raises:
        SpecError: something looks like a password or token.
    """
    notify_text = "\n".join(_texts(tree.value.get("notify")))
    problems = [_at_text(tree.file, text, found, notify_text) for found in secret_forms(text)]
    problems += [
        tree.problem(path, f"this looks like a password or token; {_remedy(path)}") for path in _named(tree.value)
    ]
    if problems:
        raise SpecError(tuple(problems))


def _remedy(path: Path) -> str:
    return _REFERENCE if path[:1] == ("notify",) else _REMEDY


def _at_text(file: str, text: str, found: re.Match[str], notify_text: str) -> str:
    """``notify_text``: the texts below ``notify``, where secrets are given by reference."""
    start = found.start()
    remedy = _REFERENCE if found.group() in notify_text else _REMEDY
    line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    return f"{file}:{line}:{column}: this looks like {form_of(found)}; {remedy}"


def _texts(value: object) -> Iterator[str]:
    """All texts below a place."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _named(value: object, path: Path = ()) -> Iterator[Path]:
    """Places of texts below keys with names of secrets."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and item and not is_reference(item) and _KEY.fullmatch(str(key).replace("-", "_")):
                yield (*path, key)
            else:
                yield from _named(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _named(item, (*path, position))
