"""Which leaf classes a sample of a foreign shard has: from its ``.cls``, ``.json`` or ``.txt`` member."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from workloads.data.reasons import BadSampleError, Reason

CLASS_EXTENSION: Final = "cls"
METADATA_EXTENSION: Final = "json"
TEXT_EXTENSION: Final = "txt"
LABEL_EXTENSIONS: Final = frozenset({CLASS_EXTENSION, METADATA_EXTENSION, TEXT_EXTENSION})
_FIELDS: Final = ("labels", "class", "cls", "label")
"""Fields of a sample's JSON that may name its classes; the first one that is there counts."""
_MAX_DIGITS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """How classes are written in the shards of one data set."""

    num_classes: int
    multi_label: bool = False
    """Samples have any number of classes, also none if their list is there and empty."""
    names: Mapping[str, int] | None = None
    """Classes by name, for shards that write names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the members of a sample say."""

    leaves: tuple[int, ...]
    subset: str | None


def class_names(classes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Classes by every text in their rows that names one class only: ``name``, ``synset``, leaf levels.

    What reads as the number of a class is never a name: members hold numbers, and a column may number its groups.
    """
    names: dict[str, int | None] = {}
    for row in classes:
        texts = {str(value) for column, value in row.items() if column != "class" and value is not None}
        for text in texts:
            if _is_number_of_a_class(text, len(classes)):
                continue
            names[text] = None if text in names else int(row["class"])
    return {name: leaf for name, leaf in names.items() if leaf is not None}


def read_labels(members: Mapping[str, bytes], rule: ClassRule) -> Labels:
    """Classes and subset from the label members of a sample, by extension.

    Raises:
        BadSampleError: there is no class, it is not in the table, or a member cannot be read.
    """
    metadata = _metadata(members.get(METADATA_EXTENSION))
    leaves = tuple(dict.fromkeys(_leaf(token, rule) for token in _tokens(members, metadata, rule)))
    if len(leaves) > 1 and not rule.multi_label:
        message = f"has the classes {list(leaves[:8])}; declare the data set multi_label: true to keep all of them"
        raise BadSampleError(Reason.SEVERAL_CLASSES, message)
    subset = metadata.get("subset")
    return Labels(leaves=leaves, subset=None if subset is None else str(subset))


def _metadata(content: bytes | None) -> Mapping[str, Any]:
    if content is None:
        return {}
    try:
        metadata = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(Reason.BAD_METADATA, f"has metadata that is not JSON: {error}") from error
    return metadata if isinstance(metadata, dict) else {"class": metadata}


def _tokens(members: Mapping[str, bytes], metadata: Mapping[str, Any], rule: ClassRule) -> Sequence[Any]:
    """The classes as written: integers or text."""
    if CLASS_EXTENSION in members:
        return _split(members[CLASS_EXTENSION], rule)
    found = next((metadata[field] for field in _FIELDS if metadata.get(field) is not None), None)
    if found is not None:
        if found == [] and not rule.multi_label:
            raise BadSampleError(Reason.NO_CLASS, "has no class: its list of labels is empty")
        return found if isinstance(found, list) else [found]
    if TEXT_EXTENSION in members:
        tokens = _split(members[TEXT_EXTENSION], rule)
        if all(_is_integer(token) or token in (rule.names or {}) for token in tokens):
            return tokens  # anything else is a caption
    message = "has no class; every sample needs a member .cls, or a .json with one of " + ", ".join(_FIELDS)
    raise BadSampleError(Reason.NO_CLASS, message)


def _split(content: bytes, rule: ClassRule) -> list[str]:
    """Integers separated by blanks or commas, or one name, which may have both in it; one name per line is a list."""
    text = content[:65536].decode("utf-8", errors="replace").strip()
    if text in (rule.names or {}):
        return [text]
    tokens = text.replace(",", " ").split()
    if all(_is_integer(token) for token in tokens):
        if not tokens:
            raise BadSampleError(Reason.NO_CLASS, "has no class: its class member is empty")
        return tokens
    return [line.strip() for line in text.splitlines()]


def _is_integer(token: str) -> bool:
    return token.removeprefix("-").isascii() and token.removeprefix("-").isdigit()


def _is_number_of_a_class(text: str, num_classes: int) -> bool:
    return len(text) <= _MAX_DIGITS and _is_integer(text) and 0 <= int(text) < num_classes


def _leaf(token: Any, rule: ClassRule) -> int:  # noqa: ANN401 - whatever a JSON holds
    if isinstance(token, str):
        named = (rule.names or {}).get(token)
        if named is not None:
            return named
    is_number = isinstance(token, int) and not isinstance(token, bool)
    if not is_number and not (isinstance(token, str) and len(token) <= _MAX_DIGITS and _is_integer(token)):
        shown = repr(token)[:48]
        raise BadSampleError(
            Reason.BAD_CLASS, f"has the class {shown}, neither an integer nor a name of the class table"
        )
    leaf = int(token)
    if not 0 <= leaf < rule.num_classes:
        message = f"has the class {leaf}; the class table has 0 to {rule.num_classes - 1}"
        raise BadSampleError(Reason.CLASS_OUT_OF_RANGE, message)
    return leaf
