"""What an average of the weights costs beside a step, and beside timm's; on a GPU where there is one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import timm
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from tests.tiny_training import RECIPE
from workloads.train.learner import build_average
from workloads.train.optim import build_optimizer
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

NUM_ROUNDS = 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On CPU small images and batches: a step that is short for its weights, so that the share is an upper bound.
NETWORKS = {
    "cuda": [("resnet50", 224, 256, 10), ("vit_base_patch16_224", 224, 256, 10)],
    "cpu": [("resnet18", 128, 64, 1), ("vit_tiny_patch16_224", 224, 16, 1)],
}[DEVICE.type]


def seconds(work: Callable[[], None], times: int) -> float:
    """Time of one call: the wall's on a GPU, that of all threads on CPU, which neighbours disturb less."""
    clock = time.perf_counter if DEVICE.type == "cuda" else time.process_time
    start = clock()
    for _ in range(times):
        work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / times


@pytest.mark.parametrize(("name", "image_size", "batch_size", "times"), NETWORKS)
def test_ema_share_of_a_training_step(name: str, image_size: int, batch_size: int, times: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=1000).to(DEVICE)
    recipe = Recipe.from_mapping({**RECIPE, "average": "ema", "optimizer": "sgd", "batch_size": batch_size})
    average = build_average(recipe, model, Calendar.of(recipe, 100 * batch_size))
    assert average is not None
    other, optimizer = ModelEmaV3(model), build_optimizer(recipe, model)
    images = torch.randn(batch_size, 3, image_size, image_size, device=DEVICE)
    targets = torch.randint(0, 1000, (batch_size,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()

    arms: dict[str, tuple[Callable[[], None], int]] = {
        "step": (step, times),
        "ours": (lambda: average.update(200), 10 * times),
        "timm ModelEmaV3": (lambda: other.update(model), 10 * times),
    }
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for work, number in arms.values():
        seconds(work, min(number, 3))
    for _ in range(NUM_ROUNDS):
        for arm, (work, number) in arms.items():
            found[arm].append(seconds(work, number))
    medians = {arm: statistics.median(times_s) for arm, times_s in found.items()}
    shares = {arm: 100 * medians[arm] / medians["step"] for arm in arms if arm != "step"}
    shown = ", ".join(f"{arm} {share:.2f} %" for arm, share in shares.items())
    case = f"{DEVICE.type} {name} batch {batch_size} at {image_size}, a step of {1e3 * medians['step']:.1f} ms"
    print(f"\n{case}; EMA: {shown}")  # noqa: T201 - the result of a benchmark
