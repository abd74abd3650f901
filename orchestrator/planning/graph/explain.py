"""Why two jobs have different keys: the identity fields that differ, followed through their inputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Identity = Mapping[str, Any]
Find = Callable[[str], Identity | None]
"""From a key to its identity; None where nobody knows it."""

ABSENT = "(absent)"
_MAX_DEPTH = 16
_INPUTS = "inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One identity field with two values; ``via`` are the roles of inputs that lead to the job that has the field."""

    path: str
    """Such as ``parameters.recipe.lr``."""
    old: Any
    new: Any
    via: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "".join(f"{role} > " for role in self.via) + self.path
        return f"{place}: {_show(self.old)} -> {_show(self.new)}"


def changes(old: Identity, new: Identity) -> list[FieldChange]:
    """Fields that differ between two identities, inputs included, in the order of the new one."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    paths = dict.fromkeys((*after, *before))
    return [
        FieldChange(path=path, old=before.get(path, ABSENT), new=after.get(path, ABSENT))
        for path in paths
        if before.get(path, ABSENT) != after.get(path, ABSENT)
    ]


def causes(old: Identity, new: Identity, find_old: Find, find_new: Find) -> list[FieldChange]:
    """As ``changes``, with each changed input replaced by what changed in the job behind it.

    An input stays as it is (two keys) where one of the two identities is not known. A job that several inputs lead to
    is shown once, by the first way.
    """
    return list(_causes(old, new, (find_old, find_new), (), set()))


def nearest(wanted: Identity, others: Iterable[tuple[str, Identity]]) -> list[str]:
    """Keys of the identities that differ from the wanted one in the fewest fields, in the order given.

    Inputs count as one field each, so that a job with one changed recipe field is nearer than one on other data; which
    of several is the nearest, ``causes`` tells by what is behind their inputs.
    """
    distances = {key: len(changes(identity, wanted)) for key, identity in others}
    least = min(distances.values(), default=0)
    return [key for key, distance in distances.items() if distance == least]


def _causes(
    old: Identity, new: Identity, find: tuple[Find, Find], via: tuple[str, ...], seen: set[tuple[str, str]]
) -> Iterator[FieldChange]:
    for change in changes(old, new):
        role = change.path.removeprefix(f"{_INPUTS}.")
        if role == change.path:
            yield FieldChange(path=change.path, old=change.old, new=change.new, via=via)
            continue
        pair = (str(change.old), str(change.new))
        if pair in seen:
            continue
        seen.add(pair)
        behind = find[0](pair[0]), find[1](pair[1])
        if behind[0] is None or behind[1] is None or len(via) >= _MAX_DEPTH:
            yield FieldChange(path=change.path, old=change.old, new=change.new, via=via)
        else:
            yield from _causes(behind[0], behind[1], find, (*via, role), seen)


def _leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Paths of all values that are no mappings; lists count as values, for their items have no names."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _show(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
