"""A sweep to plan, submit and evaluate; see ``docs/python.md``."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestrator.api.views import PlanView, ProgressDisplay, StatusView, committed_results
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import ControllerError, InfeasibleError, NotFoundError, StorageError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.results import Report
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.costs import read_prices
from orchestrator.services.fleets import StatedCluster, choose_fleet
from orchestrator.services.preview import check_accelerator, make_preview
from orchestrator.services.settings import Settings, load_settings
from orchestrator.services.stores import find_store
from orchestrator.services.submit import SubmitCheck, SubmitRequest, captured_document, prepare_submit, show_difference
from orchestrator.services.terminal import confirmed
from orchestrator.services.transports import open_submitter
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.storage.open import as_uri
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.values import ResolvedSweep
from orchestrator.sweeps.client import SweepLedger, load_plan, load_snapshot

if TYPE_CHECKING:
    from pandas import DataFrame


_POLL_S = 0.5


class Where(StrEnum):
    """What runs a sweep."""

    CLUSTER = "cluster"
    """The cluster that the settings name, by its address, dashboard or store, else this directory's background stack;
    goes on when this process ends."""
    INPROCESS = "inprocess"
    """This very process, one job after the other, without Ray: for tests and debugging."""


class Changed(StrEnum):
    """What becomes of a sweep of this name whose plan is another one."""

    ASK = "ask"
    """Show the difference and ask whoever sits at the terminal; refuse where nobody does, as in a script."""
    REPLACE = "replace"
    """Make this the next revision."""
    REFUSE = "refuse"


class Sweep:
    """A sweep.yaml, or a sweep that was submitted to a store."""

    def __init__(
        self, name: str, store_uri: str, *, resolved: ResolvedSweep | None = None, text: str = "", settings: Settings
    ) -> None:
        """Use ``from_yaml`` or ``submitted``."""
        self.name, self.store_uri = name, store_uri
        self._resolved, self._text, self._settings = resolved, text, settings
        self._message = ""
        self._planned: Plan | None = None
        self._opened: ObjectStore | None = None

    @classmethod
    def from_yaml(
        cls,
        reference: str | os.PathLike[str],
        *,
        overrides: Sequence[str] = (),
        scale: str = "",
        store: str | os.PathLike[str] = "",
    ) -> Self:
        """Read a sweep.yaml, or a shipped sweep by its name; settings count as for a command in this directory.

        Args:
            reference: path or name.
            overrides: ``a.b.c=value``, as ``--set`` takes them.
            scale: block of the file that is merged over it, such as ``tiny``.
            store: URI or path of the object store; default: the file's, else that of the settings.

        Raises:
            SpecError: there is no such file, or it or a file of settings is wrong; one line per problem.
        """
        settings = load_settings()
        resolved, text = load_sweep(os.fspath(reference), overrides, scale=scale)
        uri = as_uri(os.fspath(store)) if store else settings.store_uri(resolved)
        return cls(resolved.name, uri, resolved=resolved, text=text, settings=settings)

    @classmethod
    def submitted(cls, name: str, *, store: str | os.PathLike[str] = "") -> Self:
        """A sweep that a store knows: its ``status``, ``results`` and ``report``; settings count as for a command.

        Raises:
            NotFoundError: there is no such store or sweep.
            SpecError: a file of settings is wrong.
        """
        settings = load_settings()
        sweep = cls(name, as_uri(os.fspath(store)) if store else settings.store_uri(), settings=settings)
        sweep.status()
        return sweep

    def plan(
        self,
        *,
        gpus: int = 0,
        gpus_per_node: int = 0,
        cpus: int = 0,
        accelerator: str = "",
        prices: str | os.PathLike[str] = "",
    ) -> PlanView:
        """What a submit would run and reuse, how long it takes and what it costs. Changes nothing.

        Args:
            gpus: of the cluster to estimate for; 0 = the present one, see ``orchestrator plan``.
            gpus_per_node: of each of its nodes; 0 = 8.
            cpus: cores of that cluster; 0 = 16 per GPU.
            accelerator: what the GPUs are (``A100``) where ``resources`` does not say.
            prices: path of a table of prices.
        """
        resolved = self._must_be_resolved("plan")
        stated = StatedCluster(gpus=gpus, gpus_per_node=gpus_per_node, cpus=cpus)
        outlook = make_preview(
            resolved,
            build_plan(resolved, store_uri=self.store_uri),
            fleet=choose_fleet(self._settings, stated),
            accelerator=check_accelerator(accelerator),
            prices=read_prices(os.fspath(prices)),
        )
        return PlanView(outlook)

    def submit(
        self,
        where: Where = Where.CLUSTER,
        *,
        changed: Changed = Changed.ASK,
        directory: Path | None = None,
        wait: bool = False,
    ) -> StatusView:
        """Run the sweep; on a cluster this returns at once unless it shall ``wait``.

        Args:
            where: what runs it.
            changed: what to do if a sweep of this name has another plan; the difference is shown in any case.
            directory: in this process: folder of the node's cache; default: a temporary one.
            wait: return when the sweep has ended, and show its progress meanwhile: a view that renews itself in a
                notebook, a line for each job that ends elsewhere. Interrupting it leaves the sweep running.

        Raises:
            SpecError: a data set is declared, but not there: that suffices to plan alone.
            InfeasibleError: the sweep's budget does not allow it, the arithmetic is in the message; or the sweep
                belongs to somebody else.
            ClusterError, ControllerError, StorageError: it could not be submitted; or a sweep of this name has another
                plan, and nobody agreed to replace it.
        """
        resolved, settings = self._must_be_resolved("submit"), self._settings
        is_here = where is Where.INPROCESS
        prepared = prepare_submit(resolved, self._text, settings, store_uri=self.store_uri, runs_here=is_here)
        if prepared.check.refusals:
            raise InfeasibleError("; ".join(prepared.check.refusals))
        is_agreed = agree(prepared.check, changed)
        store = self._opened = prepared.probed_store()
        if store is not None and is_here:
            ran = run_sweep_inprocess(
                store, prepared.plan, self._text, directory=directory, provenance=captured_document()
            )
            return StatusView(ran)
        seen = None if changed is Changed.REPLACE else prepared.check.seen_revision
        request = SubmitRequest(plan=prepared.plan, spec_text=self._text, replaces=is_agreed, replaced_revision=seen)
        with open_submitter(settings, self.store_uri, store=store) as submitter:
            self._message = submitter.submit(request.sent_now())
            if submitter.store is None:  # only the cluster can tell
                return StatusView(Snapshot(sweep=self.name))
        return self.wait(shows_progress=True) if wait else self.status()

    def wait(self, timeout_s: float | None = None, *, shows_progress: bool = False) -> StatusView:
        """Wait until the sweep has ended, with what was last submitted by this object; ``submit`` says what is shown.

        Raises:
            TimeoutError: it has not ended after ``timeout_s``; it goes on.
            ControllerError: the controller refused what was submitted; or another plan than this file's was submitted,
                and not by this object.
            NotFoundError: the sweep was never submitted.
        """
        store = self._store()
        load_snapshot(store, self.name)  # or refuse
        ledger = SweepLedger(store, self.name)
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        shown = ProgressDisplay() if shows_progress else None
        while True:
            snapshot = ledger.refresh()
            if shown is not None:
                shown.show(StatusView(snapshot))
            if self._message in snapshot.refusals:
                raise ControllerError(snapshot.refusals[self._message])
            if not self._message and (differs := self._difference(snapshot)):
                raise ControllerError(f"cannot wait: {differs}; submit() first, or Sweep.submitted({self.name!r})")
            is_settled = not self._message or self._message in snapshot.handled
            if is_settled and snapshot.state.is_final:
                return StatusView(snapshot)
            if until_s is not None and time.monotonic() >= until_s:
                message = f"sweep {self.name!r} has not ended after {timeout_s:g} s: it is {snapshot.outcome}"
                raise TimeoutError(message)
            time.sleep(_POLL_S)

    def status(self) -> StatusView:
        """Where the submitted sweep stands, from the store alone. Raises ``NotFoundError`` if it never was.

        Warns where another plan than this file's was submitted: the status is that one's.
        """
        snapshot = load_snapshot(self._store(), self.name)
        is_pending = bool(self._message) and self._message not in snapshot.handled
        if not is_pending and (differs := self._difference(snapshot)):
            warnings.warn(f"the status is that of another plan: {differs}", stacklevel=2)
        return StatusView(snapshot)

    def results(self) -> DataFrame:
        """One row per run that has its result: facets (label space, seeds, target, ...) and final metrics in [0, 1].

        Of a submitted sweep these are the runs of its current plan, of a file those that a submit would reuse.

        Raises:
            StorageError: a record is damaged or altered, or the store cannot be asked. Fewer rows, or one of another
                run, would change a mean without a word.
        """
        plan = self._plan()
        found = lookup_artifacts(plan)
        if found.problems:
            raise StorageError("; ".join(found.problems))
        return committed_results(plan, found.records)

    def report(self, *, prices: str | os.PathLike[str] = "") -> Report:
        """The answer so far, computed from results alone.

        Of what was submitted it is also saved in the store, as ``orchestrator report`` does. Of a file that says
        something else it is not: that would replace the submitted sweep's. ``prices`` is the path of a table, for
        what ran on nodes that tell no price.
        """
        from orchestrator.report.build import build_report
        from orchestrator.report.render.files import save_report

        store, plan = self._store(), self._plan()
        snapshot = self._snapshot(store)
        report = build_report(store, plan, _views(plan, snapshot), read_prices(os.fspath(prices)))
        if is_same_answer(plan, snapshot.plan):
            save_report(store, self.name, report)
        return report

    def __repr__(self) -> str:
        return f"Sweep({self.name!r}, store={self.store_uri!r})"

    def _plan(self) -> Plan:
        """Of the file, else what was submitted last."""
        if self._resolved is None:
            return load_plan(self._store(), self.name)
        if self._planned is None:
            self._planned = build_plan(self._resolved, store_uri=self.store_uri)
        return self._planned

    def _difference(self, snapshot: Snapshot) -> str:
        return "" if self._resolved is None else difference(self._plan(), snapshot)

    def _snapshot(self, store: ObjectStore) -> Snapshot:
        """Empty for a sweep that was never submitted."""
        try:
            return load_snapshot(store, self.name)
        except NotFoundError:
            return Snapshot(sweep=self.name)

    def _store(self) -> ObjectStore:
        self._settings.known_store_uri(self.store_uri)
        self._opened = self._opened or find_store(self.store_uri)
        if self._opened is None:
            raise NotFoundError(f"there is no store at {self.store_uri}: submit a sweep first, or name another store")
        return self._opened

    def _must_be_resolved(self, verb: str) -> ResolvedSweep:
        if self._resolved is None:
            message = f"cannot {verb} {self.name!r}: it was read from a store; open its file with Sweep.from_yaml"
            raise NotFoundError(message)
        return self._resolved


def _views(plan: Plan, snapshot: Snapshot) -> dict[str, JobView]:
    """What the journal says of the plan's jobs, as far as these are those that were submitted."""
    keys = {job.name: job.key for job in plan.jobs}
    return {name: view for name, view in snapshot.jobs.items() if keys.get(name) == view.key}


def agree(check: SubmitCheck, changed: Changed) -> bool:
    """See to it that a plan may replace what was submitted under its name, as far as its store knows of any.

    Returns:
        Whether its user agrees to replace another plan, should one turn up that the store here does not know.

    Raises:
        ControllerError: the sweep has another plan, and nobody agreed to replace it.
    """
    plan, previous = check.plan, check.previous
    if previous is None:
        return changed is Changed.REPLACE
    if not check.changes_plan:
        return True
    show_difference(previous, plan)
    if changed is Changed.ASK and sys.stdin.isatty():
        if confirmed("Replace its plan and submit?", subject="a changed sweep"):
            return True
        raise ControllerError(f"sweep {plan.sweep!r} has another plan, and was left as it is")
    if changed is not Changed.REPLACE:
        message = (
            f"{difference(plan, previous.snapshot)}; to replace it, submit(changed=Changed.REPLACE), or give this "
            "sweep another name"
        )
        raise ControllerError(message)
    return True


def is_same_answer(plan: Plan, submitted: Plan | None) -> bool:
    """Whether a report of one plan is a report of the other: the same jobs, shown, compared and judged the same way."""
    return submitted is not None and _answer(plan) == _answer(submitted)


def difference(plan: Plan, snapshot: Snapshot) -> str:
    """How the jobs of a plan differ from those of the submitted revision, in words; empty if they do not.

    While no revision is accepted there is nothing that could differ.
    """
    if snapshot.plan is None or _keys(plan) == _keys(snapshot.plan):
        return ""
    counts = diff_plans(snapshot.plan, plan).counts
    changes = ", ".join(f"{number} {change.value}" for change, number in counts.items() if number)
    return (
        f"what was submitted as sweep {plan.sweep!r} (revision {snapshot.revision}) is not what this file and its "
        f"overrides say now: from there to here, {changes}"
    )


def _answer(plan: Plan) -> tuple[Any, ...]:
    jobs = [(job.name, job.key, job.facets, job.resources) for job in plan.jobs]
    compared = (plan.metric, plan.baseline, plan.baseline_values, plan.rows)
    return jobs, compared, plan.published, plan.simulations


def _keys(plan: Plan) -> dict[str, str]:
    return {job.name: job.key for job in plan.jobs}
