"""``include:`` of other files; errors name the place in these. Pure, except for the function that reads a file."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.merge import Located, merged
from orchestrator.sweepfile.parse.secrets import refuse_secrets
from orchestrator.sweepfile.parse.tree import Tree, parse_tree

MAX_DEPTH = 8
MAX_FILES = 100

ReadText = Callable[[str], str]
"""The text of a file at a path. Raises ``SpecError`` with one problem, the error of the file."""


class Includer:
    """Reads the files that a document names, and those that they name."""

    def __init__(self, read_text: ReadText) -> None:
        self._read_text = read_text
        self._num_files = 0
        self._open: list[str] = []

    def expand(self, tree: Tree, path: str) -> Tree:
        """The document with what it includes below it: later files over earlier ones, its own keys over all.

        Args:
            tree: the document.
            path: where its file lies; included files are named relative to its folder.

        Raises:
            SpecError: a file is missing, wrong, includes itself, or there are too many.
        """
        names = tree.value.get("include")
        if names is None:
            return tree
        own = _without(tree, "include")
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
            message = "this is not a list of files; write include: [datasets.yaml, recipes.yaml]"
            raise SpecError((tree.problem(("include",), message),))
        self._open.append(os.path.normpath(path))
        result: Tree | None = None
        for position, name in enumerate(listed):
            where = ("include", position) if isinstance(names, list) else ("include",)
            included = self._included(tree, where, os.path.join(os.path.dirname(path), name))  # noqa: PTH118, PTH120
            result = included if result is None else merged(result, Located(included.value, included.places))
        self._open.pop()
        if result is None:
            return own
        base = Tree(file=tree.file, value=result.value, places=result.places)
        return merged(base, Located(own.value, own.places))

    def _included(self, tree: Tree, where: tuple[str | int, ...], path: str) -> Tree:
        path = os.path.normpath(path)
        self._num_files += 1
        if path in self._open:
            chain = " -> ".join([*self._open[self._open.index(path) :], path])
            raise SpecError((tree.problem(where, f"this file includes itself ({chain}); remove one of the includes"),))
        if len(self._open) > MAX_DEPTH:
            raise SpecError(
                (tree.problem(where, f"includes are more than {MAX_DEPTH} deep; include the file directly"),)
            )
        if self._num_files > MAX_FILES:
            raise SpecError((tree.problem(where, f"more than {MAX_FILES} files are included; join some of them"),))
        try:
            text = self._read_text(path)
        except SpecError as error:
            raise SpecError((tree.problem(where, str(error)),)) from error
        included = parse_tree(text, path)
        refuse_secrets(included, text)
        _check_part(included)
        return self.expand(_without(included, "version"), path)


def _check_part(tree: Tree) -> None:
    """An included file is a part of a sweep: it has no name, and the same version or none."""
    if "name" in tree.value:
        raise SpecError((tree.problem(("name",), "an included file is only a part of a sweep; remove its name"),))
    if tree.value.get("version", 1) != 1 or tree.value.get("version") is True:
        raise SpecError((tree.problem(("version",), f"{tree.value['version']!r} is not a known version; known: 1"),))


def _without(tree: Tree, key: str) -> Tree:
    value = {name: item for name, item in tree.value.items() if name != key}
    return Tree(file=tree.file, value=value, places=tree.places)
