"""What a submit changes about a sweep that the store already knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.cli.output import stderr_console
from orchestrator.cli.plan_tables import diff_lines, diff_table
from orchestrator.planning.graph.diff import Change, PlanDiff, diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.open import open_store
from orchestrator.sweeps.client import list_sweeps, load_snapshot

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """A sweep as it stands before a submit under its name."""

    snapshot: Snapshot
    plan: Plan
    """Its current revision's."""

    def diff(self, plan: Plan) -> PlanDiff:
        """From what stands to what is submitted."""
        return diff_plans(self.plan, plan)

    def is_same(self, plan: Plan) -> bool:
        """Whether a submit would only give failed jobs another chance."""
        return replace(self.plan, revision=0, owner="") == replace(plan, revision=0, owner="")

    def stranger(self, sender: str) -> str:
        """Why this user may not submit it; empty if they may."""
        owner, users = self.plan.owner, self.plan.policy.users
        if not owner or not sender or sender == owner or sender in users:
            return ""
        return (
            f"sweep '{self.plan.sweep}' belongs to {owner}, and you are {sender}: submit it under another name (--set "
            "name=...), let them list you under policy.users, or insist with --force"
        )


def find_former(plan: Plan) -> Former | None:
    """The sweep of this name in the plan's store, which must exist; None if there is none yet."""
    store = open_store(plan.store_uri)
    if plan.sweep not in list_sweeps(store):
        return None
    snapshot = load_snapshot(store, plan.sweep)
    return None if snapshot.plan is None else Former(snapshot=snapshot, plan=snapshot.plan)


def show_difference(former: Former, plan: Plan) -> None:
    """Tell what changes, on stderr."""
    console, snapshot = stderr_console(), former.snapshot
    if former.is_same(plan):
        again = "; failed jobs get another chance" if snapshot.state.is_final else ""
        console.print(f"Sweep {plan.sweep} is {snapshot.state.value} with this very plan{again}.", markup=False)
        return
    diff = former.diff(plan)
    console.print(diff_table(diff, f"{plan.sweep}, revision {snapshot.revision} -> this one"))
    for line in (*diff_lines(diff, lists_jobs=False), *_stopped(snapshot, diff)):
        console.print(line, markup=False)


def _stopped(snapshot: Snapshot, diff: PlanDiff) -> Iterator[str]:
    """Jobs that run now and do not go on."""
    left = {job.name for job in diff.jobs if job.change in {Change.REMOVED, Change.REKEYED}}
    left |= {job.old_name for job in diff.jobs if job.change is Change.RENAMED}
    names = [name for name in snapshot.jobs.running if name in left]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        yield f"{len(names)} running jobs are no longer wanted and end after a checkpoint: {shown}"
