"""How long a training job takes to its first step in a process that is warm, beside building its model alone.

Prints; asserts no times. On a GPU the same: moving the model there counts as start, compilation is told apart.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.contract import Execution, ExecutionContext, JobKind, JobRequest
from orchestrator.storage.artifacts import read_record
from tests.data_jobs import DataPlane, tar_of
from tests.photographs import jpeg, photograph
from tests.tiny_training import RECIPE
from workloads.models.build import build_backbone
from workloads.models.spec import ModelSpec
from workloads.run import execute

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

ROUNDS, BATCH_SIZE, IMAGE_SIZE = 5, 4, 224
NUM_SAMPLES = {"train": 512, "val": 4}
MODELS = ("resnet50", "vit_base_patch16_224")
ONE_STEP = {"epochs": BATCH_SIZE / NUM_SAMPLES["train"], "batch_size": BATCH_SIZE, "warmup_epochs": 0.0}
LOOK = {"augment": "random_resized_crop_flip", "decoder": "turbo", "norm_group": BATCH_SIZE}


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Photographs of 500 x 375 in shards, and a label space over them."""

    plane: DataPlane
    inputs: dict[str, str]

    def job(self, model: str, seed: int) -> JobRequest:
        parameters: dict[str, Any] = {
            "model": {"name": model, "image_size": IMAGE_SIZE, "kwargs": {}},
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


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@pytest.mark.parametrize("model", MODELS)
def test_start_of_a_job_on_a_warm_runner_beside_building_its_model(lab: Lab, model: str, tmp_path: Path) -> None:
    spec = ModelSpec(name=model, image_size=IMAGE_SIZE)
    lab.run(lab.job(model, 1000))  # imports, and what torch prepares once per process
    starts, builds, compiles = [], [], []
    for seed in range(ROUNDS):
        builds.append(seconds(lambda seed=seed: build_backbone(spec, seed)))  # type: ignore[misc]
        measured = lab.run(lab.job(model, seed))
        starts.append(measured["setup_s"])
        compiles.append(measured["compile_s"])
    start, build = statistics.median(starts), statistics.median(builds)
    sys.stdout.write(
        f"\n{model}: {start:.2f} s to the first step, {build:.2f} s of which the model's construction takes alone: "
        f"{start - build:+.2f} s (asked <= 1); compilation {statistics.median(compiles):.2f} s; rounds "
        f"{'  '.join(f'{a:.2f}/{b:.2f}' for a, b in zip(starts, builds, strict=True))}\n"
    )
