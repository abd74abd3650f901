"""Activations that are computed again in the backward pass: the same bits, less memory, alone and compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.core.contract import Execution
from orchestrator.core.errors import UserError
from orchestrator.storage.local import LocalStore
from tests.memory_images import MemoryImages, memory_loop, network
from workloads.models.build import Classifier, checkpoint_activations
from workloads.runtime import precision
from workloads.runtime.precision import CompiledForward

NETWORKS: dict[str, dict[str, Any]] = {
    "test_vit": {"img_size": 16, "patch_size": 4, "drop_path_rate": 0.2, "proj_drop_rate": 0.2},
    "test_resnet": {"drop_path_rate": 0.2},
}
RECIPE = {"epochs": 2, "batch_size": 8, "norm_group": 4, "lr": 0.1, "average": "ema"}


def _trained(folder: Path, name: str, **execution: Any) -> dict[str, Tensor]:
    """Weights, running statistics and averages of a short training."""
    task = MemoryImages(network(name, **NETWORKS[name]), batch_size=8, num_samples=20)
    loop = memory_loop(task, LocalStore(folder), RECIPE, execution=Execution(**execution))
    loop.run()
    assert not loop.notes
    average = loop.learner.average
    assert average is not None
    return {**task.model.state_dict(), **{f"average/{name}": value for name, value in average.tensors().items()}}


def _assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("micro_batch", [4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_activation_checkpointing_keeps_all_bits(tmp_path: Path, name: str, micro_batch: int) -> None:
    plain = _trained(tmp_path / "plain", name, micro_batch=micro_batch)
    again = _trained(tmp_path / "again", name, micro_batch=micro_batch, activation_checkpointing=True)
    _assert_same_bits(again, plain)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["test_vit", pytest.param("test_resnet", marks=pytest.mark.slow)])
def test_activation_checkpointing_of_compiled_blocks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the compiler of machine code, which takes minutes.
    monkeypatch.setattr(precision, "CompiledForward", partial(CompiledForward, backend="aot_eager"))
    compiled = {
        again: _trained(tmp_path / str(again), name, micro_batch=8, compile="default", activation_checkpointing=again)
        for again in (False, True)
    }
    _assert_same_bits(compiled[True], compiled[False])
    plain = _trained(tmp_path / "plain", name, micro_batch=8)
    torch.testing.assert_close(compiled[True], plain, rtol=1e-2, atol=1e-4)


def _kept_bytes(model: nn.Module) -> int:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(2, 3, 16, 16))
    return sum(kept)


@pytest.mark.parametrize("name", NETWORKS)
def test_activation_checkpointing_keeps_less(name: str) -> None:
    model = network(name, **NETWORKS[name]).train()
    plain = _kept_bytes(model)
    assert checkpoint_activations(model)
    assert _kept_bytes(model) < 0.5 * plain


def test_activation_checkpointing_of_a_frozen_backbone_is_nothing_to_do() -> None:
    model = network("test_vit", **NETWORKS["test_vit"])
    model.backbone.requires_grad_(requires_grad=False)
    assert not checkpoint_activations(model)
    assert not checkpoint_activations(model.head)


@pytest.mark.parametrize("name", ["vgg11", ""])
def test_activation_checkpointing_that_a_model_lacks_is_a_user_error(name: str) -> None:
    model = Classifier(nn.Linear(2, 2), nn.Linear(2, 2))
    if name:
        with torch.device("meta"):
            model = network(name)
        model.backbone.set_grad_checkpointing = _refuse  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"activation_checkpointing is on, but .* set it to false"):
        checkpoint_activations(model)


def _refuse(enable: bool = True) -> None:
    raise AssertionError("gradient checkpointing not supported")
