"""``orchestrator export``: a backbone of the store as a folder that timm reads, with its record."""

from __future__ import annotations

import json
import math
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.arguments import FormerSweep, StoreOption, complete_job, complete_sweep, refuse_former_order
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import NotFoundError, OrchestratorError, UsageError, UserError
from orchestrator.core.plugins import is_reference
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.suggest import did_you_mean
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import stderr_console
from orchestrator.storage.artifacts import Record, download_part, read_part, read_record
from orchestrator.storage.layout import artifact_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_plan

WEIGHTS, HEAD, CONFIG, CARD, RECORD = "model.safetensors", "head.safetensors", "config.json", "README.md", "record.json"
"""Files of an export; timm looks for the first and the third."""
_BACKBONE, _MODEL = "backbone.safetensors", "model.json"
_DIGESTS = ("dataset_digest", "num_train", "num_val", "num_classes")
"""Fields of an index or label artifact that describe its data."""


def export(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP|KEY",
            help="Name of a submitted sweep, before one of its jobs; or the key of a result.",
            autocompletion=complete_sweep,
        ),
    ],
    job: Annotated[
        str, typer.Argument(help="Name of a job of the sweep; none behind a key.", autocompletion=complete_job)
    ] = "",
    directory: Annotated[
        str, typer.Argument(help="Folder to write to, always the last argument; created if it does not exist.")
    ] = "",
    *,
    epoch: Annotated[
        int | None, typer.Option(help="Export the weights kept at this epoch; default: the final weights.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of an earlier export.")] = False,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
    former: FormerSweep = "",
) -> None:
    """Export a backbone for timm: safetensors, configuration, and a model card."""
    refuse_former_order("export", former, sweep, job, directory)
    if not job:
        raise UsageError("export needs a folder: orchestrator export SWEEP JOB DIRECTORY, or export KEY DIRECTORY")
    objects = open_existing_store(store)
    record = _find(objects, job, sweep) if directory else _find(objects, sweep, "")
    _export(objects, record, Path(directory or job), epoch=epoch, force=force, form=output)


def _export(
    objects: ObjectStore, record: Record, directory: Path, *, epoch: int | None, force: bool, form: DocumentForm
) -> None:
    weights, head = _parts(record, epoch)
    _check_folder(directory, replaces=force)
    document: dict[str, Any] = parse_json(read_part(objects, record, _MODEL))
    if is_reference(str(document["name"])):
        folder = f"{objects.uri}/{artifact_folder(record.key)}"
        places = ", ".join(f"{folder}/{record.parts[part].path}" for part in (weights, _MODEL))
        message = f"{record.key} is the model {document['name']} of a package, which timm cannot build"
        raise UsageError(f"{message}; copy its files: {places}")
    # What a search chose decides, too, and is not in the identity of a job that uses it.
    chosen = record.summary.get("chosen", {}).get("parameters", {})
    config = timm_config(document, {**record.identity.get("parameters", {}), **chosen}.get("recipe", {}))
    exported = Exported(
        record=record, document=document, epoch=epoch, store_uri=objects.uri, sources=_sources(objects, record)
    )
    files = {
        CONFIG: _json(config),
        CARD: model_card(exported).encode(),
        RECORD: record.to_bytes(),
    }
    _write(objects, record, directory, {WEIGHTS: weights, HEAD: head}, files)
    if form is not DocumentForm.TABLE:
        written = [str(directory / file) for file in (WEIGHTS, HEAD, *files)]
        print_document({"key": record.key, "directory": str(directory), "files": written}, form)
    use = f"timm.create_model('local-dir:{directory}', pretrained=True)"
    stderr_console().print(f"{record.key} is in {directory}: {use}", soft_wrap=True)


def timm_config(document: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` as timm writes it for the Hugging Face hub, from an artifact's ``model.json`` and its recipe.

    The weights are those of a backbone without a classifier, so that ``num_classes`` is 0. Images for validation were
    resized to ``resize`` (default: the model's size) before their centre was cut out.
    """
    size, arguments = int(document["image_size"]), dict(document["timm_kwargs"])
    resize = recipe.get("resize") or size
    crop_pct = size / resize
    while math.floor(size / crop_pct) < resize:  # timm rounds down, and so would lose a pixel
        crop_pct = math.nextafter(crop_pct, 0.0)
    return {
        "architecture": document["name"],
        "num_classes": 0,
        "num_features": document["num_features"],
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [3, size, size],
            "fixed_input_size": "img_size" in arguments,
            "mean": document["mean"],
            "std": document["std"],
            "interpolation": recipe.get("interpolation", "bilinear"),
            "crop_pct": crop_pct,
            "custom_load": False,
        },
    }


def _find(store: ObjectStore, name: str, sweep: str) -> Record:
    if not sweep:
        try:
            return read_record(store, name)
        except NotFoundError:
            if name in list_sweeps(store):
                message = f"'{name}' is a sweep, and the last argument is the folder to write to"
                raise UsageError(f"{message}: orchestrator export {name} JOB DIRECTORY") from None
            message = f"store {store.uri} has no committed key '{name}'; for a job, put its sweep before it"
            raise NotFoundError(message) from None
    require_sweep(store, sweep)
    jobs = load_plan(store, sweep).by_name()
    if name not in jobs:
        message = f"sweep '{sweep}' has no job '{name}': {did_you_mean(name, jobs)}"
        raise NotFoundError(message)
    try:
        return read_record(store, jobs[name].key)
    except NotFoundError:
        message = f"job '{name}' of sweep '{sweep}' has no result yet; see: orchestrator status {sweep}"
        raise NotFoundError(message) from None


def _parts(record: Record, epoch: int | None) -> tuple[str, str]:
    """Names of the weights among a record's parts."""
    folder = "" if epoch is None else f"epochs/{epoch}/"
    if folder + _BACKBONE in record.parts:
        return folder + _BACKBONE, folder + HEAD
    if epoch is not None and _BACKBONE in record.parts:
        kept = sorted(
            int(part.split("/")[1]) for part in record.parts if part.startswith("epochs/") and _BACKBONE in part
        )
        raise NotFoundError(f"{record.key} kept no weights of epoch {epoch}; kept are {kept or 'the final ones only'}")
    backbone = record.identity.get("inputs", {}).get("backbone", "")
    hint = f"; it leaves the backbone of its pretraining as it is: export {backbone}" if backbone else ""
    message = f"{record.key} holds no backbone{hint or '; export a pretrain or finetune'}"
    raise UserError(message)


def _check_folder(directory: Path, *, replaces: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: name a folder to export into")
    if directory.is_dir() and any(directory.iterdir()) and not replaces:
        raise UserError(f"folder {directory} is not empty: name another, or replace a former export with --force")


def _sources(store: ObjectStore, record: Record) -> dict[str, Record]:
    """Records of what the backbone was made of, as far as they still exist: its own inputs, then theirs, and so on.

    By role; that of an input's input is `backbone/index`. A record with several roles has the first one.
    """
    found: dict[str, Record] = {}
    waiting, seen = deque([("", record)]), set[str]()
    while waiting:
        role_of, user = waiting.popleft()
        for role, key in sorted(user.identity.get("inputs", {}).items()):
            if key not in seen:
                seen.add(key)
                with suppress(OrchestratorError):  # deleted by garbage collection; its key is still in the identity
                    found[f"{role_of}{role}"] = read_record(store, key)
                    waiting.append((f"{role_of}{role}/", found[f"{role_of}{role}"]))
    return found


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _write(
    store: ObjectStore, record: Record, directory: Path, parts: Mapping[str, str], files: Mapping[str, bytes]
) -> None:
    """All files, each whole or not at all; the weights are checked against their record."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".export-") as folder:
            for file, part in parts.items():
                download_part(store, record, part, Path(folder, file))
            for file, content in files.items():
                Path(folder, file).write_bytes(content)
            for file in (*parts, *files):
                Path(folder, file).replace(directory / file)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Description of a backbone."""

    record: Record
    document: Mapping[str, Any]
    """Its ``model.json``."""
    epoch: int | None
    store_uri: str
    sources: Mapping[str, Record] = field(default_factory=dict)
    """By role: labels, index, index/dataset, backbone/labels, ..."""


def model_card(exported: Exported) -> str:
    """Markdown with the metadata block of the Hugging Face hub."""
    return "\n".join(_lines(exported)) + "\n"


def _lines(exported: Exported) -> Iterator[str]:
    record, document = exported.record, exported.document
    size, epoch = document["image_size"], exported.epoch
    yield from ("---", "library_name: timm", "tags: [timm, image-feature-extraction]", "---", "")
    yield f"# {record.key}"
    yield ""
    of_epoch = f", as it was after epoch {epoch}" if epoch is not None else ""
    yield f"A {document['name']} backbone without classifier, {document['num_features']} features,"
    yield f"for images of {size} x {size} pixels{of_epoch}."
    yield ""
    yield from ("```python", "import timm", "")
    yield "model = timm.create_model('local-dir:THIS_FOLDER', pretrained=True)  # features"
    yield "model.reset_classifier(10)  # for a new head"
    yield from ("```", "")
    yield f"Inputs are RGB in [0, 1], normalised by mean {document['mean']} and std {document['std']}."
    yield f"`head.safetensors` is the classifier it was trained with ({document['num_classes']} classes)."
    yield from ("", "## What it was trained on", "")
    yield from _source_lines(exported)
    yield from ("", "## Results", "", "Rates are fractions; they are those of the final weights.", "")
    yield from ("| metric | value |", "|---|---|")
    yield from (f"| {name} | {value:.6g} |" for name, value in sorted(record.metrics.items()))
    yield from ("", "## Identity", "", "Everything that decides its weights; its sha256 is part of the key.", "")
    yield from ("```json", json.dumps(record.identity, indent=1, sort_keys=True), "```", "")
    if chosen := record.summary.get("chosen"):
        yield from ("What its search chose:", "", "```json", json.dumps(chosen, indent=1, sort_keys=True), "```", "")
    yield from ("## Origin", "")
    yield from _origin_lines(exported)


def _source_lines(exported: Exported) -> Iterator[str]:
    for role, source in exported.sources.items():
        known = {**source.summary, **source.metrics}
        facts = [f"{name} {_plain(known[name])}" for name in _DIGESTS if name in known]
        yield f"- {role}: `{source.key}` ({source.job}){': ' if facts else ''}{', '.join(facts)}"
        space = source.identity.get("parameters", {}).get("space")
        if space:
            yield f"  - label space: `{json.dumps(space, sort_keys=True)}`"
    there = {source.key for source in exported.sources.values()}
    missing = {role: key for role, key in exported.record.identity.get("inputs", {}).items() if key not in there}
    yield from (f"- {role}: `{key}` (no longer in the store)" for role, key in missing.items())


def _origin_lines(exported: Exported) -> Iterator[str]:
    record = exported.record
    made = datetime.fromtimestamp(record.created_at_s, tz=UTC)
    yield f"- job `{record.job}` of sweep `{record.sweep}`, attempt `{record.attempt_id}`, {made:%Y-%m-%d %H:%M} UTC"
    yield f"- store {exported.store_uri}, code {record.package_digest[:12] or 'unknown'}"
    for name in ("weights_sha256", "backbone_sha256"):
        if name in record.summary:
            yield f"- {name} `{record.summary[name]}`"
    fingerprint = record.summary.get("fingerprint", {})
    if fingerprint:
        yield f"- made with {', '.join(f'{name} {value}' for name, value in sorted(fingerprint.items()))}"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"`{value}`"
