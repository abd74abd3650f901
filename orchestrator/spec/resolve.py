"""From the validated schema to the resolved sweep: label spaces, globs, recipes and references. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from orchestrator.contract import JobKind, Resources
from orchestrator.errors import StorageError
from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import Dataset, LabelSpace, Model, Pretrain, Sweep, Transfer
from orchestrator.spec.resolve_checkpoints import resolve_checkpoints, resolve_keep
from orchestrator.spec.resolve_clusters import check_embeddings
from orchestrator.spec.resolve_datasets import resolve_dataset
from orchestrator.spec.resolve_labels import LabelSources, resolve_label_spaces, thinned
from orchestrator.spec.resolve_mixture import resolve_mixture
from orchestrator.spec.resolve_model import check_model, check_recipe_of_model
from orchestrator.spec.resolve_recipe import Objectives, RecipeBook, RecipeResolver, check_labels_of, check_recipe_on
from orchestrator.spec.resolve_transfer import check_targets, resolve_transfer
from orchestrator.spec.schema import SweepSpec
from orchestrator.spec.schema_datasets import MixtureSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.survey import Surveys
from orchestrator.spec.timm_table import shipped_models
from orchestrator.spec.tree import Path, Tree
from orchestrator.storage.open import check_store_uri

_GROUPS = {
    JobKind.DATASET: "data",
    JobKind.INDEX: "data",
    JobKind.EMBED: "embed",
    JobKind.CLUSTER: "cluster",
    JobKind.LABELS: "data",
    JobKind.PRETRAIN: "pretrain",
    JobKind.FINETUNE: "transfer",
    JobKind.PROBE: "transfer",
}


def resolve_sweep(
    spec: SweepSpec,
    tree: Tree,
    recipes: RecipeBook,
    surveys: Surveys | None = None,
    *,
    objectives: Objectives | None = None,
    labels: LabelSources | None = None,
) -> Sweep:
    """Resolve a schema-valid sweep.

    Args:
        spec: the validated file.
        tree: the file with places.
        recipes: the shipped ones.
        surveys: what external data sets are.
        objectives: installed losses of other packages.
        labels: what counts classes, and installed label spaces of other packages.

    Raises:
        SpecError: a reference, glob, level or recipe is wrong; all problems found, one line each.
    """
    complaints = Complaints(tree)
    recipe_resolver = RecipeResolver(recipes, objectives or {}, tree, complaints)
    return _Resolver(spec, recipe_resolver, surveys or {}, labels, complaints).resolve()


class _Resolver:
    """Collects problems on the way, so that one run shows all of them."""

    def __init__(
        self,
        spec: SweepSpec,
        recipes: RecipeResolver,
        surveys: Surveys,
        labels: LabelSources | None,
        complaints: Complaints,
    ) -> None:
        self._spec, self._labels = spec, labels
        self._recipes = recipes
        self._surveys = surveys
        self._complaints = complaints

    def resolve(self) -> Sweep:
        spec = self._spec
        datasets = {
            name: resolve_dataset(name, entry, self._complaints, self._surveys.get(name))
            for name, entry in spec.datasets.items()
            if not isinstance(entry, MixtureSpec)
        }
        datasets |= self._mixtures(datasets)
        labels = resolve_label_spaces(spec.labels, datasets, self._complaints, self._labels)
        pretrain = self._pretrain(labels)
        transfer = tuple(
            resolve_transfer(position, entry, labels, self._recipes, self._complaints)
            for position, entry in enumerate(spec.transfer)
        )
        self._check_models(pretrain, transfer)
        check_embeddings(labels, pretrain, self._complaints)
        self._check_batches(pretrain, transfer, labels, datasets)
        self._check_splits([*pretrain.labels, *(item.target for item in transfer)], labels, datasets)
        check_targets(transfer, labels, self._complaints)
        self._complaints.refuse_repeats(("transfer",), [entry.name for entry in spec.transfer], "name")
        baseline = self._baseline(pretrain)
        self._check_store()
        self._complaints.raise_any()
        return Sweep(
            name=spec.name,
            datasets=datasets,
            labels=labels,
            pretrains=(pretrain,),
            transfer=transfer,
            baseline=baseline,
            metric=spec.report.metric,
            resources={kind: self._resources(group) for kind, group in _GROUPS.items()},
            num_workers={kind: getattr(spec.resources, group).num_workers for kind, group in _GROUPS.items()},
            compute=spec.compute.model_dump(),
            store=spec.store,
            tracking_uri=spec.tracking.uri,
            experiment=spec.tracking.experiment,
            max_failures=spec.policy.failures,
        )

    def _mixtures(self, datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
        read_table = self._labels.read_table if self._labels else None
        mixtures = {
            name: resolve_mixture(name, entry, datasets, self._complaints, read_table)
            for name, entry in self._spec.datasets.items()
            if isinstance(entry, MixtureSpec)
        }
        return {name: mixture for name, mixture in mixtures.items() if mixture is not None}

    def _pretrain(self, labels: Mapping[str, LabelSpace]) -> Pretrain:
        spec = self._spec.pretrain
        self._complaints.refuse_repeats(("pretrain", "seeds"), [str(seed) for seed in spec.seeds])
        recipe = self._recipes.resolve(("pretrain", "recipe"), spec.recipe)
        keep_path = ("pretrain", "checkpoints", "keep")
        return Pretrain(
            model=Model(name=spec.model.name, image_size=spec.model.image_size, kwargs=spec.model.kwargs),
            labels=self._globs(spec.labels, labels),
            recipe=recipe,
            seeds=tuple(spec.seeds),
            subset=spec.subset.resolved() if spec.subset else {},
            initial=self._initial(),
            keep=resolve_keep(spec.checkpoints.keep, recipe, keep_path, self._complaints),
            checkpoints=resolve_checkpoints(spec.checkpoints),
        )

    def _initial(self) -> Mapping[str, str]:
        spec = self._spec.pretrain
        if spec.init is not None and spec.init.timm is not None:
            problem = shipped_models().tag_problem(spec.model.name, spec.init.timm)
            if problem:
                self._complaints.add(("pretrain", "init", "timm"), problem)
        return {} if spec.init is None else spec.init.model_dump(exclude_none=True)

    def _check_models(self, pretrain: Pretrain, transfer: Sequence[Transfer]) -> None:
        table, model = shipped_models(), pretrain.model
        check_model(("pretrain", "model"), model, table, self._complaints)
        where, workers = ("pretrain", "recipe"), self._spec.resources.pretrain.num_workers
        check_recipe_of_model(where, pretrain.recipe, model, table, self._complaints, num_workers=workers)
        workers = self._spec.resources.transfer.num_workers
        for position, item in enumerate(transfer):
            if item.protocol is JobKind.FINETUNE:  # a probe trains no backbone
                path = ("transfer", position, "recipe")
                check_recipe_of_model(path, item.recipe, model, table, self._complaints, num_workers=workers)

    def _globs(self, globs: Sequence[str], labels: Mapping[str, LabelSpace]) -> tuple[str, ...]:
        chosen: dict[str, None] = {}
        for position, glob in enumerate(globs):
            matches = [name for name in labels if fnmatchcase(name, glob)]
            if not matches:
                message = f"'{glob}' matches no label space: {did_you_mean(glob, labels)}"
                self._complaints.add(("pretrain", "labels", position), message)
            chosen.update(dict.fromkeys(matches))
        return tuple(chosen)

    def _check_batches(
        self,
        pretrain: Pretrain,
        transfer: Sequence[Transfer],
        labels: Mapping[str, LabelSpace],
        datasets: Mapping[str, Dataset],
    ) -> None:
        uses: list[tuple[Path, Pretrain | Transfer, Sequence[str]]] = [(("pretrain",), pretrain, pretrain.labels)]
        uses += [(("transfer", position), item, (item.target,)) for position, item in enumerate(transfer)]
        for path, use, names in uses:
            where = (*path, "recipe")
            for name in dict.fromkeys(labels[name].dataset for name in names if name in labels):
                dataset = thinned(datasets[name], use.subset, (*path, "subset"), self._complaints)
                check_recipe_on(where, use.recipe, dataset, self._complaints)
            for space in (labels[name] for name in names if name in labels):
                check_labels_of(where, use.recipe, space, datasets[space.dataset], self._complaints)

    def _check_splits(
        self, used: Sequence[str], labels: Mapping[str, LabelSpace], datasets: Mapping[str, Dataset]
    ) -> None:
        for name in dict.fromkeys(labels[name].dataset for name in used if name in labels):
            if not datasets[name].has_val:
                message = "it has no validation samples, on which every training is evaluated; give it a split 'val'"
                if datasets[name].location:
                    message += " (`orchestrator data index --split train=... --split val=...` prints the entry)"
                self._complaints.add(("datasets", name), message)

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
        return Resources(**getattr(self._spec.resources, group).model_dump(exclude={"workers"}))
