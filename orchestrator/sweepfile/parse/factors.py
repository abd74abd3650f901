"""``factors:`` of a pretrain block: the block becomes one for each cell of its design. Pure.

A value of a factor is a partial block that is merged over the block, as ``tiny:`` is over the file; a list names a
field by its path and gives its values. Each cell is a separate block with its values (``factors: {mix: none}``), so
that later steps handle only blocks. Names of factors and values are facets, never part of an identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, Final

from orchestrator.core.errors import SpecError
from orchestrator.core.ids import sha256_hex
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import IS_NO_NAME, NAME
from orchestrator.sweepfile.parse.merge import EVERY, Located, located, merged_part
from orchestrator.sweepfile.parse.tree import Path, Places, Tree, dotted
from orchestrator.sweepfile.pretrain import RESERVED_FACTORS, PretrainSpec
from orchestrator.sweepfile.values import BLOCK_FACTOR

MAX_CELLS: Final = 1000
FULL: Final = "full"
ONE_AT_A_TIME: Final = "one_at_a_time"
_FACTORS, _DESIGN = "factors", "design"
_NAME = re.compile(NAME)
_MAX_NAME: Final = 63
_UNNAMED = re.compile(r"[^A-Za-z0-9_.-]+")
_REFUSED: Final = {
    "factors": "factors belong in the block itself",
    "design": "a design belongs in the block itself",
    "labels": "label spaces are the factor 'labels'; list them in the block",
}
"""Fields that the partial block of a value cannot have."""

Combination = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _CellTree(Tree):
    """A tree with cells in place of blocks: a mistake that several cells share is one problem, named by the first."""

    cells: Mapping[str, tuple[Path, str]]
    """By name of a cell's block: the path of the block that it was made of, and its values as text."""
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)

    def problem(self, path: Path, message: str, block: str = "") -> str:
        """See `Tree`."""
        is_inside = len(path) > 1 and path[0] == "pretrain" and path[1] in self.cells
        cell = str(path[1]) if is_inside else block
        if cell not in self.cells:
            return Tree.problem(self, path, message)
        origin, values = self.cells[cell]
        place, below = self.locate(path), (*origin, *path[2:]) if is_inside else path
        text = f"{place}: {dotted(below)}: {message} (in the cell {values})"
        return self.seen.setdefault((str(place), below, message), text)

    def origin_of(self, block: str) -> Path:
        """See `Tree`."""
        return self.cells[block][0] if block in self.cells else Tree.origin_of(self, block)


def with_factors(tree: Tree) -> Tree:
    """The document with a block for each cell of the designs of its blocks.

    Raises:
        SpecError: a factor, a value or a design is wrong, or there are more than ``MAX_CELLS`` cells.
    """
    if not isinstance(tree.value.get("pretrain"), dict):
        return tree
    whole = Located(tree.value, tree.places).child("pretrain")
    is_single = bool(PretrainSpec.model_fields.keys() & whole.value.keys())
    blocks = {"": whole} if is_single else {name: whole.child(name) for name in whole.value}
    declared = {
        name: _Design(tree, ("pretrain", name) if name else ("pretrain",), name, block)
        for name, block in blocks.items()
        if isinstance(block.value, Mapping) and block.value.get(_FACTORS) is not None
    }
    designs = {name: design for name, design in declared.items() if design.has_cells}
    if not designs:
        return tree
    found: dict[str, Located] = {}
    cells: dict[str, tuple[Path, str]] = {}
    is_named = _needs_names(list(declared.values()))
    for name, block in blocks.items():
        made = designs[name].cells(is_named=is_named) if name in designs else [(name, "", block)]
        for cell, values, body in made:
            if cell in found:
                message = f"two blocks would be called '{cell}'; give a block or a value another name"
                raise SpecError((tree.problem(("pretrain", name), message),))
            found[cell] = body
            if name in designs:
                cells[cell] = designs[name].path, values
    total = len(cells)
    if total > MAX_CELLS:
        path = (*next(iter(designs.values())).path, _FACTORS)
        message = f"the designs of this sweep have {total:,} cells; at most {MAX_CELLS:,} are read"
        raise SpecError((tree.problem(path, f"{message}: use fewer values, or design: {ONE_AT_A_TIME}"),))
    places = Places(whole.places.here, {name: body.places for name, body in found.items()})
    return _CellTree(
        file=tree.file,
        value={**tree.value, "pretrain": {name: body.value for name, body in found.items()}},
        places=Places(tree.places.here, {**tree.places.children, "pretrain": places}),
        cells=cells,
    )


def _needs_names(declared: Sequence[_Design]) -> bool:
    """Whether cells have the name of their block as a value of the factor ``block``.

    Not where blocks state different values themselves (``size: small``): these are what the file compares, and names of
    blocks would change together with them, so that no effect of either could be told.
    """
    stated = [design.stated for design in declared]
    return len(stated) == 1 or not any(stated) or len(set(stated)) < len(stated)


class _Design:
    """The factors of one block."""

    def __init__(self, tree: Tree, path: Path, name: str, block: Located) -> None:
        self._tree, self.path, self._name, self._block = tree, path, name, block
        self._factors: dict[str, dict[str, Located]] = {}
        self._written: dict[str, str] = {}
        """Factors as the file writes them: ``recipe.lr`` for ``lr``."""
        self._fixed: dict[str, Located] = {}
        """Factors of which the block itself is a value."""
        self._read_factors()

    @property
    def has_cells(self) -> bool:
        """Whether the block has a factor whose value it does not give itself."""
        return bool(self._factors)

    @property
    def stated(self) -> Combination:
        """The values that the block states itself, each with its factor."""
        return tuple(sorted(f"{name}: {value_text(item.value)}" for name, item in self._fixed.items()))

    def cells(self, *, is_named: bool) -> Iterator[tuple[str, str, Located]]:
        """Name, values as text and body of each cell's block, in the order of the design.

        Args:
            is_named: whether the name of the block is a value of each.
        """
        named = {BLOCK_FACTOR: self._name} if is_named and self._name else {}
        names = list(self._factors)
        base = self._without_design()
        for values in self._combinations():
            self._refuse_overwriting(values)
            body = base
            for factor, value in zip(names, values, strict=True):
                body = merged_part(body, self._factors[factor][value], ("pretrain", self._name))
            yield (
                self._cell_name(values),
                ", ".join(f"{factor} {value}" for factor, value in zip(names, values, strict=True)),
                self._with_values(body, {**dict(zip(names, values, strict=True)), **named}),
            )

    def _refuse_overwriting(self, values: Combination) -> None:
        """Two factors of a cell must not set one field: the name of the first one's value would be false."""
        earlier: dict[Path, tuple[str, object]] = {}
        for factor, value in zip(self._factors, values, strict=True):
            found = dict(_settings(self._factors[factor][value].value))
            for path, given in found.items():
                for other, (name, before) in earlier.items():
                    # Fields of a recipe that an earlier factor names are refined, not overwritten.
                    if other[: len(path)] == path and (other, before) != (path, given):
                        message = f"both '{name}' and '{factor}' set {dotted(other)}; make one factor of them"
                        raise self._problem((self._written[factor],), message)
            earlier |= {path: (factor, given) for path, given in found.items()}

    def _read_factors(self) -> None:
        factors = self._block.child(_FACTORS)
        if not isinstance(factors.value, Mapping):
            raise self._problem((), "this is not a mapping of factors; write factors: {optimizer: {sgd: {}, ...}}")
        for written in factors.value:
            values = factors.child(written)
            name = written.rpartition(".")[2] if isinstance(values.value, list) else written
            self._check_factor(written, name)
            self._written[name] = written
            if isinstance(values.value, list):
                self._factors[name] = self._listed(written, values)
            elif isinstance(values.value, Mapping):
                self._factors[name] = self._mapped(written, values)
            else:
                if "." in written and written.partition(".")[0] in PretrainSpec.model_fields:
                    message = f"a single value states what the block is and sets no field; write {written}: "
                    raise self._problem((written,), f"{message}[{value_text(values.value)}] to set it")
                self._fixed[name] = values

    def _check_factor(self, written: str, name: str) -> None:
        if not _NAME.match(name):
            raise self._problem((written,), f"'{name}' {IS_NO_NAME}")
        if name in RESERVED_FACTORS:
            raise self._problem((written,), f"'{name}' cannot name a factor: {RESERVED_FACTORS[name]}")
        if name in self._factors or name in self._fixed:
            raise self._problem((written,), f"a factor '{name}' is declared twice; rename one of the two")

    def _mapped(self, factor: str, values: Located) -> dict[str, Located]:
        """Values by name, each a partial block."""
        if not values.value:
            raise self._problem((factor,), "this factor has no value; write VALUE: {what it changes in the block}")
        found = {}
        for value in values.value:
            part = values.child(value)
            if not _NAME.match(value):
                raise self._problem((factor, value), f"'{value}' {IS_NO_NAME}")
            if not isinstance(part.value, Mapping):
                message = "this is not what a value changes in the block; write a mapping, {} for nothing"
                raise self._problem((factor, value), message)
            self._check_part((factor, value), part.value)
            found[value] = part
        return found

    def _check_part(self, where: Path, part: Mapping[str, Any]) -> None:
        for name, why in _REFUSED.items():
            if name in part:
                raise self._problem((*where, name), f"a value of a factor cannot change this: {why}")
        initial = part.get("init")
        if isinstance(initial, Mapping) and "pretrain" in initial:
            message = (
                "a block that starts from another one is not a value of a factor, because it continues a training; "
                "make it a separate block"
            )
            raise self._problem((*where, "init", "pretrain"), message)

    def _listed(self, written: str, values: Located) -> dict[str, Located]:
        """Values of the field at a path, by the text of each."""
        steps = written.split(".")
        if steps[0] not in PretrainSpec.model_fields or steps[0] in _REFUSED:
            hint = did_you_mean(steps[0], [name for name in PretrainSpec.model_fields if name not in _REFUSED])
            message = f"a list of values needs the path of a field of the block (recipe.lr: [0.1, 0.4]): {hint}"
            raise self._problem((written,), message)
        if not values.value:
            raise self._problem((written,), "this factor has no value; list some, or remove it")
        found: dict[str, Located] = {}
        for position, value in enumerate(values.value):
            if not isinstance(value, str | int | float):
                message = "a listed value is text or a number; for others write VALUE: {what it changes in the block}"
                raise self._problem((written, position), message)
            name = value_text(value)
            if not _NAME.match(name):
                message = f"'{name}' cannot be the name of a value; write NAME: {{what it changes in the block}}"
                raise self._problem((written, position), message)
            if name in found:
                raise self._problem((written, position), f"'{name}' is given twice; keep one")
            nested: Any = value
            for step in reversed(steps):
                nested = {step: nested}
            found[name] = located(nested, values.child(position).places.here)
        return found

    def _combinations(self) -> list[Combination]:
        names, design = list(self._factors), self._block.value.get(_DESIGN, FULL)
        values = [list(self._factors[name]) for name in names]
        if design == FULL:
            size = 1
            for some in values:
                size *= len(some)
            if size > MAX_CELLS:
                message = f"all combinations are {size:,} cells; at most {MAX_CELLS:,} are read: use fewer values, or "
                raise self._problem((), f"{message}design: {ONE_AT_A_TIME}")
            return list(product(*values))
        first = tuple(some[0] for some in values)
        if design == ONE_AT_A_TIME:
            alone = ((*first[:n], value, *first[n + 1 :]) for n, some in enumerate(values) for value in some[1:])
            return list(chain([first], alone))
        if not isinstance(design, list) or not design:
            message = f"this is not a design; write {FULL}, {ONE_AT_A_TIME}, or a list of combinations: "
            raise self._design_problem((), f"{message}[{{{names[0]}: {first[0]}}}, ...]")
        found: dict[Combination, int] = {}
        for position, item in enumerate(design):
            combination = self._combination(position, item, first)
            if combination in found:
                message = f"this combination is given twice (first as item {found[combination]}); keep one"
                raise self._design_problem((position,), message)
            found[combination] = position
        return list(found)

    def _combination(self, position: int, item: object, first: Combination) -> Combination:
        """One item of a listed design; the first value of each factor that it leaves out."""
        if not isinstance(item, Mapping):
            raise self._design_problem((position,), "this is not a mapping of factors to values; write {mix: none}")
        chosen = dict(zip(self._factors, first, strict=True))
        for factor, value in item.items():
            if factor not in self._factors:
                hint = did_you_mean(str(factor), self._factors)
                raise self._design_problem((position, factor), f"'{factor}' is not a factor of this block: {hint}")
            text = value_text(value)
            if text not in self._factors[factor]:
                hint = did_you_mean(text, self._factors[factor])
                raise self._design_problem((position, factor), f"'{text}' is not a value of '{factor}': {hint}")
            chosen[factor] = text
        return tuple(chosen.values())

    def _cell_name(self, values: Combination) -> str:
        """``optimizer-lamb_mix-none``, after the name of the block; with a hash in place of what is too long."""
        parts = [f"{factor}-{value}" for factor, value in zip(self._factors, values, strict=True)]
        name = _UNNAMED.sub("-", "_".join([*([self._name] if self._name else []), *parts]))
        if len(name) <= _MAX_NAME:
            return name
        digest = sha256_hex(name.encode())[:8]
        return f"{name[: _MAX_NAME - len(digest) - 1]}-{digest}"

    def _without_design(self) -> Located:
        value = {name: item for name, item in self._block.value.items() if name not in {_FACTORS, _DESIGN}}
        places = {name: item for name, item in self._block.places.children.items() if name in value}
        return Located(value, Places(self._block.places.here, places))

    def _with_values(self, body: Located, values: Mapping[str, str]) -> Located:
        """The body of a cell, with its value of each factor."""
        own: dict[str, Any] = {name: item.value for name, item in self._fixed.items()} | dict(values)
        here = located(own, self._block.child(_FACTORS).places.here)
        return Located(
            {**body.value, _FACTORS: own}, Places(body.places.here, {**body.places.children, _FACTORS: here.places})
        )

    def _problem(self, below: Path, message: str) -> SpecError:
        return SpecError((self._tree.problem((*self.path, _FACTORS, *below), message),))

    def _design_problem(self, below: Path, message: str) -> SpecError:
        return SpecError((self._tree.problem((*self.path, _DESIGN, *below), message),))


def written_settings(factors: object) -> Iterator[tuple[str, Path]]:
    """The fields that the values of a block's ``factors`` set, each with the factor.

    ``factors`` was not checked yet: what is neither a list nor a mapping is skipped.
    """
    for factor, values in factors.items() if isinstance(factors, Mapping) else ():
        if isinstance(values, list):
            yield factor, tuple(factor.split("."))
        for part in values.values() if isinstance(values, Mapping) else ():
            yield from ((factor, path) for path, _ in _settings(part))


def covered_settings(tree: Tree, change: Located, within: Path = ()) -> Iterator[str]:
    """Problems of a change that sets fields of blocks in vain, because all values of a factor set them, too.

    Args:
        tree: the document with the change in it.
        change: what was merged over it, as a document.
        within: where the change stands in its file; empty if it is an argument of a command.
    """
    whole, changed = tree.value.get("pretrain"), change.value.get("pretrain")
    if not isinstance(whole, Mapping) or not isinstance(changed, Mapping):
        return
    places = Tree(file=tree.file, value=change.value, places=change.places)
    parts: list[tuple[Path, Sequence[object], object]] = [((), [whole], changed)]
    if not PretrainSpec.model_fields.keys() & whole.keys():
        parts = [
            ((name,), [*whole.values()] if name == EVERY else [whole.get(name)], part) for name, part in changed.items()
        ]
    for steps, blocks, part in parts:
        for path, given in _settings(part):
            factors = [_covering(block, path, given) for block in blocks]
            if all(factors):  # of several blocks, one that it changes is enough
                here = ("pretrain", *steps, *path)
                shown = f"{dotted((*within, *here))}: " if within else ""
                yield f"{places.locate(here)}: {shown}{_in_vain(factors[0], path, given, steps, within)}"


def _covering(block: object, path: Path, given: object) -> str:
    """A factor of a block of which all values set a field, and not all to the given value; empty if there is none."""
    for factor, values in _settings_by_value(block.get(_FACTORS) if isinstance(block, Mapping) else None):
        is_covered = all(any(path[: len(other)] == other for other in one) for one in values)
        if is_covered and not all(one.get(path) == given for one in values):
            return factor
    return ""


def _in_vain(factor: str, path: Path, given: object, block: Path, within: Path) -> str:
    message = f"all values of the factor '{factor}' set {dotted(path)}, too, so that this has no effect; "
    if dotted(path) != factor or given is None:
        return f"{message}change these values"
    if within:
        place = dotted((*within, "pretrain", *block))
        return f"{message}write factors: {{{factor}: [{value_text(given)}]}} in {place}"
    return f"{message}write --set '{dotted(('pretrain', *block, _FACTORS, factor))}=[{value_text(given)}]'"


def _settings_by_value(factors: object) -> Iterator[tuple[str, list[dict[Path, object]]]]:
    """For each factor of a block the fields that each of its values sets; see ``written_settings``."""
    for factor, values in factors.items() if isinstance(factors, Mapping) else ():
        if isinstance(values, list) and values:
            yield factor, [{tuple(factor.split(".")): value} for value in values]
        elif isinstance(values, Mapping) and values:
            yield factor, [dict(_settings(part)) if isinstance(part, Mapping) else {} for part in values.values()]


def _settings(part: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The fields that a partial block sets, each with its value."""
    if not isinstance(part, Mapping):
        yield path, part
        return
    for name, below in part.items():
        yield from _settings(below, (*path, name))


def value_text(value: object) -> str:
    """The name of a value: numbers as they are written, ``true`` and ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
