"""The jobs that measure features of backbones: of a single one, or of several compared with each other.

They read the same ``embed`` jobs, by key, as cached probes of that data set. Measures of layers also pass some samples
through the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.features import Features
from orchestrator.planning.graph.pretraining import Draft
from orchestrator.planning.graph.transfers import Backbone
from orchestrator.sweepfile.values import AnalysisPlan, ResolvedSweep

_FACTORS = ("pretrain", "labels", "seeds", "checkpoints")


def analysis_jobs(sweep: ResolvedSweep, analysis: AnalysisPlan) -> Iterator[Draft]:
    """The jobs of an analysis, each after the features that it reads.

    The backbones and label spaces that it needs must be planned already.
    """
    backbones = tuple(_backbones(sweep, analysis))
    if analysis.between:
        for group in _groups(analysis, backbones):
            yield from _similarity(analysis, group)
        return
    for backbone in backbones:
        features = _features(analysis, backbone)
        yield from features.jobs()
        yield _draft(analysis, backbone, features)


def _backbones(sweep: ResolvedSweep, analysis: AnalysisPlan) -> Iterator[Backbone]:
    for block in analysis.pretrains:
        pretrain = sweep.pretrain(block)
        for space in analysis.spaces(pretrain):
            for seed, epoch in product(pretrain.seeds, analysis.checkpoints or (None,)):
                yield Backbone(pretrain=pretrain, space=sweep.labels[space], seed=seed, epoch=epoch)


def _features(analysis: AnalysisPlan, backbone: Backbone) -> Features:
    return Features(
        pretrain=backbone.pretrain,
        backbone=backbone.job,
        checkpoint=backbone.checkpoint,
        dataset=analysis.dataset or backbone.space.dataset,
        recipe={},
        splits=analysis.splits,
    )


def _draft(analysis: AnalysisPlan, backbone: Backbone, features: Features) -> Draft:
    inputs = {"index": f"index/{features.dataset}", **features.inputs()}
    if features.dataset == backbone.space.dataset:
        inputs["labels"] = f"labels/{backbone.space.name}"
    if analysis.of:
        inputs["classes"] = f"labels/{analysis.of}"
    parameters: dict[str, Any] = {"split": analysis.split, "measures": analysis.measures}
    if analysis.runs_backbone:
        inputs["backbone"] = features.backbone
        parameters |= features.network()
    return Draft(
        kind=JobKind.ANALYZE,
        name="/".join(filter(None, ("analyze", analysis.name, backbone.path, _epoch(backbone)))),
        readable=f"{backbone.pretrain.model.name}-{analysis.split}",
        parameters=parameters,
        inputs=inputs,
        facets={**backbone.facets, **_facets(analysis, features.dataset, _epoch(backbone))},
    )


_FACETS_OF_FACTORS: Final = {"pretrain": "pretrain", "label_space": "labels", "pretrain_seed": "seeds"}
"""The common facets of all backbones of a comparison, without those by which they are compared."""


def _similarity(analysis: AnalysisPlan, backbones: Sequence[Backbone]) -> Iterator[Draft]:
    found = [_features(analysis, backbone) for backbone in backbones]
    for features in found:
        yield from features.jobs()
    roles = {f"features{number}": features.inputs()[analysis.split] for number, features in enumerate(found)}
    first = backbones[0]
    fixed = {
        "pretrain": first.pretrain.name,
        "labels": first.space.name,
        "seeds": f"seed{first.seed}",
        "checkpoints": _epoch(first),
    }
    path = (fixed[factor] for factor in _FACTORS if factor not in analysis.between)
    yield Draft(
        kind=JobKind.ANALYZE,
        name="/".join(filter(None, ("analyze", analysis.name, *path))),
        readable=f"likeness{len(backbones)}-{analysis.split}",
        parameters={"split": analysis.split, "measures": analysis.measures},
        inputs={"index": f"index/{found[0].dataset}", **roles},
        facets={
            **{
                facet: first.facets[facet]
                for facet, factor in _FACETS_OF_FACTORS.items()
                if factor not in analysis.between and facet in first.facets
            },
            **_facets(analysis, found[0].dataset, "" if "checkpoints" in analysis.between else fixed["checkpoints"]),
        },
    )


def _groups(analysis: AnalysisPlan, backbones: Sequence[Backbone]) -> Iterator[tuple[Backbone, ...]]:
    """Groups of at least two backbones that differ only in the facet by which they are compared."""
    groups: dict[tuple[object, ...], list[Backbone]] = {}
    for backbone in backbones:
        factors = {
            "pretrain": backbone.pretrain.name,
            "labels": backbone.space.name,
            "seeds": backbone.seed,
            "checkpoints": backbone.epoch,
        }
        key = tuple(value for factor, value in factors.items() if factor not in analysis.between)
        groups.setdefault(key, []).append(backbone)
    yield from (tuple(group) for group in groups.values() if len(group) > 1)


def _epoch(backbone: Backbone) -> str:
    return "" if backbone.epoch is None else f"epoch{backbone.epoch}"


def _facets(analysis: AnalysisPlan, dataset: str, checkpoint: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {"analysis": analysis.name, "dataset": dataset}
    return {**found, "checkpoint": checkpoint} if checkpoint else found
