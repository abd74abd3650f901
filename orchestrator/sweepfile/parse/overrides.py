"""``--set a.b.c=value``: one value of a document, changed from outside. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from orchestrator.core.errors import SourceLocation, SpecError
from orchestrator.sweepfile.parse.factors import covered_settings, value_text, written_settings
from orchestrator.sweepfile.parse.merge import EVERY, Located, located, merged
from orchestrator.sweepfile.parse.tree import Places, Tree, parse_value
from orchestrator.sweepfile.pretrain import RESERVED_FACTORS, PretrainSpec

_OPTION = "--set "
_UNNAMED = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_BLOCKS = 1000
_LISTS = frozenset({"seeds", "labels"})
"""Fields of blocks and transfers that are lists even if the file does not have them."""


class _Argument(SourceLocation):
    """A place on the command line, which has neither lines nor columns."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.file


def is_argument(here: SourceLocation) -> bool:
    """Whether a value stands on the command line, in no file."""
    return isinstance(here, _Argument)


@dataclass(frozen=True, slots=True)
class _Override:
    path: tuple[str, ...]
    values: tuple[Any, ...]
    """One, or the items of a list without brackets (``0.1,0.4``)."""
    here: SourceLocation

    def problem(self, message: str) -> SpecError:
        return SpecError((f"{self.here}: {message}",))


def with_overrides(tree: Tree, arguments: Sequence[str], scale: Mapping[str, Located] | None = None) -> Tree:
    """The document with the arguments of ``--set`` over it, one after the other.

    Several values without brackets mean: the items where a list stands, the ``grid`` of a transfer's recipe, or blocks
    of ``pretrain``, one for each combination.

    Args:
        tree: the document, with its scale.
        arguments: those of ``--set``.
        scale: the block that was merged over the document, by its name.

    Raises:
        SpecError: an argument is not ``path=value``, or names what is not there; or an argument or the scale sets a
            field of which a factor has the last word.
    """
    several: list[_Override] = []
    changes: list[Located] = []
    for argument in arguments:
        override = _parse(argument, tree)
        if len(override.values) == 1 or _holds_list(tree.value, override.path):
            value = override.values[0] if len(override.values) == 1 else list(override.values)
            changes.append(_change(override.path, value, override.here))
            tree = merged(tree, changes[-1])
        elif override.path[0] == "transfer":
            tree = _with_grid(tree, override)
        elif override.path[0] == "pretrain":
            several.append(override)
        else:
            message = "several values are a grid, which pretrain and the recipe of a transfer can have; give one value"
            raise override.problem(f"{message}, or write a list in brackets: [1, 2]")
    problems = [line for change in changes for line in covered_settings(tree, change)]
    problems += [line for name, part in (scale or {}).items() for line in covered_settings(tree, part, (name,))]
    if problems:
        raise SpecError(tuple(dict.fromkeys(problems)))
    return _with_blocks(tree, several) if several else tree


def _over(tree: Tree, path: Sequence[str], value: object, here: SourceLocation) -> Tree:
    return merged(tree, _change(path, value, here))


def _change(path: Sequence[str], value: object, here: SourceLocation) -> Located:
    for step in reversed(path):
        value = {step: value}
    return located(value, here)


def _parse(argument: str, tree: Tree) -> _Override:
    here = _Argument(file=_OPTION + argument, line=1, column=1)
    left, equals, text = argument.partition("=")
    if not equals or not left.strip():
        message = "this is not path=value; write for instance --set pretrain.recipe.lr=0.1"
        raise SpecError((f"{here}: {message}",))
    if not text.strip():
        raise SpecError((f"{here}: there is no value after '='; null brings back the default, '' is empty text",))
    path = _steps(left.strip(), tree)
    if not all(path):
        raise SpecError((f"{here}: the path has an empty step; write a.b.c, with numbers or names for items of lists",))
    return _Override(path, tuple(_value(item, here) for item in _items(text.strip())), here)


def _value(text: str, here: SourceLocation) -> Any:  # noqa: ANN401 - YAML holds anything
    try:
        return parse_value(text, "value")
    except SpecError as error:
        problem = str(error).partition(": ")[2]
        raise SpecError((f"{here}: {text!r} cannot be read: {problem}",)) from error


def _items(text: str) -> list[str]:
    """``1,2,3`` has three items; what is quoted, or in brackets, is one value."""
    if text[0] in "[{\"'" or "," not in text:
        return [text]
    return [item.strip() for item in text.split(",")]


def _steps(left: str, tree: Tree) -> tuple[str, ...]:
    """The steps of a path; of keys that hold dots themselves, the longest that exists is meant."""
    here: Any = tree.value
    parts, steps = left.split("."), []
    while parts:
        known = here if isinstance(here, dict) else {}
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), 1)
        step, parts = ".".join(parts[:length]), parts[length:]
        steps.append(step)
        here = _below(here, step)
    return tuple(steps)


def _below(here: object, step: str) -> object:
    if isinstance(here, dict):
        return here.get(step)
    if isinstance(here, list):
        named = [item for item in here if isinstance(item, dict) and item.get("name") == step]
        by_number = here[int(step)] if step.isdecimal() and int(step) < len(here) else None
        return named[0] if named else by_number
    return None


def _holds_list(value: object, path: Sequence[str]) -> bool:
    for step in path:
        value = _below(value, step)
    return isinstance(value, list) or path[-1] in _LISTS


def _with_grid(tree: Tree, override: _Override) -> Tree:
    """A grid over a field of a transfer's recipe, which then does not say it itself."""
    if len(override.path) != 4 or override.path[2] != "recipe":
        raise override.problem("a grid of a transfer is over fields of its recipe: transfer.NAME.recipe.FIELD=a,b")
    _, item, _, field = override.path
    tree = _over(tree, ("transfer", item, "grid", field), list(override.values), override.here)
    for position, entry in enumerate(tree.value["transfer"]):
        grid = entry.get("grid") if isinstance(entry, dict) else None
        recipe = entry.get("recipe") if isinstance(grid, dict) and field in grid else None
        if isinstance(recipe, dict) and field in recipe:
            tree = _over(tree, ("transfer", str(position), "recipe", field), None, override.here)
    return tree


# --------------------------------------------------------------------------------------------------- several blocks


def _with_blocks(tree: Tree, overrides: Sequence[_Override]) -> Tree:
    """A block of ``pretrain`` for each combination of values, named by them."""
    targets = {_block_of(tree, override) for override in overrides}
    if len(targets) > 1:
        raise overrides[-1].problem("grids of several blocks at once have no names; give each its own --set of blocks")
    block = targets.pop()
    _refuse_overwriting(tree, block, overrides)
    combinations = list(product(*(override.values for override in overrides)))
    if len(combinations) > _MAX_BLOCKS:
        raise overrides[-1].problem(f"this makes {len(combinations)} blocks; at most {_MAX_BLOCKS} are read")
    blocks: dict[str, Tree] = {}
    for values in combinations:
        name = "_".join([*([block] if block else []), *map(_label, overrides, values)])
        if name in blocks:
            raise overrides[-1].problem(f"two blocks would be called '{name}'; give different values")
        one = tree
        for override, value in zip(overrides, values, strict=True):
            one = _over(one, override.path, value, override.here)
        steps = ("pretrain", block) if block else ("pretrain",)
        for factor, value in _factors_of(overrides, values).items():
            one = _over(one, (*steps, "factors", factor), value, overrides[0].here)
        blocks[name] = one
    return _measuring(_replaced(tree, block, blocks), block, list(blocks), overrides[0].here)


def _refuse_overwriting(tree: Tree, block: str, overrides: Sequence[_Override]) -> None:
    """What is merged later must not set a field of these: the value that names the block would be false."""
    steps = ("pretrain", block) if block else ("pretrain",)
    earlier: list[tuple[str, ...]] = []
    for override in overrides:
        for before in earlier:
            if before[: len(override.path)] == override.path:
                field = ".".join(before[len(steps) :])
                remedy = "give it once" if before == override.path else f"give {field} last"
                raise override.problem(f"this overwrites {field}, which an earlier --set gives; {remedy}")
        earlier.append(override.path)
    found: Any = tree.value
    for step in (*steps, "factors"):
        found = _below(found, step)
    for factor, path in written_settings(found):
        for override in overrides:
            below = override.path[len(steps) :]
            if below[: len(path)] == path:
                message = (
                    f"the factor '{factor}' of the block sets {'.'.join(map(str, path))}, too; make one factor of them"
                )
                raise override.problem(message)


def _measuring(tree: Tree, block: str, made: Sequence[str], here: SourceLocation) -> Tree:
    """The document in which what measures the backbones of a block measures those of the blocks made of it."""
    for part in ("transfer", "analyze"):
        entries = tree.value.get(part)
        for position, entry in enumerate(entries if isinstance(entries, list) else ()):
            wanted = entry.get("pretrain") if isinstance(entry, dict) else None
            found = list(_measured(wanted, block, made)) if isinstance(wanted, list) else wanted
            if found != wanted:
                tree = _over(tree, (part, str(position), "pretrain"), found, here)
    return tree


def _measured(wanted: Sequence[object], block: str, made: Sequence[str]) -> Iterator[object]:
    """Names and globs of blocks, with those that were made of a block wherever that is meant."""
    for glob in wanted:
        is_meant = isinstance(glob, str) and fnmatchcase(block, glob)
        if glob != block:
            yield glob
        yield from (name for name in made if is_meant and not fnmatchcase(name, str(glob)))


def _block_of(tree: Tree, override: _Override) -> str:
    """Name of the block that a path leads into; empty for the only, unnamed one."""
    pretrain = tree.value.get("pretrain")
    if not isinstance(pretrain, dict):
        raise override.problem("there is no pretrain block to make several of")
    if PretrainSpec.model_fields.keys() & pretrain.keys():
        return ""
    if override.path[1:2] == (EVERY,) or override.path[1:2] == () or override.path[1] not in pretrain:
        raise override.problem("a grid needs one block: pretrain.BLOCK.FIELD=a,b, with the name of a block")
    return override.path[1]


def _factors_of(overrides: Sequence[_Override], values: Sequence[object]) -> dict[str, str]:
    """The factors of a block as a cell: the last step of each path, or two steps if those repeat."""
    last = [override.path[-1] for override in overrides]
    named = [
        step if last.count(step) == 1 and step not in RESERVED_FACTORS else ".".join(override.path[-2:])
        for step, override in zip(last, overrides, strict=True)
    ]
    scalars = ((name, value) for name, value in zip(named, values, strict=True) if not isinstance(value, list | dict))
    return {name: "null" if value is None else value_text(value) for name, value in scalars}


def _label(override: _Override, value: object) -> str:
    """``lr-0.1``: the last step and the value, in signs that names may have."""
    return _UNNAMED.sub("-", f"{override.path[-1]}-{value}").strip("-")


def _replaced(original: Tree, block: str, trees: dict[str, Tree]) -> Tree:
    """The document whose block is replaced by those of other documents."""
    value, places = dict(original.value), original.places.children
    old, old_places = value["pretrain"], places["pretrain"]
    steps = (block,) if block else ()
    blocks = {name: item for name, item in old.items() if name != block} if block else {}
    below = {name: item for name, item in old_places.children.items() if name in blocks}
    for name, tree in trees.items():
        found, here = tree.value["pretrain"], tree.places.children["pretrain"]
        for step in steps:
            found, here = found[step], here.children[step]
        blocks[name], below[name] = found, here
    value["pretrain"] = blocks
    root = Places(original.places.here, {**places, "pretrain": Places(old_places.here, below)})
    return Tree(file=original.file, value=value, places=root)
