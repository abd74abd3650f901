"""Ways from tar to batch, one per process: ``python -m tests.benchmarks.loader_arms ARM FOLDER`` prints a measurement.

Every arm makes batches of ``BATCH_SIZE`` uint8 images by RandomResizedCrop 224 and flip, with ``NUM_CORES`` workers.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

NUM_CORES = 2
IMAGE_SIZE, BATCH_SIZE = 224, 64
DROPPED_BATCHES, TIMED_BATCHES = 12, 24
"""The dropped ones are the work of start-up and of queues; afterwards production alone sets the pace."""


def ours(folder: Path, decoder: str) -> Iterator[int]:
    """Numbers of images of the batches of `TrainLoader` over the data set in ``folder/plane``."""
    from tests.data_jobs import DataPlane
    from workloads.data.augment import Augment
    from workloads.data.decode import DecoderName
    from workloads.data.index import SampleIndex
    from workloads.data.loader import SampleSource, TrainLoader
    from workloads.data.order import SampleOrder
    from workloads.data.pixels import PixelSpec
    from workloads.data.split_targets import SplitTargets
    from workloads.runtime.streams import Stage

    plane = DataPlane(folder=folder / "plane")
    index = SampleIndex.open(plane.store, (folder / "index").read_text(), plane.cache)
    pixels = PixelSpec(image_size=IMAGE_SIZE, decoder=DecoderName(decoder))
    source = SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels, cache_bytes=0)
    loader = TrainLoader(
        source,
        SampleOrder(source.split.shard_sizes, 0, 2),
        SplitTargets.of(source.split.leaves, 2),
        batch_size=BATCH_SIZE,
        start_step=0,
        total_steps=10**6,
        seed=0,
        stage=Stage.PRETRAIN,
        augment=Augment.RANDOM_RESIZED_CROP_FLIP,
        num_workers=NUM_CORES,
    )
    for batch in loader:
        yield len(batch.images_BCHW)


def webdataset_torchvision(folder: Path) -> Iterator[int]:
    """As webdataset's own examples have it: batches are made in the workers and come through shared memory."""
    import webdataset
    from torchvision.transforms import v2

    torch.set_num_threads(1)  # what DataLoader's workers do by themselves
    crop = v2.Compose([v2.RandomResizedCrop(IMAGE_SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    shards = [str(path) for path in sorted((folder / "shards").iterdir())]
    dataset = (
        webdataset.WebDataset(shards, resampled=True, nodesplitter=None)
        .shuffle(100)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(crop, int)
        .batched(BATCH_SIZE, collation_fn=torch.utils.data.default_collate)
    )
    for images_BCHW, _ in webdataset.WebLoader(dataset, batch_size=None, num_workers=NUM_CORES):
        yield len(images_BCHW)


def decoding_alone(folder: Path, num_threads: int) -> Iterator[int]:
    """Images in memory; no order, no labels, no queues: what decoding and cropping cost with the code of `ours`."""
    from workloads.data.augment import Augment, Augmenter
    from workloads.data.decode import DecoderName
    from workloads.data.pixels import PixelSpec
    from workloads.runtime.streams import Stage

    photographs = [path.read_bytes() for path in sorted((folder / "photographs").iterdir())]
    augmenter = Augmenter(Augment.RANDOM_RESIZED_CROP_FLIP, seed=0, stage=Stage.PRETRAIN, image_size=IMAGE_SIZE)
    pixels = PixelSpec(image_size=IMAGE_SIZE, decoder=DecoderName.TURBO)
    squares = np.empty((num_threads, BATCH_SIZE, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)

    def work(number: int, start: int) -> None:
        for slot, row in enumerate(augmenter.uniforms(start, BATCH_SIZE).tolist()):
            encoded = photographs[(start + slot) % len(photographs)]
            pixels.render(encoded, partial(augmenter.place, uniforms=row), squares[number, slot])
        augmenter.finish(squares[number], start)

    for step in range(10**6):
        numbers = range(num_threads)
        threads = [threading.Thread(target=work, args=(n, (step * num_threads + n) * BATCH_SIZE)) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield num_threads * BATCH_SIZE


ARMS: Mapping[str, Callable[[Path], Iterator[int]]] = {
    "ours": partial(ours, decoder="turbo"),
    "ours_pillow": partial(ours, decoder="pillow"),
    "peer": webdataset_torchvision,
    "one_thread": partial(decoding_alone, num_threads=1),
    "two_threads": partial(decoding_alone, num_threads=NUM_CORES),
}


def measure(batches: Iterator[int]) -> Mapping[str, float]:
    """Images and CPU milliseconds per second and image; memory of all processes at their peaks, and shared once."""
    for _ in range(DROPPED_BATCHES):
        next(batches)
    begun_s, cpu_s = time.perf_counter(), _cpu_s()
    num_images = sum(next(batches) for _ in range(TIMED_BATCHES))
    elapsed_s, cpu_s = time.perf_counter() - begun_s, _cpu_s() - cpu_s
    return {
        "images_per_s": num_images / elapsed_s,
        "cpu_ms_per_image": 1000 * cpu_s / num_images,
        "rss_bytes": sum(_kib(folder / "status", "VmHWM:") for folder in _family()) * 1024,
        "pss_bytes": sum(_kib(folder / "smaps_rollup", "Pss:") for folder in _family()) * 1024,
    }


def _family() -> list[Path]:
    """This process and its children."""
    own = Path("/proc/self").resolve()
    children: list[str] = []
    for task in (own / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children += (task / "children").read_text().split()
    return [own, *(Path("/proc") / pid for pid in children)]


def _cpu_s() -> float:
    return (
        sum(sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13])) for folder in _family())
        / 100
    )


def _kib(path: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(field))


if __name__ == "__main__":
    json.dump(measure(ARMS[sys.argv[1]](Path(sys.argv[2]))), sys.stdout)
    sys.stdout.flush()
    import os

    os._exit(0)  # an endless loader with workers has no orderly end
