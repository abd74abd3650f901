"""The jobs that measure backbones on targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import Draft, model_parameters, pretrain_job, subset_parameters
from orchestrator.planning.graph.features import Features, is_cached
from orchestrator.planning.graph.readable import readable_rule
from orchestrator.planning.graph.searches import backbone_search, best_facets, recipe_search, searched_spaces
from orchestrator.sweepfile.recipe import LOOK_FIELDS
from orchestrator.sweepfile.values import Cell, LabelSpace, Pretrain, ResolvedSweep, Transfer

RETRAIN = "retrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backbone:
    """What is measured; ``epoch`` is a kept one of its pretraining, None its end."""

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
        """What that job is to those that read the backbone."""
        return "search" if self.search else "backbone"

    @property
    def path(self) -> str:
        """Of the names of jobs that measure it."""
        space = "best" if len(self.among) > 1 else self.space.name
        return pretrain_job(self.pretrain.name, space, self.seed).partition("/")[2]

    @property
    def facets(self) -> dict[str, str | int]:
        """What it is compared by."""
        return best_facets(self.pretrain, self.among or (self.space,), self.seed)

    @property
    def checkpoint(self) -> dict[str, int]:
        """Of the identity: nothing where the final weights are meant, however they are named."""
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
    sweep: ResolvedSweep, transfer: Transfer, backbone: _Backbone, *, cell: Cell, fraction: float | None
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


def _backbones(sweep: ResolvedSweep, transfer: Transfer) -> Iterator[_Backbone]:
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
                yield _Backbone(pretrain=pretrain, space=among[0], seed=seed, epoch=None, search=name, among=among)
        for space in dict.fromkeys((*measured, *retrained)):
            for seed, epoch in product(pretrain.seeds, transfer.checkpoints or (None,)):
                yield _Backbone(pretrain=pretrain, space=sweep.labels[space], seed=seed, epoch=epoch)


def _features(sweep: ResolvedSweep, transfer: Transfer, backbone: _Backbone, cell: Cell) -> Features | None:
    """What a cell reads; None if it reads images."""
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
    sweep: ResolvedSweep, transfer: Transfer, backbone: _Backbone, *, cell: Cell, fraction: float | None, seed: int
) -> Draft:
    target, pretrain, recipe = sweep.labels[transfer.target], backbone.pretrain, cell.recipe
    inputs = {"index": f"index/{target.dataset}", "labels": f"labels/{target.name}"}
    parameters = {"model": model_parameters(pretrain.model), "recipe": recipe, "seed": seed}
    features = _features(sweep, transfer, backbone, cell)
    if features is not None:
        inputs |= features.inputs()
        parameters["recipe"] = _without_look(recipe)
    else:
        inputs[backbone.role] = backbone.job
        parameters |= backbone.checkpoint
    return Draft(
        kind=transfer.protocol,
        name=_name(transfer, backbone, cell=cell, fraction=fraction, seed=seed),
        readable=f"{pretrain.model.name}-{readable_rule(target.space)}-seed{seed}",
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


def _without_look(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a recipe without an optimiser: what its features look like follows from their keys."""
    if "lr" in recipe:
        return recipe
    return {name: value for name, value in recipe.items() if name not in LOOK_FIELDS}


def _subset(transfer: Transfer, fraction: float | None, seed: int) -> Mapping[str, Any]:
    """The part of the training split that a job trains on; a fraction of 1 is all of it, whatever the seed."""
    if fraction is None or (fraction == 1 and not transfer.subset):
        return transfer.subset
    limits = {name: value for name, value in transfer.subset.items() if name != "seed"}
    share = {"fraction": fraction} if fraction < 1 else {}
    return {**limits, **share, "seed": seed if transfer.subset_seed is None else transfer.subset_seed}


def _name(transfer: Transfer, backbone: _Backbone, *, cell: Cell, fraction: float | None, seed: int) -> str:
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


def _more_facets(
    transfer: Transfer, backbone: _Backbone, *, cell: Cell, fraction: float | None
) -> dict[str, str | int]:
    """Those of what not every transfer has."""
    is_retrained = RETRAIN in transfer.baselines and backbone.space.name == transfer.target
    found = {
        "checkpoint": "" if backbone.epoch is None else f"epoch{backbone.epoch}",
        "fraction": "" if fraction is None else f"{fraction:g}",
        "cell": cell.name,
        "select_on": transfer.select_on,
        "baseline": RETRAIN if is_retrained else "",
    }
    return {name: text for name, text in found.items() if text}
