"""Initial weights: from files of several kinds and names, with a report; refused where too little matches."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from orchestrator.core.contract import Execution, JobRequest
from orchestrator.core.errors import StorageError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.testing.memory_store import MemoryStore
from workloads.models.build import build_backbone
from workloads.models.initial import LoadReport, initial_of, load_initial
from workloads.models.spec import ModelSpec
from workloads.models.weights import encode_tensors, weights_sha256

RESNET = ModelSpec(name="test_resnet", image_size=32)
VIT = ModelSpec(name="test_vit", image_size=32)
Tensors = Mapping[str, Tensor]


def _weights(spec: ModelSpec = RESNET, seed: int = 7) -> dict[str, Tensor]:
    return dict(build_backbone(spec, seed)[0].state_dict())


def _saved(document: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(document, buffer)
    return buffer.getvalue()


def _load(folder: Path, content: bytes, spec: ModelSpec = RESNET, name: str = "w.bin") -> tuple[nn.Module, LoadReport]:
    (folder / name).write_bytes(content)
    backbone, _ = build_backbone(spec, 0)
    initial = {"uri": f"file://{folder}/{name}", "sha256": sha256(content).hexdigest()}
    return backbone, load_initial(backbone, spec, initial, MemoryStore())


def _prefixed(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _with_head(tensors: Tensors) -> dict[str, Tensor]:
    return {**tensors, "fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}


KINDS: dict[str, Callable[[Tensors], bytes]] = {
    "safetensors": encode_tensors,
    "safetensors-with-head": lambda tensors: encode_tensors(_with_head(tensors)),
    "ours": lambda tensors: encode_tensors(_prefixed(tensors, "backbone.")),
    "ddp": lambda tensors: _saved({"state_dict": _prefixed(tensors, "module."), "epoch": 3}),
    "compiled-ddp": lambda tensors: _saved({"model": _prefixed(tensors, "_orig_mod.module.")}),
    "averaged-first": lambda tensors: _saved(
        {"state_dict": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, "state_dict_ema": tensors}
    ),
    "open-clip": lambda tensors: _saved({**_prefixed(tensors, "visual.trunk."), "logit_scale": torch.tensor(1.0)}),
    "timm-script": lambda tensors: _saved(
        {"state_dict": dict(tensors), "args": argparse.Namespace(lr=0.1, model="test_resnet"), "arch": "test_resnet"}
    ),
    "masked-autoencoder": lambda tensors: _saved(
        {"model": {**tensors, "decoder_blocks.0.weight": torch.zeros(1 << 20), "mask_token": torch.zeros(64)}}
    ),
    "bare": lambda tensors: _saved(dict(tensors)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_of_any_kind_are_the_files(tmp_path: Path, kind: str) -> None:
    backbone, report = _load(tmp_path, KINDS[kind](_weights()))
    assert weights_sha256(backbone.state_dict()) == weights_sha256(_weights())
    assert (report.share, report.num_missing, report.missing, report.mismatched) == (1.0, 0, (), ())
    assert report.num_matched == len(backbone.state_dict())


def test_initial_weights_report_names_heads_and_unknown_names_apart(tmp_path: Path) -> None:
    foreign = {**_with_head(_weights()), "projector.weight": torch.zeros(2)}
    _, report = _load(tmp_path, encode_tensors(foreign))
    assert report.head == ("fc.bias", "fc.weight")
    assert (report.unexpected, report.num_unexpected) == (("projector.weight",), 1)
    document = report.to_json()
    assert document["source"].endswith("w.bin")
    assert document["head"] == ["fc.bias", "fc.weight"]


def test_initial_weights_missing_and_mismatched_keep_their_random_values(tmp_path: Path) -> None:
    weights, random = _weights(), _weights(seed=0)
    small = sorted(weights, key=lambda name: weights[name].numel())
    gone, other = [name for name in small if name.endswith(".weight")][:2]
    del weights[gone]
    weights[other] = torch.zeros(3)
    backbone, report = _load(tmp_path, encode_tensors(weights))
    assert report.missing == (gone,)
    assert report.mismatched == (f"{other}: [3] -> {list(random[other].shape)}",)
    assert 0.9 < report.share < 1
    assert all(torch.equal(backbone.state_dict()[name], random[name]) for name in (gone, other))


def test_initial_weights_of_another_image_size_have_resized_positions(tmp_path: Path) -> None:
    larger = ModelSpec(name="test_vit", image_size=64)
    backbone, report = _load(tmp_path, encode_tensors(_weights(larger)), VIT)
    assert report.share == 1.0
    assert backbone.state_dict()["pos_embed"].shape != _weights(larger)["pos_embed"].shape
    assert torch.equal(backbone.state_dict()["norm.weight"], _weights(larger)["norm.weight"])


def test_initial_weights_of_another_network_are_refused_with_examples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"only 0\.\d% of the backbone of timm model test_resnet.*bn1"):
        _load(tmp_path, encode_tensors({"transformer.weight": torch.zeros(3)}))
    with pytest.raises(UserError, match="test_vit"):
        _load(tmp_path, encode_tensors(_weights(RESNET)), VIT)


def test_initial_weights_of_a_larger_network_of_the_family_are_refused(tmp_path: Path) -> None:
    small, large = (ModelSpec(name=name, image_size=32) for name in ("resnet18", "resnet34"))
    message = (
        r"timm model resnet18 has no place for 47\.\d% of the backbone in file://.*w\.bin \(at most 5% .*"
        r"96 names are unknown, such as \['layer1\.2\.bn1"
    )
    with pytest.raises(UserError, match=message):
        _load(tmp_path, encode_tensors(_weights(large)), small)
    with pytest.raises(UserError, match=r"has no place for .* probably a larger network"):
        _load(tmp_path, encode_tensors(_weights(VIT)), ModelSpec(name="test_vit", image_size=32, kwargs={"depth": 4}))


def test_initial_weights_report_tells_what_part_of_the_source_has_a_place(tmp_path: Path) -> None:
    weights = _weights()
    extra = sum(tensor.numel() for tensor in weights.values()) // 50
    _, report = _load(tmp_path, encode_tensors({**weights, "layer9.0.more": torch.zeros(extra)}))
    assert report.share == 1.0
    assert report.use == pytest.approx(50 / 51, abs=1e-3)


@pytest.mark.parametrize("with_head", [False, True])
def test_initial_weights_of_a_backbone_with_layers_under_the_heads_name_are_loaded(
    tmp_path: Path, *, with_head: bool
) -> None:
    convnext = ModelSpec(name="test_convnext", image_size=32)
    weights = _weights(convnext)
    assert "head.norm.weight" in weights
    head = {"head.fc.weight": torch.zeros(1000, 64)} if with_head else {}
    backbone, report = _load(tmp_path, encode_tensors(weights | head), convnext)
    assert weights_sha256(backbone.state_dict()) == weights_sha256(weights)
    assert (report.share, report.use, report.num_unexpected, report.head) == (1.0, 1.0, 0, tuple(head))


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (len, ("executed",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_saved({"state_dict": {"a": _Evil()}}), "without executing"),
        (b"", "not a weights file"),
        (b"<html>not found</html>", "not a weights file"),
        (encode_tensors({"a": torch.zeros(100)})[:-50], "not a weights file"),
        (_saved({"a": torch.zeros(100)})[:-200], "damaged"),
        (_saved([1, 2]), "only 0.0%"),
    ],
    ids=["pickle", "empty", "html", "cut", "cut-torch", "no-tensors"],
)
def test_initial_weights_bad_file_is_a_user_error(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        _load(tmp_path, content)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "pickle"])
def test_initial_weights_refusal_names_what_the_file_asks_for_in_plain_words(tmp_path: Path, *, is_zip: bool) -> None:
    buffer = io.BytesIO()
    torch.save({"state_dict": {"a": _Evil()}}, buffer, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UserError) as caught:
        _load(tmp_path, buffer.getvalue())
    text = str(caught.value)
    assert "it holds len, which is not plain data; store the tensors alone" in text
    assert text.isprintable()
    assert "weights_only" not in text
    with pytest.raises(UserError, match="damaged archive"):
        _load(tmp_path, _saved({"a": torch.zeros(100)})[:-200])


def test_initial_weights_other_file_than_was_planned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(encode_tensors(_weights()))
    initial = {"uri": f"file://{tmp_path}/w.safetensors", "sha256": "0" * 64}
    with pytest.raises(UserError, match=r"has sha256 [0-9a-f]{64}, but the sweep says 0000"):
        load_initial(build_backbone(RESNET, 0)[0], RESNET, initial, MemoryStore())


def test_initial_weights_missing_file_is_a_user_error(tmp_path: Path) -> None:
    initial = {"uri": f"file://{tmp_path}/nothing.safetensors", "sha256": "0" * 64}
    with pytest.raises(UserError, match="there is no file of initial weights at file://"):
        load_initial(build_backbone(RESNET, 0)[0], RESNET, initial, MemoryStore())


def _request(parameters: Mapping[str, Any], execution: Execution | None = None, kind: str = "pretrain") -> JobRequest:
    return JobRequest(
        attempt_id="a.1",
        attempt_number=1,
        sweep="s",
        job="j",
        key=f"{kind}-made-0123456789abcdef",
        kind=JobKind(kind),
        identity={"kind": kind, "code_version": 1, "parameters": parameters, "inputs": {}},
        store_uri="memory://",
        execution=execution or Execution(),
    )


def _commit(store: MemoryStore, parts: Mapping[str, bytes]) -> str:
    request = _request({})
    writer = ArtifactWriter(store, request)
    for name, content in parts.items():
        writer.add(name, content)
    writer.commit(now=0.0, metrics={})
    return request.key


def test_initial_weights_of_an_artifact_are_its_backbone() -> None:
    store = MemoryStore()
    key = _commit(store, {"backbone.safetensors": encode_tensors(_weights()), "head.safetensors": b"x"})
    backbone, _ = build_backbone(RESNET, 0)
    report = load_initial(backbone, RESNET, {"artifact": key}, store)
    assert weights_sha256(backbone.state_dict()) == weights_sha256(_weights())
    assert report.source == key


def test_initial_weights_of_an_artifact_without_backbone_or_record_are_refused() -> None:
    store = MemoryStore()
    backbone, _ = build_backbone(RESNET, 0)
    with pytest.raises(UserError, match=r"which memory.* does not hold"):
        load_initial(backbone, RESNET, {"artifact": "pretrain-gone-0123456789abcdef"}, store)
    key = _commit(store, {"head.safetensors": b"x"})
    with pytest.raises(UserError, match="no backbone"):
        load_initial(backbone, RESNET, {"artifact": key}, store)


def test_initial_weights_of_a_timm_tag_ask_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, (backbone, _) = _weights(), build_backbone(RESNET, 0)
    real, asked = timm.create_model, []

    def without_network(name: str, *, pretrained: bool, **kwargs: Any) -> nn.Module:
        asked.append((name, pretrained))
        model = real(name, **kwargs)
        model.load_state_dict(weights)
        return model

    monkeypatch.setattr(timm, "create_model", without_network)
    report = load_initial(backbone, RESNET, {"timm": "r160_in1k"}, MemoryStore())
    assert asked == [("test_resnet.r160_in1k", True)]
    assert report.share == 1.0


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("no route to host"), StorageError), (RuntimeError("Invalid pretrained tag"), UserError)],
)
def test_initial_weights_of_timm_tell_outages_from_wrong_tags(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    backbone, _ = build_backbone(RESNET, 0)

    def fail(name: str, **kwargs: Any) -> nn.Module:
        raise error

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(raised, match=r"test_resnet\.nothing"):
        load_initial(backbone, RESNET, {"timm": "nothing"}, MemoryStore())


def test_initial_of_a_request_joins_identity_and_place() -> None:
    assert initial_of(_request({})) is None
    placed = _request({"initial": {"sha256": "ab"}}, Execution(initial_uri="file:///x/w"))
    assert initial_of(placed) == {"sha256": "ab", "uri": "file:///x/w"}
    assert initial_of(_request({"initial": {"timm": "tag"}})) == {"timm": "tag"}


def test_initial_of_a_request_with_a_backbone_of_the_sweep_is_its_artifact() -> None:
    request = _request({})
    inputs = {**request.identity["inputs"], "initial": "pretrain-x-0123456789abcdef"}
    started = replace(request, identity={**request.identity, "inputs": inputs})
    assert initial_of(started) == {"artifact": "pretrain-x-0123456789abcdef"}


def test_initial_weights_of_timm_files_load_into_our_backbone(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    backbone, report = _load(tmp_path, path.read_bytes(), VIT)
    assert report.share == 1.0
    assert set(report.head) == {"head.weight", "head.bias"}
    assert torch.equal(
        backbone.state_dict()["blocks.0.attn.qkv.weight"], model.state_dict()["blocks.0.attn.qkv.weight"]
    )
