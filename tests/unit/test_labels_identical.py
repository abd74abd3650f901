"""Label maps are the same bytes on every machine: whatever the hash seed of Python and the number of threads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, read_record
from tests.data_jobs import DataPlane
from tests.unit.test_wordnet import NET
from workloads.data.index import SplitIndex
from workloads.features.artifact import FeatureTable
from workloads.jobs.cluster import Clustering, Rule
from workloads.labels.inputs import LabelInputs
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import find_parents, write_parents
from workloads.solvers.kmeans import Library, Settings, one_thread_per_call, open_search

ROOT = Path(__file__).parents[2]
LIBRARIES = [library for library in Library if library is not Library.FAISS or find_spec("faiss")]
CLASSES = [
    {"class": n, "name": f"class{n}", "synset": synset, "group": f"group{n % 3}"}
    for n, synset in enumerate(["n00000006", "n00000003", "n00000004", "n00000005", "n00000002", "n00000007"])
]
NET_SPACE: dict[str, Any] = {"key": "synset", "digest": ""}
GROUP: dict[str, Any] = {"hierarchy": "group"}
SPACES: list[dict[str, Any]] = [
    GROUP,
    {"modulo": 2, "base": GROUP},
    {"wordnet": {"level": 1, **NET_SPACE}},
    {"wordnet": {"level": 2, "paths": "random", "seed": 3, **NET_SPACE}},
    {"wordnet": {"contains": "n00000003", **NET_SPACE}},
    {"merge": {"num_classes": 3, "seed": 1}},
    {"merge": {"groups": [{"name": "a", "classes": ["class4", 2]}], "others": "keep"}},
    {"binary": ["class1"], "classes": {"names": ["class1", 5, 3]}},
    {"random": {"num_classes": 5, "seed": 0}},
    {"random": {"num_classes": 5, "seed": 0, "draw": "independent"}},
    {"split": {"num": 2, "seed": 0}, "base": GROUP},
    {"random": {"num_classes": 4, "seed": 2, "within": GROUP}},
    {"modulo": 2, "classes": {"num": 4, "seed": 5}},
    {"taxonomy": {"level": "order", "digest": "", "key": "name", "class_key": "name"}},
    {"taxonomy": {"level": "word", "folders": ["word"], "separator": "_"}},
]
PROGRAM = """
import sys
from pathlib import Path
from tests.unit.test_labels_identical import clusterings, maps
for line in (*maps(Path(sys.argv[1])), *clusterings(4)):
    print(line)
"""


def maps(folder: Path) -> Iterator[str]:
    (folder / "data.noun").write_text(NET)
    (folder / "table.csv").write_text("name,order\n" + "".join(f"class{n},order{n // 2}\n" for n in range(6)))
    split = SplitIndex.in_memory(leaves=np.arange(600) % 6)
    plane = DataPlane(folder=folder / "plane")
    for number, space in enumerate(SPACES):
        files = {"wordnet": str(folder / "data.noun"), "table": str(folder / "table.csv")}
        inputs = LabelInputs(classes=CLASSES, num_train=600, files=files)
        label_map = make_label_map(space, CLASSES, num_train=600, files=inputs.files)
        request = plane.request(JobKind.LABELS, {"number": number}, {})
        writer = ArtifactWriter(plane.store, request)
        label_map.write(writer)
        write_parents(writer, find_parents(label_map, space, inputs))
        writer.commit(now=0.0)
        record = read_record(plane.store, request.key)
        parts = {name: part.sha256 for name, part in record.parts.items()}
        bound = label_map.resolve_targets(split).take(np.arange(600)).tobytes()
        yield json.dumps([space, parts, sha256(bound).hexdigest()], sort_keys=True)


def clusterings(num_threads: int) -> Iterator[str]:
    features = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float16)
    table = FeatureTable(
        key="embed-x",
        split="train",
        index_key="",
        dataset_digest="",
        dim=8,
        starts=np.array([0]),
        parts=(features,),
        missing=np.empty(0, dtype=np.int64),
    )
    for library in LIBRARIES:
        for rule in (Rule(k=8), Rule(min_samples=9)):
            clustering = Clustering(
                rule=rule,
                settings=Settings(seed=1),
                num_threads=num_threads,
                open_search=partial(open_search, library, device=torch.device("cpu")),
            )
            with one_thread_per_call():
                space = clustering.fit(table, np.arange(600) % 3, ("a", "b", "c"))
            content = space.targets_N.tobytes() + b"".join(group.centroids_KD.tobytes() for group in space.groups)
            yield json.dumps([library, str(rule), len(space.class_names), sha256(content).hexdigest()])


@pytest.mark.ci
def test_labels_are_byte_identical_under_any_hash_seed_and_thread_count(tmp_path: Path) -> None:
    """Those of this process beside those of another one, whose texts have other hashes."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    seed = "4242" if os.environ.get("PYTHONHASHSEED") != "4242" else "1"
    threads = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
    environment = {**os.environ, **threads, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(there)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [*maps(here), *clusterings(1)]
    assert len(expected) == len(SPACES) + 2 * len(LIBRARIES)
    assert done.stdout.splitlines() == expected
