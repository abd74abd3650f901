"""Table 1 of the paper in small: every kind of label space, pretrained and fine-tuned to the report's last line."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.contract import ENTRY_POINT
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.report.build import build_report
from orchestrator.report.render.files import render_markdown
from orchestrator.report.render.terminal import render_terminal
from orchestrator.state.transitions import SweepState
from orchestrator.storage.dataset_files import DatasetFile, ShardEntry, dataset_digest
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from tests.unit.test_wordnet import (
    PUBLISHED,
    real,  # noqa: F401 - a fixture
    shipped,
)

ONE_SEED = ["pretrain.seeds=[0]", "transfer.*.seeds=[0]"]
SMALL = "{name: fasternet_t0, image_size: 32, kwargs: {patch_size: 8, embed_dim: 64, depths: [1], feature_dim: 256}}"
"""Takes a fifth of the time of the model that the sweep names for rehearsals: the subject here is the plan and its
tables."""
KINDS = {"manual", "random", "per-superclass", "rebalanced", "whole"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rehearsal_of_table_1_runs_to_its_end_and_prints_the_papers_tables(tmp_path: Path) -> None:
    sweep, text = load_sweep("paper-inat21-resnet34", [*ONE_SEED, f"pretrain.model={SMALL}"], scale="tiny")
    store = LocalStore(tmp_path / "store")
    plan = build_plan(sweep, store_uri=store.uri)
    snapshot = run_sweep_inprocess(store, plan, text, directory=tmp_path / "node", entry_point=ENTRY_POINT)
    assert snapshot.state is SweepState.SUCCEEDED, snapshot.counts

    report = build_report(store, plan, snapshot.jobs)
    Console(width=160, file=sys.stdout).print(render_terminal(report))
    assert not report.missing
    table = next(table for table in report.headlines if table.transfer == "finetune")
    assert {row.series for row in table.rows} == KINDS
    assert len(table.rows) == 34
    assert all(row.summary is not None and 0 <= row.summary.mean < 1 for row in table.rows)
    assert table.one_pass is not None
    assert table.one_pass.summary is not None

    rebalanced = [row.granularity or 0 for row in table.rows if row.series == "rebalanced"]
    assert rebalanced == sorted(rebalanced), "smaller smallest clusters are more of them"
    assert rebalanced[0] < rebalanced[-1]
    backbone_of_clusters = "pretrain/manual/depth7/seed0"
    assert snapshot.jobs[backbone_of_clusters].state.is_done

    document = render_markdown(report)
    assert "finetune (finetune on manual/depth1): val_error [%] by kind of labels and G" in document  # table 1
    assert "| G | manual | random | per-superclass | rebalanced | whole |" in document
    checkpoints = next(found for found in report.ablations if found.place.transfer == "checkpoints")  # table 6
    assert checkpoints.values == ("epoch1", "epoch2", "epoch3")
    jobs = plan.by_name()
    shared = [job for job in plan.jobs if job.kind is JobKind.FINETUNE and job.facets.get("checkpoint") == "epoch3"]
    assert len(shared) == 6
    assert all(job.key == jobs[f"finetune/finetune/{job.facets['label_space']}/seed0/seed0"].key for job in shared)


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_declared_sizes_of_imagenet21k_are_those_of_its_class_table_and_of_wordnet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synsets = shipped("imagenet21k_goog_synsets.txt")
    rows = [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate(synsets)]
    table = json.dumps(rows).encode()
    (tmp_path / "classes.json").write_bytes(table)
    sizes = {"train": 12_743_321, "val": 102_400}
    splits = {
        split: (ShardEntry(name=f"{split}-0.tar", size_bytes=1, sha256=f"{place:064x}", num_samples=number),)
        for place, (split, number) in enumerate(sizes.items())
    }
    described = DatasetFile(
        splits=splits,
        num_classes=len(rows),
        levels={"synset": len(rows)},
        classes_sha256=sha256(table).hexdigest(),
        digest=dataset_digest(splits),
    )
    (tmp_path / "dataset.json").write_bytes(described.to_bytes())
    monkeypatch.setenv("IN21K", tmp_path.as_uri())
    sweep, _ = load_sweep("paper-in21k-binary")
    assert not sweep.datasets["in21k"].missing
    counted = {space.level: space.num_classes for space in sweep.labels.values() if space.entry == "nouns"}
    assert counted == {str(level): number for level, number in PUBLISHED.items()}
    assert sweep.labels["living"].num_classes == 2
