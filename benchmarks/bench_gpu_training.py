"""Training speed on a GPU: MFU, timm's own loop, averaging, checkpoints, real images against made-up ones.

Meant for a machine with one H100 (``make bench ARGS=benchmarks/bench_gpu_training.py``). Without a GPU the same
code runs with tiny sizes, so that it is known to work; its figures then say nothing. Nothing here asserts times.
"""

from __future__ import annotations

import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from torch import Tensor, nn

from orchestrator.core.contract import Execution
from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane
from tests.photographs import jpeg, photograph
from tests.tiny_training import RECIPE
from workloads.checkpoint.store import CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter, WhenBusy
from workloads.data.augment import Augment
from workloads.data.decode import DecoderName
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.models.batchnorm import ghost_batchnorm
from workloads.models.build import Classifier, build_backbone, build_head, memory_format
from workloads.models.spec import ModelSpec
from workloads.runtime.enums import Precision
from workloads.runtime.precision import Arithmetic
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.large_head import loss_of
from workloads.train.learner import Learner, RunState
from workloads.train.micro_batch import Layout
from workloads.train.objective import build_objective
from workloads.train.recipe import Recipe
from workloads.train.samples import PixelNormalizer
from workloads.train.schedule import Calendar
from workloads.train.step import Update
from workloads.train.step_metrics import Throughput
from workloads.train.task import TrainInputs

# ---------------------------------------------------------------------------------------------------------------------
# Training steps to compare, on whatever device there is: the product's own update, and loops of others beside it.

NUM_CLASSES = 1000
Arm = Callable[[int], None]
"""Makes so many steps."""


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(size: int, image_size: int, layout: torch.memory_format) -> TrainInputs:
    """One made-up batch on the device."""
    images = torch.randn(size, 3, image_size, image_size, device=device()).contiguous(memory_format=layout)
    return TrainInputs(inputs=images, targets=torch.arange(size, device=device()) % NUM_CLASSES)


class OwnStep:
    """The product's update of a model on one batch again and again."""

    def __init__(self, spec: ModelSpec, batch_size: int, *, compile_mode: str = "off", **recipe: Any) -> None:
        parsed = Recipe.from_mapping({**RECIPE, "batch_size": batch_size, "epochs": 1, "warmup_epochs": 0.0, **recipe})
        backbone, num_features = build_backbone(spec, 0)
        memory = memory_format(backbone)
        model = Classifier(backbone, build_head(num_features, NUM_CLASSES, 0))
        model.to(device=device(), memory_format=memory)  # type: ignore[call-overload]
        self.arithmetic = Arithmetic.of(parsed, Execution(compile=compile_mode, deterministic=False), device())
        self.learner = Learner(model.train(), parsed, Calendar.of(parsed, 10**7), self.arithmetic)
        losses_of = loss_of(model, build_objective(parsed, NUM_CLASSES), self.arithmetic.compiled)
        layout = Layout.of(model, parsed, micro_batch=batch_size, ranks=Ranks())
        self._normalize = PixelNormalizer(parsed, device(), memory)
        self._groups = layout.norm_group if layout.micro_batch > layout.norm_group else 0
        self._update = Update(self.learner, losses_of, layout, max_norm=parsed.grad_clip)
        self._batch = batch(batch_size, spec.image_size, memory)
        self._step = 0
        self._fed: Iterator[Batch] | None = None

    def __call__(self, num_steps: int) -> None:
        with self.arithmetic.numerics():
            if self._groups:
                with ghost_batchnorm(self.learner.model, self._groups):
                    self._run(num_steps)
            else:
                self._run(num_steps)

    def feed(self, batches: Iterator[Batch]) -> None:
        """Take real images from now on."""
        self._fed = batches

    def _next(self) -> TrainInputs:
        if self._fed is None:
            return self._batch
        batch = next(self._fed)
        images_BCHW = self._normalize(batch.images_BCHW)
        return TrainInputs(inputs=images_BCHW, targets=batch.targets.to(images_BCHW.device, non_blocking=True))

    def _run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._update(self._next(), 1e-4)
            self._step += 1
            if self.learner.average is not None:
                self.learner.average.update(self._step)


class TimmStep:
    """timm's own train script in eager AMP: autocast, mean cross-entropy, its optimiser, channels last."""

    def __init__(self, name: str, batch_size: int, image_size: int, *, amp: bool) -> None:
        model = timm.create_model(name, num_classes=NUM_CLASSES)
        # The script's own switch --channels-last: without it the comparison would flatter us.
        self._model = model.to(device=device(), memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self._optimizer = create_optimizer_v2(self._model, opt="sgd", lr=1e-4, momentum=0.9)
        self._loss = nn.CrossEntropyLoss()
        self._amp = amp
        self._batch = batch(batch_size, image_size, torch.channels_last)

    def __call__(self, num_steps: int) -> None:
        torch.backends.cudnn.benchmark = True
        for _ in range(num_steps):
            with torch.autocast(device().type, dtype=torch.bfloat16, enabled=self._amp):
                loss: Tensor = self._loss(self._model(self._batch.inputs), self._batch.targets)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()


def seconds_per_step(arm: Arm, num_steps: int) -> float:
    """Time of a step, the device's work included."""
    _wait()
    started_s = time.perf_counter()
    arm(num_steps)
    _wait()
    return (time.perf_counter() - started_s) / num_steps


def interleaved(arms: Mapping[str, Arm], *, num_steps: int, rounds: int) -> dict[str, float]:
    """Median seconds per step of every arm, measured in turn after a warm-up of each."""
    for arm in arms.values():
        arm(max(2, num_steps // 4))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        # The order alternates, so that no arm always follows the same one.
        for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(seconds_per_step(arms[name], num_steps))
    return {name: statistics.median(values) for name, values in times.items()}


def _wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def photograph_batches(folder: Path, *, num_images: int, batch_size: int, image_size: int) -> Iterator[Batch]:
    """Endless batches of JPEGs of 500 x 375 as ImageNet has them, cropped and flipped as in its training."""
    shard = BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number in range(num_images):
            contents = {"jpg": jpeg(photograph(number % 64)), "cls": b"0"}
            for suffix, content in contents.items():
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    plane = DataPlane(folder=folder)
    index = SampleIndex.open(
        plane.store, plane.index(plane.foreign({"train-0.tar": shard.getvalue()})).key, plane.cache
    )
    pixels = PixelSpec(image_size=image_size, decoder=DecoderName.TURBO)
    source = SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels, cache_bytes=0)
    return iter(
        TrainLoader(
            source,
            SampleOrder(source.split.shard_sizes, 0, 1),
            SplitTargets.of(source.split.leaves, NUM_CLASSES),
            batch_size=batch_size,
            start_step=0,
            total_steps=10**6,
            seed=0,
            stage=Stage.PRETRAIN,
            augment=Augment.RANDOM_RESIZED_CROP_FLIP,
            num_workers=os.cpu_count() or 1,
            device=device(),
        )
    )


IMAGENET = {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}


# ---------------------------------------------------------------------------------------------------------------------
# Training speed on a GPU: MFU, timm's own loop, averaging, checkpoints, real images against made-up ones.
#
# Meant for a machine with one H100 (``make bench ARGS=benchmarks/bench_gpu_training.py``). Without a GPU the same
# code runs with tiny sizes, so that it is known to work; its figures then say nothing. Nothing here asserts times.

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
