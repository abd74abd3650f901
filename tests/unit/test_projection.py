"""CLIP towers: what their projection gives, from timm's tags and from files, and weights that have none."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest, Progress
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.local import LocalStore
from workloads.features.backbone import open_backbone
from workloads.models.initial import open_projected
from workloads.models.spec import ModelSpec

SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
SPEC = ModelSpec(name="vit_base_patch32_clip_224", image_size=32, kwargs=SMALL)
RESNET = ModelSpec(name="resnet50_clip", image_size=64, kwargs={})
NUM_OUTPUTS = 24
OPENAI = {
    "patch_embed.proj": "conv1",
    "pos_embed": "positional_embedding",
    "cls_token": "class_embedding",
    "blocks.": "transformer.resblocks.",
    "norm_pre": "ln_pre",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "norm.": "ln_post.",
    "attn.qkv.": "attn.in_proj_",
    "attn.proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Parts of a ViT's names in timm, and in OpenAI's own files."""


def tower(spec: ModelSpec = SPEC, num_classes: int = NUM_OUTPUTS) -> nn.Module:
    torch.manual_seed(3)
    arguments = {"num_classes": num_classes, "img_size": spec.image_size, **spec.kwargs}
    made: nn.Module = timm.create_model(spec.name, **arguments)
    return made.eval()


def initial(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return {"uri": path.as_uri(), "sha256": sha256(path.read_bytes()).hexdigest()}


def images(size: int = 32) -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * size * size).view(2, 3, size, size).sin()


def openai(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A ViT's tensors under the names of OpenAI's own files, with a text tower beside it."""
    found = {"token_embedding.weight": torch.zeros(3, 3)}
    for name, tensor in tensors.items():
        if name.startswith("head."):
            continue
        theirs = name
        for our_part, their_part in OPENAI.items():
            theirs = theirs.replace(our_part, their_part)
        found[f"visual.{theirs}"] = tensor.squeeze() if "embedding" in theirs else tensor
    return found | {"visual.proj": tensors["head.weight"].T}


def open_clip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {f"visual.trunk.{name}": tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    return found | {"visual.head.proj.weight": tensors["head.weight"], "logit_scale": torch.zeros(1)}


@pytest.mark.parametrize("layout", [dict, openai, open_clip])
def test_projection_of_a_file_is_what_the_whole_tower_says(layout: Any, tmp_path: Path) -> None:
    whole = tower()
    with torch.no_grad():
        whole.state_dict()["head.bias"].zero_()  # CLIP's projection has none
        expected = whole(images())
        found = open_projected(SPEC, initial(tmp_path / "w.safetensors", layout(whole.state_dict()))).eval()(images())
    assert found.shape == (2, NUM_OUTPUTS)
    assert torch.equal(found, expected)


@pytest.mark.ci
def test_projection_of_a_clip_resnet_goes_through_its_attention_pool(tmp_path: Path) -> None:
    whole = tower(RESNET, 16)
    found = open_projected(RESNET, initial(tmp_path / "w.safetensors", whole.state_dict())).eval()
    with torch.no_grad():
        assert torch.equal(found(images(64)), whole(images(64)))


def test_projection_of_weights_without_one_says_what_to_do(tmp_path: Path) -> None:
    headless = initial(tmp_path / "w.safetensors", tower(num_classes=0).state_dict())
    with pytest.raises(UserError, match=r"no last layer to project.*output: features"):
        open_projected(SPEC, headless)
    with pytest.raises(UserError, match=r"resnet50_clip_gap\.openai have no last layer"):
        open_projected(ModelSpec(name="resnet50_clip_gap", image_size=64), {"timm": "openai"})
    with pytest.raises(UserError, match=r"init\.timm or init\.uri"):
        open_projected(SPEC, {"artifact": "pretrain-x-0"})


def test_projection_of_another_network_is_refused(tmp_path: Path) -> None:
    tensors = tower().state_dict()
    del tensors["blocks.1.mlp.fc1.weight"]
    with pytest.raises(UserError, match=r"1 tensors are missing or of another shape, such as \['blocks\.1\.mlp"):
        open_projected(SPEC, initial(tmp_path / "w.safetensors", tensors))


def test_projection_of_a_timm_tag_is_timms_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = timm.create_model, []

    def without_network(name: str, *, pretrained: bool = False, **arguments: Any) -> nn.Module:
        asked.append((name, pretrained, "num_classes" in arguments))
        made: nn.Module = real(name, **arguments)
        return made

    monkeypatch.setattr(timm, "create_model", without_network)
    network = open_projected(SPEC, {"timm": "openai"})
    assert asked == [("vit_base_patch32_clip_224.openai", True, False)]
    assert isinstance(network.head, nn.Linear)
    assert network.head.out_features == 512  # CLIP's space of ViT-B/32, as the tag says


@pytest.mark.parametrize(("output", "dim"), [("features", 32), ("projection", NUM_OUTPUTS)])
def test_embedding_job_takes_the_output_it_is_asked_for(output: str, dim: int, tmp_path: Path) -> None:
    whole = tower()
    source = initial(tmp_path / "w.safetensors", whole.state_dict())
    parameters = {
        "split": "train", "model": SPEC.to_json(), "initial": {"sha256": source["sha256"]}, "view": "center",
        "resize": None, "interpolation": None, "decoder": "pillow", "mean": None, "std": None, "precision": "fp32",
        **({} if output == "features" else {"output": output}),
    }  # fmt: skip
    request = JobRequest(
        attempt_id="a", attempt_number=1, sweep="s", job="embed/x/train", key="embed-x-0", kind=JobKind.EMBED,
        identity={"parameters": parameters, "inputs": {}}, store_uri=(tmp_path / "store").as_uri(),
        execution=Execution(initial_uri=source["uri"]),
    )  # fmt: skip
    seen: list[Progress] = []
    context = ExecutionContext(store=LocalStore(tmp_path), scratch=tmp_path, cache=tmp_path, report=seen.append)
    backbone = open_backbone(request, context, torch.device("cpu"))
    assert backbone.num_features == dim
    pixels_BCHW = torch.arange(3 * 32 * 32, dtype=torch.uint8).view(1, 3, 32, 32)
    with torch.no_grad():
        found = backbone(pixels_BCHW)
        mean, std = (
            torch.tensor(channel).view(3, 1, 1) for channel in (backbone.preprocessing.mean, backbone.preprocessing.std)
        )
        seen_BCHW = (pixels_BCHW / 255 - mean) / std
        (head,) = (layer for name, layer in whole.named_children() if name == "head")
        inputs: list[Tensor] = []
        head.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        projected = whole(seen_BCHW)
        expected = inputs[0] if output == "features" else projected
    assert torch.allclose(found, expected, atol=1e-4)
    assert backbone.preprocessing.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))  # CLIP's own
