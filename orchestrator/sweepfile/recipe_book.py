"""Recipes by name, with bases, resolved for a protocol and checked on data sets and label spaces. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.tree import MovedTree, Path, Tree
from orchestrator.sweepfile.problems import Complaints, validate
from orchestrator.sweepfile.recipe import EXCLUSIVE, TRAINING, RecipeSpec, ignored_fields, missing_fields, schema_of
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweepfile.values import Dataset, LabelSpace

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


RecipeBook = Mapping[str, Mapping[str, Any]]
Objectives = Mapping[str, str]
"""Installed objectives: name -> ``<distribution>==<version>:<name>``."""

BUILTIN_LOSSES = ("softmax", "sigmoid")


class RecipeResolver:
    """Resolves the recipes of one sweep; ``complaints`` collects what is wrong with them."""

    def __init__(self, book: RecipeBook, objectives: Objectives, tree: Tree, complaints: Complaints) -> None:
        self._book = book if isinstance(book, Recipes) else Recipes({}, book, tree, complaints)
        self._objectives, self._tree, self._complaints = objectives, tree, complaints

    def resolve(self, path: Path, recipe: str | Mapping[str, Any], protocol: str = "") -> Mapping[str, Any]:
        """All fields of the recipe that stands at ``path``, for a transfer's ``protocol``; nothing if it is wrong."""
        given = {} if isinstance(recipe, str) else dict(recipe)
        base = recipe if isinstance(recipe, str) else given.pop("base", None)
        if base is not None and (not isinstance(base, str) or base not in self._book):
            where = path if isinstance(recipe, str) else (*path, "base")
            self._complaints.add(where, f"{base!r} is not a recipe: {did_you_mean(str(base), self._book)}")
            return {}
        inherited = self._book[base] if base is not None else {}
        if base in self._book.broken:  # which is complained of at its own place
            return {}
        fields = over_base(inherited, given)
        try:
            spec = validate(schema_of(fields, protocol or TRAINING), fields, self._tree, path)
            if not isinstance(spec, RecipeSpec):
                return spec.resolved()
            return self._checked(path, spec, given, ignored_fields(spec, protocol))
        except SpecError as error:
            self._complaints.extend(error)
            return {}

    def of(self, protocol: str) -> ProtocolRecipes:
        """The same for one protocol alone."""
        return ProtocolRecipes(self, protocol)

    def known_fields(self, recipe: str | Mapping[str, Any], protocol: str = "") -> tuple[str, ...]:
        """Names of the fields that such a recipe may have; none if its base is not known."""
        given = {} if isinstance(recipe, str) else dict(recipe)
        base = recipe if isinstance(recipe, str) else given.pop("base", None)
        if base is not None and (not isinstance(base, str) or base not in self._book):
            return ()
        fields = over_base(self._book[base] if base is not None else {}, given)
        return tuple(schema_of(fields, protocol or TRAINING).model_fields)

    def elsewhere(self, moved: Mapping[Path, Path]) -> tuple[RecipeResolver, Complaints]:
        """A resolver that complains of some places as of others, and what it complains to."""
        complaints = Complaints(MovedTree.of(self._tree, moved))
        return RecipeResolver(self._book, self._objectives, complaints.tree, complaints), complaints

    def _checked(
        self, path: Path, spec: RecipeSpec, given: Mapping[str, Any], ignored: Mapping[str, str]
    ) -> Mapping[str, Any]:
        for name in given.keys() & ignored.keys():
            self._complaints.add((*path, name), f"{given[name]!r} {ignored[name]}")
        for message in missing_fields(spec).values():
            self._complaints.add(path, message)
        # What a base says about an optimiser or schedule that was overridden goes with it.
        fields = {name: getattr(spec, name) for name in spec.model_fields_set - ignored.keys()}
        loss = self._loss((*path, "loss"), spec.loss)
        return type(spec).model_construct(**{**fields, "loss": loss}).resolved()

    def _loss(self, path: Path, name: str) -> str:
        if name in BUILTIN_LOSSES:
            return name
        if name not in self._objectives:
            known = (*BUILTIN_LOSSES, *self._objectives)
            self._complaints.add(path, f"'{name}' is neither built in nor installed: {did_you_mean(name, known)}")
        return self._objectives.get(name, name)


@dataclass(frozen=True, slots=True)
class ProtocolRecipes:
    """A resolver of the recipes of one protocol."""

    resolver: RecipeResolver
    protocol: str

    def resolve(self, path: Path, recipe: str | Mapping[str, Any]) -> Mapping[str, Any]:
        """See `RecipeResolver`."""
        return self.resolver.resolve(path, recipe, self.protocol)

    def known_fields(self, recipe: str | Mapping[str, Any]) -> tuple[str, ...]:
        """See `RecipeResolver`."""
        return self.resolver.known_fields(recipe, self.protocol)

    def elsewhere(self, moved: Mapping[Path, Path]) -> tuple[ProtocolRecipes, Complaints]:
        """See `RecipeResolver`."""
        resolver, complaints = self.resolver.elsewhere(moved)
        return resolver.of(self.protocol), complaints


def check_recipe_on(path: Path, recipe: Mapping[str, Any], dataset: Dataset, complaints: Complaints) -> None:
    """Complain about a resolved recipe that cannot train on a data set whose size is known."""
    if "batch_size" not in recipe:  # it was refused, or takes all samples at once
        return
    batch_size, num_train = recipe["batch_size"], dataset.num_train - num_held_out(recipe, dataset.num_train)
    if batch_size > num_train:
        message = f"batch_size {batch_size} is more than the {num_train} training samples of '{dataset.name}'; lower it"
        complaints.add((*path, "batch_size"), message)
        return
    total = num_steps(recipe["epochs"], num_train, batch_size)
    if total < 1:
        message = f"{recipe['epochs']:g} epochs of the {num_train} training samples of '{dataset.name}' give no batch"
        complaints.add((*path, "epochs"), f"{message} of {batch_size}; train longer or in smaller batches")
    elif recipe.get("warmup_steps", 0) > total:
        message = f"the training on '{dataset.name}' has {total} steps; the warm-up of {recipe['warmup_steps']} would"
        complaints.add((*path, "warmup_steps"), f"{message} outlast it; use 0 to {total}")


def num_held_out(recipe: Mapping[str, Any], num_train: int) -> int:
    """Training samples that a recipe keeps out of training."""
    share: float = recipe.get("select_holdout", 0.0)
    return math.floor(share * num_train + 0.5)


def check_labels_of(
    path: Path, recipe: Mapping[str, Any], space: LabelSpace, dataset: Dataset, complaints: Complaints
) -> None:
    """Complain about a label space that the resolved recipe at ``path`` cannot learn."""
    if space.num_classes == 1:
        message = f"the recipe trains on '{space.name}', which has a single class: there is nothing to tell apart"
        complaints.add(path, f"{message}; use a label space of 2 classes or more")
    several = space.multi_label or (dataset.multi_label and not _has_one_target(space))
    if several and recipe.get("loss", "softmax") == "softmax":
        message = f"samples of '{space.name}' have several classes each, and a softmax can give only one of them"
        complaints.add((*path, "loss"), f"{message} probability 1; use loss: sigmoid")


def _has_one_target(space: LabelSpace) -> bool:
    """Whether a rule gives one target to a sample of several leaf classes: of classes it has all their targets."""
    by_sample = {"random", "split", "clusters", "binary"}
    return bool(by_sample & space.space.keys()) or "contains" in space.space.get("wordnet", {})


def num_steps(epochs: float, num_samples: int, batch_size: int) -> int:
    """Steps of a run, as the data plane counts them (a test compares the two): halves round up."""
    return math.floor(Fraction(repr(float(epochs))) * num_samples / batch_size + Fraction(1, 2))
