"""The job ``pretrain``: a backbone from random weights under one label space."""

from __future__ import annotations

from orchestrator.contract import ExecutionContext, JobRequest, JobResult
from workloads.data.streams import Stage
from workloads.train.images import ImageTask, new_backbone, new_head
from workloads.train.job import Setting, run_training


def run_pretrain(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``backbone.safetensors`` (timm's names), ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PRETRAIN, _pretrain_task)


def _pretrain_task(setting: Setting) -> ImageTask:
    backbone, num_features = new_backbone(setting)
    return ImageTask(setting, backbone, new_head(setting, num_features))
