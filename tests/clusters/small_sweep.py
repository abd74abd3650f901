"""A small real sweep for clusters that are disturbed, and what it ends with where nothing disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import NotFoundError, StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import load_snapshot, read_progress
from tests import slow_augmentation

SWEEP = "small"
_TRAINED = {JobKind.PRETRAIN, JobKind.FINETUNE}
_TEXT = """
version: 1
name: small
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  recipe: {epochs: %d, batch_size: 16, lr: 0.02%s}
transfer:
  - {name: tuned, target: levels/depth1, protocol: finetune, recipe: {epochs: 4, batch_size: 16, lr: 0.01}}
report: {baseline: levels/depth1}
"""


def write_sweep(path: Path, *, num_epochs: int, slow: bool = False) -> Path:
    """The sweep's file; its two pretrains have 6 steps per epoch, and so much time to be disturbed.

    ``slow``: with the augmentation that waits.
    """
    path.write_text(_TEXT % (num_epochs, f", augment_plugin: {slow_augmentation.NAME}" if slow else ""))
    return path


def find_snapshot(store: ObjectStore) -> Snapshot | None:
    """The sweep as its journal tells it; None before that, or while the store cannot be asked."""
    with suppress(NotFoundError, StorageError):
        return load_snapshot(store, SWEEP)
    return None


def has_ended(store: ObjectStore) -> bool:
    """Whether it is over."""
    snapshot = find_snapshot(store)
    return snapshot is not None and snapshot.state.is_final


def pretrains_past(store: ObjectStore, step: int) -> list[str]:
    """Pretrains that run and are past a step."""
    snapshot = find_snapshot(store)
    live = set() if snapshot is None else {attempt.attempt_id for attempt in snapshot.live_attempts}
    with suppress(NotFoundError, StorageError):
        lines = read_progress(store, SWEEP).items()
        mine = [(job, line) for job, line in lines if job.startswith("pretrain/") and line.attempt_id in live]
        return [job for job, line in mine if line.progress.step >= step]
    return []


def weights(store: ObjectStore, snapshot: Snapshot) -> Mapping[str, str]:
    """Digests of all trained weights by job."""
    views = [view for view in snapshot.jobs.values() if view.name.partition("/")[0] in _TRAINED]
    return {view.name: str(read_record(store, view.key).summary["weights_sha256"]) for view in views}


def undisturbed_weights(folder: Path, sweep_file: Path) -> Mapping[str, str]:
    """Of the same sweep, run in this process."""
    store = LocalStore(folder / "undisturbed")
    plan = build_plan(load_sweep(str(sweep_file))[0], store_uri=store.uri)
    return weights(store, run_sweep_inprocess(store, plan, directory=folder / "node"))
