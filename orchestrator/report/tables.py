"""From a plan and the metrics of its committed runs to tables, a row per label space; pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from orchestrator.core.job_kinds import RESULT_KINDS, TRANSFER_KINDS, JobKind
from orchestrator.core.metrics import is_of_backbone, level_of
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.pairing import backbone_of, makes_backbone, pretraining_of, sharing_between
from orchestrator.planning.graph.plan import Job, Plan, Published
from orchestrator.report.comparisons import compared
from orchestrator.report.factors import FactorLayout
from orchestrator.report.inputs import Committed
from orchestrator.report.results import (
    Compute,
    Criterion,
    FactorTable,
    OnePass,
    Result,
    Row,
    Table,
    TablePlace,
    counted_seeds,
    values_by_seeds,
)
from orchestrator.report.statistics.intervals import bounds_of
from orchestrator.report.statistics.summaries import SeedPair, Summary, summarize, summarize_runs
from orchestrator.state.snapshot import JobView
from orchestrator.state.spending import ResourceUse, bill_of, uses_of

Cells = dict[str, list[Job]]
"""Jobs by grid cell, in plan order; without a grid the only cell is ``""``."""
Grouped = dict[TablePlace, dict[str, Cells]]
"""Cells by place and label space, in plan order."""
SELECT_METRIC = "select_error"
"""Error on the tenth of the training split that runs of a grid hold out, chosen by the samples' keys."""
VALIDATION_METRIC = "val_error"
"""Of the last epoch, whatever the report compares: the best epoch of a run is known only by looking at all of them."""
BEST_METRIC = "best_val_error"
"""The lowest of all evaluations of a run."""
_Address = tuple[str, str, str, str, str, str]
NAN, WITHOUT_METRIC, MISSING = "nan", "without metric", "missing"


def group_transfers(jobs: Iterable[Job], layout: FactorLayout) -> Grouped:
    """Every transfer job in its table, row and cell."""
    grouped: Grouped = {}
    for job in jobs:
        if job.kind in TRANSFER_KINDS:
            place = place_of(job)
            place, row = layout.address_of(job, place) or (place, str(job.facets["label_space"]))
            spaces = grouped.setdefault(place, {})
            cells = spaces.setdefault(row, {})
            cells.setdefault(str(job.facets.get("cell", "")), []).append(job)
    return grouped


def place_of(job: Job) -> TablePlace:
    """The table that a transfer job belongs to."""
    return TablePlace(
        transfer=str(job.facets["transfer"]),
        protocol=str(job.facets["protocol"]),
        target=str(job.facets["target"]),
        pretrain=str(job.facets.get("pretrain", "")),
        checkpoint=str(job.facets.get("checkpoint", "")),
        fraction=str(job.facets.get("fraction", "")),
    )


def seeds_of(job: Job) -> SeedPair:
    """What pairs a transfer with those of other label spaces; what has no seed of its own counts as seed 0."""
    return SeedPair(pretrain=int(job.facets.get("pretrain_seed", 0)), transfer=int(job.facets.get("transfer_seed", 0)))


def _origin(job: Job) -> str:
    """The backbone, artifact, file or published weights from which a pretraining starts; empty: random weights."""
    backbone, published = job.identity["inputs"].get("initial", ""), job.identity["parameters"].get("initial")
    return backbone or (json.dumps(published, sort_keys=True) if published else "")


def headline_places(places: Iterable[TablePlace]) -> frozenset[TablePlace]:
    """Of every transfer and pretrain block: the last checkpoint on the largest fraction of the labels."""
    by_transfer: dict[TablePlace, list[TablePlace]] = {}
    for place in places:
        by_transfer.setdefault(replace(place, checkpoint="", fraction=""), []).append(place)
    return frozenset(
        max(alike, key=lambda place: (facet_rank(place.fraction), facet_rank(place.checkpoint)))
        for alike in by_transfer.values()
    )


def facet_rank(value: str) -> float:
    """Order of checkpoints and fractions by the number in their name; no name stands for the end and for all."""
    if not value:
        return float("inf")
    number = re.search(r"\d+(\.\d+)?(e-?\d+)?", value)
    return float(number[0]) if number else -1.0


def backbones_of(job: Job, jobs: Mapping[str, Job]) -> set[str]:
    """Names of the jobs between a transfer and its backbone, the backbone included and the transfer not."""
    found: set[str] = set()
    for name in job.needs:
        need = jobs.get(name)
        if need is not None and need.kind.value in {"pretrain", "embed", "search"} and name not in found:
            found.add(name)
            if need.kind.value == "embed":
                found |= backbones_of(need, jobs)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was selected for a row."""

    cell: str
    """Of the grid; empty for what a search found."""
    criterion: Criterion


def select_cell(
    cells: Mapping[str, Sequence[Result]], expected: Mapping[str, int], *, wanted: Criterion | None = None
) -> Selection | None:
    """The cell with the lowest mean error over its runs; cells with all their runs go before cells that lack some.

    Of equal ones it is that of the lowest mean loss on the same samples, then the first.

    Runs that held out a part of their training split are compared on that; where none did, on ``VALIDATION_METRIC``,
    which favours the label space with the larger grid: whoever shows the result must say so (``Criterion``). ``wanted``
    is what the sweep asks for, where it says so. None as long as no run has a result.
    """
    held_out = {
        cell: error
        for cell, results in cells.items()
        if wanted is not Criterion.VALIDATION and (error := mean_metric(results, SELECT_METRIC)) is not None
    }
    criterion = Criterion.TRAIN_HOLDOUT if held_out else Criterion.VALIDATION
    errors = held_out or {
        cell: error for cell, results in cells.items() if (error := mean_metric(results, VALIDATION_METRIC)) is not None
    }
    if not errors:
        return None
    metric = f"{(SELECT_METRIC if held_out else VALIDATION_METRIC).removesuffix('error')}loss"

    def rank(cell: str) -> tuple[bool, float, float]:
        loss = mean_metric(cells[cell], metric)
        return (len(cells[cell]) < expected[cell], errors[cell], math.inf if loss is None else loss)

    return Selection(cell=min(errors, key=rank), criterion=criterion)


def mean_metric(results: Sequence[Result], metric: str) -> float | None:
    """Mean over the runs; None if there is no run, or one without a finite value."""
    values = [result.metrics.get(metric, math.nan) for result in results]
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else None


class PublishedIndex:
    """Looks entries up and remembers which of them nobody asked for. Of several for one row, the last one counts."""

    def __init__(self, entries: Sequence[Published]) -> None:
        self._entries = {_address(entry): entry for entry in entries}
        self._unused = dict(self._entries)
        self.repeated = tuple(entry for entry in entries if self._entries[_address(entry)] is not entry)

    @property
    def unused(self) -> tuple[Published, ...]:
        """Entries that name no row of this report."""
        return tuple(self._unused.values())

    def find(self, place: TablePlace, label_space: str, *, is_headline: bool, cell: str = "") -> Published | None:
        """The entry of a row; papers do not name the last checkpoint or all of the labels, so headlines need not."""
        places = [place]
        if is_headline:
            places += [replace(place, checkpoint=""), replace(place, checkpoint="", fraction="")]
        for candidate in places:
            wanted = (candidate.transfer, candidate.pretrain, label_space)
            address = (*wanted, candidate.checkpoint, candidate.fraction, cell)
            if address in self._entries:
                self._unused.pop(address, None)
                return self._entries[address]
        return None


def _address(entry: Published) -> _Address:
    place = (entry.transfer, entry.pretrain, entry.label_space)
    return (*place, entry.checkpoint, entry.fraction, entry.cell)


def with_backbone_metric(
    plan: Plan, committed: Mapping[str, Committed], views: Mapping[str, JobView]
) -> Mapping[str, Committed]:
    """What is committed, where the sweep reports what pretraining took: with that among the metrics of each run.

    Hours are those of the table's column of hours, of the backbone alone; images per second are those of its record.
    Records that hold a metric of this name themselves keep it, and runs of unknown time have none.
    """
    if not is_of_backbone(plan.metric):
        return committed
    found, jobs = dict(committed), plan.by_name()
    for job in plan.jobs:
        if job.kind not in RESULT_KINDS or job.name not in committed or plan.metric in committed[job.name].metrics:
            continue
        backbone = backbone_of(job, jobs)
        value = _took(plan.metric, backbone, committed, views) if backbone else None
        if value is not None:
            run = committed[job.name]
            found[job.name] = replace(run, metrics={**run.metrics, plan.metric: value})
    return found


def _took(metric: str, backbone: Job, committed: Mapping[str, Committed], views: Mapping[str, JobView]) -> float | None:
    """What making a backbone took: its pretraining, or the search that found it."""
    if metric == "images_per_s":
        return committed[backbone.name].images_per_s if backbone.name in committed else None
    seconds = seconds_of(backbone, committed, views)
    if seconds is None:
        return None
    uses = _uses(backbone, seconds, views)
    return math.fsum(use.gpu_s if metric == "gpu_hours" else use.cpu_s for use in uses) / 3600


def seconds_of(job: Job, committed: Mapping[str, Committed], views: Mapping[str, JobView]) -> float | None:
    """All attempts of this sweep; for a job that it reused, what its record says: see ``Committed.measured_s``."""
    view = views.get(job.name)
    if view is not None and view.ran_s > 0:
        return view.ran_s
    found = committed.get(job.name)
    return None if found is None else found.measured_s


def _uses(job: Job, seconds: float, views: Mapping[str, JobView]) -> Sequence[ResourceUse]:
    """By sort of node; what another sweep made, it made on nodes of which nothing is known here."""
    view = views.get(job.name)
    if view is not None and view.used:
        return view.used
    return uses_of((), replace(job.resources, accelerator=""), job.execution.num_workers, seconds)


class TableBuilder:
    """Builds the tables of one plan; ``views`` is what the journal says of its jobs, where anybody asked it."""

    def __init__(
        self,
        plan: Plan,
        committed: Mapping[str, Committed],
        views: Mapping[str, JobView],
        grouped: Grouped,
        *,
        layout: FactorLayout,
        prices: PriceTable | None = None,
    ) -> None:
        self._prices, self._layout = prices, layout
        self._plan, self._committed, self._views, self._grouped = plan, committed, views, grouped
        self._jobs = plan.by_name()
        self._pretrains = [job for job in plan.jobs if job.kind is JobKind.PRETRAIN]
        self._direct: dict[str, dict[str, list[Job]]] = {}
        """Pretrainings by label space and block."""
        for job in self._pretrains:
            blocks = self._direct.setdefault(str(job.facets.get("label_space", "")), {})
            blocks.setdefault(str(job.facets.get("pretrain", "")), []).append(job)
        self._labels = {job.name.partition("/")[2]: job for job in plan.jobs if job.kind is JobKind.LABELS}
        self._headlines = headline_places(grouped)
        self.published = PublishedIndex(plan.published)

    def build(self) -> tuple[Table, ...]:
        """One table per place, in the order of the plan."""
        return tuple(self._table(place, spaces) for place, spaces in self._grouped.items())

    def results(self, jobs: Sequence[Job]) -> tuple[Result, ...]:
        """The runs that are committed with a finite value of the plan's metric, each artifact once."""
        return tuple(
            Result(
                job=job.name,
                key=job.key,
                seeds=seeds_of(job),
                metrics=self._committed[job.name].metrics,
                cell=str(job.facets.get("cell", "")),
            )
            for job in _once(jobs)
            if self._why_absent(job) is None
        )

    def num_expected(self, jobs: Iterable[Job]) -> int:
        """Values of the plan's metric once all of these are committed."""
        return len({self._seeds_counted(job) for job in jobs})

    def _seeds_counted(self, job: Job) -> SeedPair:
        return counted_seeds(seeds_of(job), self._plan.metric)

    def absent(self) -> dict[str, str]:
        """Why backbones and transfers have no result, by job."""
        jobs = [job for job in self._plan.jobs if job.kind in RESULT_KINDS]
        return {job.name: why for job in jobs if (why := self._why_absent(job)) is not None}

    def backbones(self) -> dict[str, float]:
        """The metric of the committed backbones on their own labels."""
        there = (job.name for job in self._pretrains if self._why_absent(job) is None)
        return {name: self._committed[name].metrics[self._plan.metric] for name in there}

    def summarize(self, results: Sequence[Result]) -> Summary | None:
        """Summary of the plan's metric."""
        return self._summary(values_by_seeds(results, self._plan.metric)) if results else None

    def _summary(self, values: Mapping[SeedPair, float]) -> Summary:
        found, bounds = summarize_runs(values), bounds_of(self._plan.metric, values.values())
        return found if bounds is None else replace(found, low=bounds.clip(found.low), high=bounds.clip(found.high))

    def granularity(self, space: str, jobs: Sequence[Job]) -> int | None:
        """What the committed label space counted; what the planner knew before that."""
        labels = self._labels.get(space)
        if labels is not None and (found := self._committed.get(labels.name)) and "num_classes" in found.metrics:
            return int(found.metrics["num_classes"])
        planned = jobs[0].facets.get("granularity")
        return None if planned is None else int(planned)

    def series(self, space: str) -> str:
        """Levels and sizes of one entry share a line; single label spaces share one with others of their rule."""
        entry, slash, _ = space.partition("/")
        labels = self._labels.get(space)
        if slash or labels is None:
            return entry
        space_of = labels.identity["parameters"]["space"]
        return "rebalanced" if "rebalanced" in space_of.get("clusters", {}) else str(next(iter(space_of), entry))

    def _table(self, place: TablePlace, spaces: Mapping[str, Cells]) -> Table:
        cells = self._cells_of_rows(spaces)
        table = Table(
            transfer=place.transfer,
            protocol=place.protocol,
            target=place.target,
            metric=self._plan.metric,
            baseline=_baseline(spaces) or self._plan.baseline,
            num_val=self._num_val(spaces),
            has_one_draw=_has_one_draw(spaces.values()),
            has_one_origin=any(self._has_one_origin(cells) for cells in spaces.values()),
            has_one_search=any(self._has_one_search(cells) for cells in spaces.values()),
            rows=tuple(self._row(place, space, cells) for space, cells in spaces.items()),
            pretrain=place.pretrain,
            checkpoint=place.checkpoint,
            fraction=place.fraction,
            is_headline=place in self._headlines,
            one_pass=None if cells else self._one_pass(place, place.pretrain, self._direct.get(place.target, {})),
        )
        metric = self._plan.metric
        values = (found.metrics[metric] for row in table.rows for found in row.results)
        bounds = bounds_of(metric, values)
        if not cells:
            return compared(table, bounds)
        baseline = self._layout.baseline_row
        factors = FactorTable(
            **{field.name: getattr(table, field.name) for field in fields(table)},
            row_factors=self._layout.rows,
            row_values=tuple(tuple(cell[name] for name in self._layout.rows) for cell in cells.values()),
            one_passes=tuple(self._one_pass_of_row(place, row) for row in spaces.values()),
        )
        factors = replace(factors, baseline=baseline if baseline in cells else "")
        backbones = {row: pretraining_of(next(iter(some.values()))[0], self._jobs) for row, some in spaces.items()}

        def is_paired(one: str, other: str) -> bool:
            return bool(sharing_between(backbones[one], backbones[other], self._jobs))

        return compared(factors, bounds, is_paired)

    def _cells_of_rows(self, spaces: Mapping[str, Cells]) -> dict[str, Mapping[str, str]]:
        """The values of every row of a table of combinations; empty for a table of label spaces."""
        found = {}
        for row, cells in spaces.items():
            job = next(iter(cells.values()))[0]
            values = self._layout.values_of(job)
            if not self._layout.has_factor_rows or values is None:
                return {}
            found[row] = values
        return found

    def _row(self, place: TablePlace, space: str, cells: Cells) -> Row:
        found = {cell: self.results(jobs) for cell, jobs in cells.items()}
        selection = self._selection(found, cells)
        cell = selection.cell if selection else next(iter(cells))
        results, jobs = found[cell], cells[cell]
        return Row(
            label_space=space,
            series=self._series_of(space, jobs),
            granularity=self.granularity(str(jobs[0].facets["label_space"]), jobs),
            num_expected=self.num_expected(jobs),
            results=results,
            summary=self.summarize(results),
            subsets=_subsets(self._plan.metric, results),
            improvement=None,
            difference=None,
            absent=self._absent_of(jobs),
            compute=self._compute([job for some in cells.values() for job in some]),
            published=self.published_of(place, jobs[0], is_headline=place in self._headlines),
            cell=selection.cell if selection else "",
            selected_by=selection.criterion if selection else None,
            others=tuple(result for other, some in found.items() if other != cell for result in some),
        )

    def _selection(self, found: Mapping[str, Sequence[Result]], cells: Cells) -> Selection | None:
        """The cell of a grid, or that a search chose; None without a choice, and without a result."""
        wanted = wanted_criterion(next(iter(cells.values())))
        if "" not in cells:
            return select_cell(found, {cell: len(_once(jobs)) for cell, jobs in cells.items()}, wanted=wanted)
        if wanted is None or not found[""] or not self._is_searched(cells[""]):
            return None
        return Selection(cell="", criterion=wanted)

    def _is_searched(self, jobs: Sequence[Job]) -> bool:
        """Whether a search found the recipe of any of these transfers, or its backbone."""
        needs = {name for job in jobs for name in backbones_of(job, self._jobs)}
        return any(self._jobs[name].kind is JobKind.SEARCH for name in needs)

    def _series_of(self, row: str, jobs: Sequence[Job]) -> str:
        """Of a combination, all but the value of the first factor of the rows: what one line holds fixed."""
        values = self._layout.values_of(jobs[0]) if self._layout.has_factor_rows else None
        return self.series(row) if values is None else ", ".join(values[name] for name in self._layout.rows[1:])

    def published_of(self, place: TablePlace, job: Job, *, is_headline: bool, cell: str = "") -> Published | None:
        """Of a row, or of a cell of its grid: by the facets of its jobs, also where rows are combinations."""
        place = replace(place, pretrain=str(job.facets.get("pretrain", "")))
        return self.published.find(place, str(job.facets["label_space"]), is_headline=is_headline, cell=cell)

    def _num_val(self, spaces: Mapping[str, Cells]) -> int | None:
        """Validation samples of the runs of a table, where any of them says it; the fewest."""
        jobs = [job for cells in spaces.values() for some in cells.values() for job in some]
        found = (self._committed[job.name].num_val for job in jobs if job.name in self._committed)
        return min((num for num in found if num), default=None)

    def _has_one_origin(self, cells: Cells) -> bool:
        """Whether the pretrainings of a row have several seeds and start from one backbone."""
        jobs = (pretraining_of(job, self._jobs) for some in cells.values() for job in some)
        found = {job.key: _origin(job) for job in jobs if job}
        return len(found) > 1 and len(set(found.values())) == 1 and "" not in found.values()

    def _absent_of(self, jobs: Sequence[Job]) -> dict[str, int]:
        """How many values of a row are not there, by why."""
        there = values_by_seeds(self.results(jobs), self._plan.metric)
        reasons = {self._seeds_counted(job): why for job in _once(jobs) if (why := self._why_absent(job)) is not None}
        return dict(Counter(why for seeds, why in reasons.items() if seeds not in there))

    def _has_one_search(self, cells: Cells) -> bool:
        """Whether the transfers of a row have several seeds and the recipe that one search found."""
        jobs = [job for some in cells.values() for job in some]
        found = {name for job in jobs for name in job.needs if self._is_recipe_search(name)}
        return bool(found) and len({seeds_of(job) for job in jobs}) > 1

    def _is_recipe_search(self, name: str) -> bool:
        job = self._jobs.get(name)
        return job is not None and job.kind is JobKind.SEARCH and not makes_backbone(job)

    def _why_absent(self, job: Job) -> str | None:
        committed = self._committed.get(job.name)
        if committed is not None:
            value = committed.metrics.get(self._plan.metric)
            if value is None:
                return WITHOUT_METRIC
            return None if math.isfinite(value) else NAN
        view = self._views.get(job.name)
        return MISSING if view is None or view.state.is_done else view.state.value

    def _one_pass_of_row(self, place: TablePlace, row: Cells) -> OnePass | None:
        """Of a row that is a combination: other blocks have other values."""
        name = str(next(iter(row.values()))[0].facets.get("pretrain", ""))
        return self._one_pass(place, name, {name: self._direct.get(place.target, {}).get(name, [])})

    def _one_pass(self, place: TablePlace, name: str, blocks: Mapping[str, Sequence[Job]]) -> OnePass | None:
        """Backbones that were trained on the target itself: of this block, else of the first that has any; also those
        of other blocks that differ in their seeds alone.
        """
        jobs = [job for some in blocks.values() for job in some]
        own = blocks.get(name) or jobs
        alike = [job for job in (*own, *jobs) if _but_seed(job) == _but_seed(own[0])]
        block = list({job.key: job for job in reversed(alike)}.values())[::-1]  # those of this block first
        published = self.published.find(replace(place, pretrain=name), "", is_headline=place in self._headlines)
        if not block and published is None:
            return None
        values = values_by_seeds(self.results(block), self._plan.metric)
        return OnePass(
            pretrain=str(block[0].facets.get("pretrain", "")) if block else name,
            label_space=place.target,
            summary=self._summary(values) if values else None,
            published=published,
        )

    def _ran_s(self, job: Job) -> float:
        return self._views[job.name].ran_s if job.name in self._views else 0.0

    def _compute(self, transfers: Sequence[Job]) -> Compute | None:
        backbones = {name for job in transfers for name in backbones_of(job, self._jobs)}
        named = [*transfers, *(self._jobs[name] for name in sorted(backbones))]
        made: dict[str, Job] = {}
        for job in named:  # of several names for one artifact, the one that ran
            if job.key not in made or self._ran_s(job) > self._ran_s(made[job.key]):
                made[job.key] = job
        jobs = list(made.values())
        spent = [(job, seconds_of(job, self._committed, self._views)) for job in jobs]
        known = [(job, seconds) for job, seconds in spent if seconds is not None]
        unknown = sum(job.name in self._committed for job in jobs) - sum(
            job.name in self._committed for job, _ in known
        )
        if not known:
            return None
        uses = [use for job, seconds in known for use in _uses(job, seconds, self._views)]
        bill = bill_of(uses, self._prices)
        return Compute(
            gpu_hours=math.fsum(use.gpu_s for use in uses) / 3600,
            cpu_hours=math.fsum(use.cpu_s for use in uses) / 3600,
            num_unknown=unknown,
            cost=bill.amount if bill.is_known else None,
            is_cost_partial=bill.is_partial or unknown > 0,
            currency=self._prices.currency if self._prices else "",
        )


def _once(jobs: Iterable[Job]) -> list[Job]:
    """Jobs without those that only give an artifact of these seeds another name, as blocks with equal values do."""
    first: dict[tuple[SeedPair, str], Job] = {}
    for job in jobs:
        first.setdefault((seeds_of(job), job.key), job)
    return list(first.values())


def wanted_criterion(jobs: Sequence[Job]) -> Criterion | None:
    """By what the sweep asks to select cells; None where it does not say."""
    asked = {"train": Criterion.TRAIN_HOLDOUT, "val": Criterion.VALIDATION}
    return asked.get(str(jobs[0].facets.get("select_on", ""))) if jobs else None


def _has_one_draw(rows: Iterable[Cells]) -> bool:
    """Whether transfers of several seeds train on the same part of the training split, drawn by chance."""
    jobs = [job for cells in rows for some in cells.values() for job in some]
    subsets = [job.identity["parameters"].get("subset") or {} for job in jobs]
    is_drawn = all(subset.keys() & {"fraction", "max_per_class"} for subset in subsets)
    seeds = {subset.get("seed") for subset in subsets}
    return is_drawn and len(seeds) == 1 and len({job.facets.get("transfer_seed") for job in jobs}) > 1


def _baseline(spaces: Mapping[str, Cells]) -> str:
    """The row that this very transfer calls its retraining baseline; empty if it names none."""
    for space, cells in spaces.items():
        if any(job.facets.get("baseline") == "retrain" for jobs in cells.values() for job in jobs):
            return space
    return ""


def _subsets(metric: str, results: Sequence[Result]) -> dict[str, Summary]:
    """Summaries by subset name: ``hard`` for ``val_error_hard``; errors of levels have none."""
    if level_of(metric):
        return {}  # ``val_level_error_super_coarse`` is the error of another level than ``super``
    prefix = f"{metric}_"
    names = dict.fromkeys(name for result in results for name in sorted(result.metrics) if name.startswith(prefix))
    return {
        name.removeprefix(prefix): summarize(values)
        for name in names
        if (values := [value for result in results if math.isfinite(value := result.metrics.get(name, math.nan))])
    }


def _but_seed(job: Job) -> Mapping[str, Any]:
    """What a job's identity says but for its seed."""
    parameters = {name: value for name, value in job.identity["parameters"].items() if name != "seed"}
    return {**job.identity, "parameters": parameters}
