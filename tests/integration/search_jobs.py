"""An entry point whose trials are arithmetic: they tell every epoch, and write down what they did."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from orchestrator.core.contract import Evaluation, ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.core.errors import NumericsError, PreemptedError
from orchestrator.planning.graph.build import build_plan
from orchestrator.storage.artifacts import ArtifactWriter, is_committed, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.load import load_sweep
from tests.builders import request_of

ENTRY_POINT = "tests.integration.search_jobs:execute"
DIVERGES_FROM_LR = 0.9

SWEEP = """
version: 1
name: searching
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  recipe: {epochs: 9, batch_size: 16, lr: 0.05}
transfer:
  - name: tuned
    target: levels/depth1
    protocol: finetune
    labels: [levels/depth2]
    recipe: {epochs: 9, batch_size: 16}
    search: SEARCH
"""


def search_request(store: ObjectStore, folder: Path, search: str, *, attempt: int = 1, **options: Any) -> JobRequest:
    """An attempt at the one search of a sweep; ``options`` go to its trials by a file beside the store."""
    path = folder / "sweep.yaml"
    path.write_text(SWEEP.replace("SEARCH", search))
    (folder / "store.options.json").write_text(json.dumps(options))
    sweep, _ = load_sweep(str(path))
    (job,) = [job for job in build_plan(sweep, store_uri=store.uri).jobs if job.kind == "search"]
    return request_of(job, store.uri, attempt, sweep=sweep.name)


def error_after(lr: float, epoch: float) -> float:
    """Falls with every epoch, to a floor that is lowest at lr 0.3."""
    return abs(lr - 0.3) + 0.1 / epoch


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Train: one epoch after the other, from the last one that was written down."""
    if is_committed(context.store, request.key):
        record = read_record(context.store, request.key)
        return JobResult(
            attempt_id=request.attempt_id, key=request.key, outcome=Outcome.ALREADY_COMMITTED, metrics=record.metrics
        )
    folder = Path(request.store_uri.removeprefix("file://")).parent
    options = json.loads((folder / "store.options.json").read_text())
    recipe, history = request.parameters["recipe"], folder / "history" / request.key
    history.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    first = 1 + max((int(one.name.partition("-")[0]) for one in history.iterdir()), default=0)
    for epoch in range(first, int(recipe["epochs"]) + 1):
        context.report(Progress(phase="train", step=epoch))
        context.activity.tick()
        _wait(options.get("gates", {}).get(str(epoch)), context)
        if recipe["lr"] >= DIVERGES_FROM_LR:
            raise NumericsError(f"the loss is NaN at lr {recipe['lr']}")
        metrics = {"select_error": error_after(recipe["lr"], epoch)}
        (history / f"{epoch}-{os.getpid()}-{secrets.token_hex(4)}").touch()
        if context.watch is not None and (epoch in context.watch.rungs or epoch == recipe["epochs"]):
            spent_s = time.perf_counter() - started_s
            context.watch.tell(Evaluation(step=epoch, epoch=float(epoch), metrics=metrics, spent_s=spent_s))
        if context.should_stop() and epoch < recipe["epochs"]:
            raise PreemptedError(f"stopped after epoch {epoch}")
    writer = ArtifactWriter(context.store, request)
    writer.add("weights", str(recipe["lr"]).encode())
    outcome = writer.commit(now=time.time(), metrics=metrics)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=metrics)


def _wait(gate: str | None, context: ExecutionContext) -> None:
    while gate and not Path(gate).exists():
        if context.should_stop():
            raise PreemptedError("stopped at a gate")
        time.sleep(0.01)


def epochs_done(folder: Path) -> dict[str, list[int]]:
    """By key of a trial, every epoch that any process trained, in order."""
    return {
        history.name: sorted(int(one.name.partition("-")[0]) for one in history.iterdir())
        for history in sorted((folder / "history").iterdir())
    }
