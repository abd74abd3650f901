"""Training speed on a GPU: MFU, timm's own loop, averaging, checkpoints, real images against made-up ones.

Meant for a machine with one H100 (``pytest -m bench -s tests/benchmarks/test_gpu_training.py``). Without a GPU the same
code runs with tiny sizes, so that it is known to work; its figures then say nothing. Nothing here asserts times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.storage.local import LocalStore
from tests.benchmarks.training_arms import (
    IMAGENET,
    Arm,
    OwnStep,
    TimmStep,
    device,
    interleaved,
    photograph_batches,
    seconds_per_step,
)
from workloads.checkpoint.store import CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter, WhenBusy
from workloads.models.spec import ModelSpec
from workloads.runtime.enums import Precision
from workloads.train.learner import RunState
from workloads.train.step_metrics import Throughput

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
HAS_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Sizes:
    """What is measured on this machine."""

    vit: ModelSpec
    resnet: ModelSpec
    batch_size: int
    norm_group: int
    num_steps: int
    rounds: int
    compile_mode: str
    precision: str


SIZES = (
    Sizes(
        vit=ModelSpec(name="vit_base_patch16_224", image_size=224),
        resnet=ModelSpec(name="resnet50", image_size=224),
        batch_size=256,
        norm_group=256,
        num_steps=40,
        rounds=5,
        compile_mode="default",
        precision="bf16",
    )
    if HAS_GPU
    else Sizes(
        vit=ModelSpec(name="test_vit", image_size=64),
        resnet=ModelSpec(name="test_resnet", image_size=64),
        batch_size=8,
        norm_group=8,
        num_steps=2,
        rounds=3,
        compile_mode="off",
        precision="fp32",
    )
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On CPUs the sizes are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if HAS_GPU else 1)
    yield
    torch.set_num_threads(before)


def _say(text: str) -> None:
    where = torch.cuda.get_device_name() if HAS_GPU else "CPU, tiny sizes: the figures say nothing"
    sys.stdout.write(f"\n{text}  [{where}]\n")


def _own(spec: ModelSpec, compile_mode: str, **recipe: Any) -> OwnStep:
    wanted = {"precision": SIZES.precision, "norm_group": SIZES.norm_group, **IMAGENET, **recipe}
    return OwnStep(spec, SIZES.batch_size, compile_mode=compile_mode, **wanted)


def test_vit_b16_training_mfu() -> None:
    arms = {"eager": _own(SIZES.vit, "off"), "compiled": _own(SIZES.vit, SIZES.compile_mode)}
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    throughput = Throughput.of(SIZES.vit, device(), Precision(SIZES.precision), tf32=False, num_classes=1000)
    for name, seconds in times.items():
        rate = SIZES.batch_size / seconds
        mfu = throughput.mfu(rate)
        shown = "unknown" if mfu is None else f"{mfu:.1%}"
        _say(f"{SIZES.vit.name} {name}: {rate:.0f} images/s, MFU {shown} (asked 40 %)")
    _say(f"notes: {arms['compiled'].arithmetic.notes}")


def test_resnet50_beside_timms_eager_amp_loop() -> None:
    spec = SIZES.resnet
    arms: dict[str, Arm] = {
        "timm": TimmStep(spec.name, SIZES.batch_size, spec.image_size, amp=SIZES.precision == "bf16"),
        "eager": _own(spec, "off"),
        "compiled": _own(spec, SIZES.compile_mode),
    }
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    for name in ("eager", "compiled"):
        rate = SIZES.batch_size / times[name]
        _say(f"{spec.name} {name}: {rate:.0f} images/s = {times['timm'] / times[name]:.2f} x timm (asked 1.2)")


def test_weight_average_share_of_a_step() -> None:
    arms = {"plain": _own(SIZES.vit, SIZES.compile_mode), "ema": _own(SIZES.vit, SIZES.compile_mode, average="ema")}
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    _say(f"EMA: {times['ema'] / times['plain'] - 1:+.2%} of a step (asked 1 %)")


def test_checkpoint_share_of_500_steps(tmp_path: Path) -> None:
    own = _own(SIZES.vit, SIZES.compile_mode, optimizer="adam")
    own(2)
    step_s = min(seconds_per_step(own, SIZES.num_steps) for _ in range(3))
    writer = CheckpointWriter(CheckpointFolder(LocalStore(tmp_path), "pretrain-0123456789abcdef"))
    stalls = []
    for step in range(1, 4):
        own(1)
        if HAS_GPU:
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        writer.has_room(WhenBusy.WAIT)
        waited_s = time.perf_counter() - started_s
        writer.save(own.learner.checkpoint(RunState(step=step)))
        stalls.append(time.perf_counter() - started_s - waited_s)
        own(SIZES.num_steps)
    writer.drain()
    writer.close()
    # The first save also allocates its memory: 500 steps later that is paid.
    _say(f"a checkpoint stops training for {stalls[-1] * 1e3:.1f} ms = {stalls[-1] / (500 * step_s):.2%} of 500 steps")


def test_loader_fed_training_beside_made_up_batches(tmp_path: Path) -> None:
    arms = {name: _own(SIZES.resnet, SIZES.compile_mode) for name in ("fed", "made-up")}
    num_images = 8192 if HAS_GPU else 64
    size, batch_size = SIZES.resnet.image_size, SIZES.batch_size
    arms["fed"].feed(photograph_batches(tmp_path, num_images=num_images, batch_size=batch_size, image_size=size))
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    fed, made_up = (SIZES.batch_size / times[name] for name in ("fed", "made-up"))
    _say(f"loader-fed {fed:.0f} images/s, made-up {made_up:.0f}: {fed / made_up:.1%} (asked 97 % on a GPU)")
