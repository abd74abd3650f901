"""URIs of single objects, and brace patterns of them: ``s3://bucket/in21k/train-{000000..001023}.tar``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from math import prod
from typing import Final

from braceexpand import braceexpand

from orchestrator.core.errors import StorageError
from orchestrator.storage.open import check_store_uri
from orchestrator.storage.protocol import check_name

MAX_EXPANDED: Final = 1_000_000
"""Names that one pattern may stand for: a typing error must not fill the memory."""

_RANGE = re.compile(r"\{(-?[0-9]{1,30})\.\.(-?[0-9]{1,30})")


def expand_braces(pattern: str) -> tuple[str, ...]:
    """The URIs that a pattern stands for, in its order; ``{000..127}`` counts, ``{a,b}`` lists, nesting multiplies.

    Raises:
        StorageError: braces do not match, or there are more than ``MAX_EXPANDED``.
    """
    ranges = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern)]
    try:
        if prod(ranges) > MAX_EXPANDED:  # before braceexpand makes a list of it
            raise StorageError(_too_many(pattern))
        found = tuple(islice(braceexpand(pattern, escape=False), MAX_EXPANDED + 1))
    except ValueError as error:
        raise StorageError(f"{pattern!r} has braces that do not match; write train-{{000000..001023}}.tar") from error
    if len(found) > MAX_EXPANDED:
        raise StorageError(_too_many(pattern))
    return found


def split_object_uri(uri: str) -> tuple[str, str]:
    """Store URI (the folder) and object name (the basename) of a single object's URI.

    Raises:
        StorageError: the URI is none that a store can hold: another scheme (``pipe:`` included), a user or password,
            ``..``, or no name at its end.
    """
    folder, _, name = uri.rpartition("/")
    check_store_uri(uri)  # the whole URI: messages then name what was written
    if not name or folder.endswith((":/", "://")):
        raise StorageError(f"{uri!r} names no object; write s3://bucket/folder/name or file:///folder/name")
    return folder, check_name(name)


def object_uri(store_uri: str, name: str) -> str:
    """Inverse of `split_object_uri`."""
    return f"{store_uri.removesuffix('/')}/{name}"


def find_objects(patterns: Iterable[str]) -> dict[str, tuple[str, str]]:
    """``{object name: (store URI, object name)}`` of all URIs that some patterns stand for.

    Raises:
        StorageError: a URI is refused, or two have one basename.
    """
    found: dict[str, tuple[str, str]] = {}
    for uri in (uri for pattern in patterns for uri in expand_braces(pattern)):
        place = split_object_uri(uri)
        if found.setdefault(place[1], place) != place:
            raise StorageError(f"{uri!r} has the name of a shard in {found[place[1]][0]}; names must be unique")
    return found


def _too_many(pattern: str) -> str:
    return f"{pattern!r} stands for more than {MAX_EXPANDED} names; check its ranges"
