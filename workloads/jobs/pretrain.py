"""The job ``pretrain``: a backbone under one label space, from random weights or from those that the sweep names."""

from __future__ import annotations

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.jobs.networks import ImageTask, new_backbone, new_head
from workloads.jobs.training import run_training
from workloads.models.initial import initial_of, load_initial
from workloads.runtime.streams import Stage
from workloads.train.samples import LabelledSamples
from workloads.train.task import JobContext


def run_pretrain(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``backbone.safetensors`` (timm's names), ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PRETRAIN, _pretrain_task)


def _pretrain_task(job: JobContext, samples: LabelledSamples) -> ImageTask:
    backbone, num_features = new_backbone(job)
    head, initial = new_head(job, num_features, samples.num_classes), initial_of(job.request)
    if not initial:
        return ImageTask(job, samples, backbone, head)
    report = load_initial(backbone, job.model, initial, job.context.store)
    return ImageTask(job, samples, backbone, head, origin={"initial": report.to_json()})
