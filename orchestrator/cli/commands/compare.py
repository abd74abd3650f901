"""``orchestrator compare``: the same cells of several sweeps, or two networks image by image."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.text import Text

from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, TableForm, TableOption, print_document, stdout_console
from orchestrator.core.data_plane import CHANGES
from orchestrator.core.errors import NotFoundError, UsageError, UserError
from orchestrator.core.job_kinds import RESULT_KINDS
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import build_report
from orchestrator.report.compare_samples import (
    NetworkPair,
    SampleComparison,
    compare_samples,
    draw_groups,
    groups_of,
    render_samples_page,
    sample_records,
    sample_sentences,
    sample_tables,
)
from orchestrator.report.compare_sweeps import check_different, compare_sweeps, comparison_tables, sweep_records
from orchestrator.report.factors import check_factors, matched_by
from orchestrator.report.render.columns import describe_transfer
from orchestrator.report.render.curves import encode_png
from orchestrator.report.render.files import json_ready, markdown_table, render_csv
from orchestrator.report.render.terminal import FittingTable
from orchestrator.report.results import Report, Table
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.report.tables import seeds_of
from orchestrator.services.settings import Settings
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import stderr_console
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.sample_outcomes import SampleOutcomes
from orchestrator.sweepfile.survey import ask_labels
from orchestrator.sweeps.client import list_sweeps, load_plan, load_snapshot

_NUM_IMAGES = 24
"""Images of each kind on a contact sheet."""


def compare(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="Names of submitted sweeps; the others are compared with the first.")
    ] = None,
    *,
    samples: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Names of two jobs, or of two rows of the report.")
    ] = None,
    transfer: Annotated[str, typer.Option(help="With --samples: only this transfer; default: all.")] = "",
    out: Annotated[str, typer.Option(help="With --samples: write a page, pictures and a CSV into this folder.")] = "",
    metric: Annotated[str, typer.Option(help="Metric to compare; default: the metric of the sweeps' reports.")] = "",
    match_by: Annotated[
        str,
        typer.Option(
            "--match-by",
            metavar="FACTOR,...",
            help="Match cells by the values of these factors instead of their names.",
        ),
    ] = "",
    output: TableOption = TableForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Compare the same cells of several sweeps, paired by seeds; with --samples, two networks image by image."""
    if samples is not None:
        if metric or match_by:
            raise UsageError("--metric and --match-by are for the cells of sweeps; leave them out with --samples")
        first, second = samples
        if option := next((name for name in samples if name.startswith("-")), ""):
            raise UsageError(f"--samples takes two names, and {option} is an option: write --samples A B {option} ...")
        options = SampleOptions(first=first, second=second, transfer=transfer, out=out, form=output, store=store)
        raise typer.Exit(show_sample_comparison(sweeps or [], options))

    if transfer or out:
        raise UsageError("--transfer and --out need --samples A B: only networks are compared image by image")
    factors = [name.strip() for name in match_by.split(",") if name.strip()]
    raise typer.Exit(show_comparison(sweeps or [], metric=metric, form=output, store_uri=store, match_by=factors))


def show_comparison(
    sweeps: Sequence[str], *, metric: str, form: TableForm, store_uri: str, match_by: Sequence[str] = ()
) -> ExitCode:
    """Print the comparison; it is not saved, as it belongs to no single sweep."""
    check_different(sweeps)
    store = open_existing_store(store_uri)
    for sweep in sweeps:
        require_sweep(store, sweep)
    reports, plans = zip(*(_report(store, sweep, metric, match_by) for sweep in sweeps), strict=True)
    comparison = compare_sweeps(reports, plans)
    if form in {TableForm.JSON, TableForm.YAML}:
        print_document(json_ready(comparison.to_json()), DocumentForm(form.value))
    elif form is TableForm.CSV:
        sys.stdout.write(render_csv(sweep_records(comparison)))
    else:
        for table in comparison_tables(comparison):
            if form is TableForm.TABLE:
                stdout_console().print(FittingTable(table=table))
            else:
                sys.stdout.write(markdown_table(table) + "\n\n")
    for note in comparison.notes:
        stderr_console().print(Text(f"Note: {note}", style="yellow"))
    return ExitCode.OK


def _report(store: ObjectStore, sweep: str, metric: str, match_by: Sequence[str]) -> tuple[Report, Plan]:
    snapshot = load_snapshot(store, sweep)
    plan = snapshot.plan or load_plan(store, sweep)
    chosen = replace(plan, metric=metric) if metric else plan
    if not match_by:
        return build_report(store, chosen, snapshot.jobs), plan
    check_factors(chosen, match_by)
    return matched_by(build_report(store, replace(chosen, rows=tuple(match_by)), snapshot.jobs), match_by), plan


class _Pair(NamedTuple):
    """Names of two jobs, and the seeds that they share."""

    seeds: SeedPair
    first: str
    second: str


class _Target(NamedTuple):
    """Keys of the target: the label map, and the index of the images."""

    labels: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """The pairs of networks of one transfer."""

    place: str
    """For people."""
    transfer: str
    pairs: tuple[_Pair, ...]
    pretrain: str = ""
    """Name of the pretrain block; empty for the unnamed one."""


_COMPARING = "validation images could not be compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Flags of the command."""

    first: str
    second: str
    transfer: str = ""
    """For rows: only the tables of this transfer."""
    out: str = ""
    """Folder for the page, the figure, the contact sheet and the CSV; empty = none."""
    form: TableForm = TableForm.TABLE
    store: str = ""


def show_sample_comparison(sweeps: Sequence[str], options: SampleOptions) -> ExitCode:
    """Compare and print; with ``out``, also write files."""
    store = open_existing_store(options.store)
    plan = load_plan(store, _one_sweep(store, sweeps))
    matched, comparisons = _matched(store, plan, options), []
    for match in matched:
        found, target = _compare(store, plan, match, options)
        with tempfile.TemporaryDirectory(prefix="orchestrator-compare-") as folder:
            sheet = Path(folder) / "images.png" if options.out else None
            reply = ask_labels(CHANGES, _request(store, plan, found, target, sheet), _COMPARING)
            comparison = replace(found, groups=groups_of(reply["groups"], len(found.tests)))
            if sheet is not None:
                _write(_folder(options.out, match, matched), comparison, sheet.read_bytes())
        comparisons.append(comparison)
    _print(comparisons, options.form)
    return ExitCode.OK


def _one_sweep(store: ObjectStore, sweeps: Sequence[str]) -> str:
    known = list_sweeps(store)
    if len(sweeps) > 1 or (not sweeps and len(known) != 1):
        names = ", ".join(sweeps or known) or "none"
        raise UsageError(
            f"compare --samples compares within one sweep: name it (compare SWEEP --samples A B), not {names}"
        )
    sweep = sweeps[0] if sweeps else known[0]
    require_sweep(store, sweep)
    return sweep


def _matched(store: ObjectStore, plan: Plan, options: SampleOptions) -> list[_Match]:
    """What to compare by transfer: two jobs are one pair, two rows a pair for each pair of seeds that both have."""
    jobs, names = plan.by_name(), (options.first, options.second)
    if options.first == options.second:
        raise UsageError(f"--samples names {options.first} twice: name two different jobs or rows")
    if all(name in jobs for name in names):
        for name in names:
            if jobs[name].kind not in RESULT_KINDS:
                raise UserError(f"{name} is not a network that is validated on images: name transfers or backbones")
        if options.transfer:
            raise UsageError(f"--transfer chooses tables for rows of the report; {names[0]} and {names[1]} are jobs")
        pair = _Pair(seeds_of(jobs[options.first]), *names)
        return [_Match(place=f"sweep {plan.sweep}", transfer="", pairs=(pair,))]
    tables = build_report(store, plan, load_snapshot(store, plan.sweep).jobs).headlines
    spaces = {row.label_space for table in tables for row in table.rows}
    for name in names:
        if name in jobs:
            raise UsageError(f"--samples compares two jobs or two rows: of {names[0]} and {names[1]} one is a job")
        if name not in spaces:
            hint = did_you_mean(name, [*jobs, *spaces])
            raise NotFoundError(f"sweep '{plan.sweep}' has neither a job nor a row '{name}': {hint}")
    found = [_match(table, *names) for table in _wanted(tables, options)]
    if not any(match.pairs for match in found):
        raise UserError(f"{options.first} and {options.second} have no committed transfers with the same seeds yet")
    return [match for match in found if match.pairs]


def _wanted(tables: Sequence[Table], options: SampleOptions) -> list[Table]:
    wanted = [table for table in tables if options.transfer in {"", table.transfer}]
    if not wanted:
        known = list(dict.fromkeys(table.transfer for table in tables))
        raise NotFoundError(f"--transfer {options.transfer}: {did_you_mean(options.transfer, known)}")
    return wanted


def _match(table: Table, first: str, second: str) -> _Match:
    rows = {row.label_space: row.results for row in table.rows}
    firsts = {result.seeds: result.job for result in rows.get(first, ())}
    pairs = [_Pair(one.seeds, firsts[one.seeds], one.job) for one in rows.get(second, ()) if one.seeds in firsts]
    place = describe_transfer(table)
    return _Match(place=place, transfer=table.transfer, pairs=tuple(pairs), pretrain=table.pretrain)


def _compare(store: ObjectStore, plan: Plan, match: _Match, options: SampleOptions) -> tuple[SampleComparison, _Target]:
    jobs, found, lacking = plan.by_name(), list[NetworkPair](), list[str]()
    targets: dict[_Target, str] = {}
    for seeds, *names in match.pairs:
        records = {name: _record(store, plan, name, jobs[name].key) for name in names}
        for name, record in records.items():
            inputs = record.identity["inputs"]
            targets.setdefault(_Target(inputs["labels"], inputs["index"]), name)
        first, second = (SampleOutcomes.read(store, record) for record in records.values())
        if first is None or second is None:
            lacking += [name for name, outcomes in zip(names, (first, second), strict=True) if outcomes is None]
        else:
            found.append(
                NetworkPair(seeds=seeds, first=names[0], second=names[1], first_outcomes=first, second_outcomes=second)
            )
    if len(targets) > 1:
        named = " and ".join(f"{job} ({target.labels})" for target, job in list(targets.items())[:2])
        raise UserError(f"{named} predict different targets: only answers to the same question can be compared")
    if lacking:
        _warn_of_missing_outcomes(lacking, is_all=not found)
    comparison = compare_samples(found, first=options.first, second=options.second, place=match.place)
    return comparison, next(iter(targets))


def _record(store: ObjectStore, plan: Plan, name: str, key: str) -> Record:
    try:
        return read_record(store, key)
    except NotFoundError:
        message = f"job {name!r} of sweep {plan.sweep!r} has no result yet; see: orchestrator status {plan.sweep}"
        raise NotFoundError(message) from None


def _warn_of_missing_outcomes(lacking: Sequence[str], *, is_all: bool) -> None:
    """Warn that results are of a version that kept no outcomes. Raises ``UserError`` if nothing is left to compare."""
    others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    message = (
        f"{lacking[0]}{others}: committed by an earlier version, which kept no outcome per validation image; give the "
        "transfer a new seed (`seeds:` in the sweep.yaml), submit again (backbones are reused) and compare the new jobs"
    )
    if is_all:
        raise UserError(message)
    stderr_console().print(Text(f"Note: left out: {message}", style="yellow"))


def _request(
    store: ObjectStore, plan: Plan, comparison: SampleComparison, target: _Target, sheet: Path | None
) -> dict[str, Any]:
    """For the data plane, see ``workloads.commands.sample_changes``."""
    indexes = (job for job in plan.jobs if job.key == target.data)
    location = next((dict(job.execution.data_location) for job in indexes), {})
    return {
        "store": store.uri,
        "cache": str(Settings().home / "cache" / "labels"),
        "index": target.data,
        "labels": target.labels,
        "location": location,
        "first": comparison.first,
        "second": comparison.second,
        "num_pairs": len(comparison.tests),
        "num_images": _NUM_IMAGES,
        "fixed": _counts(comparison.fixed_N),
        "broken": _counts(comparison.broken_N),
        "left_out": np.flatnonzero(~comparison.counted_N).tolist(),
        "sheet": "" if sheet is None else str(sheet),
    }


def _counts(counts_N: NDArray[np.int64]) -> list[list[int]]:
    """``[ordinal, number]`` of the entries that are not 0."""
    ordinals = np.flatnonzero(counts_N)
    pairs: list[list[int]] = np.stack([ordinals, counts_N[ordinals]], axis=1).tolist()
    return pairs


def _folder(out: str, match: _Match, matched: Sequence[_Match]) -> Path:
    """Where its files go: a transfer has a table of each pretrain block, and no two may have one folder."""
    is_repeated = [one.transfer for one in matched].count(match.transfer) > 1
    return Path(out, match.transfer if len(matched) > 1 else "", match.pretrain if is_repeated else "")


def _write(folder: Path, comparison: SampleComparison, sheet: bytes) -> None:
    figure = encode_png(draw_groups(comparison))
    files = {
        "samples.html": render_samples_page(comparison, figure_png=figure, sheet_png=sheet),
        "groups.png": figure,
        "images.png": sheet,
        "samples.csv": render_csv(sample_records([comparison])).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error}; name another folder") from error
    stderr_console().print(f"wrote {', '.join(str(folder / name) for name in files)}", soft_wrap=True)


def _print(comparisons: Sequence[SampleComparison], form: TableForm) -> None:
    if form in {TableForm.JSON, TableForm.YAML}:
        document = [one.to_json() | {"sentences": sample_sentences(one)} for one in comparisons]
        print_document(document, DocumentForm(form.value))
    elif form is TableForm.CSV:
        sys.stdout.write(render_csv(sample_records(comparisons)))
    elif form is TableForm.TABLE:
        for comparison in comparisons:
            for table in sample_tables(comparison):
                stdout_console().print(FittingTable(table=table))
            for sentence in sample_sentences(comparison):
                stdout_console().print(f"  {sentence}")
    else:
        for comparison in comparisons:
            sys.stdout.write("\n\n".join(markdown_table(table) for table in sample_tables(comparison)) + "\n\n")
            sys.stdout.writelines(f"- {sentence}\n" for sentence in sample_sentences(comparison))
