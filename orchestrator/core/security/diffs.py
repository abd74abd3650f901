"""Removes secrets from diffs of program text, so that these can be published and still be applied.

In addition to ``redaction``, the detectors of the package detect-secrets check every line, except those that use
entropy: digests and keys of artifacts are not secrets. They take 70 us per line, ``redaction`` takes 20 us; this is too
slow for logs.

Added lines can be changed: a value becomes ``[hidden]``, lines stay lines. Removed and context lines must be as in the
file to which the diff is applied. So if one of them has a secret, it is left out if it is only context; else the whole
hunk is left out, and a line at the top says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from orchestrator.core.security.redaction import HIDDEN, redacted_values

if TYPE_CHECKING:
    from detect_secrets.plugins.base import BasePlugin

_NO_SECRETS: Final = frozenset(
    {"Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector", "PrivateKeyDetector"}
)
"""Detectors that are not asked: entropy and addresses; keys of several lines are found here."""
_MIN_CHARACTERS: Final = 6
_MAX_LINE: Final = 8192
_OVERLAP: Final = 1024
"""Of the pieces of longer lines, so that a token is whole in one of them."""
"""Detectors see longer lines in pieces: their patterns have no bounds."""
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_NAME: Final = re.compile(r"(?:---|\+\+\+) \"?(?!/dev/null)(?:[a-z]/)?(.+?)\"?\t?$")
"""A name with its prefix, which a setting of git leaves out."""
_WORD_OF_KEY: Final = re.compile(r"[A-Za-z0-9+/=]{16,}")
_LINE_OF_KEY: Final = re.compile(r"[A-Za-z0-9+/=:, -]{8,}")


@dataclass(slots=True, kw_only=True)
class _Hunk:
    """A hunk of a diff; each line of ``body`` begins with its sign."""

    old_start: int
    new_start: int
    section: str
    body: list[str] = field(default_factory=list)

    @property
    def header(self) -> str:
        """Its first line, counted anew."""
        old, new = (sum(line[:1] in signs for line in self.body) for signs in ({" ", "-"}, {" ", "+"}))
        return f"@@ -{self.old_start},{old} +{self.new_start},{new} @@{self.section}"


def redacted_diff(diff: str) -> str:
    """What ``git diff`` prints, without secrets; it applies to the same files as before."""
    lines, notes, kept = diff.removesuffix("\n").split("\n"), list[str](), list[str]()
    starts = [number for number, line in enumerate(lines) if line.startswith("diff --git ")]
    for start, stop in pairwise([*starts, len(lines)]):
        kept += _redacted_file(lines[start:stop], notes)
    return "\n".join([*notes, *kept, *([""] if diff.endswith("\n") else [])])


def _redacted_file(lines: Sequence[str], notes: list[str]) -> list[str]:
    first = next((number for number, line in enumerate(lines) if _HUNK.match(line)), len(lines))
    header, names = list(lines[:first]), [found[1] for line in lines[:first] if (found := _NAME.match(line))]
    name = names[-1] if names else ""
    kept = list[str]()
    for hunk in _hunks(lines[first:], name):
        if (clean := _redacted_hunk(hunk, name)) is not None:
            kept += [clean.header, *clean.body]
        else:
            notes.append(
                f"# Left out: a change of {name}, line {hunk.old_start}, beside or of what looks like a secret"
            )
    if first < len(lines) and not kept:
        return []
    return [*map(redacted_values, header), *kept]


def _hunks(lines: Sequence[str], name: str) -> Iterator[_Hunk]:
    hunk: _Hunk | None = None
    old = new = 0
    for line in lines:
        found = _HUNK.match(line) if old <= 0 and new <= 0 else None
        if found is not None:
            if hunk is not None:
                yield hunk
            old, new = int(found[2] or 1), int(found[4] or 1)
            hunk = _Hunk(old_start=int(found[1]), new_start=int(found[3]), section=_section(found[5], name))
        elif hunk is not None:
            hunk.body.append(line)
            old -= line[:1] in {" ", "-"}
            new -= line[:1] in {" ", "+"}
    if hunk is not None:
        yield hunk


def _section(text: str, name: str) -> str:
    """The line above a hunk that git repeats for readers; one of a key has no form that tells it."""
    return "" if _WORD_OF_KEY.fullmatch(text.strip()) else _hidden_line(text, name)


def _redacted_hunk(hunk: _Hunk, name: str) -> _Hunk | None:
    """Without secrets; None if it could not be applied without them."""
    clean = [
        line[:1] + text for line, text in zip(hunk.body, _hidden([line[1:] for line in hunk.body], name), strict=True)
    ]
    fixed = [number for number, line in enumerate(hunk.body) if line[:1] != "+" and clean[number] != line]
    if not fixed:
        return _Hunk(old_start=hunk.old_start, new_start=hunk.new_start, section=hunk.section, body=clean)
    changed = [number for number, line in enumerate(hunk.body) if line[:1] in {"+", "-"}]
    if not changed or any(changed[0] <= number <= changed[-1] for number in fixed):
        return None
    start = max((number + 1 for number in fixed if number < changed[0]), default=0)
    stop = min((number for number in fixed if number > changed[-1]), default=len(clean))
    if stop == changed[-1] + 1 and stop < len(clean):
        return None  # without context behind it git takes the file's end to be there
    return _Hunk(
        old_start=hunk.old_start + start,
        new_start=hunk.new_start + start,
        section=hunk.section,
        body=clean[start:stop],
    )


def _hidden(texts: Sequence[str], name: str) -> list[str]:
    """Lines that follow one another, of a file of this name."""
    in_key = _lines_of_keys(texts)
    return [HIDDEN if number in in_key else _hidden_line(text, name) for number, text in enumerate(texts)]


def _lines_of_keys(texts: Sequence[str]) -> set[int]:
    """Numbers of the lines of private keys, also of those whose beginning or end is not there."""
    found, is_in_key = set[int](), False
    for number, text in enumerate(texts):
        is_end = "-----END" in text and "PRIVATE KEY-----" in text
        if "-----BEGIN" in text and "PRIVATE KEY-----" in text:
            is_in_key = not is_end
            found.add(number)
        elif is_end:
            first = number
            while not is_in_key and first > 0 and _LINE_OF_KEY.fullmatch(texts[first - 1].strip()):
                first -= 1
            found.update(range(first, number + 1))
            is_in_key = False
        elif is_in_key:
            found.add(number)
    return found


def _hidden_line(text: str, name: str) -> str:
    text = redacted_values(text)
    starts = range(0, len(text), _MAX_LINE - _OVERLAP)
    values = {value for start in starts for value in _found(text[start : start + _MAX_LINE], name)}
    for value in sorted(values, key=lambda value: (-len(value), value)):
        text = text.replace(value, HIDDEN)
    return text


def _found(line: str, name: str) -> Iterator[str]:
    for detector in _detectors():
        yield from (value for value in detector.analyze_string(line) if len(value) >= _MIN_CHARACTERS)
    yield from _after_keywords(line, name)


def _after_keywords(line: str, name: str) -> Iterator[str]:
    """Values that are given to what is called as secrets are; in programs only those in quotes."""
    from detect_secrets.filters import heuristic
    from detect_secrets.plugins import keyword
    from detect_secrets.util.filetype import determine_file_type

    patterns = keyword.REGEX_BY_FILETYPE.get(determine_file_type(name), keyword.QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP)
    for value in keyword.KeywordDetector().analyze_string(line, denylist_regex_to_group=patterns):
        is_other = (
            len(value) < _MIN_CHARACTERS
            or HIDDEN in value
            or heuristic.is_sequential_string(value)
            or heuristic.is_templated_secret(value)
            or heuristic.is_prefixed_with_dollar_sign(value)
            or heuristic.is_not_alphanumeric_string(value)
            or heuristic.is_indirect_reference(line)
        )
        if not is_other:
            yield value


@cache
def _detectors() -> tuple[BasePlugin, ...]:
    """The values that detectors find, without their verification, which would send them to a server."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    kinds: Iterable[type[BasePlugin]] = get_mapping_from_secret_type_to_class().values()
    return tuple(kind() for kind in kinds if kind.__name__ not in _NO_SECRETS and kind.__name__ != "KeywordDetector")
