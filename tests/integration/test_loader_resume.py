"""Photographs in tars, decoded for real: the loader can stop before any step and go on as if it had not."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane, plane, tar_of
from tests.photographs import jpeg, photograph
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.decode import DecoderName
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

__all__ = ["plane"]

ROOT = Path(__file__).parents[2]
NUM_SHARDS, SHARD_SAMPLES, BATCH_SIZE, NUM_STEPS = 4, 9, 8, 11  # two and a half epochs of 36 samples
RECIPES = {
    "resized-crop": (AugmentSpec(augment=Augment.RANDOM_RESIZED_CROP_FLIP), DecoderName.TURBO),
    "jittered-crop": (AugmentSpec(augment=Augment.RANDOM_CROP_FLIP, color_jitter=0.4), DecoderName.PILLOW),
    "centre": (AugmentSpec(augment=Augment.FLIP), DecoderName.TURBO),
}


@pytest.fixture(scope="module")
def index(plane: DataPlane) -> SampleIndex:
    shards = {}
    for number in range(NUM_SHARDS):
        members = []
        for sample in range(SHARD_SAMPLES * number, SHARD_SAMPLES * (number + 1)):
            width, height = (120, 90) if sample % 3 else (90, 130)
            members.append((f"photo-{sample:03d}.jpg", jpeg(photograph(sample, width=width, height=height))))
            members.append((f"photo-{sample:03d}.cls", str(sample % 5).encode()))
        shards[f"train-{number}.tar"] = tar_of(members)
    return plane.index(plane.foreign(shards, num_classes=5))


def loader_of(plane: DataPlane, index: SampleIndex, recipe: str, cache: Path, **options: Any) -> TrainLoader:
    augment, decoder = RECIPES[recipe]
    pixels = PixelSpec(image_size=48, resize=56, decoder=decoder)
    source = SampleSource(plane.store, index, "train", cache_dir=cache, pixels=pixels, cache_bytes=0)
    fixed: dict[str, Any] = {"start_step": 0, "num_workers": 2, "stage": Stage.PRETRAIN}
    return TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 7, 2),
        SplitTargets.of(source.split.leaves, 5),
        batch_size=BATCH_SIZE,
        total_steps=NUM_STEPS,
        seed=7,
        augment=augment,
        **{**fixed, **options},
    )


def digest(batch: Batch) -> str:
    content = (batch.images_BCHW.contiguous().numpy(), batch.targets.numpy(), batch.ordinals_B)
    return hashlib.sha256(b"".join(array.tobytes() for array in content)).hexdigest()


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_before_any_step_gives_the_same_batches(
    plane: DataPlane, index: SampleIndex, recipe: str, tmp_path: Path
) -> None:
    """Also on a node whose cache is cold, and with another number of workers."""
    whole = [digest(batch) for batch in loader_of(plane, index, recipe, plane.cache)]
    assert len(whole) == len(set(whole)) == NUM_STEPS
    for step in range(1, NUM_STEPS + 1):
        resumed = loader_of(plane, index, recipe, tmp_path / str(step), num_workers=step % 4, start_step=step)
        assert [digest(batch) for batch in resumed] == whole[step:]


def test_resume_sees_each_sample_once_per_epoch(plane: DataPlane, index: SampleIndex) -> None:
    num_samples = NUM_SHARDS * SHARD_SAMPLES
    batches = loader_of(plane, index, "centre", plane.cache)
    seen = np.concatenate([batch.ordinals_B for batch in batches])
    for epoch in range(2):
        assert sorted(seen[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


_KILLED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.data_jobs import DataPlane
from tests.integration.test_loader_resume import digest, loader_of
from workloads.data.index import SampleIndex
plane = DataPlane(folder=Path({folder!r}))
index = SampleIndex.open(plane.store, {key!r}, plane.cache)
for batch in loader_of(plane, index, "resized-crop", plane.cache):
    print(batch.step, digest(batch), flush=True)
"""


def test_resume_after_kill_nine_continues_the_sequence(plane: DataPlane, index: SampleIndex) -> None:
    """The workers are threads: whoever kills one kills them all, and the next process goes on from the step."""
    whole = [digest(batch) for batch in loader_of(plane, index, "resized-crop", plane.cache)]
    assert isinstance(plane.store, LocalStore)
    num_batches = 3
    script = _KILLED.format(root=str(ROOT), folder=str(plane.folder), key=index.key)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        told = [line.split() for _, line in zip(range(num_batches), child.stdout, strict=False)]
        child.send_signal(signal.SIGKILL)
    assert [int(step) for step, _ in told] == list(range(num_batches))
    resumed = loader_of(plane, index, "resized-crop", plane.cache, start_step=num_batches)
    assert [found for _, found in told] + [digest(batch) for batch in resumed] == whole
