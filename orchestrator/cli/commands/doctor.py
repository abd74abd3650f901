"""``orchestrator doctor``: checks that this machine, the store and every node have what sweeps need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from orchestrator.backends.ray.settings import CACHE_VARIABLE, cache_directory
from orchestrator.cli.arguments import ExaminedStore
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.checks import Check, CheckResult, Verdict, run_checks
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.redaction import redacted
from orchestrator.doctor.cluster import ClusterQuestion
from orchestrator.doctor.store import check_free_space, store_checks
from orchestrator.doctor.sweep_inputs import reach_tracking, read_beginnings, sample_shards
from orchestrator.doctor.verdicts import examine_cluster
from orchestrator.services.settings import UNKNOWN_STORE, Settings, shown_store
from orchestrator.services.terminal import stderr_console
from orchestrator.stack.description import read_stack
from orchestrator.sweepfile.load import load_sweep
from orchestrator.sweepfile.values import ResolvedSweep

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "dim"}
_SHARDS = "shards"


def doctor(
    sweep: Annotated[str, typer.Argument(help="A sweep.yaml or shipped sweep; its data are checked, too.")] = "",
    *,
    local: Annotated[
        bool, typer.Option("--local", help="Check only this machine and the store, not the cluster.")
    ] = False,
    limit: Annotated[float, typer.Option(min=1, help="Time limit for all checks of the cluster, in seconds.")] = 60.0,
    output: DocumentOption = DocumentForm.TABLE,
    store: ExaminedStore = "",
) -> None:
    """Check store, credentials, disks, tracking, and every node of the cluster; print how to fix what fails."""
    settings = Settings()
    loaded = load_sweep(sweep)[0] if sweep else None
    uri = store or settings.store_uri(loaded)
    results = [*_store_results(uri), *run_checks([*_machine_checks(settings, loaded)])]
    if not local:
        bad = {result.name for result in results if result.verdict in {Verdict.FAILED, Verdict.SKIPPED}}
        results += _cluster_results(settings, loaded, uri, bad, limit)
    num_failed = sum(result.verdict is Verdict.FAILED for result in results)
    if output is not DocumentForm.TABLE:
        checks = [{**asdict(result), "detail": redacted(result.detail)} for result in results]
        print_document({"ok": not num_failed, "checks": checks}, output)
    else:
        stdout_console().print(_table(results))
    if num_failed:
        stderr_console().print(f"{num_failed} of {len(results)} checks failed.")
        raise typer.Exit(ExitCode.FAILURE)


def _store_results(uri: str) -> Iterator[CheckResult]:
    if uri != UNKNOWN_STORE:
        yield from run_checks([*store_checks(uri)])
        return
    detail = f"it is {shown_store(uri)}, which is not known here: set store=... in its context, or --store"
    yield CheckResult(name="store", verdict=Verdict.SKIPPED, detail=detail)


def _machine_checks(settings: Settings, sweep: ResolvedSweep | None) -> Iterator[Check]:
    cache = Path(os.environ.get(CACHE_VARIABLE) or _usual_cache(settings))
    yield Check(name="cache", run=lambda: check_free_space(cache, "the cache"), remedy=f"set {CACHE_VARIABLE}")
    named = sweep.tracking_uri if sweep else ""
    # MLflow is imported first, and waits for up to 30 s.
    yield Check(name="tracking", run=lambda: reach_tracking(settings.publishing_uri(named)), limit_s=45.0)
    if sweep is not None:
        yield Check(name=_SHARDS, run=lambda: read_beginnings(sample_shards(sweep)), limit_s=30.0)


def _usual_cache(settings: Settings) -> Path:
    """The local stack has its own cache; other clusters have one on each node."""
    return cache_directory() if settings.ray_address else settings.home / "cache"


def _cluster_results(
    settings: Settings, sweep: ResolvedSweep | None, store_uri: str, bad: set[str], limit_s: float
) -> Iterator[CheckResult]:
    stack = None if settings.driver_address or settings.is_remote else read_stack(settings.home)
    address = stack.ray_address if stack is not None else settings.driver_address
    if not address:
        yield CheckResult(name="cluster", verdict=Verdict.SKIPPED, detail=_why_not(settings))
        return
    tracking = settings.tracking_uri(sweep.tracking_uri if sweep else "")
    try:
        question = ClusterQuestion(
            address="" if stack is not None else address,
            home=str(settings.home),
            namespace=settings.namespace,
            store_uri="" if bad - {"cache", "tracking", _SHARDS} else store_uri,
            tracking_uri="" if "tracking" in bad else tracking,
            tracking_is_of_sweep=tracking != settings.tracking_uri(),
            token="" if stack is not None else settings.read_token(),
            shards=tuple(sample_shards(sweep)) if sweep is not None and _SHARDS not in bad else (),
        )
        yield from examine_cluster(question, address, limit_s)
    except OrchestratorError as error:
        yield CheckResult(name="cluster", verdict=Verdict.FAILED, detail=redacted(str(error)))


def _why_not(settings: Settings) -> str:
    if settings.is_remote:
        return "it is reached by its dashboard or store only: run doctor on one of its nodes"
    return (
        f"no stack runs in {settings.home} (orchestrator up, or the first submit, starts one); RAY_ADDRESS is not set"
    )


def _table(results: Sequence[CheckResult]) -> Table:
    table = Table(title="Doctor", title_justify="left")
    for column in ("check", "where", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for where, result in _grouped(results):
        verdict = Text(result.verdict.value, style=_STYLES[result.verdict])
        table.add_row(result.name, where, verdict, redacted(result.detail), result.remedy)
    return table


def _grouped(results: Sequence[CheckResult]) -> Iterator[tuple[str, CheckResult]]:
    """A check that is fine on many nodes takes one line."""
    groups: dict[tuple[str, ...], list[CheckResult]] = {}
    for number, result in enumerate(results):
        is_fine = result.verdict is Verdict.OK and result.node
        groups.setdefault((result.name, "ok") if is_fine else (result.name, str(number)), []).append(result)
    for group in groups.values():
        first = group[0]
        yield (f"{len(group)} nodes" if len(group) > 1 else first.node), first
