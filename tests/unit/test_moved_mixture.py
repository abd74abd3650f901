"""Mixtures whose components moved since they were indexed, and counts that are declared after an index is there."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.errors import BadDataError, NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.data_checks import miscounted
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.artifacts import read_record
from orchestrator.sweepfile import load_sweep
from tests.data_jobs import Member, encoded, tar_of
from tests.shared_writing import Written
from workloads.data.index import SampleIndex
from workloads.data.source import SampleSource

IMAGES = {name: [encoded("PNG", seed=10 * number + row) for row in range(2)] for number, name in enumerate("ab")}
_SWEEP = """
version: 1
name: moved
datasets: DATASETS
labels: {all: {dataset: both, hierarchy: [leaf]}}
pretrain:
  model: {name: test_vit, image_size: 16}
  labels: [all/*]
  recipe: {epochs: 1, batch_size: 2, lr: 0.1}
"""


class Mixture:
    """Two data sets beside each other and their mixture, by way of the language."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, Written(folder / "node")
        for name in "ab":
            self._fill(folder / name, name)

    def _fill(self, folder: Path, name: str) -> None:
        folder.mkdir()
        rows = [{"class": leaf, "name": f"c{leaf}"} for leaf in range(2)]
        (folder / "classes.json").write_text(json.dumps(rows))
        for split in ("train", "val"):
            members: list[Member] = []
            for row, image in enumerate(IMAGES[name]):
                members += [(f"{split}{name}{row}.png", image), (f"{split}{name}{row}.cls", str(row).encode())]
            (folder / f"{split}-000.tar").write_bytes(tar_of(members))

    def plan(self, **places: Path) -> Plan:
        datasets: dict[str, Any] = {"both": {"mixture": ["a", "b"]}}
        for name in "ab":
            uri = places.get(name, self.folder / name).as_uri()
            shards = {split: f"{uri}/{split}-000.tar" for split in ("train", "val")}
            # Copies have other times, which do not count.
            datasets[name] = {"shards": shards, "classes": f"{uri}/classes.json", "num_train": 2, "num_val": 2}
        return self.plan_of(datasets)

    def plan_of(self, datasets: dict[str, Any]) -> Plan:
        path = self.folder / "sweep.yaml"
        path.write_text(_SWEEP.replace("DATASETS", json.dumps(datasets)))
        return build_plan(load_sweep(str(path))[0], store_uri=self.written.store.uri)

    def index(self, plan: Plan) -> None:
        for job in plan.jobs:
            if job.kind is JobKind.INDEX:
                self.written.run(job)

    def images(self, plan: Plan) -> list[bytes]:
        """Pixels of all training samples as the mixture's training jobs see them."""
        job = next(job for job in plan.jobs if job.kind is JobKind.PRETRAIN)
        cache = self.folder / "other node"
        location = job.execution.data_location
        index = SampleIndex.open(self.written.store, plan.by_name()["index/both"].key, cache, location)
        source = SampleSource(self.written.store, index, "train", cache_dir=cache, image_size=16, cache_bytes=0)
        found = [image.tobytes() for image in source.images(np.arange(index.split("train").num_samples))]
        source.close()
        return found


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    return Mixture(tmp_path)


def test_mixture_of_a_component_that_moved_is_read_where_it_lies_now(mixture: Mixture, tmp_path: Path) -> None:
    before = mixture.plan()
    mixture.index(before)
    there = Mixture.images(mixture, before)
    shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "other node")
    after = mixture.plan(b=tmp_path / "elsewhere")
    assert [job.key for job in after.jobs] == [job.key for job in before.jobs]
    assert mixture.images(after) == there
    shutil.rmtree(tmp_path / "other node")
    with pytest.raises(NotFoundError):
        mixture.images(before)


def test_mixture_tells_every_job_where_each_component_lies(mixture: Mixture, tmp_path: Path) -> None:
    for job in mixture.plan().jobs:
        location = job.execution.data_location
        if job.name in {"index/a", "index/b"}:
            assert set(location["splits"]) == {"train", "val"}
            continue
        places = [part["splits"]["val"][0] for part in location["components"]]
        assert places == [f"{(tmp_path / name).as_uri()}/val-000.tar" for name in "ab"]
        assert tmp_path.as_uri() not in json.dumps(job.identity)


@pytest.mark.parametrize(("split", "number"), [("train", 3), ("val", 1)])
def test_count_that_is_declared_after_the_index_is_compared_with_it(mixture: Mixture, split: str, number: int) -> None:
    before = mixture.plan()
    mixture.index(before)
    uri = (mixture.folder / "a").as_uri()
    declared: dict[str, Any] = {
        "shards": {name: f"{uri}/{name}-000.tar" for name in ("train", "val")},
        "classes": f"{uri}/classes.json",
        "num_train": 2,
        "num_val": 2,
        f"num_{split}": number,
    }
    plan = mixture.plan_of({"both": declared})
    job = plan.by_name()["index/both"]  # it is committed, so that nothing scans the shards again
    assert job.key == before.by_name()["index/a"].key
    metrics = {job.key: read_record(mixture.written.store, job.key).metrics}
    (refusal,) = miscounted(plan, metrics)
    assert refusal.startswith(f"datasets.both.num_{split} declares {number} samples, but its index, {job.key}, has 2;")
    assert list(miscounted(before, metrics)) == []
    with pytest.raises(BadDataError, match=rf"num_{split} declares {number} samples, but the shards of split"):
        SampleIndex.open(mixture.written.store, job.key, mixture.folder / "cache", job.execution.data_location)
