"""Problems of a sweep.yaml, one line each: the place, what is wrong with which value, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.core.errors import SpecError
from orchestrator.core.schema_words import why_refused
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import BACKBONE_KEY, IS_NO_NAME, LEVEL_TEXT, MAX_INTEGER, NAME, SYNSET, keys_of
from orchestrator.sweepfile.parse.tree import Path, Tree, plain_value

Schema = TypeVar("Schema", bound=BaseModel)

_MAPPING = ("a mapping", "write key: value")
_TYPES: Mapping[str, tuple[str, str]] = {
    "int_type": ("a whole number", "write for example 3"),
    "float_type": ("a number", "write for example 0.1"),
    "string_type": ("text", "write a name"),
    "bool_type": ("true or false", "write one of the two"),
    "list_type": ("a list", "write [a, b, ...]"),
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
"""By type of pydantic's error: the expected value, and what to write."""
_PATTERNS: Mapping[str, str] = {
    NAME: IS_NO_NAME,
    LEVEL_TEXT: "is not a level; begin with a letter or digit, then letters, digits, '_', '.', '+', '-', at most 63 in "
    "all",
    SYNSET: "is not a synset of WordNet; write one such as n02084071, which is dog",
    BACKBONE_KEY: "is not the key of a backbone; write the key of a pretrain or finetune job (`orchestrator ls "
    "artifacts` lists them)",
}
"""By pattern: what is wrong with a text that does not match it; the others are of digests."""


def validate(schema: type[Schema], value: object, tree: Tree, path: Path = ()) -> Schema:
    """Validate a value that stands at ``path`` of ``tree``.

    Raises:
        SpecError: one line for each problem.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        found = [one for detail in error.errors(include_url=False) for one in _one_by_one(detail)]
        details = _best_meant(found, value)
        lines = [_line(detail, _alike(detail, details, value), value, tree, path) for detail in details]
        raise SpecError(tuple(dict.fromkeys(lines))) from error


def _one_by_one(detail: ErrorDetails) -> Iterator[ErrorDetails]:
    """One for each unknown key of a mapping."""
    if detail["type"] != "unknown_keys":
        yield detail
        return
    for key, hint in detail["ctx"]["hints"].items():
        text = f"unknown key '{key}': {hint}"
        yield ErrorDetails(type="unknown_key", loc=detail["loc"], msg=text, input=detail["input"], ctx={"key": key})


def _best_meant(details: Sequence[ErrorDetails], root: object) -> list[ErrorDetails]:
    """Without the types that would do as well where one alternative has the right type, and is wrong otherwise."""
    meant = {_real_path(one["loc"], root) for one in details if one["type"] not in _TYPES}
    return [one for one in details if one["type"] not in _TYPES or _real_path(one["loc"], root) not in meant]


def _alike(detail: ErrorDetails, details: Sequence[ErrorDetails], root: object) -> list[ErrorDetails]:
    """Errors of types that are accepted at the place of an error: there is one for each of them."""
    place = _real_path(detail["loc"], root)
    return [one for one in details if one["type"] in _TYPES and _real_path(one["loc"], root) == place]


def _line(detail: ErrorDetails, alike: Sequence[ErrorDetails], root: object, tree: Tree, prefix: Path) -> str:
    path = _real_path(detail["loc"], root)
    if detail["type"] == "missing":
        missing = detail["loc"][-1]
        value = "1" if missing == "version" else "..."
        return tree.problem((*prefix, *path), f"'{missing}' is missing; add '{missing}: {value}' here")
    if detail["type"] == "unknown_key":
        path = (*path, detail["ctx"]["key"])
    if detail["type"] == "union_tag_invalid":
        path = (*path, str(detail["ctx"]["discriminator"]).strip("'"))
    if detail["type"] == "refused":
        path = (*path, *detail.get("ctx", {}).get("at", ()))
    return tree.problem((*prefix, *path), _message(detail, alike))


def _message(detail: ErrorDetails, alike: Sequence[ErrorDetails]) -> str:
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    if kind in _TYPES:
        return _type_message(value, alike)
    if kind == "literal_error":
        return _literal_message(value, context["expected"])
    if kind == "union_tag_invalid":
        return _tag_message(context)
    if kind in {"unknown_key", "one_rule", "refused"}:
        return detail["msg"]
    if kind in {"too_short", "too_long"}:
        return _size_message(kind, context)
    if kind == "less_than_equal" and context["le"] == MAX_INTEGER:
        why = "is refused: whole numbers above 2^53 - 1 are not exact everywhere; use a smaller one"
    elif kind == "string_pattern_mismatch":
        why = _PATTERNS.get(context["pattern"], "is not a digest; write 64 of the signs 0 to 9 and a to f")
    else:
        why = f"is refused: {why_refused(kind, detail['msg'], context)}"
    return f"{shown_value(value)} {why}"


def _type_message(value: object, alike: Sequence[ErrorDetails]) -> str:
    types = [one["type"] for one in alike]
    names = list(dict.fromkeys(_TYPES[kind][0] for kind in types))
    writes = list(dict.fromkeys(_TYPES[kind][1].removeprefix("write ") for kind in types))
    if value is None:
        return f"nothing is written here, where {' or '.join(names)} is required; write {' or '.join(writes)}"
    what = f"{shown_value(value)} is {'not' if len(names) == 1 else 'neither'} {' nor '.join(names)}"
    if isinstance(value, str) and set(types) & {"int_type", "float_type"} and not isinstance(plain_value(value), str):
        return f"{shown_value(value)} is text; write it without quotes: {value}"
    if "int_type" in types and isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INTEGER:
        return f"{what}; write {int(value)}"
    if "string_type" in types and isinstance(value, bool | int | float):
        return f'{what}; put it in quotes: "{_plain(value)}"'
    keys = [key for one in alike for key in keys_of(one.get("ctx", {}).get("class_name", ""))]
    known = f" ({did_you_mean('', keys, they_are='known keys')})" if keys else ""
    return f"{what}; write {' or '.join(writes)}{known}"


def _literal_message(value: object, expected: str) -> str:
    """What pydantic expects is written as in Python: texts in quotes, numbers without."""
    parts = [part.strip() for part in expected.replace(" or ", ", ").split(",")]
    allowed = [part.strip("'") for part in parts]
    if _plain(value) in allowed and isinstance(value, str):
        return f"{shown_value(value)} is text; write it without quotes: {value}"
    if _plain(value) in allowed:
        return f'{shown_value(value)} is not text; put it in quotes: "{_plain(value)}"'
    return f"{shown_value(value)} is not one of the allowed values; {did_you_mean(_plain(value), allowed)}"


def _size_message(kind: str, context: dict[str, Any]) -> str:
    number = context["min_length" if kind == "too_short" else "max_length"]
    bound = f"at {'least' if kind == 'too_short' else 'most'} {number} item{'s' * (number != 1)}"
    if not context["actual_length"]:
        return f"this is empty; write {bound}"
    return f"this has {context['actual_length']} item{'s' * (context['actual_length'] != 1)}; write {bound}"


def _tag_message(context: dict[str, Any]) -> str:
    key = str(context["discriminator"]).strip("'")
    allowed = [part.strip(" '") for part in str(context["expected_tags"]).split(",")]
    return f"{key} '{context['tag']}' is not known: {did_you_mean(str(context['tag']), allowed)}"


def _real_path(loc: tuple[int | str, ...], root: object) -> Path:
    """Keep the steps that exist in the value: pydantic also names union members and missing keys."""
    path: list[int | str] = []
    here: Any = root
    for step in loc:
        exists = (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        )
        if exists:
            here = here[step]
            path.append(step)
    return tuple(path)


def _plain(value: object) -> str:
    """As YAML writes it, without quotes around texts."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_quoted(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    return str(value)


def _quoted(value: object) -> str:
    return repr(value) if isinstance(value, str) else _plain(value)


def shown_value(value: object) -> str:
    """A value as YAML writes it, on part of a line."""
    text = _quoted(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -------------------------------------------------------------------------------------------- problems found on the way


class Complaints:
    """Collects the errors of a sweep.yaml, each with its place in the file."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._problems: list[str] = []
        self._doubted: set[Path] = set()

    @property
    def tree(self) -> Tree:
        """The file."""
        return self._tree

    @property
    def problems(self) -> tuple[str, ...]:
        """The complaints so far."""
        return tuple(self._problems)

    def add(self, path: Path, message: str, block: str = "") -> None:
        """Complain about the value at ``path``; ``block``: because of this block of ``pretrain``."""
        self.doubt(path)
        self._problems.append(self._tree.problem(path, message, block))

    def doubt(self, path: Path) -> None:
        """Note that something at ``path`` is complained of elsewhere."""
        self._doubted.update(path[:length] for length in range(len(path) + 1))

    def doubts(self, path: Path) -> bool:
        """Whether there was a complaint about the value at ``path`` or below it."""
        return path in self._doubted

    def extend(self, error: SpecError) -> None:
        """Add the problems of an error; they name their places themselves."""
        self._problems.extend(error.problems)

    def refuse_repeats(self, path: Path, values: Sequence[str], key: str | None = None) -> None:
        """Complain about each value that stands in the list at ``path`` before; ``key`` is where an item holds it."""
        seen: set[str] = set()
        for position, value in enumerate(values):
            if value in seen:
                where = (*path, position) if key is None else (*path, position, key)
                self.add(where, f"'{value}' is given twice; keep one")
            seen.add(value)

    def raise_any(self) -> None:
        """Raises ``SpecError`` with all of them, if there are any."""
        if self._problems:
            raise SpecError(tuple(dict.fromkeys(self._problems)))
