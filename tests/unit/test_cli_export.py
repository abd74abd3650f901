"""Exported backbones: timm builds and loads them from the folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from orchestrator.cli.commands.export import timm_config
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import Part, Record, read_record
from orchestrator.storage.digests import digests_of
from orchestrator.storage.layout import artifact_folder, record_name
from orchestrator.storage.local import LocalStore
from tests.builders import accept
from tests.commands import run_command
from tests.scripted_sweep import make_job, make_plan
from workloads.models.weights import encode_tensors

SIZES = {"test_vit": 48, "test_resnet": 64}


def put_backbone(store: LocalStore, name: str, *, epochs: tuple[int, ...] = (), seed: int = 0) -> Record:
    """A committed pretraining with random weights, and others at the kept epochs."""
    size = SIZES[name]
    arguments: dict[str, Any] = {"img_size": size} if "vit" in name else {}
    torch.manual_seed(seed)
    document = {
        "name": name,
        "image_size": size,
        "kwargs": {},
        "timm_kwargs": arguments,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.2],
        "num_features": timm.create_model(name, num_classes=0, **arguments).num_features,
        "num_classes": 7,
    }
    contents = {"model.json": json.dumps(document).encode()}
    for folder in ("", *(f"epochs/{epoch}/" for epoch in epochs)):
        weights = timm.create_model(name, num_classes=0, **arguments).state_dict()
        contents[f"{folder}backbone.safetensors"] = encode_tensors(weights)
        contents[f"{folder}head.safetensors"] = encode_tensors({"weight": torch.zeros(7, 2)})
    return put_record(store, make_job("pretrain/a"), contents, recipe={"resize": 2 * size, "interpolation": "bicubic"})


def put_record(
    store: LocalStore, job: Job, contents: Mapping[str, bytes], *, recipe: Mapping[str, object] | None = None
) -> Record:
    parts = {}
    for name, content in contents.items():
        path, digests = f"parts/1-0123456789abcdef/{name}", digests_of(content)
        store.put(f"{artifact_folder(job.key)}/{path}", content)
        parts[name] = Part(path=path, size_bytes=len(content), sha256=digests.sha256, blake3=digests.blake3)
    identity = {**job.identity, "parameters": {"recipe": recipe or {}}, "inputs": {"labels": "labels-gone-0123"}}
    record = Record(
        key=job.key,
        identity=identity,
        attempt_id=f"{job.key}.1",
        job=job.name,
        sweep="sweep",
        created_at_s=1_800_000_000.0,
        parts=parts,
        metrics={"val_error": 0.125},
    )
    store.put(record_name(job.key), record.to_bytes())
    return record


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def weights_of(store: LocalStore, record: Record, part: str = "backbone.safetensors") -> dict[str, Tensor]:
    import safetensors.torch

    return safetensors.torch.load(store.get(f"{artifact_folder(record.key)}/{record.parts[part].path}"))


def is_same(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() >= weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("name", SIZES)
def test_exported_backbone_is_what_timm_builds_from_the_folder(
    store: LocalStore, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record, folder = put_backbone(store, name), tmp_path / "out"
    result = run_command(capsys, "export", record.key, str(folder), "--store", store.uri, "-o", "json")
    assert result.code == 0, result.err
    assert {Path(file).name for file in result.document["files"]} == {path.name for path in folder.iterdir()}
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert is_same(model, weights_of(store, record))
    assert model.num_classes == 0
    config = resolve_model_data_config(model)
    assert tuple(config["input_size"]) == (3, SIZES[name], SIZES[name])
    assert (tuple(config["mean"]), config["interpolation"], config["crop_pct"]) == ((0.5, 0.4, 0.3), "bicubic", 0.5)
    reset: Any = model.reset_classifier
    reset(10)
    assert model(torch.zeros(1, 3, SIZES[name], SIZES[name])).shape == (1, 10)
    arguments: dict[str, Any] = {"img_size": SIZES[name]} if "vit" in name else {}
    again = timm.create_model(name, num_classes=0, checkpoint_path=folder / "model.safetensors", **arguments)
    assert is_same(again, weights_of(store, record))


def test_exported_card_tells_identity_metrics_and_data(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, folder = put_backbone(store, "test_vit"), tmp_path / "out"
    run_command(capsys, "export", record.key, str(folder), "--store", store.uri)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\n")
    assert json.dumps(record.identity, indent=1, sort_keys=True) in card
    assert "| val_error | 0.125 |" in card
    assert "labels: `labels-gone-0123` (no longer in the store)" in card
    assert Record.from_bytes((folder / "record.json").read_bytes()) == read_record(store, record.key)


def test_exported_card_names_the_data_of_the_backbone_and_of_the_one_it_continues(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = put_backbone(store, "test_vit")
    jobs = {name: make_job(f"index/{name}") for name in ("old", "new")}
    records = {name: put_record(store, job, {}) for name, job in jobs.items()}

    def with_inputs(record: Record, **inputs: str) -> Record:
        changed = replace(record, identity={**record.identity, "inputs": inputs})
        store.put(record_name(record.key), changed.to_bytes())
        return changed

    with_inputs(first, index=records["old"].key)
    contents = {name: store.get(f"{artifact_folder(first.key)}/{part.path}") for name, part in first.parts.items()}
    second = put_record(store, make_job("pretrain/b"), contents)
    with_inputs(second, index=records["new"].key, initial=first.key)
    assert run_command(capsys, "export", second.key, str(tmp_path / "out"), "--store", store.uri).code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- index: `{records['new'].key}`" in card
    assert f"- initial/index: `{records['old'].key}`" in card


def test_export_of_a_kept_epoch_takes_its_weights(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, folder = put_backbone(store, "test_resnet", epochs=(5,)), tmp_path / "out"
    arguments = ("export", record.key, str(folder), "--store", store.uri, "--epoch")
    missing = run_command(capsys, *arguments, "6")
    assert (missing.code, folder.exists()) == (102, False)
    assert "kept are [5]" in missing.err
    assert run_command(capsys, *arguments, "5").code == 0
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert is_same(model, weights_of(store, record, "epochs/5/backbone.safetensors"))
    assert not is_same(model, weights_of(store, record))


def test_export_of_a_job_finds_its_key_in_the_sweep(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_backbone(store, "test_vit")
    accept(store, make_plan(make_job("pretrain/a"), make_job("probe/a"), revision=1, store_uri=store.uri))
    arguments = ("--store", store.uri)
    assert run_command(capsys, "export", "sweep", "pretrain/a", str(tmp_path / "out"), *arguments).code == 0
    unfinished = run_command(capsys, "export", "sweep", "probe/a", str(tmp_path / "other"), *arguments)
    assert unfinished.code == 102
    assert "has no result yet" in unfinished.err
    unknown = run_command(capsys, "export", "sweep", "pretrain/b", str(tmp_path / "other"), *arguments)
    assert "did you mean 'pretrain/a'" in unknown.err


def test_export_refuses_what_has_no_backbone_and_folders_that_hold_something(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = put_record(store, make_job("probe/a"), {"model.json": b"{}", "head.safetensors": b""})
    result = run_command(capsys, "export", probe.key, str(tmp_path / "out"), "--store", store.uri)
    assert result.code == 1
    assert "holds no backbone" in result.err
    record = put_backbone(store, "test_vit")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    result = run_command(capsys, "export", record.key, str(tmp_path / "out"), "--store", store.uri)
    assert result.code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert run_command(capsys, "export", "nothing-0123", str(tmp_path / "x"), "--store", store.uri).code == 102


def test_export_of_a_model_of_a_package_names_its_files(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {"model.json": b'{"name": "nets==1.0:tiny"}', "backbone.safetensors": b"", "head.safetensors": b""}
    record = put_record(store, make_job("pretrain/a"), contents)
    result = run_command(capsys, "export", record.key, str(tmp_path / "out"), "--store", store.uri)
    assert result.code == 2
    folder = f"{store.uri}/{artifact_folder(record.key)}"
    for name in ("backbone.safetensors", "model.json"):
        assert f"{folder}/{record.parts[name].path}" in result.err


def test_export_of_damaged_weights_is_refused_and_leaves_nothing(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, folder = put_backbone(store, "test_vit"), tmp_path / "out"
    store.put(f"{artifact_folder(record.key)}/{record.parts['backbone.safetensors'].path}", b"other")
    result = run_command(capsys, "export", record.key, str(folder), "--store", store.uri)
    assert result.code == 1
    assert "the store lost or changed it" in result.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("size", "resize"), [(192, 225), (160, 212), (224, 256), (224, 224)])
def test_images_are_resized_by_timm_as_they_were_in_the_evaluation(size: int, resize: int) -> None:
    document = {"name": "m", "image_size": size, "timm_kwargs": {}, "num_features": 8, "mean": [0.5], "std": [0.5]}
    config = timm_config(document, {"resize": resize})
    assert math.floor(size / config["pretrained_cfg"]["crop_pct"]) == resize
