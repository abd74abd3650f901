"""Label maps are the same bytes on every machine: whatever the hash seed of Python and the number of threads."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.test_wordnet import NET

PROGRAM = """
import json, os, sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from hashlib import sha256
import numpy as np
import torch
from orchestrator.core.contract import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from tests.data_jobs import DataPlane
from workloads.data.index import SplitIndex
from workloads.features.artifact import FeatureTable
from workloads.jobs.cluster import Clustering, Rule
from workloads.solvers.kmeans import Settings
from workloads.solvers.kmeans import Library, one_thread_per_call, open_search
from workloads.labels.taxonomy import find_parents, write_parents
from workloads.labels.definition import LabelInputs
from workloads.labels.spaces import make_label_map

LIBRARIES = [library for library in Library if library is not Library.FAISS or find_spec("faiss")]
folder = Path(sys.argv[1])
classes = [
    {"class": n, "name": f"class{n}", "synset": synset, "group": f"group{n % 3}"}
    for n, synset in enumerate(["n00000006", "n00000003", "n00000004", "n00000005", "n00000002", "n00000007"])
]
net = {"key": "synset", "digest": ""}
group = {"hierarchy": "group"}
spaces = [
    group,
    {"modulo": 2, "base": group},
    {"wordnet": {"level": 1, **net}},
    {"wordnet": {"level": 2, "paths": "random", "seed": 3, **net}},
    {"wordnet": {"contains": "n00000003", **net}},
    {"merge": {"num_classes": 3, "seed": 1}},
    {"merge": {"groups": [{"name": "a", "classes": ["class4", 2]}], "others": "keep"}},
    {"binary": ["class1"], "classes": {"names": ["class1", 5, 3]}},
    {"random": {"num_classes": 5, "seed": 0}},
    {"random": {"num_classes": 5, "seed": 0, "draw": "independent"}},
    {"split": {"num": 2, "seed": 0}, "base": group},
    {"random": {"num_classes": 4, "seed": 2, "within": group}},
    {"modulo": 2, "classes": {"num": 4, "seed": 5}},
    {"taxonomy": {"level": "order", "digest": "", "key": "name", "class_key": "name"}},
    {"taxonomy": {"level": "word", "folders": ["word"], "separator": "_"}},
]
split = SplitIndex.in_memory(leaves=np.arange(600) % 6)
plane = DataPlane(folder=folder / "plane")
for number, space in enumerate(spaces):
    files = {"wordnet": str(folder / "data.noun"), "table": str(folder / "table.csv")}
    inputs = LabelInputs(classes=classes, num_train=600, files=files)
    label_map = make_label_map(space, classes, num_train=600, files=inputs.files)
    request = plane.request(JobKind.LABELS, {"number": number}, {})
    writer = ArtifactWriter(plane.store, request)
    label_map.write(writer)
    write_parents(writer, find_parents(label_map, space, inputs))
    writer.commit(now=0.0)
    record = read_record(plane.store, request.key)
    parts = {name: part.sha256 for name, part in record.parts.items()}
    bound = label_map.resolve_targets(split).take(np.arange(600)).tobytes()
    print(json.dumps([space, parts, sha256(bound).hexdigest()], sort_keys=True))

features = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float16)
table = FeatureTable(
    key="embed-x", split="train", index_key="", dataset_digest="", dim=8, starts=np.array([0]), parts=(features,),
    missing=np.empty(0, dtype=np.int64),
)
for library in LIBRARIES:
    for rule in (Rule(k=8), Rule(min_samples=9)):
        clustering = Clustering(
            rule=rule, settings=Settings(seed=1), num_threads=int(os.environ["OMP_NUM_THREADS"]),
            open_search=partial(open_search, library, device=torch.device("cpu")),
        )
        with one_thread_per_call():
            space = clustering.fit(table, np.arange(600) % 3, ("a", "b", "c"))
        content = space.targets_N.tobytes() + b"".join(group.centroids_KD.tobytes() for group in space.groups)
        print(json.dumps([library, str(rule), len(space.class_names), sha256(content).hexdigest()]))
"""
NUM_MAPS, NUM_CLUSTERINGS = 15, 2


def maps_under(folder: Path, hash_seed: str, threads: str) -> list[str]:
    folder.mkdir()
    (folder / "data.noun").write_text(NET)
    (folder / "table.csv").write_text("name,order\n" + "".join(f"class{n},order{n // 2}\n" for n in range(6)))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_labels_are_byte_identical_under_any_hash_seed_and_thread_count(tmp_path: Path) -> None:
    first, other = maps_under(tmp_path / "one", "1", "1"), maps_under(tmp_path / "two", "4242", "4")
    assert len(first) - NUM_MAPS in {NUM_CLUSTERINGS, 2 * NUM_CLUSTERINGS}, "of one library or two"
    assert first == other
