"""YAML with positions: plain values plus the place where each of them stands.

Only the safe subset is read, with the pitfalls of YAML 1.1 taken out: ``1e-4`` is a float, only ``true`` and
``false`` are booleans (``no``, ``on`` and ``off`` stay text), dates stay text, duplicate keys are refused, and size,
depth and the expansion of aliases are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from orchestrator.errors import SourceLocation, SpecError

Path = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 200_000

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"

_TAGS = {_NULL, _BOOL, _INT, _FLOAT, _STR, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}

_SCALARS = (
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_INT, re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """A SafeLoader whose plain scalars follow the YAML 1.2 core schema."""


_Loader.yaml_implicit_resolvers = {}  # or else the YAML 1.1 rules of the base class would stay
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


@dataclass(slots=True, kw_only=True)
class Tree:
    """A parsed file: ``value`` is plain Python, ``locate`` finds where a path of it stands."""

    file: str
    value: Any = None
    _places: dict[Path, SourceLocation] = field(default_factory=dict)

    def locate(self, path: Path) -> SourceLocation:
        """Place of a key or item, else of its nearest ancestor that exists."""
        while path and path not in self._places:
            path = path[:-1]
        return self._places.get(path, SourceLocation(file=self.file, line=1, column=1))

    def problem(self, path: Path, message: str) -> str:
        """One line of a ``SpecError``: ``file:line:column: path: message``."""
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        return f"{self.locate(path)}: {dotted + ': ' if dotted else ''}{message}"


def parse_tree(text: str, file: str) -> Tree:
    """Parse YAML text.

    Raises:
        SpecError: not YAML, not a mapping, a key twice, too large, too deep or too much expansion.
    """
    if len(text.encode()) > MAX_BYTES:
        raise SpecError(
            (f"{file}:1:1: the file has more than {MAX_BYTES} bytes; a sweep.yaml is text that people read",)
        )
    tree = Tree(file=file)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise SpecError((_syntax_problem(error, file),)) from error
    except yaml.YAMLError as error:
        raise SpecError((f"{file}:1:1: not readable as YAML: {error}",)) from error
    except RecursionError as error:
        raise SpecError((f"{file}:1:1: nested too deeply; at most {MAX_DEPTH} levels are read",)) from error
    if not isinstance(node, yaml.MappingNode):
        raise SpecError((f"{file}:1:1: the file is not a mapping of keys; begin with 'version: 1' and 'name: ...'",))
    tree.value = _Builder(tree).build(node, ())
    return tree


class _Builder:
    """Turns nodes into values and remembers places; counts nodes so that aliases cannot explode."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._num_nodes = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 - YAML holds anything
        self._num_nodes += 1
        place = self._place(node)
        self._tree._places.setdefault(path, place)  # noqa: SLF001 - the builder fills its own tree
        if self._num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            limit = f"more than {MAX_NODES} values after expanding aliases, or more than {MAX_DEPTH} levels"
            raise SpecError((f"{place}: {limit}; write the file out flat",))
        if node.tag not in _TAGS:
            raise SpecError(
                (f"{place}: the tag {node.tag!r} is refused; write plain text, numbers, lists and mappings",)
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, position)) for position, item in enumerate(node.value)]
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise SpecError((f"{self._place(key_node)}: a key must be plain text",))
            place = self._place(key_node)
            _refuse_half_characters(key, place)
            if key in mapping:
                first = self._tree.locate((*path, key))
                raise SpecError((f"{place}: key '{key}' stands here a second time (first at {first}); keep one",))
            self._tree._places[(*path, key)] = place  # noqa: SLF001
            mapping[key] = self.build(value_node, (*path, key))
        return mapping

    def _scalar(self, node: yaml.Node, place: SourceLocation) -> Any:  # noqa: ANN401
        _refuse_half_characters(str(node.value), place)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise SpecError((f"{place}: {node.value!r} is not readable: {error}",)) from error

    def _place(self, node: yaml.Node) -> SourceLocation:
        mark = node.start_mark
        return SourceLocation(file=self._tree.file, line=mark.line + 1, column=mark.column + 1)


def _refuse_half_characters(text: str, place: SourceLocation) -> None:
    """An escaped half of a surrogate pair makes text that no file, key or error message can hold."""
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise SpecError(
            (f"{place}: {text!r} holds half of a character (\\ud800 to \\udfff); write the character itself",)
        )


def _syntax_problem(error: yaml.MarkedYAMLError, file: str) -> str:
    mark = error.problem_mark
    place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else f"{file}:1:1"
    return f"{place}: not valid YAML: {error.problem}; check indentation, quotes and brackets here"
