"""The ``probe`` with ``features: cached, solver: sgd``: head and optimiser of any probe, on features of embed jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.data.streams import Stage
from workloads.embed.features import FeatureTable
from workloads.train.evaluate import EvalInputs
from workloads.train.images import new_head, zero_targets
from workloads.train.job import Setting, run_training
from workloads.train.samples import EVAL_BATCH_SIZE, LabelledSplit
from workloads.train.task import TrainInputs
from workloads.transfer.features import Features
from workloads.transfer.probe import ProbeTask
from workloads.transfer.unseen import unseen_notes


def run_cached_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PROBE, _cached_task)


def _cached_task(setting: Setting) -> CachedProbeTask:
    context, inputs, samples = setting.context, setting.request.inputs, setting.samples
    tables = {role: FeatureTable.open(context.store, inputs[role], context.cache) for role in ("train", "val")}
    train, val = samples.train, samples.val
    setting.notes.extend(unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals()))
    return CachedProbeTask(setting, tables, new_head(setting, tables["train"].dim))


class CachedProbeTask(ProbeTask):
    """Only the head is there. What has no features is replaced as in loading, and left out of evaluation."""

    def __init__(self, setting: Setting, tables: dict[str, FeatureTable], head: nn.Linear) -> None:
        super().__init__(setting, nn.Identity(), head)
        self._tables = tables

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        device = self._setting.device
        features_BF = torch.zeros(num_samples, self.head.in_features, device=device)
        targets = zero_targets(num_samples, device, is_multi_label=self.is_multi_label)
        return TrainInputs(inputs=features_BF, targets=targets)

    def held_out_batches(self, split: LabelledSplit) -> Iterator[EvalInputs]:
        """See ``TrainedModel``."""
        return self._batches_of(split, self._tables["train"])

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        return list(self._batches_of(self._setting.samples.val, self._tables["val"]))

    @cached_property
    def _train_features(self) -> Features:
        view, table = self._setting.samples.train.view, self._tables["train"]
        ordinals = np.setdiff1d(view.ordinals(), table.missing)
        rows = np.full(table.num_samples, -1, dtype=np.int64)
        rows[ordinals] = np.arange(len(ordinals))
        features_NF = torch.from_numpy(table.take(ordinals)).to(self._setting.device).float()
        return Features(features_NF=features_NF, rows=rows)

    def _batches_of(self, split: LabelledSplit, table: FeatureTable) -> Iterator[EvalInputs]:
        """As images would be evaluated: the same batches on the same ranks, without what has no features."""
        ordinals, ranks = split.view.ordinals(), self._setting.samples.ranks
        for start in range(ranks.rank * EVAL_BATCH_SIZE, len(ordinals), ranks.world_size * EVAL_BATCH_SIZE):
            ordinals_B = np.setdiff1d(ordinals[start : start + EVAL_BATCH_SIZE], table.missing)
            targets_B = torch.from_numpy(split.labels.take(ordinals_B)).to(self._setting.device)
            subsets_B = np.asarray(split.source.split.subset_ids[ordinals_B])
            inputs = self._on_device(table, ordinals_B)
            yield EvalInputs(inputs=inputs, targets_B=targets_B, subsets_B=subsets_B, ordinals_B=ordinals_B)

    def _on_device(self, table: FeatureTable, ordinals_B: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(table.take(ordinals_B)).to(self._setting.device).float()
