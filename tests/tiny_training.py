"""A tiny real data set and requests to train on it, run through the one entry point of the data plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.identity import make_identity
from orchestrator.storage import ObjectStore
from orchestrator.storage.local import LocalStore
from workloads.run import execute

DATASET = {
    "builtin": "synthetic-hierarchy",
    "version": 1,
    "branching": [2, 2],
    "image_size": 16,
    "patch_size": 4,
    "num_train": 96,
    "num_val": 48,
}
RECIPE: Mapping[str, Any] = {
    "epochs": 2.5,
    "batch_size": 16,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "nesterov": False,
    "betas": [0.9, 0.999],
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "warmup_epochs": 0.5,
    "label_smoothing": 0.0,
    "grad_clip": 0.0,
    "augment": "none",
    "norm_group": None,
    "precision": "fp32",
    "shuffle_block_shards": 4,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "eval_every_epochs": 1,
}
NO_BATCHNORM: dict[str, Any] = {"name": "test_vit", "image_size": 16, "kwargs": {"patch_size": 4, "drop_rate": 0.1}}
BATCHNORM: dict[str, Any] = {"name": "test_resnet", "image_size": 16, "kwargs": {"drop_rate": 0.1}}


class TinyTraining:
    """One store with a committed data set; ``labels`` are committed when a job first asks for them."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.dataset = self.run(self.request(JobKind.DATASET, DATASET, {})).key
        self.index = self.run(self.request(JobKind.INDEX, {}, {"dataset": self.dataset})).key

    def labels(self, space: Mapping[str, Any]) -> str:
        return self.run(self.request(JobKind.LABELS, {"space": space}, {"index": self.index})).key

    def training(
        self,
        kind: JobKind = JobKind.PRETRAIN,
        *,
        model: Mapping[str, Any] = NO_BATCHNORM,
        recipe: Mapping[str, Any] | None = None,
        seed: int = 0,
        space: Mapping[str, Any] | None = None,
        backbone: str | None = None,
        execution: Execution | None = None,
        attempt: int = 1,
    ) -> JobRequest:
        """A request to train; ``recipe`` changes single fields of ``RECIPE``."""
        parameters = {"model": model, "recipe": {**RECIPE, **(recipe or {})}, "seed": seed}
        inputs = {"index": self.index, "labels": self.labels(space or {"hierarchy": "depth2"})}
        if backbone is not None:
            inputs["backbone"] = backbone
        return self.request(kind, parameters, inputs, execution=execution, attempt=attempt)

    def request(
        self,
        kind: JobKind,
        parameters: Mapping[str, Any],
        inputs: Mapping[str, str],
        *,
        execution: Execution | None = None,
        attempt: int = 1,
    ) -> JobRequest:
        identity = make_identity(kind, parameters, inputs)
        key = make_key(kind, "", identity)
        return JobRequest(
            attempt_id=f"{key}.{attempt}",
            attempt_number=attempt,
            sweep="tiny",
            job=f"{kind}/tiny",
            key=key,
            kind=kind,
            identity=identity,
            store_uri=self.store.uri,
            execution=execution or Execution(deterministic=True),  # as CPUs always are; tests compare bits
        )

    def run(
        self,
        request: JobRequest,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> JobResult:
        scratch = self.folder / "scratch" / request.attempt_id
        scratch.mkdir(parents=True, exist_ok=True)
        context = ExecutionContext(
            store=self.store,
            scratch=scratch,
            cache=self.folder / "cache",
            report=report,
            should_stop=should_stop,
        )
        return execute(request, context)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store and its data set, to be copied: runs of one key that differ need a store each."""
    folder = tmp_path_factory.mktemp("prepared")
    TinyTraining(LocalStore(folder / "store"), folder)
    return folder
