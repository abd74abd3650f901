"""Measures of features in one process: memory, and time beside one matrix product of the same size.

``ANALYSIS_SAMPLES`` scales it down (1,000,000 x 768 features of 10,000 classes by default: 1.5 GB on disk, minutes on
two cores).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

NUM_SAMPLES = int(os.environ.get("ANALYSIS_SAMPLES", "1000000"))
NUM_CLASSES = max(10, NUM_SAMPLES // 100)
DIM = 768
MAX_BYTES = 2 * 1024**3

SCRIPT = """
import sys, time
import numpy as np
from workloads.analysis import geometry
from workloads.analysis.features import SampleClasses, class_moments, second_moment
from workloads.analysis.units import feature_ranks

path, num_samples, num_classes, dim = sys.argv[1], *map(int, sys.argv[2:5])
features_ND = np.lib.format.open_memmap(path, mode="r")


class Mapped:
    num_samples, dim = features_ND.shape

    def __iter__(self):
        # A map of its own for each pass: pages of earlier ones count as memory of this process otherwise.
        for start in range(0, self.num_samples, 8192):
            rows = np.lib.format.open_memmap(path, mode="r")[start : start + 8192]
            yield np.array(rows)


classes = SampleClasses.of(np.arange(num_samples) % num_classes, [str(number) for number in range(num_classes)])
stream, seconds = Mapped(), {}


def timed(name, function):
    began = time.perf_counter()
    found = function()
    seconds[name] = time.perf_counter() - began
    return found


timed("one product X^T X in float64", lambda: second_moment(stream))
moments = timed("moments by class", lambda: class_moments(stream, classes))
timed("NC1, NC2, CDNV", lambda: (geometry.nc1(moments), geometry.nc2(moments), geometry.cdnv(moments)))
levels = {"top": np.arange(num_classes) % 10}
timed("distances by ancestor", lambda: geometry.distances_by_ancestor(moments, levels))
timed("RankMe, stable rank", lambda: feature_ranks(stream))
product = seconds["one product X^T X in float64"]
for name, took in seconds.items():
    print(f"{name:32s} {took:8.1f} s  {took / product:6.2f} products")
"""


def test_measures_of_a_million_samples_stay_within_two_gibibytes(tmp_path: Path) -> None:
    import numpy as np

    path, random = tmp_path / "features.npy", np.random.default_rng(0)
    features_ND = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(NUM_SAMPLES, DIM))
    for start in range(0, NUM_SAMPLES, 65_536):
        stop = min(start + 65_536, NUM_SAMPLES)
        features_ND[start:stop] = random.standard_normal((stop - start, DIM), dtype=np.float32)
    features_ND.flush()
    del features_ND
    sizes = [str(number) for number in (NUM_SAMPLES, NUM_CLASSES, DIM)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), *sizes], check=True, capture_output=True, text=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    sys.stdout.write(f"\n{NUM_SAMPLES} x {DIM}, {NUM_CLASSES} classes\n{done.stdout}")
    sys.stdout.write(f"peak memory {peak_bytes / 1024**3:.2f} GiB\n")
    assert peak_bytes <= MAX_BYTES
