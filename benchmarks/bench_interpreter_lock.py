"""What decoding costs the thread that trains: how long it waits for the interpreter's lock.

The steps are those of ResNet-34 and ViT-B/16 at 64 images per rank, forward, backward and optimiser in eager mode.
Without a GPU they are networks of the same layers with few channels on two tiny images: as many calls, each of which
lets go of the lock and takes it again, and next to nothing to compute, as where a GPU computes. The thread that trains
then has one core for itself, and 12 decoding threads share the other one; they decode as many images as an H100 would
train on. The waits are counted by the kernel (see ``lock_wait_s``): the time in which a thread waits for a core is
left out, but not that in which the holder of the lock does. With a GPU the real steps run on it, and nothing is pinned;
the thread then also waits for autograd's thread, which counts as a wait for the lock: compare rates instead.

Arms, in turns: a made-up batch; batches of ``TrainLoader`` with 12 threads in this process; the same with a process
that decodes for each of them; the loader in another process, as it is where a GPU trains; a made-up batch while another
process decodes as much.

``python -m benchmarks.bench_interpreter_lock FOLDER IMAGES_PER_S``: that other process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.data_jobs import DataPlane, decoding_in_processes, loading_in_a_process
from tests.photographs import jpeg, photograph
from workloads.data import decode, loader
from workloads.data.augment import Augment
from workloads.data.decode import DecoderName
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, SampleSource, TrainLoader
from workloads.data.order import SampleOrder
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
IMAGES_PER_RANK, NUM_THREADS, IMAGE_SIZE, NUM_CLASSES = 64, 12, 224, 1000
IMAGES_PER_S = {"resnet34": 2500, "vit_base_patch16_224": 1200}
"""That one H100 trains on in bfloat16, about: what decoding has to keep up with."""
NARROW: Mapping[str, Mapping[str, Any]] = {
    "resnet34": {"channels": (8, 8, 8, 8)},
    "vit_base_patch16_224": {"embed_dim": 48, "num_heads": 12, "img_size": 32},
}
WARMUP_STEPS, NUM_STEPS, ROUNDS = 5, 40, 5
CORES = sorted(os.sched_getaffinity(0))


def lock_wait_s(wall_s: float, before: tuple[float, float]) -> float:
    """Of a section that needs no data and no device: the time in which this thread neither ran nor waited for a core.

    It slept then, and there is nothing else to sleep for but the interpreter's lock.
    """
    ran_s, queued_s = scheduled()
    return max(0.0, wall_s - (ran_s - before[0]) - (queued_s - before[1]))


def scheduled() -> tuple[float, float]:
    """Seconds for which this thread has run, and for which it could have run and had no core."""
    ran, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="ascii").split()
    return int(ran) / 1e9, int(queued) / 1e9


def pin(core: int) -> None:
    """This thread, and those that it starts, to a core; not on a machine with a GPU."""
    if not HAS_GPU:
        os.sched_setaffinity(0, {CORES[core % len(CORES)]})


class Training:
    """A network and its optimiser; a step as the processor sees it."""

    def __init__(self, name: str) -> None:
        with torch.device(DEVICE):
            width = {} if HAS_GPU else NARROW[name]
            self._model: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES, **width).train()
            self._targets = torch.zeros(IMAGES_PER_RANK if HAS_GPU else 2, dtype=torch.int64)
            self._tiny_BCHW = torch.zeros(2, 3, 32, 32)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        self._loss = nn.CrossEntropyLoss()

    def step(self, images_BCHW: Tensor) -> None:
        pixels_BCHW = self._tiny_BCHW
        if HAS_GPU:
            pixels_BCHW = images_BCHW.to(DEVICE, non_blocking=True).to(torch.float32).div_(255)
        with torch.autocast("cuda", dtype=torch.bfloat16) if HAS_GPU else nullcontext():
            loss: Tensor = self._loss(self._model(pixels_BCHW), self._targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@dataclass(kw_only=True)
class Steps:
    """What some steps took."""

    launch_s: list[float] = field(default_factory=list)
    lock_s: list[float] = field(default_factory=list)
    whole_s: float = 0.0

    def summary(self, base: Steps) -> str:
        launch_ms, lock_ms = (1e3 * statistics.median(values) for values in (self.launch_s, self.lock_s))
        mean_ms = 1e3 * statistics.mean(self.lock_s)
        rate = IMAGES_PER_RANK * len(self.launch_s) / self.whole_s
        ratio = statistics.median(self.launch_s) / statistics.median(base.launch_s)
        share = 100 * sum(self.lock_s) / self.whole_s
        return (
            f"launching {launch_ms:5.1f} ms ({ratio:.2f} of made-up), of which waiting for the lock {lock_ms:5.2f} ms "
            f"(mean {mean_ms:5.2f}); {rate:4.0f} images/s: {share:4.1f} % of the time"
        )


def run(training: Training, batches: Iterator[Tensor], step_s: float, found: Steps) -> None:
    """Steps at a pace of ``step_s``: where a step is launched faster, the thread sleeps as it waits for a GPU."""
    for number in range(WARMUP_STEPS + NUM_STEPS):
        images_BCHW = next(batches)
        started_s, before = time.perf_counter(), scheduled()
        if number == WARMUP_STEPS:
            begun_s = started_s
        training.step(images_BCHW)
        launched_s = time.perf_counter() - started_s
        waited_s = lock_wait_s(launched_s, before)
        if HAS_GPU:
            torch.cuda.synchronize()
        time.sleep(max(0.0, step_s - (time.perf_counter() - started_s)))
        if number >= WARMUP_STEPS:
            found.launch_s.append(launched_s)
            found.lock_s.append(waited_s)
    found.whole_s += time.perf_counter() - begun_s


def write_shard(folder: Path, width: int) -> None:
    """A data set of 256 JPEGs, 500 x 375 or smaller; what holds the lock does not depend on their size."""
    shard = BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number in range(256):
            for suffix, content in (
                ("jpg", jpeg(photograph(number % 16, width=width, height=width * 3 // 4))),
                ("cls", b"0"),
            ):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    plane = DataPlane(folder=folder)
    (folder / "index").write_text(plane.index(plane.foreign({"train-0.tar": shard.getvalue()})).key)


def batches_of(
    folder: Path, *, num_workers: int = NUM_THREADS, augment: Augment = Augment.RANDOM_RESIZED_CROP_FLIP
) -> Iterator[Batch]:
    plane = DataPlane(folder=folder)
    index = SampleIndex.open(plane.store, (folder / "index").read_text(), plane.cache)
    pixels = PixelSpec(image_size=IMAGE_SIZE, decoder=DecoderName.TURBO)
    source = SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels, cache_bytes=0)
    batches = TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 0, 1),
        SplitTargets.of(source.split.leaves, NUM_CLASSES),
        batch_size=IMAGES_PER_RANK,
        start_step=0,
        total_steps=10**6,
        seed=0,
        stage=Stage.PRETRAIN,
        augment=augment,
        num_workers=num_workers,
        device=DEVICE,
    )
    return iter(batches)


@contextmanager
def in_threads() -> Iterator[None]:
    """Loaders use neither processes that decode nor another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "decodes_in_processes", lambda _device: False)
        yield


HOW: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "fed by 12 threads": in_threads,
    "fed by 12 threads, a process for each": decoding_in_processes,
    "fed by another process": loading_in_a_process,
}


def fed(folder: Path, how: str) -> Iterator[Tensor]:
    """Images of the loader, whose threads and processes stay on the other core."""
    pin(1)
    with HOW[how]():
        batches = batches_of(folder)
        first = next(batches)
    pin(0)
    yield first.images_BCHW
    for batch in batches:
        yield batch.images_BCHW


def made_up() -> Iterator[Tensor]:
    pin(0)
    images_BCHW = torch.zeros(IMAGES_PER_RANK, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    while True:
        yield images_BCHW


def test_time_per_image_that_may_hold_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time of a batch in one thread without what lets go of the lock: decoding, resizing, mirroring.

    Reading the file lets go of it too and is still in it, so this is an upper bound. Other work on the cores changes
    processor time little.
    """
    write_shard(tmp_path, 500)
    pixels_HWC = np.zeros((375, 500, 3), dtype=np.uint8)
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda _encoded, buffer: pixels_HWC)
    for interpolation in decode._RESIZE:
        monkeypatch.setitem(decode._RESIZE, interpolation, lambda *_, **__: None)
    batches = batches_of(tmp_path, num_workers=0, augment=Augment.RANDOM_RESIZED_CROP)
    times_ms = []
    for _ in range(WARMUP_STEPS + NUM_STEPS):
        started_s = time.thread_time()
        next(batches)
        times_ms.append(1e3 * (time.thread_time() - started_s) / IMAGES_PER_RANK)
    held_ms = statistics.median(times_ms[WARMUP_STEPS:])
    shares = ", ".join(
        f"{held_ms * rate / 10:.1f} % at {rate} images/s ({name})" for name, rate in IMAGES_PER_S.items()
    )
    print(f"\nat most {held_ms:.4f} ms per image hold the lock: {shares}")  # noqa: T201 - a benchmark's result


@pytest.mark.parametrize(("name", "width"), [("resnet34", 120), ("vit_base_patch16_224", 240), ("resnet34", 500)])
def test_lock_waits_of_training(tmp_path: Path, name: str, width: int) -> None:
    """Asked: decoding costs at most 3 %."""
    write_shard(tmp_path, width)
    torch.set_num_threads(1)
    training, step_s = Training(name), 0.0 if HAS_GPU else IMAGES_PER_RANK / IMAGES_PER_S[name]
    arms = {arm: Steps() for arm in ("made-up", *HOW, "made-up, 12 threads of another process")}
    command = [sys.executable, "-m", "benchmarks.bench_interpreter_lock", str(tmp_path), str(IMAGES_PER_S[name])]
    for _ in range(ROUNDS):
        run(training, made_up(), step_s, arms["made-up"])
        for how in HOW:
            batches = fed(tmp_path, how)
            run(training, batches, step_s, arms[how])
            batches.close()  # type: ignore[attr-defined]
        pin(1)
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as other:
            assert other.stdout is not None
            other.stdout.readline()
            run(training, made_up(), step_s, arms["made-up, 12 threads of another process"])
            other.kill()
    where = torch.cuda.get_device_name() if HAS_GPU else "narrow network, one core each"
    print(f"\n{name}, JPEGs of {width} x {width * 3 // 4}, {where}:")  # noqa: T201 - a benchmark's result
    for arm, found in arms.items():
        print(f"  {arm:40} {found.summary(arms['made-up'])}")  # noqa: T201 - a benchmark's result


if __name__ == "__main__":
    torch.set_num_threads(1)
    step_s = IMAGES_PER_RANK / float(sys.argv[2])
    for _ in batches_of(Path(sys.argv[1])):
        print(flush=True)  # noqa: T201 - says that it is at work
        time.sleep(step_s)
