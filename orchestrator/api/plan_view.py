"""A plan as people look at it in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.api.frames import frame, html_of, planned_jobs
from orchestrator.cli.plan_tables import outlook_lines
from orchestrator.planning.graph.diff import PlanDiff, diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, group_jobs
from orchestrator.services.outlook import Outlook

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class PlanView:
    """What ``orchestrator plan`` prints; ``outlook`` has all of it as values."""

    outlook: Outlook

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
        return [*outlook_lines(self.outlook), *problems, *refusals]
