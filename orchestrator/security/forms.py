"""What secrets look like, and what variables that hold them are called. Pure.

Only what has a recognisable form is found; values that have none are known by their place (see ``known``). Parts of
patterns have a longest length, because a text that begins a form again and again must not take quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_FORMS = (
    ("an AWS access key", r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("a GitHub token", r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})"),
    ("a GitLab token", r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_-]{20,}"),
    ("a Hugging Face token", r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}"),
    ("a Slack token", r"(?<![A-Za-z0-9])xox[abeprs]-[A-Za-z0-9-]{10,}"),
    ("a Slack webhook", r"https://hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/_-]{10,}"),
    ("an API key", r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"),
    ("a Google API key", r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}"),
    ("a Vault token", r"(?<![A-Za-z0-9])hv[sbr]\.[A-Za-z0-9_-]{24,}"),
    ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    ("a signed web token", r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10,500}\.eyJ[A-Za-z0-9_-]{10,8000}\.[A-Za-z0-9_-]+"),
    ("a URI with a user or password", r"(?<![A-Za-z0-9])[a-z][a-z0-9+.-]{0,30}://[^\s/@:]{0,500}:[^\s/@]{1,2000}@"),
)
_FORM = re.compile("|".join(f"(?P<f{number}>{pattern})" for number, (_, pattern) in enumerate(_FORMS)))
# "tokenizer" and "tokens" are words of this field, not of secrets.
_VARIABLE = re.compile(r"(?i)secret|passw|_pwd$|token(?!iz|s(?![a-z]))|credential|private_?key|api_?key|access_?key")
_POINTER = re.compile(r"(?i)_(?:path|file|dir|directory|folder|mode|name|url|uri|ttl|expiration|expires?_?\w*)$")


def secret_forms(text: str) -> Iterator[re.Match[str]]:
    """Everything in a text that looks like a secret."""
    return _FORM.finditer(text)


def form_of(found: re.Match[str]) -> str:
    """What a match of ``secret_forms`` looks like: ``an AWS access key``."""
    return _FORMS[int((found.lastgroup or "f0")[1:])][0]


def secret_form(text: str) -> str:
    """What a text looks like (``an AWS access key``); empty if it looks like no secret."""
    found = _FORM.search(text)
    return form_of(found) if found is not None else ""


def names_secret(variable: str) -> bool:
    """Whether a variable is called as those are that hold secrets, or say where they lie."""
    return _VARIABLE.search(variable) is not None


def points_to_secret(variable: str) -> bool:
    """Whether a variable says where a secret lies (``RAY_AUTH_TOKEN_PATH``) or how it is used, and holds none."""
    return names_secret(variable) and _POINTER.search(variable) is not None
