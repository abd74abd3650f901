"""``orchestrator gc``, ``fsck``, ``ls`` and ``du``: the object store as a whole."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from os import getpid
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.units import format_bytes, parse_duration
from orchestrator.retention.fsck import Census, Depth, Finding, check_documents, check_store, check_sweep
from orchestrator.retention.gc import CollectionLock, Collector, Trash
from orchestrator.retention.gc_rules import DAY_S, GcAction, Graces, Tally
from orchestrator.retention.inventory import (
    ALL_GROUPS,
    Amount,
    ArtifactLine,
    Grouping,
    Usage,
    artifact_lines,
    measure_usage,
    whole_artifact,
)
from orchestrator.retention.roots import RootReader, check_reference, current_plans, is_forgotten
from orchestrator.retention.roots import forget as forget_sweep
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import say, stderr_console
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.pins import Pin, add_pin, read_pins, remove_pin
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_plan

_DAY = f"{DAY_S / 3600:g}h"  # the default of Graces, as an option is written
_USAGE_COLUMNS = ("artifacts", "checkpoints", "metrics", "logs", "shared")
_ACTION_TITLES = {
    GcAction.WAIT_FOR_GRACE: "younger than the grace",
    GcAction.HIDE: "into the trash",
    GcAction.WAIT_IN_TRASH: "waits in the trash",
    GcAction.DESTROY: "destroyed",
}


class Listing(StrEnum):
    """What ``ls`` lists."""

    ARTIFACTS = "artifacts"
    PINS = "pins"


class UsageBy(StrEnum):
    """What ``du`` adds up by."""

    SWEEP = "sweep"
    KIND = "kind"
    LEVEL = "level"


def gc(
    *,
    apply: Annotated[
        bool, typer.Option("--apply/--dry-run", help="Delete, or only show what would be deleted; default: only show.")
    ] = False,
    grace: Annotated[str, typer.Option(help="Never delete objects younger than this: 24h, 7d, ...")] = _DAY,
    trash_grace: Annotated[
        str, typer.Option(help="How long deleted objects stay in the trash, from which they can be restored.")
    ] = _DAY,
    forget: Annotated[
        list[str] | None, typer.Option(help="Name of a finished sweep whose results may be deleted.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME=TARGET: keep a key, a checkpoint or a sweep's results.")
    ] = None,
    unpin: Annotated[list[str] | None, typer.Option(help="Name of a pin to remove.")] = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show or delete objects that no sweep, pin or committed result needs; safe while sweeps run."""
    objects = open_existing_store(store)
    graces = Graces(age_s=_grace_s(grace), trash_s=_grace_s(trash_grace))
    _change_roots(objects, forget=forget or (), pin=pin or (), unpin=unpin or ())
    collector = Collector(objects, RootReader(objects), graces=graces, holder=_holder())
    tally = collector.collect() if apply else collector.preview()
    if output is not DocumentForm.TABLE:
        print_document(tally_document(tally, applied=apply), output)
        return
    if not tally.amounts and not tally.restored:
        stdout_console().print(f"No garbage in {objects.uri}.")
        return
    stdout_console().print(tally_table(tally, applied=apply))
    if not apply:
        stderr_console().print("Nothing was deleted. To do it: orchestrator gc --apply")


def fsck(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also read all content and compare its sha256.")] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Rebuild damaged plans; delete damaged snapshots, leases, claims and caches."),
    ] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Check the store: report every missing, truncated or changed object, and repair what can be repaired."""
    from orchestrator.retention.fsck import repair as repair_object  # loads the planner, which only fsck needs

    objects, census = open_existing_store(store), Census()
    depth = Depth.CONTENT if deep else Depth.SIZES
    findings: list[tuple[Finding, str]] = []
    for sweep in list_sweeps(objects):
        checked = check_sweep(objects, sweep)
        findings += [(one, repair_object(objects, one, checked) if repair else "") for one in checked.findings]
    others = chain(check_documents(objects, depth, census), check_store(objects, depth, census))
    findings += [(one, repair_object(objects, one) if repair else "") for one in others]
    if output is not DocumentForm.TABLE:
        listed = [{**asdict(finding), "repair": done} for finding, done in findings]
        print_document({"num_heads": census.num_heads, **asdict(census.checked), "findings": listed}, output)
    else:
        for finding, done in findings:
            text = f"{finding.problem.value}  {finding.name}  {finding.detail}{f' ({done})' if done else ''}"
            stdout_console().print(text)
    num_left = sum(not done for _, done in findings)
    how = "sizes and content" if deep else "sizes (--deep reads the content too)"
    repaired = f", {len(findings) - num_left} of them repaired" if repair else ""
    stderr_console().print(
        f"{census.num_heads} records and manifests, {_amount(census.checked)}: {how} compared, "
        f"{len(findings)} damaged objects in {objects.uri}{repaired}",
    )
    if num_left:
        raise typer.Exit(ExitCode.FAILURE)


def ls(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.ARTIFACTS,
    *,
    sweep: Annotated[str, typer.Option(help="List only what belongs to jobs of this sweep's plan.")] = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """List artifacts or pins in the store."""
    objects = open_existing_store(store)
    if sweep:
        require_sweep(objects, sweep)
    keys = {job.key for job in load_plan(objects, sweep).jobs} if sweep else None
    if what is Listing.PINS:
        # Of a checkpoint, a pin names KEY/checkpoints/STEP-NONCE.
        pins = [pin for pin in read_pins(objects) if keys is None or keys & {key.partition("/")[0] for key in pin.keys}]
        _print_pins(objects, pins, output)
        return
    lines = (line for line in artifact_lines(objects) if keys is None or line.key in keys)
    hidden = {stone.key for stone in Trash(objects).read_all() if stone.unit == whole_artifact(stone.key)}
    if output is not DocumentForm.TABLE:
        print_document([{**asdict(line), "is_hidden": line.key in hidden} for line in lines], output)
        return
    table = Table(title=f"Artifacts in {objects.uri}", title_justify="left")
    for column in ("key", "state", "written"):
        table.add_column(column)
    for column in ("objects", "size", "checkpoints"):
        table.add_column(column, justify="right")
    for line in sorted(lines, key=lambda line: line.key):
        table.add_row(*_artifact_row(line, is_hidden=line.key in hidden))
    stdout_console().print(table)


def du(
    *,
    by: Annotated[UsageBy, typer.Option(help="How to group the sums.")] = UsageBy.SWEEP,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show how much storage sweeps, kinds of jobs or label spaces use."""
    objects = open_existing_store(store)
    usage = measure_usage(objects, _grouping(objects, by))
    everything = usage.pop(ALL_GROUPS)
    if output is not DocumentForm.TABLE:
        groups = {group: asdict(found) for group, found in usage.items()}
        print_document({"groups": groups, "total": asdict(everything)}, output)
        return
    table = Table(title=f"Usage of {objects.uri} by {by.value}", title_justify="left")
    table.add_column(by.value)
    for column in (*_USAGE_COLUMNS, "total"):
        table.add_column(column, justify="right")
    for group, found in sorted(usage.items(), key=lambda item: -item[1].total.num_bytes):
        table.add_row(group, *_usage_row(found))
    table.add_section()
    table.add_row("all, each once", *_usage_row(everything))
    stdout_console().print(table)


def _grace_s(text: str) -> float:
    seconds = parse_duration(text)
    if seconds is None:
        message = f"{text!r} is not a duration: write a number and one of s, m, h, d, such as 24h or 7d"
        raise typer.BadParameter(message)
    return seconds


def tally_document(tally: Tally, *, applied: bool) -> dict[str, Any]:
    """A tally in JSON."""
    garbage = [
        {"action": action.value, "reason": reason.value, **asdict(amount)}
        for (action, reason), amount in sorted(tally.amounts.items())
    ]
    return {"applied": applied, "garbage": garbage, "restored": sorted(set(tally.restored))}


def tally_table(tally: Tally, *, applied: bool) -> Table:
    """One row per reason, one column per action that occurs."""
    title = "Garbage collected" if applied else "Garbage that `gc --apply` would handle now"
    table = Table(title=title, title_justify="left")
    table.add_column("reason")
    actions = [action for action in GcAction if any(did is action for did, _ in tally.amounts)]
    for action in actions:
        table.add_column(_ACTION_TITLES[action], justify="right")
    for reason in sorted({reason for _, reason in tally.amounts}):
        found = [tally.amounts.get((action, reason)) for action in actions]
        table.add_row(reason.replace("_", " "), *("-" if amount is None else _amount(amount) for amount in found))
    if tally.amounts:
        table.add_section()
        table.add_row("all", *(_amount(tally.total(action)) for action in actions))
    if tally.restored:
        table.caption = f"{len(set(tally.restored))} taken back out of the trash: they are needed again"
        table.caption_justify = "left"
    return table


def _grouping(store: ObjectStore, by: UsageBy) -> Grouping:
    if by is UsageBy.KIND:
        return Grouping(of_key=lambda key: (key.partition("-")[0],), of_log=lambda _, job: (job.partition("/")[0],))
    by_key: dict[str, set[str]] = {}
    by_job: dict[str, set[str]] = {}
    for plan in current_plans(store):
        for job in plan.jobs:
            level = str(job.facets.get("label_space", ""))
            group = plan.sweep if by is UsageBy.SWEEP else level
            if group:
                by_key.setdefault(job.key, set()).add(group)
                by_job.setdefault(job.name, set()).add(level)
    if by is UsageBy.SWEEP:
        return Grouping(of_key=lambda key: by_key.get(key, ()), of_log=lambda sweep, _: (sweep,))
    return Grouping(of_key=lambda key: by_key.get(key, ()), of_log=lambda _, job: by_job.get(job, ()))


def _usage_row(usage: Usage) -> list[str]:
    return [format_bytes(getattr(usage, column).num_bytes) for column in (*_USAGE_COLUMNS, "total")]


def _change_roots(store: ObjectStore, *, forget: Sequence[str], pin: Sequence[str], unpin: Sequence[str]) -> None:
    for name in unpin:
        remove_pin(store, name)
        say(f"Pin {name} is removed.")
    for text in pin:
        name, _, target = text.partition("=")
        if not name or not target:
            message = f"--pin {text!r} is not NAME=TARGET; TARGET is a key, a checkpoint of a key, or a sweep"
            raise typer.BadParameter(message)
        _add_pin(store, name, target)
    for sweep in forget:
        require_sweep(store, sweep)
        forget_sweep(store, sweep, now=time.time())


def _add_pin(store: ObjectStore, name: str, target: str) -> None:
    """Pinning a sweep pins the jobs of its current plan."""
    is_sweep = target in list_sweeps(store)
    if not is_sweep:
        check_reference(store, target)
    is_visible = not is_forgotten(store, target) if is_sweep else is_committed(store, target)
    # All else may be in the trash: a collection at work, which has read the pins already, may destroy it.
    lock = None if is_visible else CollectionLock(store, _holder(), time.time)
    with lock or nullcontext():
        if not is_sweep and not is_visible:
            check_reference(store, target)  # a collection may have ended meanwhile
        keys = tuple(job.key for job in load_plan(store, target).jobs) if is_sweep else (target,)
        if lock is not None:
            lock.keep()  # reading a large trash takes long
        add_pin(store, Pin(name=name, keys=keys, created_at_s=time.time()))
    say(f"Pin {name} keeps {_kept(keys)}{f' of sweep {target}' if is_sweep else ''}.")


def _kept(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{len(keys)} keys"


def _holder() -> str:
    return f"{socket.gethostname()}:{getpid()}"


def _print_pins(store: ObjectStore, pins: Sequence[Pin], form: DocumentForm) -> None:
    if form is not DocumentForm.TABLE:
        print_document([asdict(pin) for pin in pins], form)
        return
    table = Table("pin", "since", "keeps", title=f"Pins in {store.uri}", title_justify="left")
    for pin in pins:
        table.add_row(pin.name, _date(pin.created_at_s), _kept(pin.keys))
    stdout_console().print(table)


def _artifact_row(line: ArtifactLine, *, is_hidden: bool) -> list[str]:
    state = "committed" if line.is_committed else "in the trash" if is_hidden else "unfinished"
    size, checkpoints = format_bytes(line.total.num_bytes), format_bytes(line.checkpoints.num_bytes)
    return [line.key, state, _date(line.newest_at_s), str(line.total.num_objects), size, checkpoints]


def _amount(amount: Amount) -> str:
    return f"{format_bytes(amount.num_bytes)} in {amount.num_objects}"


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
