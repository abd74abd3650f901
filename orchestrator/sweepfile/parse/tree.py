"""YAML with positions: plain values, and the place of each of them.

Only the safe subset is read, with the pitfalls of YAML 1.1 taken out: ``1e-4`` is a float, only ``true`` and
``false`` are booleans (``no``, ``on`` and ``off`` stay text), dates stay text, duplicate keys are refused, and size,
depth and the expansion of aliases are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from orchestrator.core.errors import SourceLocation, SpecError

Path = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 200_000

_MAX_SHOWN = 40

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"

_TAGS = {_NULL, _BOOL, _INT, _FLOAT, _STR, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}

# Characters that a text must not have; the YAML reader would refuse them with a position in bytes.
_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")

_GROUPED = "[1-9][0-9]{0,2}(?:_[0-9]{3})+"
"""``1_000_000``. Other digits with underscores are text: classes are called ``1_2``."""
_SCALARS = (
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_INT, re.compile(rf"^[-+]?(?:0|[1-9][0-9]*|{_GROUPED})$"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(rf"^[-+]?(?:(?:[0-9]+|{_GROUPED})(?:\.[0-9]*|(?=[eE]))|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"),
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """A SafeLoader whose plain scalars follow the YAML 1.2 core schema."""


_Loader.yaml_implicit_resolvers = {}  # or else the YAML 1.1 rules of the base class would stay
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


@dataclass(slots=True)
class Places:
    """Places of a value and of its parts, in the same shape as the value."""

    here: SourceLocation
    children: dict[str | int, Places] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Tree:
    """A parsed document: ``value`` is plain Python, ``locate`` finds where a path of it stands.

    Parts may come from other files, as ``places`` says; ``file`` is the one that was asked for.
    """

    file: str
    value: Any = None
    places: Places

    def locate(self, path: Path) -> SourceLocation:
        """Place of a key or item, else of its nearest ancestor that exists."""
        places = self.places
        for step in path:
            if step not in places.children:
                break
            places = places.children[step]
        return places.here

    def problem(self, path: Path, message: str, block: str = "") -> str:
        """One line of a ``SpecError``: ``file:line:column: path: message``. ``block``: of ``pretrain``, if it is about
        one and stands elsewhere.
        """
        return f"{self.locate(path)}: {dotted(path) + ': ' if path else ''}{message}"

    def origin_of(self, block: str) -> Path:
        """The path in the file of a block of ``pretrain``; of a cell, the path of the block that it was made of."""
        return ("pretrain", block) if block else ("pretrain",)


@dataclass(slots=True, kw_only=True)
class MovedTree(Tree):
    """A tree in which some values have other places than their path."""

    moved: Mapping[Path, Path]

    @classmethod
    def of(cls, tree: Tree, moved: Mapping[Path, Path]) -> MovedTree:
        """A tree in which the paths ``moved``, and what is below them, are found and named as those they map to."""
        return cls(file=tree.file, value=tree.value, places=tree.places, moved=moved)

    def problem(self, path: Path, message: str, block: str = "") -> str:
        """See `Tree`."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.moved:
                return Tree.problem(self, (*self.moved[path[:end]], *path[end:]), message, block)
        return Tree.problem(self, path, message, block)


def dotted(path: Path) -> str:
    """A path as people write it: ``transfer[0].recipe.lr``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def pattern_path(path: Path) -> str:
    """A path as patterns match it: steps that dots separate, where a name's own dots are underscores."""
    return ".".join(str(step).replace(".", "_") for step in path)


def parse_tree(text: str, file: str) -> Tree:
    """Parse YAML text.

    Raises:
        SpecError: not YAML, not a mapping, a key twice, too large, too deep or too much expansion.
    """
    if len(text.encode()) > MAX_BYTES:
        raise SpecError((f"{file}:1:1: {too_large()}",))
    node = _compose(text, file)
    if not isinstance(node, yaml.MappingNode):
        raise SpecError((f"{file}:1:1: the file is not a mapping of keys; begin with 'version: 1' and 'name: ...'",))
    value, places = _TreeBuilder(file).build(node, 0)
    return Tree(file=file, value=value, places=places)


def too_large() -> str:
    """The error of a file above the limit."""
    return f"the file has more than {MAX_BYTES} bytes; a sweep.yaml is text that people read: name data, do not list it"


def parse_value(text: str, file: str) -> Any:  # noqa: ANN401 - YAML holds anything
    """One value as a sweep.yaml would hold it; ``file`` is what errors call the text. Raises ``SpecError``."""
    node = _compose(text, file)
    return None if node is None else _TreeBuilder(file).build(node, 0)[0]


def implicit_scalars() -> Iterator[tuple[str, re.Pattern[str], list[str]]]:
    """Tags of plain scalars, how they are written, and with which signs they begin."""
    yield from _SCALARS


def plain_value(text: str) -> str | int | float | bool:
    """The value of a text without quotes: a number or boolean if it is written like one, else the text."""
    for tag, pattern, _ in _SCALARS:
        if tag != _NULL and pattern.match(text):
            value: str | int | float | bool = yaml.constructor.SafeConstructor().construct_object(
                yaml.ScalarNode(tag, text)
            )
            return value
    return text


def _compose(text: str, file: str) -> yaml.Node | None:
    if (sign := _UNREADABLE.search(text)) is not None:
        line, column = text.count("\n", 0, sign.start()) + 1, sign.start() - text.rfind("\n", 0, sign.start())
        message = f"{file}:{line}:{column}: the character {sign.group()!r} is not text; remove it"
        raise SpecError((message,))
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise SpecError((_syntax_problem(error, file, text),)) from error
    except yaml.YAMLError as error:
        raise SpecError((f"{file}:1:1: not readable as YAML: {error}",)) from error
    except RecursionError as error:
        raise SpecError((f"{file}:1:1: nested too deeply; at most {MAX_DEPTH} levels are read",)) from error
    return node


class _TreeBuilder:
    """Turns nodes into values and remembers places; counts nodes so that aliases cannot explode."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._num_nodes = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, depth: int) -> tuple[Any, Places]:
        self._num_nodes += 1
        place = self._place(node)
        if self._num_nodes > MAX_NODES:
            limit = f"the file has more than {MAX_NODES} values after expanding aliases"
            raise SpecError((f"{place}: {limit}; a sweep.yaml is text that people read: use fewer aliases",))
        if depth > MAX_DEPTH:
            raise SpecError((f"{place}: nested more than {MAX_DEPTH} levels deep; write the file out flat",))
        if node.tag not in _TAGS:
            raise SpecError(
                (f"{place}: the tag {node.tag!r} is refused; write plain text, numbers, lists and mappings",)
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(item, depth + 1) for item in node.value]
            return [value for value, _ in items], Places(place, {n: places for n, (_, places) in enumerate(items)})
        return self._scalar(node, place), Places(place)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> tuple[dict[str, Any], Places]:
        mapping: dict[str, Any] = {}
        places = Places(self._place(node))
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError((f"{place}: a key must be plain text; write key: value, or put text in quotes",))
            key = str(key_node.value)
            _refuse_half_characters(key, place)
            if key in mapping:
                first = places.children[key].here
                raise SpecError((f"{place}: key '{key}' is given twice (first at {first}); keep one",))
            if key == "<<":
                message = "merge keys (<<) are not read; write the keys out, or use 'base' in recipes and 'include'"
                raise SpecError((f"{place}: {message}",))
            mapping[key], below = self.build(value_node, depth + 1)
            places.children[key] = Places(place, below.children)  # a value is where its key is
        return mapping, places

    def _scalar(self, node: yaml.Node, place: SourceLocation) -> Any:  # noqa: ANN401
        _refuse_half_characters(str(node.value), place)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            shown = node.value if len(node.value) <= _MAX_SHOWN else f"{node.value[:_MAX_SHOWN]}..."
            message = f"{place}: {shown!r} cannot be read as a number; write one of at most 15 digits, or quote text"
            raise SpecError((message,)) from error

    def _place(self, node: yaml.Node) -> SourceLocation:
        mark = node.start_mark
        return SourceLocation(file=self._file, line=mark.line + 1, column=mark.column + 1)


def _refuse_half_characters(text: str, place: SourceLocation) -> None:
    """An escaped half of a surrogate pair makes text that no file, key or error message can hold."""
    if _HALF_CHARACTER.search(text):
        raise SpecError(
            (f"{place}: {text!r} holds half of a character (\\ud800 to \\udfff); write the character itself",)
        )


_BARE_HOLE = re.compile(r"\$\{[^{}\n]*\}")
"""A substitution without quotes, which YAML reads as a mapping where it stands in another one."""


_SYNTAX = (
    (r"found unexpected end of stream", "quoted", "the quotation mark that opens here is never closed; close it"),
    (r"could not find expected ':'", "simple key", "':' is missing after the key here; write key: value"),
    (r"expected ',' or '(.)'", "flow", "within the brackets that open here, ',' or '{0}' is missing before {there}"),
    (r"expected alphabetic or numeric", "alias", "'*' begins a reference in YAML; put text with '*' in quotes"),
    (r"expected alphabetic or numeric", "anchor", "'&' begins an anchor in YAML; put text with '&' in quotes"),
    (r"undefined alias '(.*)'", "", "'*{0}' refers to an anchor '&{0}' that is not defined above; put text in quotes"),
    (r"found character '(.*)' that cannot", "", "plain text cannot begin with '{0}'; put it in quotes"),
    (
        r"unknown escape character '(.*)'",
        "",
        "'\\{0}' is not an escape sequence; write \\\\ or use single quotes",
    ),
    (r"mapping values are not", "", "':' cannot be here; indent as in the line above, or put the value in quotes"),
    (r"found '<block mapping start>'", "", "this line is not indented as the keys of its block; align it with them"),
    (r"<block end>, but found '-'", "", "'-' begins an item of a list among keys; write a key here, or remove the '-'"),
    (r"<block end>, but found '([]},])'", "", "'{0}' belongs to no bracket before it; remove it, or use quotes"),
    (r"<block end>, but found", "", "the value has ended before this; put the whole value in quotes"),
    (r"expected the node content", "", "a value is missing before this; write one"),
)
"""Of PyYAML's messages: a pattern, a word of their context (its place is the better one), and what people read."""


def _syntax_problem(error: yaml.MarkedYAMLError, file: str, text: str) -> str:
    mark = error.problem_mark
    if mark is not None and text[mark.index : mark.index + 1] == "\t":
        return f"{_at(file, mark)}: there is a tab here, and YAML allows only spaces for indentation; use spaces"
    problem, context = str(error.problem), str(error.context)
    if "another document" in problem:
        message = "a second document begins here; a sweep.yaml is one: remove the line '---', or make two files"
        return f"{_at(file, mark)}: {message}"
    hole = _BARE_HOLE.match(text, mark.index - 1) if mark is not None and mark.index else None
    if hole:
        message = f'within {{...}} and [...], text with ${{...}} needs quotes; put it in quotes: "{hole.group()}"'
        return f"{_at(file, mark)}: {message}"
    there = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the end"
    for pattern, word, message in _SYNTAX:
        if word in context and (found := re.search(pattern, problem)):
            place = _at(file, error.context_mark if word in {"quoted", "simple key", "flow"} else mark)
            return f"{place}: not valid YAML: {message.format(*found.groups(), there=there)}"
    return f"{_at(file, mark)}: not valid YAML: {problem}; check indentation, quotes and brackets here"


def _at(file: str, mark: yaml.Mark | None) -> str:
    return f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else f"{file}:1:1"
