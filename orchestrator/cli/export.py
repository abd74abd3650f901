"""``orchestrator export``: a backbone of the store as a folder that timm reads, with all that is known of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.console import stderr_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.model_card import Exported, model_card
from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.core.errors import NotFoundError, OrchestratorError, UserError
from orchestrator.core.security.json_text import parse_json
from orchestrator.services.sources import open_existing_store, require_sweep
from orchestrator.storage.artifacts import Record, download_part, read_part, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweeps.client import load_plan

WEIGHTS, HEAD, CONFIG, CARD, RECORD = "model.safetensors", "head.safetensors", "config.json", "README.md", "record.json"
"""Files of an export; timm looks for the first and the third."""
_BACKBONE, _MODEL = "backbone.safetensors", "model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Flags of the command."""

    sweep: str = ""
    """The job's sweep; empty: a key is given, not a job."""
    epoch: int | None = None
    """Kept weights of this epoch; None = the final ones."""
    replaces: bool = False
    """Whether files of a former export may be replaced."""
    form: DocumentForm = DocumentForm.TABLE
    store: str = ""


def export_backbone(name: str, directory: Path, options: ExportOptions) -> ExitCode:
    """Write the backbone of a key, or of a sweep's job, into a folder."""
    store = open_existing_store(options.store)
    record = _find(store, name, options.sweep)
    weights, head = _parts(record, options.epoch)
    _check_folder(directory, replaces=options.replaces)
    document: dict[str, Any] = parse_json(read_part(store, record, _MODEL))
    config = timm_config(document, record.identity.get("parameters", {}).get("recipe", {}))
    exported = Exported(
        record=record, document=document, epoch=options.epoch, store_uri=store.uri, sources=_sources(store, record)
    )
    files = {
        CONFIG: _json(config),
        CARD: model_card(exported).encode(),
        RECORD: record.to_bytes(),
    }
    _write(store, record, directory, {WEIGHTS: weights, HEAD: head}, files)
    if options.form is not DocumentForm.TABLE:
        written = [str(directory / file) for file in (WEIGHTS, HEAD, *files)]
        print_document({"key": record.key, "directory": str(directory), "files": written}, options.form)
    use = f"timm.create_model('local-dir:{directory}', pretrained=True)"
    stderr_console().print(f"{record.key} is in {directory}: {use}", markup=False, soft_wrap=True)
    return ExitCode.OK


def timm_config(document: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` as timm writes it for the Hugging Face hub, from an artifact's ``model.json`` and its recipe.

    The weights are those of a backbone without a classifier, so that ``num_classes`` is 0. Images for validation were
    resized to ``resize`` (default: the model's size) before their centre was cut out.
    """
    size, arguments = int(document["image_size"]), dict(document["timm_kwargs"])
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
            "crop_pct": size / (recipe.get("resize") or size),
            "custom_load": False,
        },
    }


def _find(store: ObjectStore, name: str, sweep: str) -> Record:
    if not sweep:
        try:
            return read_record(store, name)
        except NotFoundError:
            message = f"store {store.uri} has no committed key '{name}'; for a job, name its sweep with --sweep"
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
    """Records of what the backbone was trained on, by role, as far as they are still there."""
    found: dict[str, Record] = {}
    waiting = dict(record.identity.get("inputs", {}))
    while waiting:
        role, key = waiting.popitem()
        try:
            found[role] = read_record(store, key)
        except OrchestratorError:
            continue  # collected meanwhile; its key is in the identity all the same
        inputs = found[role].identity.get("inputs", {})
        waiting |= {name: value for name, value in inputs.items() if name not in found}
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
