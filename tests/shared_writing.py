"""Sweeps whose jobs write their data sets, planned from a sweep.yaml and run job by job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from tests.builders import request_of
from workloads.data.index import SampleIndex
from workloads.run import execute

TREE = {
    "builtin": "synthetic-hierarchy",
    "branching": [2, 3],
    "num_train": 1300,
    "num_val": 600,
    "image_size": 16,
    "patch_size": 4,
}
_SWEEP = """
version: 1
name: written
datasets: {mine: DATASET}
labels: {all: {dataset: mine, hierarchy: [leaf]}}
pretrain:
  model: {name: test_vit, image_size: 16}
  labels: [all/*]
  recipe: {epochs: 1, batch_size: 2, lr: 0.1, loss: LOSS}
transfer: [{name: top, target: all/leaf, protocol: probe, recipe: {base: default-probe, batch_size: 2, loss: LOSS}}]
"""


class Written:
    """A store, a node, and the jobs of a sweep over one data set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "store")
        self._attempts: dict[str, int] = {}

    def plan(self, entry: Mapping[str, Any]) -> Plan:
        path = self.folder / "sweep.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        loss = "sigmoid" if "separator" in entry.get("convert", {}) else "softmax"
        path.write_text(_SWEEP.replace("DATASET", json.dumps(entry)).replace("LOSS", loss))
        return build_plan(load_sweep(str(path))[0], store_uri=self.store.uri)

    def run(self, job: Job, *, should_stop: Callable[[], bool] = lambda: False) -> Record:
        number = self._attempts[job.key] = self._attempts.get(job.key, 0) + 1
        request = request_of(job, self.store.uri, number, sweep="written")
        scratch = self.folder / "scratch" / request.attempt_id
        scratch.mkdir(parents=True)
        execute(
            request,
            ExecutionContext(store=self.store, scratch=scratch, cache=self.folder / "cache", should_stop=should_stop),
        )
        assert not list(scratch.glob("*.tar"))
        return read_record(self.store, job.key)

    def run_all(self, plan: Plan) -> dict[str, Record]:
        """All jobs that write and index the data set, in plan order."""
        kinds = {JobKind.DATASET, JobKind.INDEX}
        return {job.name: self.run(job) for job in plan.jobs if job.kind in kinds}

    def open(self, plan: Plan) -> SampleIndex:
        job = plan.by_name()["index/mine"]
        return SampleIndex.open(self.store, job.key, self.folder / "cache", location=job.execution.data_location)


def shard_digests(record: Record) -> dict[str, str]:
    return {name: part.sha256 for name, part in record.parts.items() if name.endswith(".tar")}
