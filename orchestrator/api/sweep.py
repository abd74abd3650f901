"""A sweep to plan, submit and evaluate; see ``docs/python.md``."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchestrator.api.frames import committed_results
from orchestrator.api.plan_view import PlanView
from orchestrator.api.revision import Changed, agree, difference, is_same_answer
from orchestrator.api.status_view import StatusView
from orchestrator.cli.money import read_prices
from orchestrator.cli.plan import check_accelerator, choose_fleet
from orchestrator.cli.settings import Settings
from orchestrator.controller.foreground import run_sweep_inprocess
from orchestrator.core.code import package_digest
from orchestrator.core.errors import ControllerError, InfeasibleError, NotFoundError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.results import Report
from orchestrator.services.fleets import StatedCluster
from orchestrator.services.look_up import look_up
from orchestrator.services.outlook import make_outlook
from orchestrator.services.sources import read_sweep
from orchestrator.state.job_view import JobView
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import model
from orchestrator.sweepfile.survey import require_datasets
from orchestrator.sweeps.client import SweepLedger, load_plan, load_snapshot
from orchestrator.tracking import provenance

if TYPE_CHECKING:
    from pandas import DataFrame

_POLL_S = 0.5


class Where(StrEnum):
    """What runs a sweep."""

    CLUSTER = "cluster"
    """The cluster of ``RAY_ADDRESS``, else this directory's background stack; goes on when this process ends."""
    INPROCESS = "inprocess"
    """This very process, one job after the other, without Ray: for tests and debugging."""


class Sweep:
    """A sweep.yaml, or a sweep that was submitted to a store."""

    def __init__(
        self, name: str, store_uri: str, *, resolved: model.Sweep | None = None, text: str = "", settings: Settings
    ) -> None:
        """Use ``from_yaml`` or ``submitted``."""
        self.name, self.store_uri = name, store_uri
        self._resolved, self._text, self._settings = resolved, text, settings
        self._message = ""
        self._planned: Plan | None = None

    @classmethod
    def from_yaml(
        cls, reference: str | os.PathLike[str], *, overrides: Sequence[str] = (), scale: str = "", store: str = ""
    ) -> Self:
        """Read a sweep.yaml, or a shipped sweep by its name.

        Args:
            reference: path or name.
            overrides: ``a.b.c=value``, as ``--set`` takes them.
            scale: block of the file that is merged over it, such as ``tiny``.
            store: URI of the object store; default: the file's, else the project's.

        Raises:
            SpecError: there is no such file, or it is wrong; one line per problem.
        """
        settings = Settings()
        resolved, text = read_sweep(os.fspath(reference), overrides, scale=scale)
        uri = store or settings.store_uri(resolved)
        return cls(resolved.name, uri, resolved=resolved, text=text, settings=settings)

    @classmethod
    def submitted(cls, name: str, *, store: str = "") -> Self:
        """A sweep that a store knows: its ``status``, ``results`` and ``report``.

        Raises:
            NotFoundError: there is no such store or sweep.
        """
        settings = Settings()
        sweep = cls(name, store or settings.store_uri(), settings=settings)
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
        outlook = make_outlook(
            resolved,
            build_plan(resolved, store_uri=self.store_uri),
            fleet=choose_fleet(self._settings, stated),
            accelerator=check_accelerator(accelerator),
            prices=read_prices(os.fspath(prices)),
        )
        return PlanView(outlook)

    def submit(
        self, where: Where = Where.CLUSTER, *, changed: Changed = Changed.ASK, directory: Path | None = None
    ) -> StatusView:
        """Run the sweep; on a cluster this returns at once, see ``wait``.

        Args:
            where: what runs it.
            changed: what to do if a sweep of this name has another plan; the difference is shown in any case.
            directory: in this process: folder of the node's cache; default: a temporary one.

        Raises:
            SpecError: a data set is declared, but not there: that suffices to plan alone.
            InfeasibleError: the sweep's budget does not allow it; the arithmetic is in the message.
            ClusterError, ControllerError, StorageError: it could not be submitted; or a sweep of this name has another
                plan, and nobody agreed to replace it.
        """
        require_datasets(self._must_be_resolved("submit"))
        view = self.plan()
        if view.outlook.refusals:
            raise InfeasibleError("; ".join(view.outlook.refusals))
        if not self._settings.jobs_address:
            probe_store(open_store(self.store_uri))
        is_agreed = agree(view.plan, changed)
        if where is Where.INPROCESS:
            origin = provenance.capture_all(Path.cwd(), package_digest()).to_json()
            store = open_store(self.store_uri)
            return StatusView(run_sweep_inprocess(store, view.plan, self._text, directory=directory, provenance=origin))
        from orchestrator.cli.reach import reach
        from orchestrator.cli.wish import Wish

        with reach(self._settings, self.store_uri, foreground=False) as submitter:
            self._message = submitter.submit(Wish(plan=view.plan, text=self._text, replaces=is_agreed))
            if submitter.store is None:  # only the cluster can tell
                return StatusView(Snapshot(sweep=self.name))
        return self.status()

    def wait(self, timeout_s: float | None = None) -> StatusView:
        """Wait until the sweep has ended, with what was last submitted by this object.

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
        while True:
            snapshot = ledger.refresh()
            if self._message in snapshot.refusals:
                raise ControllerError(snapshot.refusals[self._message])
            if not self._message and (differs := self._difference(snapshot)):
                raise ControllerError(f"cannot wait: {differs}; submit() first, or Sweep.submitted({self.name!r})")
            is_settled = not self._message or self._message in snapshot.handled
            if is_settled and snapshot.state.is_final:
                return StatusView(snapshot)
            if until_s is not None and time.monotonic() >= until_s:
                message = f"sweep {self.name!r} has not ended after {timeout_s:g} s: it is {snapshot.state.value}"
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
        """
        plan = self._plan()
        found = look_up(plan)
        if found.problems and not found.records:
            raise NotFoundError("; ".join(found.problems))
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
        if not is_initialised(self.store_uri):
            raise NotFoundError(f"there is no store at {self.store_uri}: submit a sweep first, or name another store")
        return open_store(self.store_uri)

    def _must_be_resolved(self, verb: str) -> model.Sweep:
        if self._resolved is None:
            message = f"cannot {verb} {self.name!r}: it was read from a store; open its file with Sweep.from_yaml"
            raise NotFoundError(message)
        return self._resolved


def _views(plan: Plan, snapshot: Snapshot) -> dict[str, JobView]:
    """What the journal says of the plan's jobs, as far as these are those that were submitted."""
    keys = {job.name: job.key for job in plan.jobs}
    return {name: view for name, view in snapshot.jobs.items() if keys.get(name) == view.key}
