"""What training costs beyond its arithmetic: the loop, its data, averaged weights, large heads, and the start of a job.

Compares with plain PyTorch and timm in the same run, in turns, and prints ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane, tar_of
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from tests.photographs import jpeg, photograph
from tests.rank_processes import RankPool, raise_errors
from tests.tiny_training import RECIPE
from workloads.jobs.networks import ImageTask, new_backbone, new_head
from workloads.models.batchnorm import ghost_batchnorm
from workloads.models.build import Classifier, build_backbone
from workloads.models.spec import ModelSpec
from workloads.run import execute
from workloads.runtime import precision
from workloads.runtime.precision import Arithmetic, CompiledForward, CompileMode
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.large_head import CHUNK_CLASSES, LARGE_LOGITS, LossForward, head_losses
from workloads.train.learner import Learner, build_average
from workloads.train.micro_batch import Layout
from workloads.train.objective import SigmoidObjective, SoftmaxObjective
from workloads.train.optim import build_optimizer
from workloads.train.recipe import Recipe
from workloads.train.samples import LabelledSamples
from workloads.train.schedule import Calendar
from workloads.train.step import GradientSum, Update
from workloads.train.task import JobContext, TrainInputs

# ---------------------------------------------------------------------------------------------------------------------
# What the training loop costs beyond a plain PyTorch loop over the same model and batches, and a gang's gradients
# beside DistributedDataParallel's.

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


# ---------------------------------------------------------------------------------------------------------------------
# When gradients are ready to be sent: eager, the backbone compiled as a whole, and block by block.

COMPILE_ROUNDS = 5
COMPILE_ARMS = ("eager", "whole", "blocks")
COMPILED_MODELS: dict[str, dict[str, Any]] = {"vit_tiny_patch16_224": {"img_size": IMAGE_SIZE}, "resnet18": {}}


def _compiled(name: str, arm: str) -> tuple[nn.Module, CompiledForward]:
    """The same network in each arm, and how its backbone is called."""
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=0, **COMPILED_MODELS[name]).train()
    mode = CompileMode.OFF if arm == "eager" else CompileMode.DEFAULT
    with pytest.MonkeyPatch.context() as patch:
        if arm == "whole":
            patch.setattr(precision, "blocks_of", lambda network: [network])
        return backbone, CompiledForward(backbone, mode)


def _timed_step(backbone: nn.Module, forward: CompiledForward, images: Tensor) -> tuple[float, list[float]]:
    """Seconds of both passes, and when each gradient was there as a share of the backward pass."""
    ready_s: list[float] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _: ready_s.append(time.perf_counter()))
        for parameter in backbone.parameters()
    ]
    for parameter in backbone.parameters():
        parameter.grad = None
    started_s = time.perf_counter()
    loss = forward(images).square().mean()
    backward_s = time.perf_counter()
    loss.backward()
    ended_s = time.perf_counter()
    for handle in handles:
        handle.remove()
    return ended_s - started_s, [(at_s - backward_s) / (ended_s - backward_s) for at_s in ready_s]


@pytest.mark.parametrize("name", COMPILED_MODELS)
def test_gradients_of_compiled_blocks_beside_the_whole_and_eager(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # empty: compilation is measured, too
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE)
    arms = {arm: _compiled(name, arm) for arm in COMPILE_ARMS}
    compile_s, gradients = {}, {}
    for arm, (backbone, forward) in arms.items():
        compile_s[arm], _ = _timed_step(backbone, forward, images)
        gradients[arm] = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
        assert not forward.note
    steps: dict[str, list[tuple[float, list[float]]]] = {arm: [] for arm in arms}
    for turn in range(COMPILE_ROUNDS):
        for arm in list(arms)[:: 1 if turn % 2 else -1]:
            steps[arm].append(_timed_step(*arms[arm], images))
    eager_s = statistics.median(step_s for step_s, _ in steps["eager"])
    for arm in arms:
        step_s = statistics.median(step_s for step_s, _ in steps[arm])
        shares = [
            statistics.median(choose(share) for _, share in steps[arm]) for choose in (min, statistics.median, max)
        ]
        ours, theirs = (torch.cat([gradient.flatten() for gradient in gradients[one]]) for one in (arm, "eager"))
        off = float((ours - theirs).norm() / theirs.norm())
        sys.stdout.write(
            f"\n{name} {arm}: first/median/last gradient at {'/'.join(f'{share:.2f}' for share in shares)} of the "
            f"backward pass; first step {compile_s[arm]:.1f} s, then {step_s / eager_s:.2f} of eager's; gradients "
            f"differ from eager's by {off:.1e} of their norm"
        )
    sys.stdout.write("\n")


# ---------------------------------------------------------------------------------------------------------------------
# BatchNorm by norm groups: operations and time beside plain BatchNorm, and beside one group after the other.

GROUP_ROUNDS = 5
GROUP_SIZE, GROUP_SHARE, GROUP_IMAGE_SIZE = 64, 512, 32
GROUP_ARMS = ("plain", "one by one", "at once")


class _CountedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return operation(*args, **(kwargs or {}))


def _grouped_update(arm: str, model: nn.Module) -> Callable[[], object]:
    """A step of the product on one batch."""
    group = GROUP_SHARE if arm == "plain" else GROUP_SIZE
    recipe = Recipe.from_mapping({**RECIPE, "batch_size": GROUP_SHARE, "norm_group": group})
    learner = Learner(model, recipe, Calendar.of(recipe, 10**7), Arithmetic(torch.device("cpu")))
    layout = Layout.of(model, recipe, micro_batch=GROUP_SHARE, ranks=Ranks())
    update = Update(learner, LossForward(model, SoftmaxObjective(NUM_CLASSES)), layout)
    images = torch.randn(GROUP_SHARE, 3, GROUP_IMAGE_SIZE, GROUP_IMAGE_SIZE)
    images = images.contiguous(memory_format=torch.channels_last)
    batch = TrainInputs(inputs=images, targets=torch.zeros(GROUP_SHARE, dtype=torch.int64))

    def step() -> None:
        with ghost_batchnorm(model, group, one_by_one=arm == "one by one"):
            update(batch, 0.0)

    return step


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_norm_groups_beside_plain_batchnorm(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = {}
    for arm in GROUP_ARMS:
        backbone = timm.create_model(name, num_classes=0)
        net = Classifier(backbone, nn.Linear(int(backbone.num_features), NUM_CLASSES)).train()  # type: ignore[arg-type]
        steps[arm] = _grouped_update(arm, net.to(memory_format=torch.channels_last))
    counts, spent_s = {}, {arm: [0.0] * 0 for arm in GROUP_ARMS}
    for arm, step in steps.items():
        step()
        with _CountedOperations() as counted:
            step()
        counts[arm] = counted.number
    for turn in range(GROUP_ROUNDS):
        for arm in GROUP_ARMS[:: 1 if turn % 2 else -1]:
            started_s = time.process_time()
            steps[arm]()
            spent_s[arm].append(time.process_time() - started_s)
    torch.set_num_threads(threads)
    for arm in GROUP_ARMS:
        ratios = [ours / plain for ours, plain in zip(spent_s[arm], spent_s["plain"], strict=True)]
        rounds = "  ".join(f"{ratio:.3f}" for ratio in ratios)
        sys.stdout.write(
            f"\n{name}, {GROUP_SHARE // GROUP_SIZE} groups of {GROUP_SIZE}, {arm}: {counts[arm]} operations per step, "
            f"{statistics.median(ratios):.3f} of the CPU time with plain BatchNorm (asked <= 1.05); rounds {rounds}"
        )
    sys.stdout.write("\n")


# ---------------------------------------------------------------------------------------------------------------------
# How much training waits for its data: JPEGs through shards, decoder and augmentation, beside one batch in memory.

FEED_ROUNDS, FEED_STEPS, FEED_BATCH_SIZE, FEED_IMAGE_SIZE, NUM_CORES = 7, 4, 32, 160, 2
NUM_SHARDS, SHARD_SAMPLES, NUM_PHOTOGRAPHS = 2, 256, 64
MODEL = {"name": "resnet18", "image_size": FEED_IMAGE_SIZE, "kwargs": {}}
PHOTOGRAPHS = {
    "augment": "random_resized_crop_flip",
    "decoder": "turbo",
    "batch_size": FEED_BATCH_SIZE,
    "norm_group": FEED_BATCH_SIZE,
    "epochs": 100,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ImageTask:
    """A ResNet-18 on photographs of 500 x 375."""
    plane = DataPlane(folder=tmp_path_factory.mktemp("feed"))
    pictures = cycle([jpeg(photograph(seed)) for seed in range(NUM_PHOTOGRAPHS)])
    shards = {}
    for shard in (*(f"train-{number}.tar" for number in range(NUM_SHARDS)), "val-0.tar"):
        size = SHARD_SAMPLES if shard.startswith("train") else 8
        members = [
            member
            for row, content in enumerate(islice(pictures, size))
            for member in ((f"{shard[:-4]}-{row:04d}.jpg", content), (f"{shard[:-4]}-{row:04d}.cls", b"%d" % (row % 2)))
        ]
        shards[shard] = tar_of(members)
    index = plane.index(plane.foreign(shards))
    space = {"random": {"num_classes": 2, "seed": 0}}
    labels = plane.run(JobKind.LABELS, {"space": space}, {"index": index.key}).key
    parameters = {"model": MODEL, "recipe": {**RECIPE, **PHOTOGRAPHS}, "seed": 0}
    request = plane.request(JobKind.PRETRAIN, parameters, {"index": index.key, "labels": labels})
    object.__setattr__(request, "execution", Execution(num_threads=NUM_CORES))
    context = ExecutionContext(store=plane.store, scratch=plane.folder, cache=plane.cache)
    job = JobContext.of(request, context, Stage.PRETRAIN)
    samples = LabelledSamples.open(job)
    backbone, num_features = new_backbone(job)
    return ImageTask(job, samples, backbone, new_head(job, num_features, samples.num_classes))


def _seconds(update: Update, batches: Iterable[TrainInputs]) -> tuple[float, float]:
    """By the clock and of CPU, without the first step, during which loading begins."""
    clock_s = cpu_s = 0.0
    for number, batch in enumerate(batches):
        if number == 1:
            clock_s, cpu_s = time.perf_counter(), time.process_time()
        update(batch, 0.01)
    return time.perf_counter() - clock_s, time.process_time() - cpu_s


def test_training_fed_by_the_loader_beside_one_batch_in_memory(task: ImageTask) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_CORES)
    recipe = task._job.recipe
    learner = Learner(task.model, recipe, Calendar.of(recipe, 512), Arithmetic(torch.device("cpu")))
    losses_of = LossForward(task.model, SoftmaxObjective(2))
    update = Update(learner, losses_of, Layout.of(task.model, recipe, ranks=Ranks()))
    one = next(task.batches(0, 1, unit=1))
    ratios = []
    for number in range(FEED_ROUNDS):
        first = number * FEED_STEPS
        spent_s = {}
        for arm in ("loader", "memory") if number % 2 else ("memory", "loader"):
            batches = repeat(one, FEED_STEPS) if arm == "memory" else task.batches(first, first + FEED_STEPS, unit=1)
            spent_s[arm] = _seconds(update, batches)
        ratios.append([memory / loader for memory, loader in zip(spent_s["memory"], spent_s["loader"], strict=True)])
    torch.set_num_threads(threads)
    clock, cpu = (statistics.median(ratio[kind] for ratio in ratios) for kind in (0, 1))
    rounds = "  ".join(f"{clock:.3f}/{cpu:.3f}" for clock, cpu in ratios)
    sys.stdout.write(f"\ntraining fed by the loader: {clock:.3f} of the speed with one batch in memory (asked >= 0.90)")
    sys.stdout.write(f"; by CPU time, what both cores could do at best, {cpu:.3f}; rounds {rounds}\n")


# ---------------------------------------------------------------------------------------------------------------------
# What an average of the weights costs beside a step, and beside timm's; on a GPU where there is one.

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


# ---------------------------------------------------------------------------------------------------------------------
# Heads over chunks of classes against heads that hold all logits: time of a step and memory, in turns.

# Below, at and above the rule; ImageNet21k's classes with ViT-B's features, and a head of half a million.
CASES = [(64, 192, 21_843), (1024, 768, 21_843), (64, 256, 500_000)]
HEAD_ROUNDS = 5


def _step(arm: str, features: Tensor, head: nn.Linear, targets: Tensor, loss: str) -> float:
    objective = (SoftmaxObjective if loss == "softmax" else SigmoidObjective)(head.out_features)
    for tensor in (features, *head.parameters()):
        tensor.grad = None  # its memory is used again
    started_s = time.process_time()
    if arm == "plain":
        losses = objective.losses(head(features), targets)
    else:
        losses, _ = head_losses(features, head, objective.linear_form(targets))
    losses.sum().backward()
    return time.process_time() - started_s


def _inputs(case: tuple[int, int, int]) -> tuple[Tensor, nn.Linear, Tensor]:
    batch_size, num_features, num_classes = case
    features = torch.randn(batch_size, num_features, requires_grad=True)
    return features, nn.Linear(num_features, num_classes), torch.randint(0, num_classes, (batch_size,))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("case", CASES, ids=["x".join(map(str, case)) for case in CASES])
def test_large_head_step_over_chunks_beside_all_logits(case: tuple[int, int, int], loss: str) -> None:
    torch.set_num_threads(1)
    inputs = _inputs(case)
    arms: dict[str, list[float]] = {"plain": [], "chunked": []}
    for turn in range(HEAD_ROUNDS + 1):
        for arm in list(arms) if turn % 2 else list(reversed(arms)):
            seconds = _step(arm, *inputs, loss)
            arms[arm] += [seconds] if turn else []
    plain, chunked = (statistics.median(times) for times in arms.values())
    is_large = case[0] * case[2] >= LARGE_LOGITS
    memory = {arm: _peak_mib(arm, case, loss) for arm in arms}
    sys.stdout.write(
        f"\n{case[0]} x {case[2]} {loss}: chunks of {CHUNK_CLASSES} take {chunked / plain:.2f} of the time and "
        f"{memory['chunked']:.0f} instead of {memory['plain']:.0f} MiB; rule says {'chunks' if is_large else 'plain'}\n"
    )


def _peak_mib(arm: str, case: tuple[int, int, int], loss: str) -> float:
    """What a step takes at its peak beside weights, features and gradients, in a process of its own."""
    program = (
        "import json, pathlib, sys, torch\n"
        "from benchmarks.bench_training import _inputs, _step\n"
        "arm, case, loss = json.loads(sys.argv[1])\n"
        "torch.set_num_threads(1)\n"
        "inputs = _inputs(tuple(case))\n"
        "_step(arm, *_inputs((2, 8, 16)), loss)\n"
        "for parameter in inputs[1].parameters():\n"
        "    parameter.grad = torch.zeros_like(parameter)\n"
        "own = pathlib.Path('/proc/self')\n"
        "(own / 'clear_refs').write_text('5')  # the peak counts from here on\n"
        "status = lambda name: int((own / 'status').read_text().split(name)[1].split()[0])\n"
        "before = status('VmRSS:')\n"
        "_step(arm, *inputs, loss)\n"
        "print(status('VmHWM:') - before)\n"
    )
    command = [sys.executable, "-c", program, json.dumps([arm, case, loss])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) / 1024


# ---------------------------------------------------------------------------------------------------------------------
# How long a training job takes to its first step in a process that is warm, beside building its model alone.
#
# Prints; asserts no times. On a GPU the same: moving the model there counts as start, compilation is told apart.

START_ROUNDS, START_BATCH_SIZE, START_IMAGE_SIZE = 5, 4, 224
NUM_SAMPLES = {"train": 512, "val": 4}
START_MODELS = ("resnet50", "vit_base_patch16_224")
ONE_STEP = {
    "epochs": START_BATCH_SIZE / NUM_SAMPLES["train"],
    "batch_size": START_BATCH_SIZE,
    "warmup_epochs": 0.0,
}
LOOK = {"augment": "random_resized_crop_flip", "decoder": "turbo", "norm_group": START_BATCH_SIZE}


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Photographs of 500 x 375 in shards, and a label space over them."""

    plane: DataPlane
    inputs: dict[str, str]

    def job(self, model: str, seed: int) -> JobRequest:
        parameters: dict[str, Any] = {
            "model": {"name": model, "image_size": START_IMAGE_SIZE, "kwargs": {}},
            "recipe": {**RECIPE, **ONE_STEP, **LOOK},
            "seed": seed,
        }
        request = self.plane.request(JobKind.PRETRAIN, parameters, self.inputs)
        object.__setattr__(request, "execution", Execution(num_threads=2))
        return request

    def run(self, request: JobRequest) -> dict[str, float]:
        """What the record of a job says of its times."""
        scratch = self.plane.folder / "scratch" / request.key
        scratch.mkdir(parents=True)
        execute(request, ExecutionContext(store=self.plane.store, scratch=scratch, cache=self.plane.cache))
        measured: dict[str, float] = read_record(self.plane.store, request.key).summary["measured"]
        return measured


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    plane = DataPlane(folder=tmp_path_factory.mktemp("start"))
    pictures = cycle([jpeg(photograph(seed)) for seed in range(16)])
    shards = {
        f"{split}-0.tar": tar_of(
            [
                member
                for row, content in enumerate(islice(pictures, number))
                for member in ((f"{row:04d}.jpg", content), (f"{row:04d}.cls", b"%d" % (row % 2)))
            ]
        )
        for split, number in NUM_SAMPLES.items()
    }
    index = plane.index(plane.foreign(shards))
    space = {"random": {"num_classes": 2, "seed": 0}}
    labels = plane.run(JobKind.LABELS, {"space": space}, {"index": index.key}).key
    return Lab(plane=plane, inputs={"index": index.key, "labels": labels})


def seconds_of_start(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@pytest.mark.parametrize("model", START_MODELS)
def test_start_of_a_job_on_a_warm_runner_beside_building_its_model(lab: Lab, model: str, tmp_path: Path) -> None:
    spec = ModelSpec(name=model, image_size=START_IMAGE_SIZE)
    lab.run(lab.job(model, 1000))  # imports, and what torch prepares once per process
    starts, builds, compiles = [], [], []
    for seed in range(START_ROUNDS):
        builds.append(seconds_of_start(lambda seed=seed: build_backbone(spec, seed)))  # type: ignore[misc]
        measured = lab.run(lab.job(model, seed))
        starts.append(measured["setup_s"])
        compiles.append(measured["compile_s"])
    start, build = statistics.median(starts), statistics.median(builds)
    sys.stdout.write(
        f"\n{model}: {start:.2f} s to the first step, {build:.2f} s of which the model's construction takes alone: "
        f"{start - build:+.2f} s (asked <= 1); compilation {statistics.median(compiles):.2f} s; rounds "
        f"{'  '.join(f'{a:.2f}/{b:.2f}' for a, b in zip(starts, builds, strict=True))}\n"
    )
