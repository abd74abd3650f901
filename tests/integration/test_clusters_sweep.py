"""The shipped sweep of clusters, from its data set to its report: eight kinds of jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.report.build import build_report
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from workloads.commands.labels import nesting
from workloads.data.index import SampleIndex
from workloads.labels.label_map import LabelMap

KINDS = {
    JobKind.DATASET, JobKind.INDEX, JobKind.LABELS, JobKind.PRETRAIN, JobKind.EMBED, JobKind.CLUSTER, JobKind.FINETUNE,
    JobKind.PROBE,
}  # fmt: skip

ONE_SEED_FEW_EPOCHS = ["pretrain.seeds=[0]", "transfer.*.recipe.epochs=1", "transfer.*.recipe.eval_every_epochs=1"]
"""Half of the time; what is asserted holds for any seeds and errors."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shipped_clusters_sweep_runs_to_its_report(tmp_path: Path) -> None:
    sweep, text = load_sweep("clusters", ONE_SEED_FEW_EPOCHS)
    store = LocalStore(tmp_path / "store")
    plan = build_plan(sweep, store_uri=store.uri)
    assert {job.kind for job in plan.jobs} == KINDS
    snapshot = run_sweep_inprocess(store, plan, text, directory=tmp_path / "node")
    assert snapshot.state is SweepState.SUCCEEDED, snapshot.counts

    keys = {name: view.key for name, view in snapshot.jobs.items()}
    index = SampleIndex.open(store, keys["index/tree"], tmp_path / "cache")
    maps = {
        name.removeprefix("labels/"): LabelMap.open(store, key) for name, key in keys.items() if name[:7] == "labels/"
    }
    for split in index.splits.values():
        bound = {name: label_map.resolve_targets(split) for name, label_map in maps.items()}
        refines = {name: nesting(labels, bound["levels/depth1"])["refines"] for name, labels in bound.items()}
        assert all(refines[name] for name in ("within/4", "within/16", "rebalanced", "levels/depth4"))
        assert not any(refines[name] for name in ("whole/8", "whole/32"))
    granularities = {name: label_map.num_classes for name, label_map in maps.items()}
    assert (granularities["within/4"], granularities["within/16"], granularities["whole/32"]) == (8, 32, 32)
    train = index.splits["train"]
    assert np.min(maps["rebalanced"].resolve_targets(train).counts()) >= 16
    embedded = read_record(store, keys["embed/within/train"])
    assert embedded.identity["inputs"]["backbone"] == keys["pretrain/levels/depth4/seed0"]
    assert sum(name.startswith("embed/") for name in keys) == 2, "once for all entries: train and val"

    report = build_report(store, plan, snapshot.jobs)
    assert not report.missing
    for table in report.headlines:
        shown = {row.label_space: row.granularity for row in table.rows}
        assert shown["rebalanced"] == granularities["rebalanced"]
        assert shown.keys() == granularities.keys()
