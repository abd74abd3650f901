"""Problems found on the way, so that one run shows all of them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.tree import Path, Tree


class Complaints:
    """Collects what is wrong with a sweep.yaml, each with its place in the file."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._problems: list[str] = []
        self._doubted: set[Path] = set()

    @property
    def tree(self) -> Tree:
        """The file."""
        return self._tree

    @property
    def problems(self) -> tuple[str, ...]:
        """What was complained of so far."""
        return tuple(self._problems)

    def add(self, path: Path, message: str) -> None:
        """Complain about what stands at ``path``."""
        self._doubted.update(path[:length] for length in range(len(path) + 1))
        self._problems.append(self._tree.problem(path, message))

    def doubts(self, path: Path) -> bool:
        """Whether there was a complaint about what stands at ``path`` or below it."""
        return path in self._doubted

    def extend(self, error: SpecError) -> None:
        """Add the problems of an error; they name their places themselves."""
        self._problems.extend(error.problems)

    def refuse_repeats(self, path: Path, values: Sequence[str], key: str | None = None) -> None:
        """Complain about each value that stands in the list at ``path`` before; ``key`` is where an item holds it."""
        seen: set[str] = set()
        for position, value in enumerate(values):
            if value in seen:
                where = (*path, position) if key is None else (*path, position, key)
                self.add(where, f"'{value}' stands here a second time; keep one")
            seen.add(value)

    def raise_any(self) -> None:
        """Raises ``SpecError`` with all of them, if there are any."""
        if self._problems:
            raise SpecError(tuple(dict.fromkeys(self._problems)))
