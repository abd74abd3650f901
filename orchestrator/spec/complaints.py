"""Problems found on the way, so that one run shows all of them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import SpecError
from orchestrator.spec.tree import Path, Tree


class Complaints:
    """Collects what is wrong with a sweep.yaml, each with its place in the file."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._problems: list[str] = []

    def add(self, path: Path, message: str) -> None:
        """Complain about what stands at ``path``."""
        self._problems.append(self._tree.problem(path, message))

    def extend(self, error: SpecError) -> None:
        """Add the problems of an error; they name their places themselves."""
        self._problems.extend(error.problems)

    def refuse_repeats(self, path: Path, values: Sequence[str], key: str | None = None) -> None:
        """Complain about each value that stands in the list at ``path`` before; ``key`` is where an item holds it."""
        for position, value in enumerate(values):
            if value in values[:position]:
                where = (*path, position) if key is None else (*path, position, key)
                self.add(where, f"'{value}' stands here a second time; keep one")

    def raise_any(self) -> None:
        """Raises ``SpecError`` with all of them, if there are any."""
        if self._problems:
            raise SpecError(tuple(self._problems))
