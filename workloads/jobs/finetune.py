"""The job ``finetune``: a new head on a pretrained backbone, all weights learn."""

from __future__ import annotations

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.jobs.networks import ImageTask, new_head, pretrained_backbone
from workloads.jobs.training import Setting, run_training
from workloads.runtime.streams import Stage


def run_finetune(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``backbone.safetensors`` (timm's names), ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.FINETUNE, _finetune_task)


def _finetune_task(setting: Setting) -> ImageTask:
    backbone, num_features = pretrained_backbone(setting)
    return ImageTask(setting, backbone, new_head(setting, num_features))
