"""``orchestrator reproduce``: writes files from which a submitted sweep can be run again, and compares their plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.arguments import StoreOption, SweepName
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.services import reproduction
from orchestrator.services.reproduction import Reproduction
from orchestrator.services.settings import Settings
from orchestrator.storage.files import rewrite_text
from orchestrator.storage.open import open_store
from orchestrator.sweeps.client import load_plan
from orchestrator.tracking.provenance import requirements_text

_SHOWN = 5
_SWEEP, _REQUIREMENTS, _DIFF, _PROVENANCE = "sweep.yaml", "requirements.txt", "uncommitted.diff", "provenance.json"


def reproduce(
    sweep: SweepName,
    *,
    revision: Annotated[int, typer.Option(min=0, help="Revision of the plan; default: the current one.")] = 0,
    into: Annotated[str, typer.Option(help="Folder to write to; default: reproduce-SWEEP.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the files of an earlier reproduction.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Write the files to run a submitted sweep again: complete sweep.yaml, packages, code and uncommitted changes."""
    folder = Path(into or f"reproduce-{sweep}")
    raise typer.Exit(_write(sweep, revision, folder, Settings().known_store_uri(store), force=force, form=output))


def _write(sweep: str, revision: int, folder: Path, uri: str, *, force: bool, form: DocumentForm) -> ExitCode:
    objects = open_store(uri)
    current = load_plan(objects, sweep).revision
    if revision > current:
        raise NotFoundError(f"sweep {sweep} has revisions 1-{current}, and no {revision}; pass one of them")
    found = reproduction.reproduce(objects, sweep, revision or current)
    files = _files(found)
    _save(folder, files, force=force)
    if form is DocumentForm.TABLE:
        for line in _lines(found, folder, list(files)):
            stdout_console().print(line)
    else:
        print_document({**_document(found), "folder": str(folder), "files": list(files)}, form)
    return ExitCode.OK if found.is_exact else ExitCode.FAILURE


def _files(found: Reproduction) -> dict[str, str]:
    origin = found.origin
    files = {_SWEEP: "".join(f"# {line}\n" for line in _header(found)) + found.text}
    if found.provenance:
        files[_PROVENANCE] = json.dumps({**found.provenance, "nodes": found.nodes}, indent=1) + "\n"
    if origin.packages:
        files[_REQUIREMENTS] = requirements_text(dict(origin.packages))
    if origin.diff:
        files[_DIFF] = origin.diff
    return files


def _header(found: Reproduction) -> Iterator[str]:
    plan, origin = found.submitted, found.origin
    yield f"Revision {plan.revision} of sweep {plan.sweep} in {plan.store_uri}: {len(plan.jobs)} jobs."
    if origin.commit:
        changes = f" with the changes of {_DIFF}" if origin.diff else ""
        yield f"Submitted from commit {origin.commit}{changes}."
    if origin.packages:
        yield f"Its environment: pip install --no-deps -r {_REQUIREMENTS} (Python {origin.machine.get('python', '?')})."


def _save(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise UserError(f"{folder} has {', '.join(there)} already; name another folder with --into, or pass --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            rewrite_text(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; name another folder with --into") from error


def _document(found: Reproduction) -> dict[str, Any]:
    plan, origin = found.submitted, found.origin
    return {
        "sweep": plan.sweep,
        "revision": plan.revision,
        "num_jobs": len(plan.jobs),
        "same_keys": found.is_exact,
        "differs": found.diff.to_json()["counts"],
        "commit": origin.commit,
        "has_uncommitted_changes": bool(origin.diff),
        "untracked_files": list(origin.untracked),
        "hardware": found.hardware,
        "same_code": not found.has_other_code,
        "other_packages": {name: list(versions) for name, versions in found.other_packages().items()},
    }


def _lines(found: Reproduction, folder: Path, files: list[str]) -> Iterator[str]:
    plan, origin = found.submitted, found.origin
    yield f"Wrote {', '.join(files)} into {folder}."
    if found.is_exact:
        yield f"Planned here, all {len(plan.jobs)} jobs of revision {plan.revision} have the keys that they had."
    else:
        yield f"Planned here, revision {plan.revision} is not what it was: {found.diff!r}"
        for cause, jobs in list(found.diff.by_cause().items())[:_SHOWN]:
            yield f"  {len(jobs)} jobs, such as {jobs[0].name}: {cause}"
    if not found.provenance:
        yield "Nothing is known of code and environment: it was submitted by an earlier version."
    if origin.commit:
        yield f"Commit {origin.commit}{f' and {_DIFF}' if origin.diff else ''}."
    if origin.untracked:
        yield f"{len(origin.untracked)} files were not known to git, such as {origin.untracked[0]}: they are not here."
    if found.nodes:
        hardware = "; ".join(f"{count} with {what}" for what, count in found.hardware.items())
        yield f"Its attempts ran on {len(found.nodes)} node{'s' * (len(found.nodes) > 1)}: {hardware}."
    if found.has_other_code:
        yield "The code of this program differs from the code at that time; check out the commit."
    if others := found.other_packages():
        name, (then, now) = next(iter(others.items()))
        yield f"{len(others)} packages differ, such as {name}: {then or 'none'} -> {now or 'none'}."
