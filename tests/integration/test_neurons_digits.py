"""The shipped sweep neurons-digits finds what docs/analyze.md expects: one backbone of it, in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.planning.graph.build import build_plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep

ONE_BACKBONE = (
    "pretrain.labels=[coarse]",
    "pretrain.seeds=[0]",
    "transfer=[]",
    "report=null",
    "analyze.0.from_checkpoints=null",
    "analyze.0.measures=[collapse, distances]",
    "analyze.1.labels=[coarse]",
    "analyze.1.measures=[{clp: {reduce: tsne, seeds: [0, 1]}}]",
)
SHIPPED = Path(__file__).parents[2] / "workloads" / "sweeps" / "neurons-digits.yaml"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_structure_of_the_ten_digits_survives_coarse_labels(tmp_path: Path) -> None:
    document = yaml.safe_load(SHIPPED.read_text())
    document["analyze"] = [one for one in document["analyze"] if "between" not in one]  # one backbone is like no other
    written = tmp_path / SHIPPED.name
    written.write_text(yaml.safe_dump(document))
    sweep, text = load_sweep(str(written), ONE_BACKBONE)
    store = LocalStore(tmp_path / "store")
    plan = build_plan(sweep, store_uri=store.uri)
    snapshot = run_sweep_inprocess(store, plan, text, directory=tmp_path / "node")
    assert snapshot.state is SweepState.SUCCEEDED, snapshot.counts
    structure, probing, layers = (
        read_record(store, plan.by_name()[f"analyze/{name}/coarse/seed0"].key).metrics
        for name in ("structure", "probing", "layers")
    )
    assert 1.8 <= structure["msdr"] <= 2.7
    assert structure["distance_self"] < structure["distance_same"] < structure["distance_other"]
    # The trained classes are nearer to collapse than the digits, of which two are in each.
    assert structure["nc1"] < structure["original_nc1"]
    assert {"clp_accuracy", "clp_std", "lpo_accuracy", "clp_raw_accuracy", "lpo_raw_accuracy"} <= probing.keys()
    assert 0 < layers["layers_active_share"] < 1
