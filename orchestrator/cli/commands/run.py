"""``orchestrator run``: runs one job in the foreground, for debugging."""

from __future__ import annotations

import pdb  # noqa: T100 - the debugger is the point of --pdb
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.arguments import FormerSweep, StoreOption, complete_job, complete_sweep, refuse_former_order
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.controller.attempt_requests import Claimant, allocate_attempt, make_request
from orchestrator.core.contract import ENTRY_POINT, ExecutionContext, JobResult, Progress
from orchestrator.core.errors import NotFoundError, OrchestratorError, UsageError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.settings import Settings
from orchestrator.services.status import describe_progress
from orchestrator.services.stores import find_store
from orchestrator.services.terminal import stderr_console
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.local import LocalStore
from orchestrator.storage.open import open_store
from orchestrator.storage.overlay import OverlayStore
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import list_sweeps, load_plan


def run(
    sweep: Annotated[
        str, typer.Argument(help="A sweep.yaml, a shipped or a submitted sweep.", autocompletion=complete_sweep)
    ],
    job: Annotated[
        str, typer.Argument(help="Name of a job (pretrain/levels/depth2/seed0).", autocompletion=complete_job)
    ] = "",
    *,
    inprocess: Annotated[bool, typer.Option("--inprocess", help="Run in this process, without Ray.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Open the debugger at the error if the job fails.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Keep the result in the store.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
    former: FormerSweep = "",
) -> None:
    """Run one job in the foreground; by default the store keeps nothing of it."""
    refuse_former_order("run", former, sweep)
    if not job:
        raise UsageError("run needs a sweep and one of its jobs: orchestrator run SWEEP JOB --inprocess")
    if not inprocess:
        message = "add --inprocess: run works only in this process (on the cluster, use `orchestrator submit`)"
        raise UsageError(message)
    raise typer.Exit(_run(sweep, job, store, debug=pdb, commit=commit, form=output))


def _run(sweep: str, name: str, store_uri: str, *, debug: bool, commit: bool, form: DocumentForm) -> ExitCode:
    """Run a job and all of its inputs that are not committed yet; print its metrics."""
    plan, base = _find_plan(sweep, store_uri)
    job = _find_job(plan, name)
    with tempfile.TemporaryDirectory(prefix="orchestrator-run-") as folder:
        store = _store_for(base, job, Path(folder), keep=commit)
        jobs = (*_missing_inputs(plan, job, store), job)
        _refuse_searches(jobs)
        try:
            for needed in jobs:
                stderr_console().print(f"running {needed.name} ({needed.key})")
                result = _execute(needed, plan, store, Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever the job raises is what the user came to see
            _show_failure(error, debug=debug)
            return ExitCode.FAILURE
        _show_metrics(job, result, form)
    return ExitCode.OK


def _show_metrics(job: Job, result: JobResult, form: DocumentForm) -> None:
    if form is not DocumentForm.TABLE:
        print_document({"job": job.name, "key": job.key, "metrics": dict(result.metrics)}, form)
        return
    for metric, value in sorted(result.metrics.items()):
        stdout_console().print(f"{metric} {value:.6g}")


def _find_plan(name: str, store_uri: str) -> tuple[Plan, ObjectStore]:
    """A sweep that the store knows, else a file or shipped sweep planned now; and where its results are."""
    uri = store_uri or Settings().store_uri()
    store = find_store(uri)
    if store is not None and name in list_sweeps(store):
        return load_plan(store, name), store
    sweep, _ = load_sweep(name)
    plan = build_plan(sweep, store_uri=Settings().known_store_uri(store_uri, sweep))
    return plan, store if store is not None and plan.store_uri == uri else open_store(plan.store_uri)


def _find_job(plan: Plan, name: str) -> Job:
    jobs = plan.by_name()
    if name not in jobs:
        message = f"sweep '{plan.sweep}' has no job '{name}': {did_you_mean(name, jobs)}"
        raise NotFoundError(message)
    return jobs[name]


def _store_for(base: ObjectStore, job: Job, folder: Path, *, keep: bool) -> ObjectStore:
    """The store, under an overlay unless the result is kept; there, a committed job is run anew."""
    if keep:
        return base
    return OverlayStore(LocalStore(folder / "overlay"), base, hidden=f"artifacts/{job.kind.value}/{job.key}/")


def _missing_inputs(plan: Plan, job: Job, store: ObjectStore) -> Iterator[Job]:
    """Ancestors without a commit, in plan order."""
    jobs, wanted = plan.by_name(), {job.name}
    for candidate in reversed(plan.jobs):
        if candidate.name in wanted:
            wanted.update(candidate.needs)
    needed = (jobs[name] for name in jobs if name in wanted and name != job.name)
    return (candidate for candidate in needed if not is_committed(store, candidate.key))


def _refuse_searches(jobs: Iterable[Job]) -> None:
    """Check the jobs before any of them runs, which may take hours. Raises ``UserError``: one of them is a search."""
    search = next((job.name for job in jobs if job.kind is JobKind.SEARCH), "")
    if search:
        message = f"{search} needs Ray, which runs its trials: submit the sweep (`orchestrator submit`); `run` can take"
        raise UserError(f"{message} the jobs that wait for it once the search is committed")


def _execute(job: Job, plan: Plan, store: ObjectStore, folder: Path) -> JobResult:
    module, _, function = ENTRY_POINT.partition(":")
    scratch = folder / job.key
    scratch.mkdir()
    cache = Settings().home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    # Its own number, also here: metrics of a later attempt supersede those of earlier ones.
    claimant = Claimant(sweep=plan.sweep, cluster=Settings().cluster, epoch=0)
    request = make_request(plan, job, allocate_attempt(store, job, claimant))
    context = ExecutionContext(store=store, scratch=scratch, cache=cache, report=_show_progress)
    result: JobResult = getattr(import_module(module), function)(request, context)
    return result


def _show_progress(progress: Progress) -> None:
    stderr_console().print(f"  {describe_progress(progress)}")


def _show_failure(error: Exception, *, debug: bool) -> None:
    if debug:
        pdb.post_mortem(error.__traceback__)
    elif isinstance(error, OrchestratorError):
        complain(str(error))
    else:
        sys.excepthook(type(error), error, error.__traceback__)
