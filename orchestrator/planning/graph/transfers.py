"""The jobs that measure backbones on targets, and those that search for them.

A search is for the best recipe of a transfer, or for the backbone that suits its target best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from orchestrator.core.job_kinds import KINDS, JobKind
from orchestrator.core.plugins import short_name
from orchestrator.planning.graph.features import Features, has_optimizer, is_cached
from orchestrator.planning.graph.identity import readable_rule
from orchestrator.planning.graph.pretraining import (
    Draft,
    backbone_job,
    model_parameters,
    pretrain_facets,
    pretrain_job,
    subset_parameters,
)
from orchestrator.sweepfile.recipe import LOOK_FIELDS
from orchestrator.sweepfile.values import Cell, LabelSpace, Pretrain, ResolvedSweep, Search, Transfer

LABEL_SPACE = "label_space"
"""The one dimension of a search over label spaces."""
SELECTION_METRICS = {"train": "select_error", "val": "val_error"}
"""The metric by which trials are chosen, by split."""
BEST = "search:best"
"""Label space, in facets, of a backbone whose label space a search chose."""
RETRAIN = "retrain"


def recipe_search(transfer: Transfer, search: Search, measured: Draft, name: str) -> Draft:
    """The search for the recipe of a transfer; ``measured`` is the job of one of its transfers without it."""
    parameters = {**measured.parameters, "recipe": {**transfer.recipe, **search.holds_out}}
    copies = search.num_at_a_time(search.trials)
    return Draft(
        kind=JobKind.SEARCH,
        name=name,
        readable=measured.readable.rpartition("-seed")[0],
        parameters={
            **_search_parameters(search, SELECTION_METRICS[transfer.select_on], transfer.recipe),
            "space": search.space,
            "trials": search.trials,
            "trial": {
                "kind": measured.kind.value,
                "code_version": KINDS[measured.kind].code_version,
                "protocol": measured.kind.value,
                "readable": measured.readable,
                "parameters": parameters,
                "adds": search.holds_out,
            },
        },
        inputs=measured.inputs,
        facets={key: value for key, value in measured.facets.items() if key != "transfer_seed"},
        execution={"num_workers": copies},
        like=measured.kind,
        copies=copies,
    )


def backbone_search(
    sweep: ResolvedSweep,
    transfer: Transfer,
    search: Search,
    *,
    pretrain: Pretrain,
    spaces: Sequence[LabelSpace],
    seed: int,
) -> Draft:
    """The search for a backbone: among label spaces, or among recipes for a single one."""
    target = sweep.labels[transfer.target]
    drafts = [backbone_job(pretrain, space, seed, "") for space in spaces]
    is_open = search.over == "labels"
    inputs = {"target_index": f"index/{target.dataset}", "target_labels": f"labels/{target.name}"}
    inputs |= {role: job for role, job in drafts[0].inputs.items() if role != "labels" or not is_open}
    space: Mapping[str, Any] = search.space
    if is_open:
        inputs |= {f"labels:{one.name}": f"labels/{one.name}" for one in spaces}
        space = {LABEL_SPACE: {"values": [one.name for one in spaces]}}
    trials = len(spaces) if is_open else search.trials
    copies = search.num_at_a_time(trials)
    readable = {one.name: draft.readable for one, draft in zip(spaces, drafts, strict=True)}
    parameters = drafts[0].parameters
    if more := search.more_read.get(pretrain.name):
        parameters = {**parameters, "recipe": {**parameters["recipe"], **more}}
    parts = (JobKind.SEARCH.value, transfer.name, pretrain.name, "" if is_open else spaces[0].name, f"seed{seed}")
    return Draft(
        kind=JobKind.SEARCH,
        name="/".join(part for part in parts if part),
        readable=f"{short_name(pretrain.model.name)}-{readable_rule(target.space)}-seed{seed}",
        parameters={
            **_search_parameters(search, f"target_{SELECTION_METRICS[transfer.select_on]}", pretrain.recipe),
            "space": space,
            "trials": trials,
            "trial": {
                "kind": JobKind.PRETRAIN.value,
                "code_version": KINDS[JobKind.PRETRAIN].code_version,
                "protocol": "",
                "readable": readable if is_open else drafts[0].readable,
                "parameters": parameters,
            },
            "probe": _probe(sweep, transfer, search, pretrain),
        },
        inputs=inputs,
        facets={**best_facets(pretrain, spaces, seed), "transfer": transfer.name, "target": transfer.target},
        execution={**drafts[0].execution, "num_workers": copies},
        like=JobKind.PRETRAIN,
        copies=copies,
    )


def best_facets(pretrain: Pretrain, spaces: Sequence[LabelSpace], seed: int) -> dict[str, str | int]:
    """Facets of what a search found among label spaces; of a single one those of any backbone."""
    facets = pretrain_facets(pretrain, spaces[0], seed)
    if len(spaces) == 1:
        return facets
    chosen = {"label_space": BEST, "level": "best"}
    return {**{name: value for name, value in facets.items() if name != "granularity"}, **chosen}


def searched_spaces(sweep: ResolvedSweep, transfer: Transfer, pretrain: Pretrain) -> Iterator[list[LabelSpace]]:
    """The label spaces of each search for backbones of a block."""
    spaces = [sweep.labels[name] for name in pretrain.labels if transfer.measures(name)]
    if transfer.search is not None and transfer.search.over == "labels":
        yield spaces
    else:
        yield from ([space] for space in spaces)


def _search_parameters(search: Search, metric: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """``recipe`` is what its trials are trained by, apart from the fields that they vary."""
    return {"over": search.over, "algorithm": search.algorithm_for(recipe), "seed": search.seed, "metric": metric}


def _probe(sweep: ResolvedSweep, transfer: Transfer, search: Search, pretrain: Pretrain) -> dict[str, Any]:
    """Parameters of the cached probe that judges; images are preprocessed as in the pretraining."""
    dataset = sweep.labels[transfer.target].dataset
    features = Features(pretrain=pretrain, backbone="", checkpoint={}, dataset=dataset, recipe=search.probe)
    model = model_parameters(pretrain.model)
    return {
        "code_version": KINDS[JobKind.PROBE].code_version,
        "model": model,
        "recipe": search.probe,
        # Searches of before judged by the centre view alone: they end by it, and others do not take their results.
        **({} if search.probe.get("views", ["center"]) == ["center"] else {"has_all_views": True}),
        "look": {"model": model, "view": "center", **features.preprocessing()},
        "seed": transfer.seeds[0],
        **subset_parameters(transfer.subset),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A backbone that is measured; ``epoch`` is a kept one of its pretraining, None its end."""

    pretrain: Pretrain
    space: LabelSpace
    seed: int
    epoch: int | None
    search: str = ""
    """Name of the job that searches for it; empty for one that is pretrained by itself."""
    among: tuple[LabelSpace, ...] = ()
    """Label spaces that the search chooses from."""

    @property
    def job(self) -> str:
        """Name of the job that pretrains it, or finds it."""
        return self.search or pretrain_job(self.pretrain.name, self.space.name, self.seed)

    @property
    def role(self) -> str:
        """Role of that job for readers of the backbone."""
        return "search" if self.search else "backbone"

    @property
    def path(self) -> str:
        """Its part in the names of jobs that measure it."""
        space = "best" if len(self.among) > 1 else self.space.name
        return pretrain_job(self.pretrain.name, space, self.seed).partition("/")[2]

    @property
    def facets(self) -> dict[str, str | int]:
        """Facets by which it is compared."""
        return best_facets(self.pretrain, self.among or (self.space,), self.seed)

    @property
    def checkpoint(self) -> dict[str, int]:
        """Its part of the identity: empty for the final weights, however they are named."""
        is_final = self.epoch is None or self.epoch == self.pretrain.recipe["epochs"]
        return {} if is_final or self.epoch is None else {"checkpoint": self.epoch}


def transfer_jobs(sweep: ResolvedSweep, transfer: Transfer) -> Iterator[Draft]:
    """The jobs of a transfer, and before them the features that they read.

    The pretrainings and label spaces that they need must be planned already.
    """
    known: set[str] = set()
    yield from _backbone_searches(sweep, transfer)
    for backbone in _backbones(sweep, transfer):
        for cell in transfer.cells:
            features = _features(sweep, transfer, backbone, cell)
            for draft in features.jobs() if features is not None else ():
                if draft.name not in known:
                    known.add(draft.name)
                    yield draft
        for fraction, cell, seed in product(transfer.fractions or (None,), transfer.cells, transfer.seeds):
            search = _recipe_search(sweep, transfer, backbone, cell=cell, fraction=fraction)
            if search is not None and search.name not in known:
                known.add(search.name)
                yield search
            job = _job(sweep, transfer, backbone, cell=cell, fraction=fraction, seed=seed)
            yield job if search is None else replace(job, inputs={**job.inputs, "search": search.name})


def _backbone_searches(sweep: ResolvedSweep, transfer: Transfer) -> Iterator[Draft]:
    search = transfer.search
    if search is None or not transfer.searches_backbones:
        return
    for pretrain in (sweep.pretrain(block) for block in transfer.pretrains):
        for spaces, seed in product(searched_spaces(sweep, transfer, pretrain), pretrain.seeds):
            yield backbone_search(sweep, transfer, search, pretrain=pretrain, spaces=spaces, seed=seed)


def _recipe_search(
    sweep: ResolvedSweep, transfer: Transfer, backbone: Backbone, *, cell: Cell, fraction: float | None
) -> Draft | None:
    """The search of a transfer's recipe, on the block's first backbone and the first transfer seed."""
    if transfer.search is None or transfer.searches_backbones:
        return None
    first = replace(backbone, seed=backbone.pretrain.seeds[0])
    measured = _job(sweep, transfer, first, cell=cell, fraction=fraction, seed=transfer.seeds[0])
    parts = (
        JobKind.SEARCH.value,
        transfer.name,
        first.pretrain.name,
        first.space.name,
        "" if first.epoch is None else f"epoch{first.epoch}",
        "" if fraction is None else f"fraction{fraction:g}",
    )
    return recipe_search(transfer, transfer.search, measured, "/".join(part for part in parts if part))


def _backbones(sweep: ResolvedSweep, transfer: Transfer) -> Iterator[Backbone]:
    for block in transfer.pretrains:
        pretrain = sweep.pretrain(block)
        retrained = (transfer.target,) if RETRAIN in transfer.baselines else ()
        measured = () if transfer.searches_backbones else filter(transfer.measures, pretrain.labels)
        if transfer.search is not None and transfer.searches_backbones:
            for spaces, seed in product(searched_spaces(sweep, transfer, pretrain), pretrain.seeds):
                name = backbone_search(
                    sweep, transfer, transfer.search, pretrain=pretrain, spaces=spaces, seed=seed
                ).name
                among = tuple(spaces)
                yield Backbone(pretrain=pretrain, space=among[0], seed=seed, epoch=None, search=name, among=among)
        for space in dict.fromkeys((*measured, *retrained)):
            for seed, epoch in product(pretrain.seeds, transfer.checkpoints or (None,)):
                yield Backbone(pretrain=pretrain, space=sweep.labels[space], seed=seed, epoch=epoch)


def _features(sweep: ResolvedSweep, transfer: Transfer, backbone: Backbone, cell: Cell) -> Features | None:
    """The features that a cell reads; None if it reads images."""
    if not is_cached(transfer.protocol, cell.recipe):
        return None
    return Features(
        pretrain=backbone.pretrain,
        backbone=backbone.job,
        role=backbone.role,
        checkpoint=backbone.checkpoint,
        dataset=sweep.labels[transfer.target].dataset,
        recipe=cell.recipe,
    )


def _job(
    sweep: ResolvedSweep, transfer: Transfer, backbone: Backbone, *, cell: Cell, fraction: float | None, seed: int
) -> Draft:
    target, pretrain, recipe = sweep.labels[transfer.target], backbone.pretrain, cell.recipe
    inputs = {"index": f"index/{target.dataset}", "labels": f"labels/{target.name}"}
    parameters = {"model": model_parameters(pretrain.model), "recipe": recipe, "seed": seed}
    features = _features(sweep, transfer, backbone, cell)
    if features is not None:
        inputs |= features.inputs()
        parameters["recipe"] = _without_preprocessing(recipe)
    else:
        inputs[backbone.role] = backbone.job
        parameters |= backbone.checkpoint
    return Draft(
        kind=transfer.protocol,
        name=_name(transfer, backbone, cell=cell, fraction=fraction, seed=seed),
        readable=f"{short_name(pretrain.model.name)}-{readable_rule(target.space)}-seed{seed}",
        parameters={**parameters, **subset_parameters(_subset(transfer, fraction, seed))},
        inputs=inputs,
        facets={
            **backbone.facets,
            "transfer": transfer.name,
            "protocol": transfer.protocol.value,
            "target": transfer.target,
            "transfer_seed": seed,
            **_more_facets(transfer, backbone, cell=cell, fraction=fraction),
        },
    )


def _without_preprocessing(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a recipe without an optimiser: how its images were preprocessed follows from the keys of their features."""
    if has_optimizer(recipe):
        return recipe
    return {name: value for name, value in recipe.items() if name not in LOOK_FIELDS}


def _subset(transfer: Transfer, fraction: float | None, seed: int) -> Mapping[str, Any]:
    """The part of the training split that a job trains on; a fraction of 1 is all of it, whatever the seed."""
    if fraction is None or (fraction == 1 and not transfer.subset):
        return transfer.subset
    limits = {name: value for name, value in transfer.subset.items() if name != "seed"}
    share = {"fraction": fraction} if fraction < 1 else {}
    return {**limits, **share, "seed": seed if transfer.subset_seed is None else transfer.subset_seed}


def _name(transfer: Transfer, backbone: Backbone, *, cell: Cell, fraction: float | None, seed: int) -> str:
    parts = (
        transfer.protocol.value,
        transfer.name,
        backbone.path,
        "" if backbone.epoch is None else f"epoch{backbone.epoch}",
        "" if fraction is None else f"fraction{fraction:g}",
        cell.name,
        f"seed{seed}",
    )
    return "/".join(part for part in parts if part)


def _more_facets(transfer: Transfer, backbone: Backbone, *, cell: Cell, fraction: float | None) -> dict[str, str | int]:
    """Facets that not every transfer has."""
    is_retrained = RETRAIN in transfer.baselines and not backbone.search and backbone.space.name == transfer.target
    found = {
        "checkpoint": "" if backbone.epoch is None else f"epoch{backbone.epoch}",
        "fraction": "" if fraction is None else f"{fraction:g}",
        "cell": cell.name,
        "select_on": transfer.select_on,
        "baseline": RETRAIN if is_retrained else "",
    }
    return {name: text for name, text in found.items() if text}
