"""Training speed on a GPU: MFU, timm's own step, compiled blocks, norm groups, averaging, checkpoints, real images.

For a machine with one H100: ``make bench ARGS=benchmarks/bench_gpu_training.py`` prints all figures as one table at its
end and writes it to gpu-figures.md. Nothing here asserts times. Without a GPU all of it is skipped; with
GPU_BENCHMARK_DRY_RUN=1 the same code runs with tiny sizes on the CPU, without generating machine code, so that it is
known to work: these figures say nothing. One GPU sends no gradients: what an exchange of them costs, and what bf16
saves of it, is not measured here.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from orchestrator.core.contract import Execution
from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane, decoding_in_processes, loading_in_a_process
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
from workloads.models.build import (
    Classifier,
    PixelNormalizer,
    build_backbone,
    build_head,
    checkpoint_activations,
    memory_format,
)
from workloads.models.spec import ModelSpec
from workloads.runtime import precision
from workloads.runtime.enums import Precision
from workloads.runtime.precision import Arithmetic
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.large_head import LossForward
from workloads.train.learner import Learner, RunState
from workloads.train.micro_batch import Layout
from workloads.train.objective import build_objective
from workloads.train.recipe import Recipe
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
    """The product's update of a model on one batch again and again.

    ``whole``: compiled as one piece. ``one_by_one``: norm groups one after the other. ``recomputes``: activations.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch_size: int,
        *,
        compile_mode: str = "off",
        whole: bool = False,
        one_by_one: bool = False,
        recomputes: bool = False,
        **recipe: Any,
    ) -> None:
        parsed = Recipe.from_mapping({**RECIPE, "batch_size": batch_size, "epochs": 1, "warmup_epochs": 0.0, **recipe})
        backbone, num_features = build_backbone(spec, 0)
        memory = memory_format(backbone)
        model = Classifier(backbone, build_head(num_features, NUM_CLASSES, 0))
        model.to(device=device(), memory_format=memory)  # type: ignore[call-overload]
        self.arithmetic = Arithmetic.of(parsed, Execution(compile=compile_mode, deterministic=False), device())
        recomputes = recomputes and checkpoint_activations(model)
        self.learner = Learner(model.train(), parsed, Calendar.of(parsed, 10**7), self.arithmetic)
        with pytest.MonkeyPatch.context() as patch:
            if whole:
                patch.setattr(precision, "blocks_of", lambda network: [network])
            losses_of = LossForward(model, build_objective(parsed, NUM_CLASSES), self.arithmetic.compiled)
        layout = Layout.of(model, parsed, micro_batch=batch_size, ranks=Ranks())
        self._normalize = PixelNormalizer(parsed.mean, parsed.std, device(), memory)
        self._groups = layout.norm_group if layout.has_groups_at_once else 0
        self._one_by_one = one_by_one
        self._update = Update(self.learner, losses_of, layout, max_norm=parsed.grad_clip, recomputes=recomputes)
        self._batch = batch(batch_size, spec.image_size, memory)
        self._step = 0
        self._fed: Iterator[Batch] | None = None

    def __call__(self, num_steps: int) -> None:
        with pytest.MonkeyPatch.context() as patch, self.arithmetic.numerics():
            # A job records its graphs once and frees them when it ends; the measurement enters and leaves many times.
            patch.setattr(precision, "_free_graphs", lambda: None)
            if self._groups:
                with ghost_batchnorm(self.learner.model, self._groups, one_by_one=self._one_by_one):
                    self._run(num_steps)
            else:
                self._run(num_steps)

    def close(self) -> None:
        """Free the memory of CUDA graphs."""
        if self.arithmetic.has_cuda_graphs:
            precision._free_graphs()

    def feed(self, batches: Iterator[Batch] | None) -> None:
        """Take real images from now on; None: the made-up batch."""
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
    """timm's own train script with AMP: autocast, mean cross-entropy, its optimiser, channels last, --torchcompile."""

    def __init__(self, name: str, batch_size: int, image_size: int, *, amp: bool, compiled: bool = False) -> None:
        model = timm.create_model(name, num_classes=NUM_CLASSES)
        # The script's own switch --channels-last: without it the comparison would flatter us.
        self._model = model.to(device=device(), memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        if compiled:
            self._model = torch.compile(self._model, backend=BACKEND)
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


def photographs_in_tars(folder: Path, num_images: int) -> SampleIndex:
    """JPEGs of 500 x 375 as ImageNet has them."""
    shard, photographs = BytesIO(), [jpeg(photograph(seed)) for seed in range(64)]
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number in range(num_images):
            for suffix, content in (("jpg", photographs[number % len(photographs)]), ("cls", b"0")):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    plane = DataPlane(folder=folder)
    return plane.index(plane.foreign({"train-0.tar": shard.getvalue()}))


def train_loader(folder: Path, index: SampleIndex, batch_size: int, image_size: int) -> TrainLoader:
    """Endless batches, cropped and flipped as in ImageNet's training."""
    plane = DataPlane(folder=folder)
    pixels = PixelSpec(image_size=image_size, decoder=DecoderName.TURBO)
    source = SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels, cache_bytes=0)
    return TrainLoader(
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


IMAGENET = {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}


# ---------------------------------------------------------------------------------------------------------------------
# What is measured, and the table.

HAS_GPU = torch.cuda.is_available()
IS_DRY_RUN = not HAS_GPU and bool(os.environ.get("GPU_BENCHMARK_DRY_RUN"))
pytestmark = pytest.mark.skipif(
    not HAS_GPU and not IS_DRY_RUN,
    reason="there is no GPU here; GPU_BENCHMARK_DRY_RUN=1 runs the same code with tiny sizes on the CPU",
)
BACKEND = "aot_eager" if IS_DRY_RUN else "inductor"
TABLE = Path("gpu-figures.md")


@dataclass(frozen=True)
class Fed:
    """A training that is fed from tars."""

    spec: ModelSpec
    batch_size: int
    compile_mode: str
    num_steps: int


@dataclass(frozen=True)
class Sizes:
    """What is measured on this machine."""

    vits: tuple[ModelSpec, ...]
    resnets: tuple[ModelSpec, ...]
    batch_size: int
    share: int
    """Samples of a step by norm groups."""
    norm_group: int
    num_steps: int
    rounds: int
    precision: str
    fed: tuple[Fed, ...]


SIZES = (
    Sizes(
        vits=tuple(ModelSpec(name=f"vit_{size}_patch16_224", image_size=224) for size in ("base", "small")),
        resnets=tuple(ModelSpec(name=name, image_size=224) for name in ("resnet50", "resnet34")),
        batch_size=256,
        share=512,
        norm_group=64,
        num_steps=10,
        rounds=3,
        precision="bf16",
        fed=tuple(
            Fed(ModelSpec(name=name, image_size=224), size, mode, num_steps)
            for name, size, mode, num_steps in (
                ("resnet34", 64, "off", 100),
                ("vit_base_patch16_224", 64, "off", 50),
                ("resnet50", 256, "default", 40),
            )
        ),
    )
    if HAS_GPU
    else Sizes(
        vits=(ModelSpec(name="test_vit", image_size=64),),
        resnets=(ModelSpec(name="test_resnet", image_size=64),),
        batch_size=8,
        share=8,
        norm_group=4,
        num_steps=2,
        rounds=3,
        precision="fp32",
        fed=(Fed(ModelSpec(name="test_resnet", image_size=64), 8, "default", 2),),
    )
)
MODELS = [*SIZES.vits, *SIZES.resnets]


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table."""

    what: str
    measured: str
    asked: str = ""


class Figures(list[Figure]):
    """The table, whose rows are also printed at once: the machine may be taken back."""

    def append(self, figure: Figure) -> None:
        """Add a row."""
        super().append(figure)
        _say(f"{figure.what}: {figure.measured}")


@pytest.fixture(scope="module")
def figures() -> Iterator[list[Figure]]:
    """What the tests of this file found; printed, and on a GPU written, when the last of them has ended."""
    found = Figures()
    yield found
    where = torch.cuda.get_device_name() if HAS_GPU else "CPU, tiny sizes: the figures say nothing"
    rows = [f"| {figure.what} | {figure.measured} | {figure.asked} |" for figure in found]
    text = "\n".join([f"{where}, torch {torch.__version__}", "", "| | measured | asked |", "|---|---|---|", *rows, ""])
    sys.stdout.write(f"\n{text}")
    if HAS_GPU:
        TABLE.write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On CPUs the sizes are too small for more, and machine code is not the point."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if HAS_GPU else 1)
    if IS_DRY_RUN:
        monkeypatch.setattr(precision, "CompiledForward", partial(precision.CompiledForward, backend=BACKEND))
    yield
    torch.set_num_threads(before)
    if HAS_GPU:
        torch.cuda.empty_cache()


def _own(spec: ModelSpec, batch_size: int = 0, **wanted: Any) -> OwnStep:
    batch_size = batch_size or SIZES.batch_size
    recipe = {"precision": SIZES.precision, "norm_group": batch_size, **IMAGENET, **wanted}
    return OwnStep(spec, batch_size, **recipe)


def _timm(spec: ModelSpec, *, compiled: bool = False) -> TimmStep:
    is_mixed = SIZES.precision == "bf16"
    return TimmStep(spec.name, SIZES.batch_size, spec.image_size, amp=is_mixed, compiled=compiled)


def _say(line: str) -> None:
    sys.stdout.write(f"\n  {line}")
    sys.stdout.flush()


def _peak_gib(arm: Arm) -> float:
    """What a step takes beside all that lives between steps."""
    if not HAS_GPU:
        return math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    arm(1)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _shares_of_backward(arm: OwnStep) -> tuple[float, float, float]:
    """When the first, the median and the last gradient are there: as a share of the time from first to last step.

    On a GPU by events on its stream; the backward pass begins with the gradient of the features.
    """
    times: list[Any] = []

    def mark(*_: object) -> None:
        if HAS_GPU:
            times.append(torch.cuda.Event(enable_timing=True))
            times[-1].record()
        else:
            times.append(time.perf_counter())

    head, backbone = arm.learner.model.head, arm.learner.model.backbone
    assert isinstance(head, nn.Module)
    assert isinstance(backbone, nn.Module)
    handles = [head.register_full_backward_hook(mark)]
    handles += [weight.register_post_accumulate_grad_hook(mark) for weight in backbone.parameters()]
    arm(1)
    _wait()
    for handle in handles:
        handle.remove()
    after = [times[0].elapsed_time(one) if HAS_GPU else one - times[0] for one in times[1:]]
    return min(after) / after[-1], statistics.median(after) / after[-1], max(after) / after[-1]


@pytest.mark.parametrize("spec", MODELS, ids=[spec.name for spec in MODELS])
def test_kernels_of_a_step(spec: ModelSpec) -> None:
    """Where the time goes: on the device by kernel, and on the host by call."""
    arm = _own(spec, compile_mode="default")
    arm(3)
    _wait()
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    arm(SIZES.num_steps)
    launched_s, cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
    _wait()
    step_ms, launch_ms, cpu_ms = (
        1e3 * seconds / SIZES.num_steps for seconds in (time.perf_counter() - started_s, launched_s, cpu_s)
    )
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_GPU else [])]) as profiler:
        arm(3)
        _wait()
    calls: list[Any] = list(profiler.key_averages())
    _say(f"{spec.name}: a step {step_ms:.1f} ms, launched in {launch_ms:.1f} (processor {cpu_ms:.1f})")
    for where, time_us, is_there in (
        ("device", lambda call: call.self_device_time_total, lambda call: call.device_type.name != "CPU"),
        ("host", lambda call: call.self_cpu_time_total, lambda call: call.device_type.name == "CPU"),
    ):
        found = sorted(filter(is_there, calls), key=time_us, reverse=True)
        busy_ms = sum(map(time_us, found)) / 3e3
        _say(f"{where} busy {busy_ms:.1f} ms, {sum(call.count for call in found) / 3:.0f} calls, of which")
        for call in found[:20]:
            _say(f"{time_us(call) / 3e3:9.2f} ms in {call.count / 3:6.1f} x {call.key[:110]}")


def _arms(spec: ModelSpec) -> dict[str, Callable[[], OwnStep | TimmStep]]:
    """What is compared with timm's uncompiled step; those first that show most."""
    own = partial(_own, spec)
    return {
        "blocks": lambda: own(compile_mode="default"),
        "whole": lambda: own(compile_mode="default", whole=True),
        "timm --torchcompile": lambda: _timm(spec, compiled=True),
        "eager": own,
        "CUDA graphs": lambda: own(compile_mode="reduce-overhead"),
    }


@pytest.mark.parametrize("spec", MODELS, ids=[spec.name for spec in MODELS])
def test_training_beside_timms_script(spec: ModelSpec, figures: list[Figure]) -> None:
    """Each arm in turns with timm's uncompiled step, and its row at once: to compile all takes minutes."""
    timms = _timm(spec)
    throughput = Throughput.of(spec, device(), Precision(SIZES.precision), tf32=False, num_classes=NUM_CLASSES)
    for name, make in _arms(spec).items():
        arm = make()
        first_s = seconds_per_step(arm, 1)
        times = interleaved({"timm": timms, name: arm}, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
        rates = {each: SIZES.batch_size / seconds for each, seconds in times.items()}
        shown = {
            each: "unknown" if (mfu := throughput.mfu(rate)) is None else f"{mfu:.1%}" for each, rate in rates.items()
        }
        text = (
            f"{rates[name]:.0f} images/s, MFU {shown[name]}, {rates[name] / rates['timm']:.2f} x timm "
            f"({rates['timm']:.0f}, MFU {shown['timm']}); first step {first_s:.1f} s"
        )
        asked = ("MFU >= 40 % compiled" if spec in SIZES.vits else ">= 1.2 x timm") if isinstance(arm, OwnStep) else ""
        figures.append(Figure(f"{spec.name}, batch {SIZES.batch_size}, {name}", text, asked))
        if isinstance(arm, OwnStep):
            shares = "/".join(f"{share:.2f}" for share in _shares_of_backward(arm))
            text = f"{shares} of the backward pass; {_peak_gib(arm):.1f} GiB"
            figures.append(Figure(f"{spec.name}, {name}: first/median/last gradient; memory", text, "as eager"))
            assert not arm.arithmetic.notes, arm.arithmetic.notes
            arm.close()


@pytest.mark.parametrize("spec", MODELS, ids=[spec.name for spec in MODELS])
def test_activation_checkpointing(spec: ModelSpec, figures: list[Figure]) -> None:
    for compile_mode in ("off", "default"):
        arms = {
            again: _own(spec, compile_mode=compile_mode, recomputes=again == "computed again")
            for again in ("kept", "computed again")
        }
        times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
        memory = ", ".join(f"{_peak_gib(arm):.1f} GiB {name}" for name, arm in arms.items())
        slower = times["computed again"] / times["kept"] - 1
        figures.append(Figure(f"{spec.name}, activations, compile {compile_mode}", f"{memory}; {slower:+.1%} time"))


@pytest.mark.parametrize("spec", SIZES.resnets, ids=[spec.name for spec in SIZES.resnets])
def test_norm_groups_beside_plain_batchnorm(spec: ModelSpec, figures: list[Figure]) -> None:
    group = {"norm_group": SIZES.norm_group}
    arms = {
        "whole batch": _own(spec, SIZES.share),
        "at once": _own(spec, SIZES.share, **group),
        "one by one": _own(spec, SIZES.share, one_by_one=True, **group),
        "whole batch, compiled": _own(spec, SIZES.share, compile_mode="default"),
        "at once, compiled": _own(spec, SIZES.share, compile_mode="default", **group),
    }
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    for name, seconds in times.items():
        plain = times["whole batch, compiled" if "compiled" in name else "whole batch"]
        text = f"{SIZES.share / seconds:.0f} images/s, {seconds / plain:.3f} of plain BatchNorm's time"
        figures.append(Figure(f"{spec.name}, groups of {SIZES.norm_group} in {SIZES.share}, {name}", text, "<= 1.05"))


def test_weight_average_share_of_a_step(figures: list[Figure]) -> None:
    spec = SIZES.vits[0]
    arms = {"plain": _own(spec, compile_mode="default"), "ema": _own(spec, compile_mode="default", average="ema")}
    times = interleaved(arms, num_steps=SIZES.num_steps, rounds=SIZES.rounds)
    figures.append(Figure(f"{spec.name}, EMA", f"{times['ema'] / times['plain'] - 1:+.2%} of a step", "1 %"))


def test_checkpoint_share_of_500_steps(tmp_path: Path, figures: list[Figure]) -> None:
    own = _own(SIZES.vits[0], compile_mode="default", optimizer="adam")
    own(2)
    step_s = min(seconds_per_step(own, SIZES.num_steps) for _ in range(3))
    writer = CheckpointWriter(CheckpointFolder(LocalStore(tmp_path), "pretrain-0123456789abcdef"))
    stalls = []
    for step in range(1, 4):
        own(1)
        _wait()
        started_s = time.perf_counter()
        writer.has_room(WhenBusy.WAIT)
        waited_s = time.perf_counter() - started_s
        writer.save(own.learner.checkpoint(RunState(step=step)))
        stalls.append(time.perf_counter() - started_s - waited_s)
        own(SIZES.num_steps)
    writer.drain()
    writer.close()
    # The first save also allocates its memory: 500 steps later that is paid.
    text = f"{stalls[-1] * 1e3:.1f} ms = {stalls[-1] / (500 * step_s):.2%} of 500 steps"
    figures.append(Figure(f"{SIZES.vits[0].name}, stall of a checkpoint", text, "<= 1 %"))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SampleIndex]:
    folder = tmp_path_factory.mktemp("photographs")
    return folder, photographs_in_tars(folder, 4096 if HAS_GPU else 64)


@pytest.mark.parametrize("fed", SIZES.fed, ids=lambda fed: fed.spec.name)
def test_fed_training_beside_made_up_batches(
    photographs: tuple[Path, SampleIndex], figures: list[Figure], fed: Fed
) -> None:
    """In turns. What was decoded ahead is trained on before the clock starts, so as long as decoding lasts.

    "its process": the loader as it is. "threads": of the process that trains, each with a process that decodes. What a
    loader makes alone is the most that the processors decode.
    """
    arm = _own(fed.spec, fed.batch_size, compile_mode=fed.compile_mode)
    arm(3)
    num_ahead = 75 if HAS_GPU else 2
    steps_s: dict[str, list[float]] = {"made-up": []}
    loaders: dict[str, Iterator[Batch]] = {}
    for how, context in (("its process", loading_in_a_process), ("threads", decoding_in_processes)):
        with context():
            loaders[how] = iter(train_loader(*photographs, fed.batch_size, fed.spec.image_size))
            alone_s = [_seconds_per_batch(loaders[how], num_ahead) for _ in range(2)]
        _say(f"{how}: {fed.batch_size / min(alone_s):.0f} images/s without training")
        steps_s[how] = []
    for turn in range(SIZES.rounds):
        for how in list(steps_s)[:: 1 if turn % 2 == 0 else -1]:
            time.sleep(5 if HAS_GPU else 0)  # or others would still decode ahead
            arm.feed(loaders.get(how))
            arm(num_ahead)
            steps_s[how].append(seconds_per_step(arm, fed.num_steps))
    for batches in loaders.values():
        batches.close()  # type: ignore[attr-defined]
    made_up_s = statistics.median(steps_s["made-up"])
    for how, times_s in steps_s.items():
        rates = ", ".join(f"{fed.batch_size / step_s:.0f}" for step_s in times_s)
        text = f"{made_up_s / statistics.median(times_s):.1%} of made-up; images/s {rates}"
        figures.append(Figure(f"{fed.spec.name}, {fed.batch_size} per step, fed by {how}", text, ">= 97 %"))


def _seconds_per_batch(batches: Iterator[Batch], num_batches: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return (time.perf_counter() - started_s) / num_batches
