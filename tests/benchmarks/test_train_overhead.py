"""What the training loop costs beyond a plain PyTorch loop over the same model and batches, and a gang's gradients
beside DistributedDataParallel's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from orchestrator.core.contract import Execution
from orchestrator.storage.local import LocalStore
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from tests.rank_processes import RankPool, raise_errors
from workloads.models.build import Classifier
from workloads.runtime.ranks import Ranks
from workloads.train.step import GradientSum

ROUNDS = 7
STEPS, BATCH_SIZE, IMAGE_SIZE = 6, 32, 64
MODELS = {"vit": "vit_tiny_patch16_224", "resnet": "resnet18"}
GANG_STEPS = 8


def _task(model: str) -> MemoryImages:
    kwargs: dict[str, Any] = {"img_size": IMAGE_SIZE} if model == "vit" else {}
    backbone = timm.create_model(MODELS[model], num_classes=0, **kwargs)
    net = Classifier(backbone, nn.Linear(int(backbone.num_features), NUM_CLASSES))  # type: ignore[arg-type]
    return MemoryImages(net, batch_size=BATCH_SIZE, num_samples=BATCH_SIZE * STEPS, image_size=IMAGE_SIZE)


def _plain(task: MemoryImages) -> tuple[float, float]:
    """Seconds by the clock and of CPU."""
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    task.model.train()
    clock_s, cpu_s = time.perf_counter(), time.process_time()
    for batch in task.batches(0, STEPS, unit=1):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(task.model(batch.inputs), batch.targets)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        float(loss.detach())
    return time.perf_counter() - clock_s, time.process_time() - cpu_s


def _ours(task: MemoryImages, folder: Path) -> tuple[float, float]:
    recipe = {
        "epochs": 1,
        "batch_size": BATCH_SIZE,
        "lr": 0.01,
        "momentum": 0.9,
        "warmup_epochs": 0,
        "schedule": "constant",
        "norm_group": BATCH_SIZE,
    }
    times: list[tuple[float, float]] = []

    loop = memory_loop(task, LocalStore(folder), recipe, execution=Execution(checkpoint_every_steps=100))
    evaluate = loop._evaluate

    def timed_evaluate() -> dict[str, float]:
        times.append((time.perf_counter(), time.process_time()))
        return evaluate()

    loop._evaluate = timed_evaluate  # type: ignore[method-assign]
    started = time.perf_counter(), time.process_time()
    loop.run()
    return times[0][0] - started[0], times[0][1] - started[1]


@pytest.mark.bench
@pytest.mark.parametrize("model", MODELS)
def test_loop_overhead_over_a_plain_loop(tmp_path: Path, model: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ratios: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        arms: list[Callable[[], tuple[float, float]]] = [
            lambda: _plain(_task(model)),
            lambda number=number: _ours(_task(model), tmp_path / str(number)),  # type: ignore[misc]
        ]
        results = [arms[arm]() for arm in (0, 1)] if number % 2 else [arms[arm]() for arm in (1, 0)][::-1]
        ratios.append((results[1][0] / results[0][0], results[1][1] / results[0][1]))
    torch.set_num_threads(threads)
    clock, cpu = (statistics.median(ratio[kind] for ratio in ratios) for kind in (0, 1))
    rounds = "  ".join(f"{a:.3f}/{b:.3f}" for a, b in ratios)
    sys.stdout.write(f"\n{model}: our loop takes {clock:.3f} of a plain loop's time, {cpu:.3f} of its CPU time ")
    sys.stdout.write(f"(asked <= 1.03); rounds {rounds}\n")


def _gang_step_s(rank: int, world_size: int, way: str) -> float:
    """Median seconds of a step whose gradients are summed over the gang."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("resnet18", num_classes=NUM_CLASSES)
    images, targets = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    gradients = GradientSum(model.parameters(), Ranks(rank=rank, world_size=world_size)) if way == "ours" else None
    net = model if gradients else DistributedDataParallel(model, gradient_as_bucket_view=True)
    times = []
    for _ in range(GANG_STEPS):
        started_s = time.perf_counter()
        if gradients:
            gradients.begin()
            gradients.last_pass()
        else:
            net.zero_grad(set_to_none=True)
        functional.cross_entropy(net(images), targets).backward()
        if gradients:
            gradients.finish()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[2:])


@pytest.mark.bench
def test_gradient_sum_beside_ddp(tmp_path: Path) -> None:
    pool = RankPool(2)
    ratios = []
    for number in range(ROUNDS):
        ways = ("ours", "ddp") if number % 2 else ("ddp", "ours")
        step_s = {way: max(raise_errors(pool.run(tmp_path, 2, _gang_step_s, way))) for way in ways}
        ratios.append(step_s["ours"] / step_s["ddp"])
    pool.close()
    rounds = "  ".join(f"{ratio:.3f}" for ratio in ratios)
    median = statistics.median(ratios)
    sys.stdout.write(
        f"\na step of 2 gloo ranks takes {median:.3f} of DistributedDataParallel's time; rounds {rounds}\n"
    )
