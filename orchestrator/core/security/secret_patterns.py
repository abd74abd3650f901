"""Patterns of secrets, and of names of variables that hold them. Pure.

Only secrets with a recognisable form are found; other values are known by their place (see ``known``). Parts of
patterns have a maximum length, so that a text with many beginnings of a pattern does not take quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_START = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))"
"""Not in the midst of a word; the end of an encoded character of a URI is none."""
WITH_USER = "a URI with a user or password"
_FORMS = (
    ("an AWS access key", _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("a GitHub token", _START + r"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})"),
    ("a GitLab token", _START + r"glpat-[A-Za-z0-9_-]{20,}"),
    ("a Hugging Face token", _START + r"hf_[A-Za-z0-9]{30,}"),
    ("a Slack token", _START + r"xox[abeprs]-[A-Za-z0-9-]{10,}"),
    (
        "a Slack webhook",
        r"https(?:://|%3[Aa]%2[Ff]%2[Ff])hooks\.slack\.com(?:/|%2[Ff])(?:services|workflows)(?:/|%2[Ff])[A-Za-z0-9/_%-]{10,}",
    ),
    ("an API key", _START + r"sk-[A-Za-z0-9_-]{20,}"),
    ("a Google API key", _START + r"AIza[A-Za-z0-9_-]{35}"),
    ("a Vault token", _START + r"hv[sbr]\.[A-Za-z0-9_-]{24,}"),
    ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    ("a signed web token", _START + r"eyJ[A-Za-z0-9_-]{10,500}\.eyJ[A-Za-z0-9_-]{10,8000}\.[A-Za-z0-9_-]+"),
    (WITH_USER, _START + r"[a-z][a-z0-9+.-]{0,30}://[^\s/@:]{0,500}:[^\s/@]{1,2000}@"),
    (
        WITH_USER,
        _START + r"[a-z][a-z0-9+.-]{0,30}%3[Aa]%2[Ff]%2[Ff][^\s/@:%]{0,100}%3[Aa][^\s/@]{1,200}?%40",
    ),
)
_FORM = re.compile("|".join(f"(?P<f{number}>{pattern})" for number, (_, pattern) in enumerate(_FORMS)))
_MARK = re.compile(
    r"AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|hf_|xox|sk-|AIza|hv[sbr]\.|PRIVATE KEY|eyJ|://|%3[Aa]%2[Ff]%2[Ff]"
)
"""Every form has one of these, which are found in a fraction of the time."""
# "tokenizer" and "tokens" are words of this field, not of secrets.
_VARIABLE = re.compile(
    r"(?i)secret|passw|_pwd(?=$|_)|token(?!iz|s(?![a-z]))|credential|private_?key|api_?key|access_?key"
)
_POINTER = re.compile(r"(?i)_(?:path|file|dir|directory|folder|mode|name|url|uri|ttl|expiration|expires?_?\w*)$")


def secret_forms(text: str) -> Iterator[re.Match[str]]:
    """Everything in a text that looks like a secret."""
    return _FORM.finditer(text) if _MARK.search(text) is not None else iter(())


def form_of(found: re.Match[str]) -> str:
    """What a match of ``secret_forms`` looks like: ``an AWS access key``."""
    return _FORMS[int((found.lastgroup or "f0")[1:])][0]


def secret_form(text: str) -> str:
    """What a text looks like (``an AWS access key``); empty if it looks like no secret."""
    found = next(secret_forms(text), None)
    return form_of(found) if found is not None else ""


def names_secret(variable: str) -> bool:
    """Whether a variable is called as those are that hold secrets, or say where they lie."""
    return _VARIABLE.search(variable) is not None


def points_to_secret(variable: str) -> bool:
    """Whether a variable says where a secret lies (``RAY_AUTH_TOKEN_PATH``) or how it is used, and holds none."""
    return names_secret(variable) and _POINTER.search(variable) is not None
