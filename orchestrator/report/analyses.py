"""What analyses found, by label space and checkpoint over seeds, together with the errors of transfers; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.pairing import pretraining_of
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.inputs import Committed
from orchestrator.report.results import AnalysisPicture, AnalysisReport, AnalysisRow, RankCorrelation, Table
from orchestrator.report.statistics.intervals import RATE, MetricRange, bounds_of
from orchestrator.report.statistics.summaries import SeedPair, spearman, summarize_runs

_MIN_BACKBONES = 4
"""Of a rank correlation: fewer have hardly any orders."""
_SIMILARITY = "cka"
_SHARES = frozenset({"active_share", "dead_share", "layers_active_share", "purity_units"})
_NEVER_NEGATIVE = re.compile(r"(original_)?(nc1|nc2|cdnv)|msdr|distance_.+|clp_std|rankme|stable_rank")

_Backbone = tuple[str, str, int, int | None]
"""Block, label space, pretraining seed, and epoch; None for the last one."""


def build_analyses(
    plan: Plan, committed: Mapping[str, Committed], tables: Sequence[Table]
) -> tuple[AnalysisReport, ...]:
    """The analyses of a plan in its order, those without a result left out."""
    grouped: dict[str, list[Job]] = {}
    for job in plan.jobs:
        if job.kind is JobKind.ANALYZE:
            grouped.setdefault(str(job.facets["analysis"]), []).append(job)
    found = {name: [job for job in jobs if job.name in committed] for name, jobs in grouped.items()}
    errors = _errors(plan, tables) if found else {}
    return tuple(
        AnalysisReport(
            name=name,
            rows=tuple(_rows(grouped[name], committed)),
            correlations=tuple(_correlations(plan, jobs, committed, errors)),
            pictures=(
                *_matrices(jobs, committed),
                *_similarity(plan, jobs, committed),
                *_layers(jobs, committed),
                *_embeddings(jobs, committed),
            ),
        )
        for name, jobs in found.items()
        if jobs
    )


def _rows(jobs: Iterable[Job], committed: Mapping[str, Committed]) -> Iterator[AnalysisRow]:
    places: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        places.setdefault(_place(job), []).append(job)
    for (pretrain, space, checkpoint), some in places.items():
        there = [job for job in some if job.name in committed]
        for metric in dict.fromkeys(name for job in there for name in committed[job.name].metrics):
            values = {
                SeedPair(pretrain=int(job.facets.get("pretrain_seed", 0)), transfer=0): value
                for job in there
                if math.isfinite(value := committed[job.name].metrics.get(metric, math.nan))
            }
            if values:
                summary, bounds = summarize_runs(values), _range(metric, values.values())
                if bounds is not None:
                    summary = replace(summary, low=bounds.clip(summary.low), high=bounds.clip(summary.high))
                yield AnalysisRow(
                    pretrain=pretrain,
                    label_space=space,
                    checkpoint=checkpoint,
                    metric=metric,
                    num_expected=len(some),
                    summary=summary,
                )


def _range(metric: str, values: Iterable[float]) -> MetricRange | None:
    """What a metric can be, so that the interval of a mean over few seeds does not end elsewhere."""
    if metric in _SHARES:
        return RATE
    is_above = _NEVER_NEGATIVE.fullmatch(metric) is not None and min(values) >= 0
    return MetricRange(low=0.0, high=math.inf) if is_above else bounds_of(metric, values)


def _place(job: Job) -> tuple[str, str, str]:
    pretrain, space, checkpoint = (str(job.facets.get(name, "")) for name in ("pretrain", "label_space", "checkpoint"))
    return pretrain, space, checkpoint


# ------------------------------------------------------------------------------------------------- beside the transfers


def _errors(plan: Plan, tables: Sequence[Table]) -> dict[str, dict[_Backbone, float]]:
    """By transfer: the error of each pretrained backbone, a mean over transfer seeds, with all of the labels."""
    lasts, jobs, found = _last_epochs(plan), plan.by_name(), dict[str, dict[_Backbone, list[float]]]()
    for table in tables:
        if table.fraction and float(table.fraction) < 1:
            continue
        for result in (result for row in table.rows for result in row.results):
            job = jobs[result.job]
            if pretraining_of(job, jobs) is None:
                continue  # what a search found has the facets of the backbones that are analysed, and is none of them
            # By the run and not by the names of table and row: with factors these are combinations of values.
            backbone = _backbone(job, lasts)
            if backbone is not None:
                of_transfer = found.setdefault(table.transfer, {})
                of_transfer.setdefault(backbone, []).append(result.metrics[table.metric])
    return {
        transfer: {backbone: math.fsum(some) / len(some) for backbone, some in values.items()}
        for transfer, values in found.items()
    }


def _last_epochs(plan: Plan) -> dict[tuple[str, str], float]:
    """By block and label space."""
    epochs = {}
    for job in plan.jobs:
        if job.kind is JobKind.PRETRAIN:
            recipe = job.identity["parameters"].get("recipe", {})
            epochs[str(job.facets.get("pretrain", "")), str(job.facets["label_space"])] = recipe.get("epochs", math.nan)
    return epochs


def _epoch(checkpoint: str, last: float | None) -> int | None:
    """The number in ``epoch5``; None for the last epoch, however it is named."""
    if not checkpoint or float(checkpoint.removeprefix("epoch")) == last:
        return None
    return int(checkpoint.removeprefix("epoch"))


def _backbone(job: Job, lasts: Mapping[tuple[str, str], float]) -> _Backbone | None:
    """The one that a transfer or an analysis is about; None for one that is about several."""
    if not {"label_space", "pretrain_seed"} <= job.facets.keys():
        return None
    pretrain, space, checkpoint = _place(job)
    return pretrain, space, int(job.facets["pretrain_seed"]), _epoch(checkpoint, lasts.get((pretrain, space)))


def _correlations(
    plan: Plan, jobs: Sequence[Job], committed: Mapping[str, Committed], errors: Mapping[str, Mapping[_Backbone, float]]
) -> Iterator[RankCorrelation]:
    """Over all backbones, then over those of each block where there are several."""
    lasts = _last_epochs(plan)
    metrics: dict[str, dict[_Backbone, float]] = {}
    for job in jobs:
        backbone = _backbone(job, lasts) if _SIMILARITY not in committed[job.name].pictures else None
        if backbone is None:
            continue
        for metric, value in committed[job.name].metrics.items():
            if math.isfinite(value):
                metrics.setdefault(metric, {})[backbone] = value
    blocks = dict.fromkeys(backbone[0] for values in metrics.values() for backbone in values)
    for transfer, of_transfer in errors.items():
        for metric, values in sorted(metrics.items()):
            for block in (None, *blocks) if len(blocks) > 1 else (None,):
                common = [one for one in values if one in of_transfer and block in {None, one[0]}]
                coefficient = spearman([values[one] for one in common], [of_transfer[one] for one in common])
                if len(common) >= _MIN_BACKBONES and coefficient is not None:
                    yield RankCorrelation(
                        metric=metric,
                        transfer=transfer,
                        coefficient=coefficient,
                        num_backbones=len(common),
                        pretrain=block or "",
                    )


# -------------------------------------------------------------------------------------------------------------- figures

_Matrix = Sequence[Sequence[float | None]]


def _matrices(jobs: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[AnalysisPicture]:
    """Distance matrices, by label space and checkpoint; of seeds whose classes are the same ones in the same order."""
    places: dict[tuple[str, str, str], list[Mapping[str, object]]] = {}
    for job in jobs:
        if (picture := committed[job.name].pictures.get("distances")) is not None:
            places.setdefault(_place(job), []).append(picture)
    for place, pictures in places.items():
        alike = [picture for picture in pictures if picture["names"] == pictures[0]["names"]]
        yield AnalysisPicture(
            kind="distances",
            title=_title(*place),
            names=_texts(pictures[0]["names"]),
            values=_mean([_numbers(picture["values"]) for picture in alike]),
            num_seeds=len(alike),
        )


def _similarity(plan: Plan, jobs: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[AnalysisPicture]:
    """Similarity matrices; means over the jobs of one place that compare backbones of the same names."""
    by_key = {job.key: job for job in plan.jobs}
    found: dict[tuple[tuple[str, str, str], tuple[str, ...]], list[_Matrix]] = {}
    for job in jobs:
        picture = committed[job.name].pictures.get(_SIMILARITY)
        if picture is not None:
            names = tuple(_compared(job, by_key))
            found.setdefault((_place(job), names), []).append(_numbers(picture["values"]))
    for ((pretrain, space, checkpoint), names), matrices in found.items():
        yield AnalysisPicture(
            kind=_SIMILARITY,
            title=_title(pretrain, space, checkpoint or "final weights"),
            names=names,
            values=_mean(matrices),
            num_seeds=len(matrices),
        )


def _compared(job: Job, by_key: Mapping[str, Job]) -> list[str]:
    """What the backbones that a job compares are called: by that in which they differ."""
    inputs = job.identity["inputs"]
    roles = sorted((role for role in inputs if role.startswith("features")), key=lambda role: int(role[8:]))
    parts = []
    for role in roles:
        embed = by_key[inputs[role]]
        backbone = by_key[embed.identity["inputs"]["backbone"]]
        epoch = embed.identity["parameters"].get("checkpoint")
        facets = backbone.facets
        parts.append(
            (
                str(facets.get("pretrain", "")),
                str(facets["label_space"]),
                f"seed{facets['pretrain_seed']}",
                "" if epoch is None else f"epoch{epoch}",
            )
        )
    differ = [place for place in range(4) if len({part[place] for part in parts}) > 1] or [1]
    return [" ".join(part[place] or "final" for place in differ) for part in parts]


def _layers(jobs: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[AnalysisPicture]:
    """Shares of active units by layer, for each checkpoint and architecture: a line for each label space."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, list[Sequence[float]]]] = {}
    for job in jobs:
        if (picture := committed[job.name].pictures.get("layers")) is not None:
            pretrain, space, checkpoint = _place(job)
            lines = found.setdefault((checkpoint, _texts(picture["names"])), {})
            lines.setdefault(_title(pretrain, space, ""), []).append(picture["values"])
    for (checkpoint, names), lines in found.items():
        yield AnalysisPicture(
            kind="layers",
            title=checkpoint or "final weights",
            names=names,
            values=tuple(
                tuple(math.fsum(some) / len(some) for some in zip(*seeds, strict=True)) for seeds in lines.values()
            ),
            num_seeds=max(len(seeds) for seeds in lines.values()),
            lines=tuple(lines),
        )


_METHODS = {"tsne": "t-SNE", "pca": "PCA"}


def _embeddings(jobs: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[AnalysisPicture]:
    """Of the first seed of each label space and checkpoint: pictures of several seeds cannot be averaged."""
    shown: set[tuple[str, str, str]] = set()
    for job in jobs:
        picture, place = committed[job.name].pictures.get("embedding"), _place(job)
        if picture is None or place in shown:
            continue
        shown.add(place)
        trained = picture["trained"] or [-1] * len(picture["points"])
        points = zip(picture["points"], picture["classes"], trained, strict=True)
        yield AnalysisPicture(
            kind="embedding",
            title=f"{_METHODS.get(str(picture['method']), picture['method'])}: {_title(*place)}",
            names=_texts(picture["class_names"]),
            values=tuple((x, y, number, own) for (x, y), number, own in points),
            num_seeds=1,
            trained_names=_texts(picture["trained_names"]),
        )


def _title(pretrain: str, space: str, checkpoint: str) -> str:
    return ", ".join(filter(None, (pretrain, space, checkpoint)))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _numbers(value: object) -> _Matrix:
    return value if isinstance(value, list) else []


def _mean(matrices: Sequence[_Matrix]) -> tuple[tuple[float | None, ...], ...]:
    """Entry by entry; None where a matrix has no number."""
    rows = zip(*matrices, strict=True)
    return tuple(
        tuple(
            None if any(value is None for value in some) else math.fsum(filter(None, some)) / len(some)
            for some in zip(*row, strict=True)
        )
        for row in rows
    )
