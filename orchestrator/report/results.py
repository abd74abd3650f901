"""What a report consists of, before anything is rendered. Rates are fractions in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.core.job_kinds import JobKind
from orchestrator.core.metrics import Better, better_of, is_of_backbone
from orchestrator.planning.graph.plan import Job, Published
from orchestrator.report.simulations import SimulationReport
from orchestrator.report.statistics.corrections import Family
from orchestrator.report.statistics.effects import Effect, VarianceTest
from orchestrator.report.statistics.summaries import PairedDifference, SeedPair, Summary
from orchestrator.sweepfile.values import LABELS_FACTOR

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure  # type: ignore[import-untyped]

REPORT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """One trial; ``value`` is the newest one of what was minimised."""

    number: int
    params: Mapping[str, Any]
    state: str
    epoch: float
    value: float | None
    hours: float
    """Of its attempts, as far as they told."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRisk:
    """How often completed trials changed places between a rung and the end."""

    rung: float
    num_stopped: int
    num_pairs: int
    num_swapped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What one search found. Hours are those of trials, each on ``gpus`` GPUs and ``cpus`` CPUs."""

    job: str
    over: str
    algorithm: str
    metric: str
    best: int
    trials: tuple[SearchTrial, ...]
    """The best ones first: those that completed, then those that came furthest."""
    epochs: float
    full_epochs: float
    spent_hours: float
    full_hours: float
    """What all of its trials would have taken to their ends, estimated by what they took per epoch."""
    saved_share: float
    risks: tuple[RungRisk, ...]
    gpus: float
    cpus: float

    @classmethod
    def of(cls, job: Job, found: Mapping[str, Any]) -> SearchReport:
        """From a search job and ``summary["search"]`` of its record."""
        saving, best, num_workers = found["saving"], found["best"]["trial"], max(1, job.execution.num_workers)
        trials = [
            SearchTrial(
                number=one["trial"],
                params=one["params"],
                state=one["state"],
                epoch=one["epoch"],
                value=one["value"],
                hours=one["spent_s"] / 3600,
                reason=one["reason"],
            )
            for one in found["trials"]
        ]
        return cls(
            job=job.name,
            over=found["over"],
            algorithm=found["algorithm"],
            metric=found["metric"],
            best=best,
            trials=tuple(sorted(trials, key=lambda trial: (trial.number != best, *_trial_rank(trial)))),
            epochs=saving["epochs"],
            full_epochs=saving["full_epochs"],
            spent_hours=saving["spent_s"] / 3600,
            full_hours=saving["full_s"] / 3600,
            saved_share=saving["share"],
            risks=tuple(RungRisk(**one) for one in found["risk"]),
            gpus=job.resources.gpus / num_workers,
            cpus=job.resources.cpus / num_workers,
        )


def build_searches(jobs: Iterable[Job], found: Mapping[str, Mapping[str, Any]]) -> tuple[SearchReport, ...]:
    """The searches of a plan that are committed; ``found`` is by job."""
    return tuple(
        SearchReport.of(job, found[job.name]) for job in jobs if job.kind is JobKind.SEARCH and found.get(job.name)
    )


def _trial_rank(trial: SearchTrial) -> tuple[bool, float, float, int]:
    is_done = trial.state == "completed"
    value = float("inf") if trial.value is None else trial.value
    return (not is_done, 0.0 if is_done else -trial.epoch, value, trial.number)


class Criterion(StrEnum):
    """By what one cell of a grid, or one trial of a search, was preferred to the others."""

    TRAIN_HOLDOUT = "select_error, on samples held out of the transfer's training split"
    VALIDATION = "selected on validation"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TablePlace:
    """Everything but the label space and the seeds that two runs must share to stand in one table."""

    transfer: str
    protocol: str
    target: str
    pretrain: str = ""
    """Name of the pretrain block; empty for the unnamed one."""
    checkpoint: str = ""
    """``epoch50``; empty for the final weights."""
    fraction: str = ""
    """Fraction of the target's labels as text; empty for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The committed metrics of one transfer run."""

    job: str
    key: str
    seeds: SeedPair
    metrics: Mapping[str, float]
    cell: str = ""
    """Cell of the grid that it is a run of."""


def counted_seeds(seeds: SeedPair, metric: str) -> SeedPair:
    """What tells values of a metric apart; of what its pretraining took, all transfers of a backbone say the same."""
    return replace(seeds, transfer=0) if is_of_backbone(metric) else seeds


def values_by_seeds(results: Iterable[Result], metric: str) -> dict[SeedPair, float]:
    """Values of a metric by ``counted_seeds``, which pair them."""
    values = {result.seeds: result.metrics[metric] for result in results}
    if not is_of_backbone(metric):
        return values
    groups: dict[SeedPair, list[float]] = {}
    for seeds, value in values.items():
        groups.setdefault(counted_seeds(seeds, metric), []).append(value)
    # They are equal, and a mean would round them, unless records have a metric of this name that is their own.
    return {seeds: some[0] if len(set(some)) == 1 else fmean(some) for seeds, some in groups.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a row cost: its backbones and all of its transfers, those of other cells of a grid included."""

    gpu_hours: float
    cpu_hours: float
    num_unknown: int = 0
    """Runs whose time nobody recorded; they are in neither sum."""
    cost: float | None = None
    """Money, at the prices that the nodes had, else of a table; None where no price is known."""
    is_cost_partial: bool = False
    """Whether hours without a known price, or runs of unknown time, are not in the cost: it was more."""
    currency: str = ""
    """Of the table of prices; labels of nodes say none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One label space of a table."""

    label_space: str
    series: str
    """The entry of the sweep's ``labels`` that it belongs to: one line of the curve."""
    granularity: int | None
    """Number of classes; None until the label space is committed."""
    num_expected: int
    """Seed pairs that the plan asks for; for the cost of pretraining, pretrain seeds."""
    results: tuple[Result, ...]
    """Of the runs that are committed with this metric, in the order of the plan."""
    summary: Summary | None
    """None while no run is committed."""
    subsets: Mapping[str, Summary]
    """By subset of the validation samples, where the runs distinguish any."""
    improvement: float | None
    """Relative to the baseline's mean, positive = lower error; None for the baseline itself."""
    difference: PairedDifference | None
    """To the baseline, paired by seeds; None for the baseline itself."""
    absent: Mapping[str, int] = field(default_factory=dict)
    """How many of the expected values are not there, by why: a job state (``failed``, ``running``, ...), ``missing``
    where the state is unknown, ``nan`` for a metric that is not a number, ``without metric``."""
    can_be_best: bool | None = None
    """Whether no other row is established to be lower: the confidence set of the best. None where nothing is tested."""
    compute: Compute | None = None
    published: Published | None = None
    cell: str = ""
    """Cell of the grid that was selected for this row; empty without a grid or a result."""
    selected_by: Criterion | None = None
    """Of the cell, or of what a search found; None without either, or a result."""
    others: tuple[Result, ...] = ()
    """Committed runs of the grid's other cells."""

    @property
    def num_values(self) -> int:
        """Those in the summary."""
        return self.summary.num_values if self.summary else 0

    @property
    def is_complete(self) -> bool:
        """Whether every value that is expected is in the summary."""
        return self.num_values == self.num_expected


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePass:
    """Pretraining on the target itself, without any transfer."""

    pretrain: str
    """The block whose backbones these are."""
    label_space: str
    summary: Summary | None
    published: Published | None = None

    @property
    def row(self) -> Row:
        """As a row of ``results.csv``."""
        return Row(
            label_space="one-pass",
            series="",
            granularity=None,
            num_expected=0,
            results=(),
            summary=self.summary,
            subsets={},
            improvement=None,
            difference=None,
            published=self.published,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two label spaces of one table; the difference is first minus second, corrected over all pairs of the table."""

    first: str
    second: str
    difference: PairedDifference


def best_first(rows: Sequence[Row], better: Better) -> tuple[Row, ...]:
    """Rows with results, best first; rows with all their seeds stand before rows that lack some."""
    places = [
        (not row.is_complete, better.sign * row.summary.mean, index) for index, row in enumerate(rows) if row.summary
    ]
    return tuple(rows[index] for _, _, index in sorted(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All label spaces under one transfer."""

    transfer: str
    protocol: str
    target: str
    metric: str
    baseline: str
    """Label space that the others are compared with; empty for none."""
    rows: tuple[Row, ...]
    pretrain: str = ""
    checkpoint: str = ""
    fraction: str = ""
    is_headline: bool = True
    """False for earlier checkpoints and smaller fractions: their place is in the ablations."""
    one_pass: OnePass | None = None
    num_val: int | None = None
    """Validation samples of every run, the fewest where runs differ; None where no record says it."""
    has_one_draw: bool = False
    """Whether all transfer seeds train on the same drawn samples of the training split."""
    has_one_origin: bool = False
    """Whether the pretrainings of all seeds of a row continue one backbone."""
    has_one_search: bool = False
    """Whether one search chose the recipe of the transfer for all seeds of a row."""
    comparisons: tuple[Comparison, ...] = ()
    """Every pair of rows with a run in common, in the order of the rows; the baseline is always the second."""
    family: Family | None = None
    """What the comparisons are corrected for; None before they are made."""

    @property
    def better(self) -> Better:
        """Which values of the metric are good."""
        return better_of(self.metric)

    @property
    def row_title(self) -> str:
        """What the names of the rows are."""
        return "pretrained on"

    @property
    def noun(self) -> str:
        """What a row is."""
        return "label space"

    @property
    def place(self) -> TablePlace:
        """What the table is about."""
        return TablePlace(
            transfer=self.transfer,
            protocol=self.protocol,
            target=self.target,
            pretrain=self.pretrain,
            checkpoint=self.checkpoint,
            fraction=self.fraction,
        )

    @property
    def baseline_row(self) -> Row | None:
        """The baseline's row, if the plan has one and any of its runs is committed."""
        found = [row for row in self.rows if row.label_space == self.baseline and row.summary]
        return found[0] if found else None

    @property
    def ranked(self) -> tuple[Row, ...]:
        """Rows with results, best first; rows with all their seeds stand before rows that lack some."""
        return best_first(self.rows, self.better)

    @property
    def subsets(self) -> tuple[str, ...]:
        """Names of all subsets, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.subsets))

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """By what the cells of the rows, or the trials of their searches, were selected; empty without either."""
        return tuple(dict.fromkeys(row.selected_by for row in self.rows if row.selected_by))


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorTable(Table):
    """A table whose rows are combinations of values; ``pretrain`` says the values of the other factors."""

    row_factors: tuple[str, ...]
    row_values: tuple[tuple[str, ...], ...]
    """By row, a value of each factor of the rows."""
    one_passes: tuple[OnePass | None, ...] = ()
    """By row, pretraining on the target itself with the row's values of all factors but that of label spaces."""

    @property
    def row_title(self) -> str:
        """What the names of the rows are."""
        return " + ".join(self.row_factors)

    @property
    def noun(self) -> str:
        """What a row is."""
        return "combination" if len(self.row_factors) > 1 else "value"

    @property
    def direct_trainings(self) -> Mapping[str, OnePass]:
        """``one_passes`` by what they are called: rows of several label spaces share one."""
        found = {}
        for values, one_pass in zip(self.row_values, self.one_passes, strict=False):
            if one_pass is not None:
                named = zip(self.row_factors, values, strict=True)
                found[" + ".join(value for factor, value in named if factor != LABELS_FACTOR)] = one_pass
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Why runs of two values are pairs: what they share besides the number of the seed."""

    factor: str
    value: str
    reference: str
    shared: str
    """Such as ``initial weights, order, crops``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectTable:
    """The effects of all factors under one transfer."""

    place: TablePlace
    """Without a block: its cells are of several."""
    metric: str
    factors: Mapping[str, tuple[str, ...]]
    """Those of several values, with the values in the order of the plan."""
    cells: tuple[tuple[str, ...], ...]
    """Those that have results, by a value of each factor."""
    means: tuple[float | None, ...]
    """By cell, over the runs of those seeds that all of these cells have; None for a cell that lacks one of them."""
    contrasts: tuple[Effect, ...]
    """Main effects, then interactions; corrected as one family."""
    tests: tuple[VarianceTest, ...]
    pairings: tuple[Pairing, ...]
    """One per main effect, in their order."""


class Facet(StrEnum):
    """What an ablation varies."""

    CELL = "cell"
    CHECKPOINT = "checkpoint"
    FRACTION = "fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationCell:
    """One label space under one value of the facet."""

    num_expected: int
    summary: Summary | None
    select_error: float | None = None
    """Mean error on what was held out of the training split to select cells; None where the runs have none."""
    is_selected: bool = False
    published: Published | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One label space under every value of the facet; ``cells`` in the order of ``Ablation.values``."""

    label_space: str
    series: str
    granularity: int | None
    cells: tuple[AblationCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A whole grid, all checkpoints or all fractions of one transfer, everything else being equal."""

    place: TablePlace
    facet: Facet
    metric: str
    values: tuple[str, ...]
    rows: tuple[AblationRow, ...]
    selected_by: tuple[Criterion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisRow:
    """One metric of the backbones of one label space at one checkpoint."""

    pretrain: str
    """Name of the block; empty for the unnamed one, and where backbones are compared with each other."""
    label_space: str
    """Empty where backbones are compared with each other."""
    checkpoint: str
    """``epoch5``; empty for the final weights."""
    metric: str
    num_expected: int
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCorrelation:
    """Spearman's coefficient of a metric and the error of a transfer, over backbones at equal checkpoints."""

    metric: str
    transfer: str
    coefficient: float
    num_backbones: int
    pretrain: str = ""
    """Of several blocks the one that all backbones are of; empty where it is over all blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisPicture:
    """What a figure is drawn from; numbers of matrices are means over seeds."""

    kind: str
    """``distances``, ``cka``, ``layers`` or ``embedding``."""
    title: str
    names: tuple[str, ...]
    """Of the rows of a matrix; of a network's layers; of the original classes of an embedding."""
    values: tuple[tuple[float | None, ...], ...]
    """Of a matrix; by line the shares of active units of each layer; of an embedding x, y, class and trained class (-1
    without one) of each sample."""
    num_seeds: int
    """Most runs that one number is a mean over."""
    lines: tuple[str, ...] = ()
    """Of ``layers``: what the backbones of each line are called."""
    trained_names: tuple[str, ...] = ()
    """Of ``embedding``: the classes that the backbone was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisReport:
    """All that one analysis found so far."""

    name: str
    rows: tuple[AnalysisRow, ...]
    correlations: tuple[RankCorrelation, ...]
    pictures: tuple[AnalysisPicture, ...]


OPTIONAL_FIELDS = ("simulations", "analyses")
"""Of ``Report``: left out where they are empty, so that the reports of other sweeps are as they were before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of a sweep so far; computed from its plan and committed records alone."""

    sweep: str
    metric: str
    baseline: str
    tables: tuple[Table, ...]
    missing: tuple[str, ...] = ()
    """Jobs of the report that are not committed."""
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why backbones and transfers have no result, by job: the values of ``Row.absent``."""
    backbones: Mapping[str, float] = field(default_factory=dict)
    """The metric of the backbones on their own labels, by job; comparable only between those of one label space."""
    ablations: tuple[Ablation, ...] = ()
    searches: tuple[SearchReport, ...] = ()
    """Those that are committed."""
    simulations: tuple[SimulationReport, ...] = ()
    version: int = field(default=REPORT_VERSION)
    analyses: tuple[AnalysisReport, ...] = ()

    def __repr__(self) -> str:
        missing = f", {len(self.missing)} results missing" if self.missing else ""
        return f"<Report of sweep {self.sweep}: {self.metric} in {len(self.tables)} tables{missing}>"

    def to_frame(self) -> DataFrame:
        """One row per table and label space, as ``results.csv``; rates are fractions in [0, 1]."""
        from orchestrator.report.render.notebook import report_frame

        return report_frame(self)

    def plot(self) -> Figure:
        """Error against granularity, a panel per transfer: a plotly figure, which notebooks show interactively."""
        from orchestrator.report.render.notebook import report_figure

        return report_figure(self)

    def _repr_html_(self) -> str:
        from orchestrator.report.render.notebook import report_html

        return report_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """What notebooks show: text where there is no HTML, such as in a terminal."""
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    @property
    def headlines(self) -> tuple[Table, ...]:
        """The tables of final weights and all labels."""
        return tuple(table for table in self.tables if table.is_headline)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form; fields that were added for some sweeps alone are left out of the others' reports."""
        document = asdict(self)
        for name in OPTIONAL_FIELDS:
            if not document[name]:
                del document[name]
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorReport(Report):
    """The answer of a sweep that compares more than label spaces."""

    factors: Mapping[str, tuple[str, ...]]
    """Those of several values, with the values in the order of the plan."""
    effects: tuple[EffectTable, ...]
    """One per transfer of final weights on all labels."""
    cells: tuple[tuple[Mapping[str, str], ...], ...]
    """By table and row, the value of each of ``factors`` by the name of its column (``factor.optimizer``); empty for
    rows that are no part of the design."""
