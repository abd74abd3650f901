"""Refuses text that looks like a password or token: sweeps are stored in object stores and shared. Pure.

Only what has a recognisable form is found. No message ever shows the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from orchestrator.errors import SpecError
from orchestrator.spec.tree import Path, Tree

_FORMS = (
    ("an AWS access key", r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("a GitHub token", r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})"),
    ("a Hugging Face token", r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}"),
    ("a Slack token", r"(?<![A-Za-z0-9])xox[abeprs]-[A-Za-z0-9-]{10,}"),
    ("an API key", r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"),
    ("a Google API key", r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}"),
    ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    ("a signed web token", r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"),
    ("a URI with a user or password", r"(?<![A-Za-z0-9])[a-z][a-z0-9+.-]*://[^\s/@:]*:[^\s/@]+@"),
)
_FORM = re.compile("|".join(f"(?P<f{number}>{pattern})" for number, (_, pattern) in enumerate(_FORMS)))
_KEY = re.compile(
    r"(?:(?:aws|s3|mlflow|hf|wandb|github)_?)?(?:password|passwd|secret|secret_?key|secret_?access_?key|access_?key"
    r"|access_?key_?id|api_?key|private_?key|(?:auth|access|api|session)_?token|token|credentials?)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(?i)secret|passw|token|credential|private_?key|api_?key|access_?key")
_REMEDY = (
    "sweeps are stored and shared, so it is refused: remove it from the file and revoke it; give it by the environment "
    "of the program that needs it (AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD); machine-dependent places are "
    "${env:NAME}"
)


def refuse_secrets(tree: Tree, text: str) -> None:
    """Look at a parsed document and its text, comments included.

    Raises:
        SpecError: something looks like a password or token.
    """
    problems = [_at_text(tree.file, text, found) for found in _FORM.finditer(text)]
    problems += [tree.problem(path, f"this looks like a password or token; {_REMEDY}") for path in _named(tree.value)]
    if problems:
        raise SpecError(tuple(problems))


def secret_form(text: str) -> str:
    """What a text looks like (``an AWS access key``); empty if it looks like no secret."""
    found = _FORM.search(text)
    return _form_of(found) if found is not None else ""


def names_secret(variable: str) -> bool:
    """Whether a variable is called as those are that hold secrets."""
    return _VARIABLE.search(variable) is not None


def _form_of(found: re.Match[str]) -> str:
    return _FORMS[int((found.lastgroup or "f0")[1:])][0]


def _at_text(file: str, text: str, found: re.Match[str]) -> str:
    start = found.start()
    line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    return f"{file}:{line}:{column}: this looks like {_form_of(found)}; {_REMEDY}"


def _named(value: object, path: Path = ()) -> Iterator[Path]:
    """Places of texts below keys that are called as secrets are."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and item and _KEY.fullmatch(str(key).replace("-", "_")):
                yield (*path, key)
            else:
                yield from _named(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _named(item, (*path, position))
