"""Documents over documents: what an including file, a ``tiny:`` block and ``--set`` change. Pure.

Mappings are merged key by key; other values are replaced, and ``null`` removes a value. Three cases are special: a
data set or label space with another source or rule is replaced as a whole, a recipe that was a name becomes the
``base`` of the fields that change it, and the items of a list are addressed by number or ``name``.
``*`` stands for all items or entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import SourceLocation, SpecError
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.labels import LabelEntry
from orchestrator.sweepfile.parse.tree import Path, Places, Tree, dotted
from orchestrator.sweepfile.pretrain import PretrainSpec

EVERY = "*"
_ENTRIES = (("datasets",), ("labels",), ("recipes",), ("pretrain",))
_SOURCES = frozenset({"builtin", "from", "shards", "convert", "mixture"})


@dataclass(frozen=True, slots=True)
class Located:
    """A value and where it stands."""

    value: Any
    places: Places

    def child(self, step: str | int) -> Located:
        """A part that exists."""
        return Located(self.value[step], self.places.children.get(step, Places(self.places.here)))


def located(value: object, here: SourceLocation) -> Located:
    """A value all of whose parts have the same place."""

    def places(part: object) -> Places:
        parts = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list) else ()
        return Places(here, {step: places(item) for step, item in parts})

    return Located(value, places(value))


def merged(base: Tree, over: Located) -> Tree:
    """The document with another one over it. Raises ``SpecError``: an item is addressed that is not there."""
    found = _merge(Located(base.value, base.places), over, ())
    return Tree(file=base.file, value=found.value, places=found.places)


def merged_part(base: Located, over: Located, path: Path) -> Located:
    """As ``merged``, of the part of a document that stands at ``path``."""
    return _merge(base, over, path)


def _merge(base: Located, over: Located, path: Path) -> Located:
    if not isinstance(over.value, dict):
        return over
    if isinstance(base.value, str) and path and path[-1] == "recipe":
        base = _named_recipe(base)
    if isinstance(base.value, list) and (over.value or not base.value):
        return _merge_items(base, over, path)
    if not isinstance(base.value, dict) or _is_given_anew(base.value, over.value, path):
        return _anew(base, over, path)
    value, children = dict(base.value), dict(base.places.children)
    for key in over.value:
        for step in _steps(key, base, over, path):
            _put(value, children, step, over.child(key), (*path, step))
    return Located(value, Places(over.places.here if not path else base.places.here, children))


def _put(value: dict[str, Any], children: dict[str | int, Places], step: str, over: Located, path: Path) -> None:
    """One key of a mapping; null removes it, if there is one."""
    if over.value is None and step in value:
        del value[step]
        children.pop(step, None)
        return
    below = Located(value[step], children[step]) if step in value and step in children else None
    found = over if below is None else _merge(below, over, path)
    value[step], children[step] = found.value, found.places


def _merge_items(base: Located, over: Located, path: Path) -> Located:
    items = [base.child(position) for position in range(len(base.value))]
    for key in over.value:
        for position in _positions(key, base, over, path):
            items[position] = _merge(items[position], over.child(key), (*path, position))
    return Located(
        [item.value for item in items], Places(base.places.here, {n: item.places for n, item in enumerate(items)})
    )


def _steps(key: str, base: Located, over: Located, path: Path) -> Iterator[str]:
    """The keys of a mapping to which a key of the upper document refers."""
    if key != EVERY:
        yield key
        return
    fields = PretrainSpec.model_fields.keys() if path == ("pretrain",) else frozenset()
    if path not in _ENTRIES or not base.value or fields & base.value.keys():
        message = "'*' means all items of a list, or all entries of datasets, labels, recipes and named blocks; here "
        raise SpecError((_problem(over.child(key), (*path, key), message + "are none"),))
    yield from list(base.value)


def _positions(key: str, base: Located, over: Located, path: Path) -> Iterator[int]:
    """The items of a list to which a key of the upper document refers."""
    names = [item.get("name") if isinstance(item, Mapping) else None for item in base.value]
    if key == EVERY and names:
        yield from range(len(names))
    elif key.isdecimal() and int(key) < len(names):
        yield int(key)
    elif key in names:
        yield names.index(key)
    else:
        named = [name for name in names if isinstance(name, str)]
        hint = did_you_mean(key, [*named, *map(str, range(len(names))), EVERY]) if names else "the list is empty"
        message = f"'{key}' is not an item of the list; address items by number (from 0), name or '*': {hint}"
        raise SpecError((_problem(over.child(key), (*path, key), message),))


def _is_given_anew(base: Mapping[str, Any], over: Mapping[str, Any], path: Path) -> bool:
    """Whether a data set gets another source, or a label space another rule, which replaces it as a whole."""
    if len(path) != 2 or path[0] not in {"datasets", "labels"}:
        return False
    alternatives = _SOURCES if path[0] == "datasets" else frozenset(LabelEntry.RULES)
    return bool(alternatives & over.keys() - base.keys())


def _anew(base: Located, over: Located, path: Path) -> Located:
    """The new value; a label space keeps its data set."""
    value, children = dict(over.value), dict(over.places.children)
    if path[:1] == ("labels",) and isinstance(base.value, dict) and "dataset" in base.value:
        value.setdefault("dataset", base.value["dataset"])
        children.setdefault("dataset", base.child("dataset").places)
    kept = {key: item for key, item in value.items() if item is not None} if base.value is not None else value
    return Located(kept, Places(over.places.here, children))


def _named_recipe(base: Located) -> Located:
    return Located({"base": base.value}, Places(base.places.here, {"base": base.places}))


def _problem(at: Located, path: Path, message: str) -> str:
    return f"{at.places.here}: {dotted(path)}: {message}"
