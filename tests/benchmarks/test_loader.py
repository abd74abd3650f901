"""From tar to batch, beside `webdataset` + DataLoader + torchvision: the same images, the same cores, in turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from orchestrator.core.units import MIB
from tests.benchmarks.loader_arms import ARMS, IMAGE_SIZE, NUM_CORES
from tests.data_jobs import DataPlane
from tests.photographs import jpeg, photograph
from workloads.data.augment import Augment, Augmenter
from workloads.data.decode import DecoderName
from workloads.data.pixels import PixelSpec
from workloads.runtime.streams import Stage

ROOT = Path(__file__).parents[2]
ROUNDS = 7
NUM_SHARDS, SHARD_SAMPLES, NUM_PHOTOGRAPHS = 4, 192, 96


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
    for number in range(NUM_SHARDS):
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
    command = [sys.executable, "-m", "tests.benchmarks.loader_arms", arm, str(folder)]
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


@pytest.mark.bench
@pytest.mark.timeout(900)
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
