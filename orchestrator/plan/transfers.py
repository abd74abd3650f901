"""The jobs that measure backbones on targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from orchestrator.plan.draft import Draft, model_parameters, pretrain_facets, pretrain_job, subset_parameters
from orchestrator.plan.features import Features, is_cached
from orchestrator.plan.readable import readable_rule
from orchestrator.spec.model import Cell, LabelSpace, Pretrain, Sweep, Transfer
from orchestrator.spec.schema_probe import LOOK_FIELDS

RETRAIN = "retrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backbone:
    """What is measured; ``epoch`` is a kept one of its pretraining, None its end."""

    pretrain: Pretrain
    space: LabelSpace
    seed: int
    epoch: int | None

    @property
    def job(self) -> str:
        """Name of the job that pretrains it."""
        return pretrain_job(self.pretrain.name, self.space.name, self.seed)

    @property
    def checkpoint(self) -> dict[str, int]:
        """Of the identity: nothing where the final weights are meant, however they are named."""
        is_final = self.epoch is None or self.epoch == self.pretrain.recipe["epochs"]
        return {} if is_final or self.epoch is None else {"checkpoint": self.epoch}


def transfer_jobs(sweep: Sweep, transfer: Transfer) -> Iterator[Draft]:
    """The jobs of a transfer, and before them the features that they read.

    The pretrainings and label spaces that they need must be planned already.
    """
    known: set[str] = set()
    for backbone in _backbones(sweep, transfer):
        for cell in transfer.cells:
            features = _features(sweep, transfer, backbone, cell)
            for draft in features.jobs() if features is not None else ():
                if draft.name not in known:
                    known.add(draft.name)
                    yield draft
        for fraction, cell, seed in product(transfer.fractions or (None,), transfer.cells, transfer.seeds):
            yield _job(sweep, transfer, backbone, cell=cell, fraction=fraction, seed=seed)


def _backbones(sweep: Sweep, transfer: Transfer) -> Iterator[_Backbone]:
    for block in transfer.pretrains:
        pretrain = sweep.pretrain(block)
        retrained = (transfer.target,) if RETRAIN in transfer.baselines else ()
        measured = filter(transfer.measures, pretrain.labels)
        for space in dict.fromkeys((*measured, *retrained)):
            for seed, epoch in product(pretrain.seeds, transfer.checkpoints or (None,)):
                yield _Backbone(pretrain=pretrain, space=sweep.labels[space], seed=seed, epoch=epoch)


def _features(sweep: Sweep, transfer: Transfer, backbone: _Backbone, cell: Cell) -> Features | None:
    """What a cell reads; None if it reads images."""
    if not is_cached(transfer.protocol, cell.recipe):
        return None
    return Features(
        pretrain=backbone.pretrain,
        backbone=backbone.job,
        checkpoint=backbone.checkpoint,
        dataset=sweep.labels[transfer.target].dataset,
        recipe=cell.recipe,
    )


def _job(
    sweep: Sweep, transfer: Transfer, backbone: _Backbone, *, cell: Cell, fraction: float | None, seed: int
) -> Draft:
    target, pretrain, recipe = sweep.labels[transfer.target], backbone.pretrain, cell.recipe
    inputs = {"index": f"index/{target.dataset}", "labels": f"labels/{target.name}"}
    parameters = {"model": model_parameters(pretrain.model), "recipe": recipe, "seed": seed}
    features = _features(sweep, transfer, backbone, cell)
    if features is not None:
        inputs |= features.inputs()
        parameters["recipe"] = _without_look(recipe)
    else:
        inputs["backbone"] = backbone.job
        parameters |= backbone.checkpoint
    return Draft(
        kind=transfer.protocol,
        name=_name(transfer, backbone, cell=cell, fraction=fraction, seed=seed),
        readable=f"{pretrain.model.name}-{readable_rule(target.space)}-seed{seed}",
        parameters={**parameters, **subset_parameters(_subset(transfer, fraction, seed))},
        inputs=inputs,
        facets={
            **pretrain_facets(pretrain, backbone.space, backbone.seed),
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
        backbone.job.partition("/")[2],
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
