"""From the validated schema to the resolved sweep: label spaces, globs, recipes and references. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from orchestrator.contract import JobKind, Resources
from orchestrator.errors import SpecError, StorageError
from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import Dataset, LabelSpace, Model, Pretrain, Sweep, Transfer
from orchestrator.spec.problems import validate
from orchestrator.spec.resolve_datasets import resolve_dataset
from orchestrator.spec.resolve_labels import resolve_label_spaces
from orchestrator.spec.schema import SweepSpec, TransferSpec
from orchestrator.spec.schema_recipe import RecipeSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.tree import Path, Tree
from orchestrator.storage.open import check_store_uri

RecipeBook = Mapping[str, Mapping[str, Any]]

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
        self._complaints = Complaints(tree)

    def resolve(self) -> Sweep:
        spec = self._spec
        datasets = {name: resolve_dataset(name, entry, self._complaints) for name, entry in spec.datasets.items()}
        labels = {
            space.name: space
            for name, entry in spec.labels.items()
            for space in resolve_label_spaces(name, entry, datasets, self._complaints)
        }
        pretrain = self._pretrain(labels)
        transfer = tuple(self._transfer(position, entry, labels) for position, entry in enumerate(spec.transfer))
        self._check_batches(pretrain, transfer, labels, datasets)
        self._check_targets(transfer, labels)
        self._complaints.refuse_repeats(("transfer",), [entry.name for entry in spec.transfer], "name")
        baseline = self._baseline(pretrain)
        self._check_store()
        self._complaints.raise_any()
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

    def _pretrain(self, labels: Mapping[str, LabelSpace]) -> Pretrain:
        spec = self._spec.pretrain
        self._complaints.refuse_repeats(("pretrain", "seeds"), [str(seed) for seed in spec.seeds])
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
                self._complaints.add(("pretrain", "labels", position), message)
            chosen.update(dict.fromkeys(matches))
        return tuple(chosen)

    def _transfer(self, position: int, entry: TransferSpec, labels: Mapping[str, LabelSpace]) -> Transfer:
        path: Path = ("transfer", position)
        if entry.target not in labels:
            hint = did_you_mean(entry.target, labels)
            self._complaints.add((*path, "target"), f"'{entry.target}' is not a label space of this sweep: {hint}")
        self._complaints.refuse_repeats((*path, "seeds"), [str(seed) for seed in entry.seeds])
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
            self._complaints.add(where, f"{base!r} is not a shipped recipe: {did_you_mean(str(base), self._recipes)}")
            return {}
        try:
            merged = {**self._recipes[base], **fields} if base is not None else fields
            return validate(RecipeSpec, merged, self._tree, path).model_dump()
        except SpecError as error:
            self._complaints.extend(error)
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
                    self._complaints.add((*path, "batch_size"), message)

    def _check_targets(self, transfer: Sequence[Transfer], labels: Mapping[str, LabelSpace]) -> None:
        for position, item in enumerate(transfer):
            space = labels.get(item.target)
            if space is not None and "random" in space.space:
                message = f"'{item.target}' are random ids: nothing can be learnt of them for validation samples"
                self._complaints.add(("transfer", position, "target"), message + "; choose a level of a hierarchy")

    def _baseline(self, pretrain: Pretrain) -> str:
        baseline = self._spec.report.baseline
        if baseline is not None and pretrain.labels and baseline not in pretrain.labels:
            hint = did_you_mean(baseline, pretrain.labels)
            self._complaints.add(("report", "baseline"), f"'{baseline}' is not pretrained in this sweep: {hint}")
        return baseline or ""

    def _check_store(self) -> None:
        try:
            if self._spec.store:
                check_store_uri(self._spec.store)
        except StorageError as error:
            self._complaints.add(("store",), str(error))

    def _resources(self, group: str) -> Resources:
        return Resources(**getattr(self._spec.resources, group).model_dump())
