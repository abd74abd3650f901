"""Recipes by name: those of the file over the shipped ones, each with the fields of its ``base``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.parse.tree import Tree
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.recipe_rules import EXCLUSIVE
from orchestrator.sweepfile.schema_probe import schema_of
from orchestrator.sweepfile.suggest import did_you_mean

Recipe = Mapping[str, Any]


def over_base(base: Recipe, given: Recipe) -> dict[str, Any]:
    """Fields over those of another recipe; of two that exclude each other the given one displaces the other."""
    inherited = dict(base)
    for pair in EXCLUSIVE:
        if not given.keys().isdisjoint(pair):
            inherited = {name: value for name, value in inherited.items() if name not in pair}
    return {**inherited, **given}


class Recipes(Mapping[str, Recipe]):
    """All recipes of a sweep by name, without bases; remembers which ones were asked for."""

    def __init__(
        self, own: Mapping[str, Recipe], shipped: Mapping[str, Recipe], tree: Tree, complaints: Complaints
    ) -> None:
        self._own, self._shipped = own, shipped
        self._tree, self._complaints = tree, complaints
        self._open: list[str] = []
        self._flat: dict[str, Recipe] = {}
        self.broken: set[str] = set()
        """Recipes of the file about which there are complaints."""
        self.used: dict[str, Recipe] = {}
        """What was asked for."""
        for name in own:
            self._flat[name] = self._resolve(name)

    def __getitem__(self, name: str) -> Recipe:
        recipe = self._flat[name] if name in self._flat else self._shipped[name]
        self.used[name] = recipe
        return recipe

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._shipped

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *self._shipped)))

    def __len__(self) -> int:
        return len(self._own.keys() | self._shipped.keys())

    def _resolve(self, name: str) -> Recipe:
        """A recipe of the file with its base; itself alone if something is wrong with that."""
        if name in self._flat:
            return self._flat[name]
        given = dict(self._own[name])
        base = given.pop("base", None)
        problem = self._problem_of_base(name, base)
        if problem:
            self._complaints.add(("recipes", name, "base"), problem)
            self.broken.add(name)
            return given
        self._open.append(name)
        inherited = self._base(name, base) if base is not None else {}
        self._open.pop()
        flat = over_base(inherited, given)
        self._check(name, given, flat, base)
        self._flat[name] = flat
        return flat

    def _base(self, name: str, base: str) -> Recipe:
        return self._resolve(base) if base in self._own and base != name else self._shipped[base]

    def _problem_of_base(self, name: str, base: object) -> str:
        if base is None or (base == name and name in self._shipped):  # over the shipped recipe of its own name
            return ""
        if not isinstance(base, str) or base not in self:
            return f"{base!r} is not a recipe: {did_you_mean(str(base), self)}"
        if base == name or base in self._open:
            chain = " -> ".join(
                [*self._open[self._open.index(base) :], name, base] if base in self._open else [name, base]
            )
            return f"the recipe '{base}' starts from itself ({chain}); break the circle"
        return ""

    def _check(self, name: str, given: Recipe, flat: Recipe, base: object) -> None:
        """What it says must be right by itself; what it leaves out, whoever uses it gives."""
        if base in self.broken:
            self.broken.add(name)
            return
        group = flat.get("norm_group")
        left_out = {"epochs": 1e6, "lr": 1e6, "batch_size": 2 * group if isinstance(group, int) and group > 0 else 4096}
        try:
            schema = schema_of(flat)
            fields = {field: value for field, value in left_out.items() if field in schema.model_fields}
            validate(schema, {**fields, **flat}, self._tree, ("recipes", name))
        except SpecError as error:
            self._complaints.extend(error)
            self.broken.add(name)
