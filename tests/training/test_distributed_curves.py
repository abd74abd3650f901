"""The loop on any layout against a plain loop over whole batches: losses of every step, and the weights at the end."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.contract import Execution
from orchestrator.core.errors import UserError
from orchestrator.storage.layout import metrics_folder
from orchestrator.storage.local import LocalStore
from tests.memory_images import KEY, MemoryImages, memory_loop, network
from tests.rank_processes import RankPool, raise_errors
from workloads.models.batchnorm import batchnorm_layers
from workloads.runtime.ranks import Ranks

BATCH_SIZE, NORM_GROUP, STEPS = 16, 4, 4
LR, CLIP = 0.05, 1.0
MODELS = {"plain": ("test_vit", {"img_size": 16, "patch_size": 4}), "batchnorm": ("test_resnet", {})}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # Without clipping, which would hide gradients of a wrong scale as Adam does.
    "sgd": {"optimizer": "sgd", "lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    # Not the default eps: it makes the sign of a gradient of 1e-8, which is noise, as good as one of 1.
    "adam": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-3, "eps": 1e-4, "grad_clip": CLIP},
}
MOMENTS = ("running_mean", "running_var")
MICRO_BATCHES = (16, 8, 4)
# A batch is one epoch here, so that there is a line of metrics for every step.
RECIPE = {
    "epochs": STEPS,
    "batch_size": BATCH_SIZE,
    "schedule": "linear",
    "warmup_epochs": 2,
    "eval_every_epochs": STEPS,
    "label_smoothing": 0.1,
}
Curve = tuple[list[float], dict[str, Tensor]]


def _curve(ranks: Ranks, folder: Path, model: str, optimizer: str, micro_batch: int) -> Curve:
    name, kwargs = MODELS[model]
    recipe = RECIPE | OPTIMIZERS[optimizer] | ({"norm_group": NORM_GROUP} if model == "batchnorm" else {})
    task = MemoryImages(network(name, **kwargs), batch_size=BATCH_SIZE, num_samples=BATCH_SIZE, ranks=ranks)
    store = LocalStore(folder / f"{ranks.world_size}-{model}-{optimizer}-{micro_batch}")
    execution = Execution(micro_batch=micro_batch, checkpoint_every_steps=STEPS)
    memory_loop(task, store, recipe, execution=execution, ranks=ranks).run()
    return (_losses(store) if ranks.is_first else []), dict(task.model.state_dict())


def _losses(store: LocalStore) -> list[float]:
    segments = sorted(stat.name for stat in store.list_objects(metrics_folder(KEY)))
    lines = [json.loads(line) for name in segments for line in store.get(name).splitlines()]
    return [line["metrics"]["train_loss"] for line in lines]


def _curves(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str, int], Curve]:
    """All cases of one gang: what a rank process runs."""
    ranks = Ranks(rank=rank, world_size=world_size)
    cases = itertools.product(MODELS, OPTIMIZERS, MICRO_BATCHES)
    return {case: _curve(ranks, folder, *case) for case in cases}


@cache
def _reference(model: str, optimizer: str) -> Curve:
    """A plain loop: whole batches, statistics per group of samples, torch's own optimisers."""
    name, kwargs = MODELS[model]
    net = network(name, **kwargs).train()
    fields = OPTIMIZERS[optimizer]
    optim: torch.optim.Optimizer = (
        torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=1e-3)
        if optimizer == "sgd"
        else torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-3, eps=1e-4)
    )
    task = MemoryImages(net, batch_size=BATCH_SIZE, num_samples=BATCH_SIZE)
    factors = [0.5, 1.0, 1.0, 0.5]  # two steps of warm-up, then linearly to 0 in two
    losses = []
    for factor in factors:
        optim.param_groups[0]["lr"] = fields["lr"] * factor
        optim.zero_grad()
        loss = functional.cross_entropy(_forward_in_groups(net, task.images), task.targets, label_smoothing=0.1)
        loss.backward()
        if "grad_clip" in fields:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optim.step()
        losses.append(float(loss.detach()))
    return losses, dict(net.state_dict())


def _forward_in_groups(net: nn.Module, images: Tensor) -> Tensor:
    layers = batchnorm_layers(net)
    if not layers:
        logits: Tensor = net(images)
        return logits
    before = [dict(layer.named_buffers()) for layer in layers]
    after: list[list[dict[str, Tensor]]] = []
    outputs = []
    for group in images.split(NORM_GROUP):
        for layer, start in zip(layers, before, strict=True):
            for name in MOMENTS:
                setattr(layer, name, start[name].clone())
        outputs.append(net(group))
        after.append([dict(layer.named_buffers()) for layer in layers])
    for number, layer in enumerate(layers):
        for name in MOMENTS:
            setattr(layer, name, torch.stack([group[number][name] for group in after]).mean(0))
        layer.num_batches_tracked = before[number]["num_batches_tracked"] - len(after) + 1
    return torch.cat(outputs)


# Two and four ranks have even shares, three uneven ones.
@pytest.mark.parametrize(
    "world_size",
    [1, 3, *(pytest.param(even, marks=pytest.mark.slow) for even in (2, 4))],
)
def test_loop_on_every_layout_follows_a_plain_loop(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    results = raise_errors(pool.run(tmp_path, world_size, _curves, tmp_path))
    for case, (losses, weights) in results[0].items():
        expected_losses, expected_weights = _reference(*case[:2])
        assert losses == pytest.approx(expected_losses, rel=2e-5), case
        for name, tensor in weights.items():
            # Adam divides by the size of a gradient: where that is rounding noise, so is the update.
            atol = 2e-5 if case[1] == "sgd" else 3e-4
            torch.testing.assert_close(tensor, expected_weights[name], rtol=1e-3, atol=atol, msg=str((case, name)))


def test_loop_in_a_gang_ends_with_the_same_bits_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    first, *others = raise_errors(pool.run(tmp_path, 3, _weights_of_one_case, tmp_path))
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def _weights_of_one_case(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    return _curve(Ranks(rank=rank, world_size=world_size), folder, "batchnorm", "sgd", 4)[1]


def test_loop_with_more_ranks_than_groups_is_refused(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.run(tmp_path, 4, _run_of_two_groups, tmp_path)
    assert all(isinstance(error, UserError) for error in errors)
    assert "batch of 16 samples in groups of 8 cannot be shared by 4 ranks" in str(errors[0])


def _run_of_two_groups(rank: int, world_size: int, folder: Path) -> None:
    ranks = Ranks(rank=rank, world_size=world_size)
    task = MemoryImages(network("test_resnet"), batch_size=16, num_samples=16, ranks=ranks)
    memory_loop(task, LocalStore(folder / "refused"), {"norm_group": 8}, ranks=ranks)
