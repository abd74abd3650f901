"""Backbones and heads: built from a seed, refused with a reason, stored in timm's own names."""

import pytest
import torch
from torch import nn

from orchestrator.core.errors import UserError
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.pixels import PixelSpec
from workloads.features.backbone import FrozenBackbone, Preprocessing
from workloads.models import build
from workloads.models.build import FrozenForward, build_backbone, build_head, memory_format
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors, encode_tensors, weights_sha256
from workloads.runtime.enums import HeadInit

RESNET = ModelSpec(name="test_resnet", image_size=16)
VIT = ModelSpec(name="test_vit", image_size=32)


def test_backbone_same_seed_has_equal_weights() -> None:
    first, _ = build_backbone(RESNET, 1)
    again, _ = build_backbone(RESNET, 1)
    assert weights_sha256(first.state_dict()) == weights_sha256(again.state_dict())


def test_backbone_other_seed_has_other_weights() -> None:
    first, _ = build_backbone(RESNET, 1)
    other, _ = build_backbone(RESNET, 2)
    assert weights_sha256(first.state_dict()) != weights_sha256(other.state_dict())


def test_build_any_model_leaves_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_backbone(RESNET, 1)
    build_head(8, 3, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_backbone_number_of_features_is_what_it_returns() -> None:
    backbone, num_features = build_backbone(ModelSpec(name="mobilenetv3_small_050", image_size=32), 0)
    assert backbone.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, num_features)


def test_backbone_of_fixed_size_is_built_for_the_size() -> None:
    backbone, num_features = build_backbone(VIT, 0)
    assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, num_features)


def test_backbone_is_built_in_training_mode() -> None:
    assert build_backbone(RESNET, 0)[0].training


def test_backbone_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"test_resnt.*did you mean .*test_resnet"):
        build_backbone(ModelSpec(name="test_resnt", image_size=32), 0)


def test_backbone_hub_name_is_refused_without_download() -> None:
    with pytest.raises(UserError, match="no model"):
        build_backbone(ModelSpec(name="hf-hub:timm/resnet18.a1_in1k", image_size=32), 0)


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(name="test_convnext", image_size=8),
        ModelSpec(name="test_resnet", image_size=32, kwargs={"no_such_argument": 1}),
        ModelSpec(name="test_resnet", image_size=32, kwargs={"global_pool": ""}),
    ],
)
def test_backbone_refused_arguments_are_a_user_error(spec: ModelSpec) -> None:
    with pytest.raises(UserError, match=rf"{spec.name} refuses image_size={spec.image_size}"):
        build_backbone(spec, 0)


def test_head_bias_and_zeros_are_set_without_changing_the_weights_of_the_default() -> None:
    plain, biased = build_head(8, 3, 1), build_head(8, 3, 1, bias=-10.0)
    zeros = build_head(8, 3, 1, init=HeadInit.ZEROS)
    assert torch.equal(plain.weight, biased.weight)
    assert biased.bias.tolist() == [-10.0] * 3
    assert not zeros.weight.any()
    assert not zeros.bias.any()
    assert build_head(8, 3, 1, bias=-10.0, init=HeadInit.ZEROS).bias.tolist() == [-10.0] * 3


def _rates(backbone: nn.Module) -> list[float]:
    return [layer.p for layer in backbone.modules() if isinstance(layer, nn.Dropout)]


def test_backbone_dropout_of_a_transformer_is_the_papers() -> None:
    plain, dropped = build_backbone(VIT, 0)[0], build_backbone(VIT, 0, dropout=0.25)[0]
    assert 0.25 not in _rates(plain)
    names = [name for name, layer in dropped.named_modules() if isinstance(layer, nn.Dropout) and layer.p == 0.25]
    # After the position embeddings, the attention's output layer and both layers of the MLP; not inside attention.
    assert "pos_drop" in names
    assert {"blocks.0.attn.proj_drop", "blocks.0.mlp.drop1", "blocks.0.mlp.drop2"} <= set(names)
    assert not any("attn_drop" in name for name in names)
    assert weights_sha256(plain.state_dict()) == weights_sha256(dropped.state_dict())


def test_backbone_dropout_of_other_networks_is_before_the_head() -> None:
    assert build_backbone(RESNET, 0, dropout=0.25)[0].drop_rate == 0.25


def test_backbone_drop_path_grows_with_depth() -> None:
    backbone = build_backbone(ModelSpec(name="test_vit", image_size=32, kwargs={"depth": 3}), 0, drop_path=0.2)[0]
    layers = [layer for name, layer in backbone.named_modules() if name.endswith("drop_path1")]
    assert [getattr(layer, "drop_prob", 0.0) for layer in layers] == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize("field", ["dropout", "drop_path"])
def test_backbone_dropout_that_a_model_lacks_or_has_twice_is_refused(field: str) -> None:
    without = ModelSpec(name="vgg11", image_size=32)
    twice = ModelSpec(name="test_resnet", image_size=32, kwargs={"drop_rate": 0.1, "drop_path_rate": 0.1})
    with pytest.raises(UserError, match="both the recipe's"):
        build_backbone(twice, 0, **{field: 0.2})
    if field == "drop_path":
        with pytest.raises(UserError, match=r"recipe\.drop_path is 0\.2, but timm model vgg11 has none"):
            build_backbone(without, 0, drop_path=0.2)


def test_backbone_number_of_features_needs_no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    real = nn.Conv2d.forward

    def watched(self: nn.Conv2d, images_BCHW: torch.Tensor) -> torch.Tensor:
        devices.append(images_BCHW.device.type)
        return real(self, images_BCHW)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    monkeypatch.setattr(build, "_NUM_FEATURES", {})
    num_features = build_backbone(RESNET, 0)[1]
    assert set(devices) == {"meta"}
    devices.clear()
    assert build_backbone(RESNET, 1, drop_path=0.1)[1] == num_features
    assert devices == []  # measured once per model


def test_model_spec_reserved_argument_is_refused() -> None:
    with pytest.raises(UserError, match="num_classes"):
        ModelSpec(name="test_resnet", image_size=32, kwargs={"num_classes": 10})


def test_memory_format_follows_the_kind_of_network() -> None:
    assert memory_format(build_backbone(RESNET, 0)[0]) == torch.channels_last
    assert memory_format(build_backbone(VIT, 0)[0]) == torch.contiguous_format


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.float64)},
        {"a": torch.zeros(2, 3).index_fill_(0, torch.tensor([1]), 1e-30)},
    ],
)
def test_weights_sha256_any_difference_changes_it(other: dict[str, torch.Tensor]) -> None:
    assert weights_sha256({"a": torch.zeros(2, 3)}) != weights_sha256(other)


def test_weights_sha256_order_and_memory_layout_do_not_change_it() -> None:
    a, b = torch.randn(2, 3, 4, 4), torch.randn(5).to(torch.bfloat16)
    laid_out = {"b": b, "a": a.to(memory_format=torch.channels_last)}
    assert weights_sha256({"a": a, "b": b}) == weights_sha256(laid_out)


def test_encode_tensors_shared_and_strided_come_back_equal() -> None:
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    tensors = {"one": layer.weight, "two": layer.weight, "scalar": torch.tensor(7)}
    decoded = decode_tensors(encode_tensors(tensors))
    assert all(torch.equal(decoded[name], tensor) for name, tensor in tensors.items())


def _frozen(network: nn.Module, num_features: int) -> FrozenBackbone:
    pixels = PixelSpec(image_size=32, resize=None, interpolation=Interpolation.BILINEAR, decoder=DecoderName.PILLOW)
    look = Preprocessing(pixels=pixels, mean=(0.5,) * 3, std=(0.25,) * 3, is_mirrored=False)
    return FrozenBackbone(network, num_features, look, torch.device("cpu"))


def test_features_of_a_batch_that_does_not_fit_into_memory_are_computed_in_halves() -> None:
    def refuse(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        asked.append(len(given[0]))
        if len(given[0]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    network, num_features = build_backbone(VIT, 0)
    images = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    asked: list[int] = []
    with torch.inference_mode():
        whole = _frozen(network, num_features)(images)
        normalized = (images.float() - 127.5) / 63.75
        assert torch.equal(whole, FrozenForward()(network, normalized))
        assert torch.equal(whole, network(normalized))
        network.register_forward_pre_hook(refuse)
        frozen = _frozen(network, num_features)
        for _ in range(2):
            torch.testing.assert_close(frozen(images), whole)
    assert asked == [7, 4, *[2, 2, 2, 1] * 2]
    assert frozen.most == 2


def test_features_of_no_image_are_none_also_of_networks_that_cannot_reshape_nothing() -> None:
    network, num_features = build_backbone(VIT, 0)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="cannot reshape"):
            network.eval()(torch.zeros(0, 3, 32, 32))
        assert _frozen(network, num_features)(torch.zeros(0, 3, 32, 32, dtype=torch.uint8)).shape == (0, num_features)
