"""The job ``finetune``: a new head on a pretrained backbone, all weights learn."""

from __future__ import annotations

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.jobs.networks import ImageTask, new_head, pretrained_backbone
from workloads.jobs.training import run_training
from workloads.runtime.streams import Stage
from workloads.train.samples import LabelledSamples
from workloads.train.task import JobContext


def run_finetune(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``backbone.safetensors`` (timm's names), ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.FINETUNE, _finetune_task)


def _finetune_task(job: JobContext, samples: LabelledSamples) -> ImageTask:
    backbone, num_features = pretrained_backbone(job, samples)
    return ImageTask(job, samples, backbone, new_head(job, num_features, samples.num_classes))
