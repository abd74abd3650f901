"""The job ``pretrain``: a backbone under one label space, from random weights or from those that the sweep names."""

from __future__ import annotations

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.jobs.networks import ImageTask, new_backbone, new_head
from workloads.jobs.training import Setting, run_training
from workloads.models.initial import initial_of, load_initial
from workloads.runtime.streams import Stage


def run_pretrain(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``backbone.safetensors`` (timm's names), ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PRETRAIN, _pretrain_task)


def _pretrain_task(setting: Setting) -> ImageTask:
    backbone, num_features = new_backbone(setting)
    head, initial = new_head(setting, num_features), initial_of(setting.request)
    if not initial:
        return ImageTask(setting, backbone, head)
    report = load_initial(backbone, setting.parameters.model, initial, setting.context.store)
    return ImageTask(setting, backbone, head, origin={"initial": report.to_json()})
