"""From tar to batch: indexed access and the loader, beside webdataset over the same shards.

``python -m benchmarks.bench_reading ARM FOLDER`` is one arm of the loader in a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from orchestrator.core.units import MIB
from orchestrator.storage.local import LocalStore
from tests.data_jobs import DataPlane, encoded, tar_of
from tests.photographs import jpeg, photograph
from tests.shard_cases import sample, write_shards
from workloads.commands.data import index
from workloads.data.augment import Augment, Augmenter
from workloads.data.cache import ShardCache, ahead
from workloads.data.cache import folder as folder_of_cache
from workloads.data.cache.objects import ObjectCache
from workloads.data.decode import DecoderName
from workloads.data.index import BadSamples, Shard, SplitIndex
from workloads.data.index_writer import SplitColumns
from workloads.data.pipeline import PlannedBatch, Window, batches_ahead
from workloads.data.pixels import PixelSpec
from workloads.data.scan import ClassRule
from workloads.data.scan_splits import ShardSource, scan_sources
from workloads.data.split_targets import SplitTargets
from workloads.runtime.streams import Stage

# ---------------------------------------------------------------------------------------------------------------------
# Batches of 512 images (77 MB) at 0.1 s per step, made in 20 ms each; every 40th takes 1.5 s, as where a store is slow
# once in a while. The window of before (what fits into 128 MiB) beside the one by time, in one run.

STEP_S, FILL_S, STALL_S, NUM_STEPS, STALLED_EVERY = 0.1, 0.02, 1.5, 120, 40


def wait_for_batches_s() -> float:
    """Seconds that a consumer of batches waits for them."""

    def plan(step: int) -> PlannedBatch:
        squares = torch.zeros((8, 4, 4, 3), dtype=torch.uint8)
        return PlannedBatch(step=step, start=8 * step, ordinals_B=np.zeros(8, dtype=np.int64), squares_BHWC=squares)

    def fill(batch: PlannedBatch, _: slice) -> None:
        time.sleep(STALL_S if batch.step % STALLED_EVERY == STALLED_EVERY - 1 else FILL_S)

    batches = batches_ahead(
        plan, fill, range(NUM_STEPS), batch_bytes=512 * 3 * 224**2, num_workers=1, memory_bytes=2**40
    )
    waited_s = 0.0
    while True:
        started_s = time.perf_counter()
        if next(batches, None) is None:
            return waited_s
        waited_s += time.perf_counter() - started_s
        time.sleep(STEP_S)


def test_wait_for_batches_of_a_store_that_is_slow_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked: batches ready for 2 s of training."""
    with monkeypatch.context() as patch:
        patch.setattr(Window, "note", lambda _window, _step_s: None)
        before_s = wait_for_batches_s()
    after_s = wait_for_batches_s()
    print(  # noqa: T201 - a benchmark's result
        f"\n{NUM_STEPS} steps: waited {before_s:.2f} s with 128 MiB ahead, {after_s:.2f} s with 2 s ahead, ratio "
        f"{before_s / after_s:.1f}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Shards of a distant store: each takes a second however it is asked for. One process or several of a node, as ranks
# are, each of which needs all of them; beside the same requests with nothing around them, in one run.

DISTANT_SHARDS, SHARD_S = 16, 1.0


class DistantShards(LocalStore):
    """Each shard comes after a second, any number of them at once."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        time.sleep(SHARD_S)
        return super().get_range(name, start, length)


def all_shards_s(folder: Path, shards: list[Shard], num_ranks: int, store: LocalStore) -> float:
    """Seconds until every rank of a node has read from every shard."""
    started_s, children = time.perf_counter(), []
    for _ in range(num_ranks):
        child = os.fork()
        if child == 0:
            with ShardCache(store, folder, shards) as cache:
                cache.prefetch(range(len(shards)))
                for shard_id in range(len(shards)):
                    assert cache.read_samples(shard_id, [0], [10]) == [sample(shard_id, 0)[:10]]
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return time.perf_counter() - started_s


def test_distant_shards_of_a_node_with_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked: >= 0.9 of the raw rate with 1, 2 and 8 ranks."""
    store = DistantShards(tmp_path / "store")
    shards = write_shards(store, DISTANT_SHARDS)
    started_s = time.perf_counter()
    with ThreadPoolExecutor(folder_of_cache.NUM_FETCHERS) as pool:
        list(pool.map(lambda shard: store.get_range(shard.object_name, 0, shard.size_bytes), shards))
    raw_s = time.perf_counter() - started_s
    print(f"\nraw, {folder_of_cache.NUM_FETCHERS} requests at once: {raw_s:.2f} s")  # noqa: T201 - a benchmark's result
    for num_ranks in (1, 2, 8):
        spent_s = {}
        for arm in ("before", "now"):
            with monkeypatch.context() as patch:
                if arm == "before":  # two threads per rank, and whoever meets a shard that another fetches waits for it
                    patch.setattr(ahead, "NUM_FETCHERS", 2)
                    patch.setattr(ObjectCache, "pin_ahead", ObjectCache.pin)
                spent_s[arm] = all_shards_s(tmp_path / f"{num_ranks}-{arm}", shards, num_ranks, store)
        before_s, after_s = spent_s.values()
        print(  # noqa: T201 - a benchmark's result
            f"{num_ranks} ranks: {before_s:.2f} s before, {after_s:.2f} s now, ratio "
            f"{before_s / after_s:.1f}; {raw_s / after_s:.2f} of raw"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Scanning and indexed access, against webdataset's iteration over the very same shards in the same run.

NUM_SHARDS, SAMPLES_PER_SHARD, NUM_ROUNDS = 6, 1500, 7
RULE = ClassRule(num_classes=10)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """JPEGs of about 4 KB: small ones, so that the overhead per sample is what is measured."""
    folder = tmp_path_factory.mktemp("shards")
    images = [encoded("JPEG", size=(64, 48), seed=seed) for seed in range(32)]
    paths = []
    for number in range(NUM_SHARDS):
        members = []
        for row in range(SAMPLES_PER_SHARD):
            key = f"n{number:08d}_{row:05d}"
            members += [(f"{key}.cls", b"3"), (f"{key}.jpg", images[row % 32])]
        paths.append(folder / f"train-{number:06d}.tar")
        paths[-1].write_bytes(tar_of(members))
    (folder / "classes.json").write_text(json.dumps([{"class": leaf, "name": str(leaf)} for leaf in range(10)]))
    return paths


def rounds(arms: dict[str, Callable[[], int]]) -> dict[str, tuple[float, float]]:
    """Median microseconds of wall and CPU time per sample of each arm; arms interleave."""
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(NUM_ROUNDS):
        for name, run in arms.items():
            started_s, cpu_s = time.perf_counter(), time.process_time()
            num_samples = run()
            wall[name].append((time.perf_counter() - started_s) / num_samples * 1e6)
            cpu[name].append((time.process_time() - cpu_s) / num_samples * 1e6)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in arms}


def show(title: str, found: dict[str, tuple[float, float]], base: str) -> None:
    print(f"\n{title} (median of {NUM_ROUNDS} interleaved rounds)")  # noqa: T201 - a benchmark's result
    for name, (wall_us, cpu_us) in found.items():
        ratio = found[base][0] / wall_us
        print(f"  {name:44} {wall_us:8.1f} us/sample, {cpu_us:8.1f} us CPU, {ratio:6.2f}x of {base}")  # noqa: T201 - a benchmark's result


def iterate_webdataset(paths: list[Path]) -> int:
    import webdataset

    pipeline = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False)
    return sum(1 for _ in pipeline)


def scan_all(paths: list[Path], num_processes: int) -> int:
    sources = [ShardSource(name=path.name, size_bytes=path.stat().st_size, path=path) for path in paths]
    total_bytes = 1 << 40 if num_processes > 1 else 0  # the pool, however small the shards
    tables = scan_sources(sources, RULE, num_processes=num_processes, total_bytes=total_bytes)
    return sum(table.num_samples for table in tables)


def test_scan_rate_beside_webdataset_iteration(shards: list[Path]) -> None:
    arms = {
        "webdataset (bytes only)": lambda: iterate_webdataset(shards),
        "scan (hash, check images, classes)": lambda: scan_all(shards, 1),
        "scan, 2 processes with their start": lambda: scan_all(shards, 2),
    }
    show("Scanning", rounds(arms), "webdataset (bytes only)")


def split_of(paths: list[Path], folder: Path) -> SplitIndex:
    sources = [ShardSource(name=path.name, size_bytes=path.stat().st_size, path=path) for path in paths]
    columns = SplitColumns(name="train", folder=folder, rule=RULE, policy=BadSamples())
    for table in scan_sources(sources, RULE, num_processes=1, total_bytes=0):
        columns.add(table)
    names = columns.finish(())
    shards = tuple(
        Shard(name=found.name, object_name="", size_bytes=0, sha256="", num_samples=found.num_samples)
        for found in columns.shards
    )
    return SplitIndex(
        index_key="",
        name="train",
        shards=shards,
        subset_names=(),
        columns=names,
        open_column=lambda column: np.load(folder / f"{column}.npy", mmap_mode="r"),
    )


def test_indexed_access_beside_webdataset_iteration(shards: list[Path], tmp_path: Path) -> None:
    split = split_of(shards, tmp_path)
    files = [os.open(path, os.O_RDONLY) for path in shards]
    order = np.random.default_rng(0).permutation(split.num_samples)

    def read(ordinals: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        owners = split.shard_of(ordinals).tolist()
        offsets, lengths = split.offsets[ordinals].tolist(), split.lengths[ordinals].tolist()
        for owner, offset, length in zip(owners, offsets, lengths, strict=True):
            os.pread(files[owner], length, offset)

    def in_batches() -> int:
        for start in range(0, len(order), 256):
            read(order[start : start + 256])
        return len(order)

    def one_by_one() -> int:
        for start in range(len(order)):
            read(order[start : start + 1])
        return len(order)

    arms = {
        "webdataset (bytes, in order)": lambda: iterate_webdataset(shards),
        "index, shuffled, batches of 256": in_batches,
        "index, shuffled, one by one": one_by_one,
    }
    show("Access", rounds(arms), "webdataset (bytes, in order)")
    for file in files:
        os.close(file)


def test_index_command_rate(shards: list[Path]) -> None:
    """The whole command on this machine's cores."""
    target = {"place": str(shards[0].parent), "splits": {}, "classes": str(shards[0].parent / "classes.json")}
    started_s = time.perf_counter()
    found = index(
        {
            "target": {**target, "num_classes": 0, "multi_label": False},
            "policy": "fail",
            "budget": 0.0,
            "write": False,
            "num_processes": 1,
        }
    )
    num_samples = found["splits"]["train"]["num_samples"]
    print(f"\ndata index: {num_samples / (time.perf_counter() - started_s):,.0f} samples/s on one core")  # noqa: T201 - a benchmark's result


# ---------------------------------------------------------------------------------------------------------------------
# Ways from tar to batch, one per process: ``python -m benchmarks.bench_reading ARM FOLDER`` prints a measurement.
#
# Every arm makes batches of ``BATCH_SIZE`` uint8 images by RandomResizedCrop 224 and flip, with ``NUM_CORES`` workers.

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


# ---------------------------------------------------------------------------------------------------------------------
# From tar to batch, beside `webdataset` + DataLoader + torchvision: the same images, the same cores, in turns.

ROOT = Path(__file__).parents[1]
ROUNDS = 7
BATCHES_NUM_SHARDS, SHARD_SAMPLES, NUM_PHOTOGRAPHS = 4, 192, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of 500 x 375, every fourth upright, about 90 kB each, like those of ImageNet: loose, in shards, indexed."""
    folder = tmp_path_factory.mktemp("loader")
    for name in ("photographs", "shards"):
        (folder / name).mkdir()
    encoded = [jpeg(photograph(seed, width=500 if seed % 4 else 375)) for seed in range(NUM_PHOTOGRAPHS)]
    for number, content in enumerate(encoded):
        (folder / "photographs" / f"{number:03d}.jpg").write_bytes(content)
    stored = cycle(encoded)
    for number in range(BATCHES_NUM_SHARDS):
        with tarfile.open(folder / "shards" / f"train-{number}.tar", "w") as tar:
            for row, content in enumerate(islice(stored, SHARD_SAMPLES)):
                _add(tar, f"{number}-{row:04d}.jpg", content)
                _add(tar, f"{number}-{row:04d}.cls", b"0")
    plane = DataPlane(folder=folder / "plane")
    index = plane.index(plane.foreign({path.name: path.read_bytes() for path in (folder / "shards").iterdir()}))
    (folder / "index").write_text(index.key)
    return folder


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, BytesIO(content))


def _measure(arm: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_reading", arm, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _pixel_difference(folder: Path) -> float:
    """Mean absolute difference of levels between our crops and torchvision's of the same boxes."""
    augmenter = Augmenter(Augment.RANDOM_RESIZED_CROP, seed=0, stage=Stage.PRETRAIN, image_size=IMAGE_SIZE)
    pixels = PixelSpec(image_size=IMAGE_SIZE, decoder=DecoderName.TURBO)
    square, differences = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8), []
    for position, path in enumerate(sorted((folder / "photographs").iterdir())):
        with Image.open(path) as image:
            at = augmenter.parameters(position, image.height, image.width).placement
            crop = v2.functional.resized_crop(
                image.convert("RGB"), at.top, at.left, at.height, at.width, [IMAGE_SIZE, IMAGE_SIZE]
            )
        pixels.render(path.read_bytes(), lambda *_, at=at: at, square)
        differences.append(np.abs(square.astype(np.int64) - np.asarray(crop)).mean())
    return float(np.mean(differences))


def test_loader_from_tar_to_batch_beside_webdataset(folder: Path) -> None:
    difference = _pixel_difference(folder)
    rounds = [{arm: _measure(arm, folder) for arm in ARMS} for _ in range(ROUNDS)]

    def median(arm: str, quantity: str) -> float:
        return statistics.median(each[arm][quantity] for each in rounds)

    def ratio(first: str, second: str, quantity: str) -> str:
        ratios = sorted(each[first][quantity] / each[second][quantity] for each in rounds)
        return f"{statistics.median(ratios):.2f} (rounds {ratios[0]:.2f} to {ratios[-1]:.2f})"

    lines = [
        f"{arm:12} {median(arm, 'images_per_s'):6.0f} images/s, {median(arm, 'cpu_ms_per_image'):.2f} CPU ms/image,"
        f" RSS {median(arm, 'rss_bytes') / MIB:.0f} MiB, PSS {median(arm, 'pss_bytes') / MIB:.0f} MiB"
        for arm in ARMS
    ]
    ideal = [each["ours"]["images_per_s"] / (NUM_CORES * each["one_thread"]["images_per_s"]) for each in rounds]
    lines += [
        f"images/s, ours / peer: {ratio('ours', 'peer', 'images_per_s')}; asked >= 1.5",
        f"CPU per image, peer / ours: {ratio('peer', 'ours', 'cpu_ms_per_image')}",
        f"images/s, ours / ({NUM_CORES} x decoding alone in one thread): {statistics.median(ideal):.2f}; asked >= 0.85",
        f"images/s, ours / decoding alone in {NUM_CORES} threads: {ratio('ours', 'two_threads', 'images_per_s')}",
        f"CPU per image, decoding alone / ours: {ratio('two_threads', 'ours', 'cpu_ms_per_image')}",
        f"peak RSS, ours / peer: {ratio('ours', 'peer', 'rss_bytes')}; asked <= 0.6",
        f"PSS (shared pages once), ours / peer: {ratio('ours', 'peer', 'pss_bytes')}",
        f"pixels, ours - torchvision on PIL: mean {difference:.3f}, of 255",
    ]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert difference < 0.1


if __name__ == "__main__":
    json.dump(measure(ARMS[sys.argv[1]](Path(sys.argv[2]))), sys.stdout)
    sys.stdout.flush()
    import os

    os._exit(0)  # an endless loader with workers has no orderly end
