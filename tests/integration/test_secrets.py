"""Credentials of the store are in nothing that is written or shown: no object, no output, no log of ours, no error."""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import StorageDeniedError
from orchestrator.planning.graph.build import build_plan
from orchestrator.stack.description import BUCKET
from orchestrator.state.transitions import SweepState
from orchestrator.storage import open_store
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store
from orchestrator.sweepfile import parse_sweep
from tests.s3_server import s3_server

__all__ = ["s3_server"]

SWEEP = """
version: 1
name: hush
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 64, num_val: 32}
labels:
  levels: {dataset: tree, hierarchy: [depth1]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  recipe: {epochs: 2, batch_size: 16, lr: 1e-3}
  checkpoints: {keep: {epochs: [1]}}
"""
COMMANDS = (
    ["plan", "sweep.yaml", "-o", "json"],
    ["status", "hush", "-o", "json"],
    ["report", "hush"],
    ["logs", "hush", "pretrain/levels/depth1/seed0"],
    ["fsck", "--deep"],
    ["ls", "-o", "json"],
    ["du", "-o", "json"],
    ["gc", "-o", "json"],
    ["doctor", "-o", "json"],
)


@pytest.fixture
def secret_words(s3_server) -> list[bytes]:
    return [os.environ[name].encode() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]


@pytest.mark.slow
def test_sweep_and_commands_write_and_show_no_credentials(
    secret_words: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"s3://{BUCKET}/hush-{secrets.token_hex(4)}"
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(f"{SWEEP}store: {uri}\n")
    store = open_store(uri)
    for logger in ("orchestrator", "workloads"):
        caplog.set_level(logging.DEBUG, logger=logger)
    plan = build_plan(parse_sweep(Path("sweep.yaml").read_text(), "sweep.yaml", {}), store_uri=uri)
    snapshot = run_sweep_inprocess(store, plan, directory=tmp_path / "node")
    assert snapshot.state is SweepState.SUCCEEDED
    monkeypatch.setenv("ORCHESTRATOR_STORE", uri)
    shown = "".join(CliRunner().invoke(app, command).output for command in COMMANDS)
    assert "pretrain-" in shown
    objects = {stat.name: store.get(stat.name) for stat in store.list_objects("")}
    assert {name.partition("/")[0] for name in objects} >= {"artifacts", "controllers", "jobs", "metrics", "sweeps"}
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    texts = {**objects, **files, "output": shown.encode(), "log": caplog.text.encode()}
    assert [name for name, text in texts.items() if any(word in text for word in secret_words)] == []


def test_errors_and_stores_that_travel_carry_no_credentials(s3_server, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = secrets.token_hex(12)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", hidden)
    store = S3Store(BUCKET, "a", S3Settings(num_parallel_parts=37))
    with pytest.raises(StorageDeniedError) as caught:
        store.get("a")
    error = caught.value
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(store) + repr(vars(store))
    travelling = pickle.dumps(error) + pickle.dumps(store)
    for word in (hidden, os.environ["AWS_ACCESS_KEY_ID"]):
        assert word not in shown
        assert word.encode() not in travelling
