"""What a report consists of, before anything is rendered. Rates are fractions in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.report.statistics import PairedDifference, SeedPair, Summary

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The committed metrics of one transfer run."""

    job: str
    key: str
    seeds: SeedPair
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One label space of a table."""

    label_space: str
    series: str
    """The entry of the sweep's ``labels`` that it belongs to: one line of the curve."""
    granularity: int | None
    """Number of classes; None until the label space is committed."""
    num_expected: int
    """Seed pairs that the plan asks for."""
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

    @property
    def is_complete(self) -> bool:
        """Whether every planned run is in the summary."""
        return len(self.results) == self.num_expected


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

    @property
    def baseline_row(self) -> Row | None:
        """The baseline's row, if the plan has one and any of its runs is committed."""
        found = [row for row in self.rows if row.label_space == self.baseline and row.summary]
        return found[0] if found else None

    @property
    def ranked(self) -> tuple[Row, ...]:
        """Rows with results, best first; rows with all their seeds stand before rows that lack some."""
        rows = [(not row.is_complete, row.summary.mean, index) for index, row in enumerate(self.rows) if row.summary]
        return tuple(self.rows[index] for _, _, index in sorted(rows))

    @property
    def subsets(self) -> tuple[str, ...]:
        """Names of all subsets, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.subsets))


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
    version: int = field(default=REPORT_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)
