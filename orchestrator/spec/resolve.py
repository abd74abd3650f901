"""From the validated schema to the resolved sweep: label spaces, globs, recipes and references. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from orchestrator.contract import JobKind, Resources
from orchestrator.errors import SpecError, StorageError
from orchestrator.spec.model import Dataset, LabelSpace, Model, Pretrain, Sweep, Transfer
from orchestrator.spec.problems import validate
from orchestrator.spec.schema import Digits, LabelEntry, RecipeSpec, SweepSpec, SyntheticHierarchy, TransferSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.tree import Path, Tree
from orchestrator.storage.open import check_store_uri

RecipeBook = Mapping[str, Mapping[str, Any]]

BUILTIN_VERSION = 1
_NUM_DIGITS = 1797
_GROUPS = {
    JobKind.DATASET: "data",
    JobKind.INDEX: "data",
    JobKind.LABELS: "data",
    JobKind.PRETRAIN: "pretrain",
    JobKind.FINETUNE: "transfer",
    JobKind.PROBE: "transfer",
}


def resolve_sweep(spec: SweepSpec, tree: Tree, recipes: RecipeBook) -> Sweep:
    """Resolve a schema-valid sweep.

    Raises:
        SpecError: a reference, glob, level or recipe is wrong; all problems found, one line each.
    """
    return _Resolver(spec, tree, recipes).resolve()


class _Resolver:
    """Collects problems on the way, so that one run shows all of them."""

    def __init__(self, spec: SweepSpec, tree: Tree, recipes: RecipeBook) -> None:
        self._spec = spec
        self._tree = tree
        self._recipes = recipes
        self._problems: list[str] = []

    def resolve(self) -> Sweep:
        spec = self._spec
        datasets = {name: self._dataset(name, entry) for name, entry in spec.datasets.items()}
        labels = {
            space.name: space for name, entry in spec.labels.items() for space in self._spaces(name, entry, datasets)
        }
        pretrain = self._pretrain(labels)
        transfer = tuple(self._transfer(position, entry, labels) for position, entry in enumerate(spec.transfer))
        self._check_batches(pretrain, transfer, labels, datasets)
        self._check_targets(transfer, labels)
        self._refuse_repeats(("transfer",), [entry.name for entry in spec.transfer], "name")
        baseline = self._baseline(pretrain)
        self._check_store()
        if self._problems:
            raise SpecError(tuple(self._problems))
        return Sweep(
            name=spec.name,
            datasets=datasets,
            labels=labels,
            pretrain=pretrain,
            transfer=transfer,
            baseline=baseline,
            metric=spec.report.metric,
            resources={kind: self._resources(group) for kind, group in _GROUPS.items()},
            store=spec.store,
            tracking_uri=spec.tracking.uri,
            experiment=spec.tracking.experiment,
            max_failures=spec.policy.failures,
        )

    def _complain(self, path: Path, message: str) -> None:
        self._problems.append(self._tree.problem(path, message))

    def _dataset(self, name: str, entry: SyntheticHierarchy | Digits) -> Dataset:
        parameters = {**entry.model_dump(), "version": BUILTIN_VERSION}
        if isinstance(entry, Digits):
            num_train = int(_NUM_DIGITS * (1 - entry.val_fraction))
            return Dataset(
                name=name,
                readable="digits",
                parameters=parameters,
                levels={"digit": 10},
                num_classes=10,
                num_train=num_train,
            )
        self._check_patches(("datasets", name), entry)
        levels = {f"depth{depth}": prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1)}
        return Dataset(
            name=name,
            readable="synthetic-" + "x".join(str(children) for children in entry.branching),
            parameters=parameters,
            levels=levels,
            num_classes=prod(entry.branching),
            num_train=entry.num_train,
        )

    def _check_patches(self, path: Path, entry: SyntheticHierarchy) -> None:
        if entry.image_size % entry.patch_size:
            message = (
                f"{entry.image_size} is not a multiple of patch_size {entry.patch_size}; images hold whole patches"
            )
            self._complain((*path, "image_size"), message)
            return
        patches = (entry.image_size // entry.patch_size) ** 2
        needed = entry.num_common_patches + entry.num_subclass_patches * (len(entry.branching) - 1)
        if needed > patches:
            message = f"an image has {patches} patches, but features need {needed}; use smaller patches or fewer"
            self._complain(path, message)
        if entry.branching[0] < 2:
            message = f"{entry.branching} has a single superclass; the first number must be at least 2"
            self._complain((*path, "branching"), message)
        nodes = sum(prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1))
        if nodes > (values := 3 * entry.patch_size**2):
            message = f"the tree has {nodes} nodes, but a patch of {entry.patch_size} pixels has {values} values and so"
            self._complain(path, f"{message} at most {values} independent features; use fewer nodes or larger patches")

    def _spaces(self, name: str, entry: LabelEntry, datasets: Mapping[str, Dataset]) -> Iterator[LabelSpace]:
        path: Path = ("labels", name)
        dataset = datasets.get(entry.dataset)
        if dataset is None:
            hint = did_you_mean(entry.dataset, datasets)
            self._complain((*path, "dataset"), f"'{entry.dataset}' is not a data set of this sweep: {hint}")
        elif entry.hierarchy is not None:
            yield from self._levels(name, entry.hierarchy, dataset)
        elif entry.random is not None:
            yield from self._random(name, entry, dataset)
        else:
            yield self._modulo(name, entry, dataset)

    def _levels(self, name: str, levels: Sequence[str], dataset: Dataset) -> Iterator[LabelSpace]:
        self._refuse_repeats(("labels", name, "hierarchy"), levels, None)
        for position, level in enumerate(levels):
            if level not in dataset.levels:
                hint = did_you_mean(level, dataset.levels)
                message = f"'{level}' is not a level of data set '{dataset.name}': {hint}"
                self._complain(("labels", name, "hierarchy", position), message)
                continue
            space = {"hierarchy": level}
            yield _space(f"{name}/{level}", name, level, dataset, (space, dataset.levels[level]))

    def _random(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[LabelSpace]:
        assert entry.random is not None  # noqa: S101 - for the type checker
        path: Path = ("labels", name, "random", "num_classes")
        self._refuse_repeats(path, [str(number) for number in entry.random.num_classes], None)
        for position, number in enumerate(entry.random.num_classes):
            if number > dataset.num_train:
                message = f"{number} classes for {dataset.num_train} training samples; at most one class per sample"
                self._complain((*path, position), message)
            space = {"random": {"num_classes": number, "seed": entry.random.seed}}
            yield _space(f"{name}/{number}", name, str(number), dataset, (space, number))

    def _modulo(self, name: str, entry: LabelEntry, dataset: Dataset) -> LabelSpace:
        assert entry.modulo is not None  # noqa: S101 - for the type checker
        if entry.modulo > dataset.num_classes:
            message = f"{entry.modulo} is more than the {dataset.num_classes} classes of data set '{dataset.name}'"
            self._complain(("labels", name, "modulo"), message + f"; use 2 to {dataset.num_classes}")
        return _space(name, name, f"mod{entry.modulo}", dataset, ({"modulo": entry.modulo}, entry.modulo))

    def _pretrain(self, labels: Mapping[str, LabelSpace]) -> Pretrain:
        spec = self._spec.pretrain
        self._refuse_repeats(("pretrain", "seeds"), [str(seed) for seed in spec.seeds], None)
        return Pretrain(
            model=Model(name=spec.model.name, image_size=spec.model.image_size, kwargs=spec.model.kwargs),
            labels=self._globs(spec.labels, labels),
            recipe=self._recipe(("pretrain", "recipe"), spec.recipe),
            seeds=tuple(spec.seeds),
        )

    def _globs(self, globs: Sequence[str], labels: Mapping[str, LabelSpace]) -> tuple[str, ...]:
        chosen: dict[str, None] = {}
        for position, glob in enumerate(globs):
            matches = [name for name in labels if fnmatchcase(name, glob)]
            if not matches:
                message = f"'{glob}' matches no label space: {did_you_mean(glob, labels)}"
                self._complain(("pretrain", "labels", position), message)
            chosen.update(dict.fromkeys(matches))
        return tuple(chosen)

    def _transfer(self, position: int, entry: TransferSpec, labels: Mapping[str, LabelSpace]) -> Transfer:
        path: Path = ("transfer", position)
        if entry.target not in labels:
            hint = did_you_mean(entry.target, labels)
            self._complain((*path, "target"), f"'{entry.target}' is not a label space of this sweep: {hint}")
        self._refuse_repeats((*path, "seeds"), [str(seed) for seed in entry.seeds], None)
        recipe = entry.recipe if entry.recipe is not None else f"default-{entry.protocol}"
        return Transfer(
            name=entry.name,
            target=entry.target,
            protocol=JobKind(entry.protocol),
            recipe=self._recipe((*path, "recipe"), recipe),
            seeds=tuple(entry.seeds),
        )

    def _recipe(self, path: Path, recipe: str | Mapping[str, Any]) -> Mapping[str, Any]:
        """All fields of a recipe given by name, inline, or inline over a ``base``."""
        fields = {"base": recipe} if isinstance(recipe, str) else dict(recipe)
        base = fields.pop("base", None)
        if base is not None and (not isinstance(base, str) or base not in self._recipes):
            where = path if isinstance(recipe, str) else (*path, "base")
            self._complain(where, f"{base!r} is not a shipped recipe: {did_you_mean(str(base), self._recipes)}")
            return {}
        try:
            merged = {**self._recipes[base], **fields} if base is not None else fields
            return validate(RecipeSpec, merged, self._tree, path).model_dump()
        except SpecError as error:
            self._problems.extend(error.problems)
            return {}

    def _check_batches(
        self,
        pretrain: Pretrain,
        transfer: Sequence[Transfer],
        labels: Mapping[str, LabelSpace],
        datasets: Mapping[str, Dataset],
    ) -> None:
        uses: list[tuple[Path, Mapping[str, Any], Sequence[str]]] = [
            (("pretrain", "recipe"), pretrain.recipe, pretrain.labels)
        ]
        uses += [(("transfer", n, "recipe"), item.recipe, (item.target,)) for n, item in enumerate(transfer)]
        for path, recipe, names in uses:
            for dataset in dict.fromkeys(labels[name].dataset for name in names if name in labels):
                num_train, batch = datasets[dataset].num_train, recipe.get("batch_size", 0)
                if batch > num_train:
                    message = f"batch_size {batch} is more than the {num_train} training samples of '{dataset}'"
                    self._complain((*path, "batch_size"), message)

    def _check_targets(self, transfer: Sequence[Transfer], labels: Mapping[str, LabelSpace]) -> None:
        for position, item in enumerate(transfer):
            space = labels.get(item.target)
            if space is not None and "random" in space.space:
                message = f"'{item.target}' are random ids: nothing can be learnt of them for validation samples"
                self._complain(("transfer", position, "target"), message + "; choose a level of a hierarchy")

    def _baseline(self, pretrain: Pretrain) -> str:
        baseline = self._spec.report.baseline
        if baseline is not None and pretrain.labels and baseline not in pretrain.labels:
            hint = did_you_mean(baseline, pretrain.labels)
            self._complain(("report", "baseline"), f"'{baseline}' is not pretrained in this sweep: {hint}")
        return baseline or ""

    def _check_store(self) -> None:
        try:
            if self._spec.store:
                check_store_uri(self._spec.store)
        except StorageError as error:
            self._complain(("store",), str(error))

    def _refuse_repeats(self, path: Path, values: Sequence[str], key: str | None) -> None:
        for position, value in enumerate(values):
            if value in values[:position]:
                where = (*path, position) if key is None else (*path, position, key)
                self._complain(where, f"'{value}' stands here a second time; keep one")

    def _resources(self, group: str) -> Resources:
        return Resources(**getattr(self._spec.resources, group).model_dump())


def _space(name: str, entry: str, level: str, dataset: Dataset, rule: tuple[Mapping[str, Any], int]) -> LabelSpace:
    space, num_classes = rule
    return LabelSpace(name=name, entry=entry, level=level, dataset=dataset.name, space=space, num_classes=num_classes)
