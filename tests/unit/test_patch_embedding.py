"""Patches of images are embedded by a matrix product where a GPU runs compiled code."""

from __future__ import annotations

from copy import deepcopy

import pytest
import timm
import torch
from torch import nn

from workloads.runtime.precision import Arithmetic, CompileMode, PatchEmbedding, embed_patches_by_products


@pytest.mark.parametrize("image_size", [(32, 48), (37, 41)])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_embedded_by_a_product(image_size: tuple[int, int], bias: bool) -> None:
    convolution = nn.Conv2d(3, 5, 16, stride=16, bias=bias)
    network = nn.Sequential(deepcopy(convolution))
    embed_patches_by_products(network)
    assert type(network[0]) is PatchEmbedding
    product = deepcopy(network)
    assert product.state_dict().keys() == network.state_dict().keys()
    results = []
    for layer in (convolution, product):
        images_BCHW = torch.randn(2, 3, *image_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        embedded = layer(images_BCHW)
        embedded.square().sum().backward()
        results.append([embedded, images_BCHW.grad, *(weight.grad for weight in layer.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("test_vit", 1),
        ("resnet18", 0),
        ("pvt_v2_b0", 0),  # a convolution without overlap in each block
    ],
)
def test_patches_are_embedded_by_a_product_on_gpus_where_code_is_compiled(name: str, number: int) -> None:
    for device, mode in (("cuda", CompileMode.DEFAULT), ("cuda", CompileMode.OFF), ("cpu", CompileMode.DEFAULT)):
        with torch.device("meta"):
            network = timm.create_model(name, num_classes=0)
        arithmetic = Arithmetic(torch.device("cpu"), compile_mode=mode)
        arithmetic.device = torch.device(device)  # which need not be there: nothing is computed
        for _ in range(2):
            arithmetic.compiled(network)
        expected = number if device == "cuda" and mode is not CompileMode.OFF else 0
        assert sum(isinstance(layer, PatchEmbedding) for layer in network.modules()) == expected
        assert ("patches" in arithmetic.fingerprint()) is (expected > 0)
