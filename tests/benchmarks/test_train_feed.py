"""How much training waits for its data: JPEGs through shards, decoder and augmentation, beside one batch in memory."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from itertools import cycle, islice, repeat

import pytest
import torch

from orchestrator.core.contract import Execution, ExecutionContext, JobKind
from tests.data_jobs import DataPlane, tar_of
from tests.photographs import jpeg, photograph
from tests.tiny_training import RECIPE
from workloads.jobs.networks import ImageTask, new_backbone, new_head
from workloads.runtime.precision import Arithmetic
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.large_head import loss_of
from workloads.train.learner import Learner
from workloads.train.micro_batch import Layout
from workloads.train.objective import SoftmaxObjective
from workloads.train.samples import LabelledSamples
from workloads.train.schedule import Calendar
from workloads.train.step import Update
from workloads.train.task import JobContext, TrainInputs

pytestmark = pytest.mark.bench

ROUNDS, STEPS, BATCH_SIZE, IMAGE_SIZE, NUM_CORES = 7, 4, 32, 160, 2
NUM_SHARDS, SHARD_SAMPLES, NUM_PHOTOGRAPHS = 2, 256, 64
MODEL = {"name": "resnet18", "image_size": IMAGE_SIZE, "kwargs": {}}
PHOTOGRAPHS = {
    "augment": "random_resized_crop_flip",
    "decoder": "turbo",
    "batch_size": BATCH_SIZE,
    "norm_group": BATCH_SIZE,
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
    losses_of = loss_of(task.model, SoftmaxObjective(2))
    update = Update(learner, losses_of, Layout.of(task.model, recipe, ranks=Ranks()))
    one = next(task.batches(0, 1, unit=1))
    ratios = []
    for number in range(ROUNDS):
        first = number * STEPS
        spent_s = {}
        for arm in ("loader", "memory") if number % 2 else ("memory", "loader"):
            batches = repeat(one, STEPS) if arm == "memory" else task.batches(first, first + STEPS, unit=1)
            spent_s[arm] = _seconds(update, batches)
        ratios.append([memory / loader for memory, loader in zip(spent_s["memory"], spent_s["loader"], strict=True)])
    torch.set_num_threads(threads)
    clock, cpu = (statistics.median(ratio[kind] for ratio in ratios) for kind in (0, 1))
    rounds = "  ".join(f"{clock:.3f}/{cpu:.3f}" for clock, cpu in ratios)
    sys.stdout.write(f"\ntraining fed by the loader: {clock:.3f} of the speed with one batch in memory (asked >= 0.90)")
    sys.stdout.write(f"; by CPU time, what both cores could do at best, {cpu:.3f}; rounds {rounds}\n")
