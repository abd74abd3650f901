"""A whole sweep.yaml: its schema, and the resolved sweep. Pure.

The schema is strict pydantic; later steps use only resolved values. Every field has a description with its unit and
range, because the schema is also the reference of the language. Invariants:

- A sweep that validates resolves without any I/O: information outside of the file is passed in as values.
- All problems are collected, each with its place, so that one run shows all of them.

A new block is a module in this package with its schema and how it is resolved, a field of `SweepSpec` and a line of
``_Resolver.resolve`` here, and a field of ``values.ResolvedSweep``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.core.errors import StorageError
from orchestrator.core.job_kinds import BACKBONE_TRAINING_KINDS, KINDS
from orchestrator.core.plugins import is_reference
from orchestrator.storage.open import check_store_uri
from orchestrator.sweepfile.analyze import AnalysisSpec, resolve_analysis
from orchestrator.sweepfile.clusters import check_embeddings
from orchestrator.sweepfile.datasets import DatasetSpec, MixtureSpec, Surveys, resolve_dataset, resolve_mixture
from orchestrator.sweepfile.fields import Name, Strict
from orchestrator.sweepfile.known_models import shipped_models
from orchestrator.sweepfile.labels import LabelEntry, LabelSources, resolve_label_spaces
from orchestrator.sweepfile.model import (
    CheckModels,
    check_arguments,
    check_model,
    check_recipe_of_model,
    check_resize,
    is_alone,
)
from orchestrator.sweepfile.notify import NotifySpec, check_channels, resolve_notify
from orchestrator.sweepfile.parse.tree import Path, Tree
from orchestrator.sweepfile.plugin_uses import PluginSources, PluginUses
from orchestrator.sweepfile.policy import PolicySpec, resolve_policy
from orchestrator.sweepfile.pretrain import PretrainBlocks, blocks_of, check_origins, path_of, resolve_pretrain
from orchestrator.sweepfile.problems import Complaints, validate
from orchestrator.sweepfile.recipe import (
    RecipeBook,
    RecipeResolver,
    Recipes,
    check_labels_of,
    check_recipe_on,
)
from orchestrator.sweepfile.report import (
    ReportSpec,
    TrackingSpec,
    check_metric,
    check_published,
    known_levels,
    resolve_baseline,
    resolve_rows,
)
from orchestrator.sweepfile.resources import ComputeSpec, ResourceGroups, resolve_resources
from orchestrator.sweepfile.search import check_searches
from orchestrator.sweepfile.simulate import SimulateSpec, SimulationSources, resolve_simulations
from orchestrator.sweepfile.subset import labelled_part, thinned
from orchestrator.sweepfile.transfer import (
    RecipeUse,
    TransferSpec,
    check_targets,
    resolve_transfer,
    uses_of,
    with_baselines,
)
from orchestrator.sweepfile.values import (
    LABELS_FACTOR,
    AnalysisPlan,
    Dataset,
    LabelSpace,
    Model,
    Pretrain,
    ResolvedSweep,
    Transfer,
)


class SweepSpec(Strict):
    """A whole sweep.yaml."""

    version: Literal[1] = Field(description="Version of the language.")
    name: Name = Field(description="Name of the sweep, which is its id: a changed file of the same name revises it.")
    datasets: Annotated[dict[Name, DatasetSpec], Field(min_length=1)] = Field(description="Data sets by name.")
    labels: Annotated[dict[Name, LabelEntry], Field(min_length=1)] = Field(
        description="Label spaces by name; an entry with several levels or numbers makes one each (NAME/LEVEL)."
    )
    recipes: dict[Name, dict[str, Any]] = Field(
        default_factory=dict,
        description="Training hyper-parameters by name, for recipe and base; they win over shipped ones of that name.",
    )
    pretrain: PretrainBlocks = Field(description="The backbones: one block, or a mapping of names to blocks.")
    transfer: list[TransferSpec] = Field(
        default_factory=list, description="How every backbone is measured; none: they are only pretrained."
    )
    analyze: list[AnalysisSpec] = Field(
        default_factory=list, description="What is measured of the features of every backbone."
    )
    simulate: dict[Name, SimulateSpec] = Field(
        default_factory=dict,
        description="Simulations by name; a sweep of them alone needs no datasets, labels and pretrain.",
    )
    report: ReportSpec = Field(ReportSpec(), description="What is compared, and with what.")
    resources: ResourceGroups = Field(ResourceGroups(), description="What attempts occupy. Changes no key.")
    compute: ComputeSpec = Field(ComputeSpec(), description="How training computes. Changes no key.")
    store: str = Field("", description="Path or URI of the object store; default: the project's own directory.")
    tracking: TrackingSpec = Field(TrackingSpec(), description="Where MLflow is. Changes no key.")
    policy: PolicySpec = Field(PolicySpec(), description="Budgets, ranks and failures. Changes no key.")
    notify: list[NotifySpec] = Field(
        default_factory=list,
        description="Who is notified when the sweep ends, stalls or spends its budget. Changes no key.",
    )


class SimulationSweepSpec(SweepSpec):
    """A sweep.yaml without backbones."""

    datasets: dict[Name, DatasetSpec] = Field(default_factory=dict, description="None is needed.")
    labels: dict[Name, LabelEntry] = Field(default_factory=dict, description="None is needed.")
    pretrain: PretrainBlocks = Field(default_factory=dict, description="None is needed.")


_BACKBONE_BLOCKS = ("datasets", "labels", "pretrain", "transfer")


def validate_sweep(tree: Tree) -> SweepSpec:
    """The schema's form of a file. Raises ``SpecError``: one line for each problem."""
    value = tree.value if isinstance(tree.value, Mapping) else {}
    only_simulates = bool(value.get("simulate")) and not any(block in value for block in _BACKBONE_BLOCKS)
    return validate(SimulationSweepSpec if only_simulates else SweepSpec, tree.value, tree)


def resolve_sweep(
    spec: SweepSpec,
    tree: Tree,
    recipes: RecipeBook,
    surveys: Surveys | None = None,
    *,
    plugins: PluginSources | None = None,
    labels: LabelSources | None = None,
    simulations: SimulationSources | None = None,
    check_models: CheckModels | None = None,
) -> ResolvedSweep:
    """Resolve a schema-valid sweep.

    Args:
        spec: the validated file.
        tree: the file with places.
        recipes: the shipped ones.
        surveys: descriptions of external data sets.
        plugins: plug-ins of other packages.
        labels: counts classes.
        simulations: checks parameters, and has the installed simulations of other packages.
        check_models: builds models without computing; None: facts that the table of models lacks are checked by jobs.

    Raises:
        SpecError: a reference, glob, level or recipe is wrong; all problems found, one line each.
    """
    complaints = Complaints(tree)
    book = Recipes(spec.recipes, recipes, tree, complaints)
    uses = PluginUses(plugins or PluginSources(), complaints)
    recipe_resolver = RecipeResolver(book, uses, tree, complaints)
    simulated = resolve_simulations(spec.simulate, simulations or SimulationSources(), complaints)
    sweep = _Resolver(spec, recipe_resolver, surveys or {}, labels, complaints, check_models=check_models).resolve()
    return replace(sweep, recipes=book.used, simulations=simulated)


class _Resolver:
    """Collects problems on the way, so that one run shows all of them."""

    def __init__(
        self,
        spec: SweepSpec,
        recipes: RecipeResolver,
        surveys: Surveys,
        labels: LabelSources | None,
        complaints: Complaints,
        *,
        check_models: CheckModels | None,
    ) -> None:
        self._spec, self._labels, self._check_arguments = spec, labels, check_models
        self._recipes = recipes
        self._surveys = surveys
        self._complaints = complaints

    def resolve(self) -> ResolvedSweep:
        spec = self._spec
        datasets = {
            name: resolve_dataset(name, entry, self._complaints, self._surveys.get(name))
            for name, entry in spec.datasets.items()
            if not isinstance(entry, MixtureSpec)
        }
        datasets |= self._mixtures(datasets)
        blocks = blocks_of(spec.pretrain)
        only_block = blocks[0].name if len(blocks) == 1 else ""
        sources = replace(self._labels or LabelSources(), only_block=only_block)
        labels = resolve_label_spaces(spec.labels, datasets, self._complaints, sources, self._recipes.plugins)
        pretrains = tuple(resolve_pretrain(block, labels, self._recipes, self._complaints) for block in blocks)
        transfer = self._transfer(datasets, labels, pretrains)
        spaces = with_baselines(pretrains, transfer)
        pretrains = tuple(replace(pretrain, baselines=spaces[pretrain.name]) for pretrain in pretrains)
        self._check_models(pretrains, transfer)
        check_embeddings(labels, pretrains, self._complaints)
        check_origins(pretrains, labels, self._complaints)
        self._check_batches(pretrains, transfer, labels, datasets)
        pretrained = [name for pretrain in pretrains for name in pretrain.labels]
        self._check_splits([*pretrained, *(item.target for item in transfer)], labels, datasets)
        check_targets(transfer, labels, self._complaints)
        groups, max_gpus = spec.resources, spec.policy.max_gpus
        check_searches(transfer, pretrains, labels, groups, self._complaints, datasets=datasets, max_gpus=max_gpus)
        self._complaints.refuse_repeats(("transfer",), [entry.name for entry in spec.transfer], "name")
        analyses = self._analyses(datasets, labels, pretrains)
        baseline = resolve_baseline(spec.report, pretrains, self._complaints)
        self._check_report(pretrains, transfer, known_levels(labels, datasets))
        rows = resolve_rows(spec.report, pretrains, self._complaints)
        check_published(spec.report, [entry.name for entry in spec.transfer], pretrains, self._complaints)
        self._check_store()
        policy = resolve_policy(spec.policy, spec.resources, self._complaints)
        notify = resolve_notify(spec.notify)
        check_channels(notify, self._complaints)
        self._check_code(pretrains, transfer)
        resources = {kind: getattr(spec.resources, row.resources) for kind, row in KINDS.items() if row.resources}
        return ResolvedSweep(
            name=spec.name,
            datasets=datasets,
            labels=labels,
            pretrains=pretrains,
            transfer=transfer,
            baseline=baseline.pop(LABELS_FACTOR, ""),
            baseline_values=baseline,
            rows=rows,
            metric=spec.report.metric,
            resources={kind: resolve_resources(requested) for kind, requested in resources.items()},
            num_workers={kind: requested.num_workers for kind, requested in resources.items()},
            compute=spec.compute.model_dump(),
            store=spec.store,
            tracking_uri=spec.tracking.uri,
            experiment=spec.tracking.experiment,
            register="" if spec.tracking.register_ == "none" else spec.tracking.register_,
            published=tuple(entry.model_dump(exclude_none=True) for entry in spec.report.published),
            policy=policy,
            notify=notify,
            analyses=analyses,
        )

    def _check_report(
        self, pretrains: Sequence[Pretrain], transfer: Sequence[Transfer], levels: Sequence[str] | None
    ) -> None:
        spec = self._spec.report
        recipes = [one.recipe for one in pretrains] + [recipe for item in transfer for recipe in item.recipes]
        has_plugins = any(is_reference(str(recipe.get("loss"))) for recipe in recipes)
        check_metric(spec, self._complaints, levels=levels, has_plugins=has_plugins)
        if not pretrains and spec.model_fields_set:
            message = "it compares pretrained backbones, and there is no 'pretrain'; remove it"
            self._complaints.add(("report",), message)

    def _mixtures(self, datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
        read_table = self._labels.read_table if self._labels else None
        mixtures = {
            name: resolve_mixture(name, entry, datasets, self._complaints, read_table)
            for name, entry in self._spec.datasets.items()
            if isinstance(entry, MixtureSpec)
        }
        return {name: mixture for name, mixture in mixtures.items() if mixture is not None}

    def _transfer(
        self, datasets: Mapping[str, Dataset], labels: Mapping[str, LabelSpace], pretrains: Sequence[Pretrain]
    ) -> tuple[Transfer, ...]:
        return tuple(
            resolve_transfer(
                position, entry, labels, self._recipes, self._complaints, datasets=datasets, pretrains=pretrains
            )
            for position, entry in enumerate(self._spec.transfer)
        )

    def _analyses(
        self, datasets: Mapping[str, Dataset], labels: Mapping[str, LabelSpace], pretrains: Sequence[Pretrain]
    ) -> tuple[AnalysisPlan, ...]:
        self._complaints.refuse_repeats(("analyze",), [entry.name for entry in self._spec.analyze], "name")
        return tuple(
            resolve_analysis(
                position,
                entry,
                datasets=datasets,
                labels=labels,
                pretrains=pretrains,
                plugins=self._recipes.plugins,
                complaints=self._complaints,
            )
            for position, entry in enumerate(self._spec.analyze)
        )

    def _check_models(self, pretrains: Sequence[Pretrain], transfer: Sequence[Transfer]) -> None:
        table, workers = shipped_models(), self._spec.resources.pretrain.num_workers
        for pretrain in pretrains:
            path, model = path_of(pretrain), pretrain.model
            check_model((*path, "model"), model, table, self._complaints)
            where = (*path, "recipe")
            check_recipe_of_model(where, pretrain.recipe, model, table, self._complaints, num_workers=workers)
            check_resize(where, pretrain.recipe, (model,), self._complaints)
        workers = self._spec.resources.transfer.num_workers
        for position, item in enumerate(transfer):
            path = ("transfer", position, "recipe")
            measured = [pretrain.model for pretrain in pretrains if pretrain.name in item.pretrains]
            for recipe in item.recipes:
                check_resize(path, recipe, measured, self._complaints)
            if item.protocol not in BACKBONE_TRAINING_KINDS:  # a probe trains no backbone
                continue
            for model in {model.name: model for model in measured}.values():
                for recipe in item.recipes:
                    check_recipe_of_model(path, recipe, model, table, self._complaints, num_workers=workers)

    def _check_code(self, pretrains: Sequence[Pretrain], transfer: Sequence[Transfer]) -> None:
        """Check plug-ins and built models; the latter takes seconds, and is done only if there are no other errors."""
        self._recipes.plugins.check()
        self._complaints.raise_any()
        if self._check_arguments is None:
            return
        models = {(*path_of(pretrain), "model"): pretrain.model for pretrain in pretrains}
        alone = self._alone(pretrains, transfer)
        check_arguments(models, alone, shipped_models(), self._check_arguments, self._complaints)
        self._complaints.raise_any()

    @staticmethod
    def _alone(pretrains: Sequence[Pretrain], transfer: Sequence[Transfer]) -> dict[Path, Model]:
        """Networks that are trained on norm groups of one sample, by where their recipes stand."""
        table = shipped_models()
        found: dict[Path, Model] = {}
        for pretrain in pretrains:
            if is_alone(pretrain.recipe, pretrain.model, table):
                found[*path_of(pretrain), "recipe"] = pretrain.model
        for position, item in enumerate(transfer):
            trained = item.protocol in BACKBONE_TRAINING_KINDS
            for model in [one.model for one in pretrains if trained and one.name in item.pretrains]:
                if any(is_alone(recipe, model, table) for recipe in item.recipes):
                    found["transfer", position, "recipe"] = model
        return found

    def _check_batches(
        self,
        pretrains: Sequence[Pretrain],
        transfer: Sequence[Transfer],
        labels: Mapping[str, LabelSpace],
        datasets: Mapping[str, Dataset],
    ) -> None:
        uses = [
            RecipeUse(
                path=path_of(block), recipe=block.recipe, subset=block.subset, labels=(*block.labels, *block.baselines)
            )
            for block in pretrains
        ]
        uses += [use for position, item in enumerate(transfer) for use in uses_of(position, item)]
        for use in uses:
            where = (*use.path, "recipe")
            parts = [labelled_part(labels[name], datasets) for name in use.labels if name in labels]
            for part in {(part.name, part.num_train): part for part in parts}.values():
                dataset = thinned(part, use.subset, (*use.path, "subset"), self._complaints)
                check_recipe_on(where, use.recipe, dataset, self._complaints)
            for space in (labels[name] for name in use.labels if name in labels):
                check_labels_of(where, use.recipe, space, datasets[space.dataset], self._complaints)

    def _check_splits(
        self, used: Sequence[str], labels: Mapping[str, LabelSpace], datasets: Mapping[str, Dataset]
    ) -> None:
        for name in dict.fromkeys(labels[name].dataset for name in used if name in labels):
            if not datasets[name].has_val:
                remedy = "raise val_fraction" if "builtin" in datasets[name].parameters else "give it a split 'val'"
                message = f"it has no validation samples, on which every training is evaluated; {remedy}"
                if datasets[name].location:
                    message += " (`orchestrator data index --split train=... --split val=...` prints the entry)"
                self._complaints.add(("datasets", name), message)

    def _check_store(self) -> None:
        try:
            if self._spec.store:
                check_store_uri(self._spec.store)
        except StorageError as error:
            self._complaints.add(("store",), str(error))
