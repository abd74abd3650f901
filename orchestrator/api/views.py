"""Plans, states and results as pandas data frames, and as HTML for notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from orchestrator.core.job_kinds import RESULT_KINDS
from orchestrator.planning.graph.design import PlanDesign
from orchestrator.planning.graph.diff import PlanDiff, diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, group_jobs
from orchestrator.services.artifact_lookup import ArtifactSummary
from orchestrator.services.preview import Preview, preview_lines
from orchestrator.services.status import failure_lines
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> DataFrame:
    """Rows as a frame that has these columns first, also when there are no rows."""
    from pandas import DataFrame

    found = DataFrame(list(rows))
    more = [column for column in found.columns if column not in columns]
    return found.reindex(columns=[*columns, *more])


def planned_jobs(preview: Preview) -> DataFrame:
    """One row per job of a plan: what becomes of it and what it takes, and its facets."""
    columns = ("job", "kind", "state", "seconds", "gpus", "gpu_hours", "kept_bytes", "cost", "estimated_from", "key")
    rows = []
    for job in preview.plan.jobs:
        estimated = preview.estimates.jobs.get(job.name)
        rows.append(
            {
                "job": job.name,
                "kind": job.kind.value,
                "state": preview.found.dispositions[job.name].value,
                "seconds": estimated.seconds if estimated else 0.0,
                "gpus": job.resources.gpus,
                "gpu_hours": estimated.gpu_hours if estimated else 0.0,
                "kept_bytes": estimated.kept_bytes if estimated else 0,
                "cost": estimated.cost if estimated else None,
                "estimated_from": estimated.source.value if estimated else "",
                "key": job.key,
                **job.facets,
            }
        )
    return frame(rows, columns)


def job_states(snapshot: Snapshot) -> DataFrame:
    """One row per job of a submitted sweep."""
    columns = ("job", "kind", "state", "attempts", "ran_s", "queued_s", "reason", "key")
    rows = [
        {
            "job": view.name,
            "kind": view.name.partition("/")[0],
            "state": view.state.value,
            "attempts": view.num_attempts,
            "ran_s": view.ran_s,
            "queued_s": view.queued_s,
            "reason": view.reason,
            "key": view.key,
        }
        for view in snapshot.jobs.values()
    ]
    return frame(rows, columns)


def committed_results(plan: Plan, records: Mapping[str, ArtifactSummary]) -> DataFrame:
    """One row per committed run that trains or measures a backbone: facets and final metrics; rates are fractions.

    Where more than label spaces is compared, each factor has a column (``factor.optimizer``). Without any run there are
    the columns that the plan says there will be.
    """
    design = PlanDesign.of(plan)
    measured = [(job, {**job.facets, **design.columns_of(job)}) for job in plan.jobs if job.kind in RESULT_KINDS]
    first = ("job", "kind", "transfer", "protocol", "target", "label_space", "granularity")
    columns = tuple(dict.fromkeys([*first, *(name for _, facets in measured for name in facets), plan.metric, "key"]))
    rows = [
        {"job": job.name, "kind": job.kind.value, **facets, **records[job.key].metrics, "key": job.key}
        for job, facets in measured
        if job.key in records
    ]
    return frame(rows, columns)


_STYLE = (
    ".orchestrator-view table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".orchestrator-view td,.orchestrator-view th{padding:.2em .7em;text-align:right;border-bottom:1px solid #d8dee6}"
    ".orchestrator-view td:first-child,.orchestrator-view th:first-child{text-align:left}"
    ".orchestrator-view progress{width:24em;accent-color:#009e73}.orchestrator-view pre{white-space:pre-wrap}"
)
"""Applies to what is inside the view alone, and needs no library of the front end."""


def html_of(title: str, table: DataFrame, lines: Iterable[str], *, share: float | None = None) -> str:
    """A heading, a bar where ``share`` in [0, 1] says how much is done, a table and lines of text."""
    text = "\n".join(lines)
    bar = "" if share is None else f"<p><progress value='{share:.4f}' max='1'></progress> {100 * share:.0f} %</p>"
    rows = table.to_html(index=False, na_rep="", border=0)
    notes = f"<pre>{escape(text)}</pre>" if text else ""
    return f"<div class='orchestrator-view'><style>{_STYLE}</style><h4>{escape(title)}</h4>{bar}{rows}{notes}</div>"


@dataclass(frozen=True, slots=True)
class PlanView:
    """What ``orchestrator plan`` prints; ``outlook`` has all of it as values."""

    outlook: Preview

    @property
    def plan(self) -> Plan:
        """The jobs with their keys."""
        return self.outlook.plan

    @property
    def jobs(self) -> DataFrame:
        """One row per job: ``job``, ``kind``, ``state`` (new, resume, reuse, stale), ``seconds``, ``gpu_hours``, ..."""
        return planned_jobs(self.outlook)

    @property
    def groups(self) -> DataFrame:
        """One row per kind and label space, with the number of jobs in each state."""
        rows = [
            {
                "kind": group.kind,
                "what": group.title,
                **{disposition.value: group.counts.get(disposition, 0) for disposition in Disposition},
                "gpu_hours": sum(
                    self.outlook.estimates.jobs[job.name].gpu_hours
                    for job in group.jobs
                    if job.name in self.outlook.estimates.jobs
                ),
            }
            for group in group_jobs(self.plan, self.outlook.found.dispositions)
        ]
        return frame(rows, ("kind", "what", *(disposition.value for disposition in Disposition), "gpu_hours"))

    @property
    def summary(self) -> dict[str, Any]:
        """Totals: counts, hours, bytes, cost, critical path, wall clock, what the budget guard says."""
        return self.outlook.summary()

    def diff(self, other: PlanView) -> PlanDiff:
        """What changes when this plan takes the place of another."""
        return diff_plans(other.plan, self.plan)

    def __repr__(self) -> str:
        return f"<{self._title()}>"  # a plan has thousands of values

    def __str__(self) -> str:
        return "\n".join([self._title(), *self._lines()])

    def _repr_html_(self) -> str:
        return html_of(self._title(), self.groups, self._lines())

    def _title(self) -> str:
        counts = ", ".join(f"{number} {disposition.value}" for disposition, number in self.outlook.counts.items())
        return f"Plan of sweep {self.plan.sweep}: {len(self.plan.jobs)} jobs, {counts}"

    def _lines(self) -> list[str]:
        problems = [f"warning: {problem}" for problem in (*self.outlook.found.problems, *self.outlook.warnings)]
        refusals = [f"refused: {refusal}" for refusal in self.outlook.refusals]
        return [*preview_lines(self.outlook), *problems, *refusals]


@dataclass(frozen=True, slots=True)
class StatusView:
    """What ``orchestrator status`` prints; ``snapshot`` has all of it as values."""

    snapshot: Snapshot

    @property
    def state(self) -> SweepState:
        """Of the sweep."""
        return self.snapshot.state

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        return {state.value: number for state, number in self.snapshot.counts.items()}

    @property
    def jobs(self) -> DataFrame:
        """One row per job: ``job``, ``kind``, ``state``, ``attempts``, ``ran_s``, ``reason``, ..."""
        return job_states(self.snapshot)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def __str__(self) -> str:
        return "\n".join([self._title(), *failure_lines(self.snapshot)])

    def _repr_html_(self) -> str:
        states = [state.value for state in JobState if state in self.snapshot.counts]
        by_kind: dict[str, dict[str, int]] = {}
        for view in self.snapshot.jobs.values():
            counts = by_kind.setdefault(view.name.partition("/")[0], dict.fromkeys(states, 0))
            counts[view.state.value] += 1
        table = frame(({"kind": kind, **counts} for kind, counts in by_kind.items()), ("kind", *states))
        num_done = sum(number for state, number in self.snapshot.counts.items() if state.is_final)
        share = num_done / len(self.snapshot.jobs) if len(self.snapshot.jobs) else None
        return html_of(self._title(), table, failure_lines(self.snapshot), share=share)

    def _title(self) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in self.counts.items())
        return f"Sweep {self.snapshot.sweep}: {self.snapshot.outcome} ({counts})"


class ProgressDisplay:
    """Shows a sweep whenever it has changed; a notebook is recognised by the shell that runs its kernel."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._said = ""

    def show(self, status: StatusView) -> None:
        """Put the present state on display, if it is another one than before."""
        told = repr(status)
        if told == self._said:
            return
        self._said = told
        if not in_notebook():
            sys.stderr.write(f"{told.strip('<>')}\n")
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(status, display_id=True)  # type: ignore[no-untyped-call] # of IPython
        elif status.snapshot.state.is_final:  # one line: the status is what the cell returns, and is shown whole there
            self._handle.update({"text/plain": told.strip("<>")}, raw=True)
        else:
            self._handle.update(status)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Never imports IPython by itself."""
    loaded = sys.modules.get("IPython")
    shell = loaded.get_ipython() if loaded is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
