"""From a request to a committed record: the frame that ``pretrain``, ``finetune`` and ``probe`` share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import timm
import torch
from torch import Tensor, nn

from orchestrator.contract import ExecutionContext, JobRequest, JobResult, Progress, Timings
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.data.streams import Stage
from workloads.models.build import timm_kwargs
from workloads.models.spec import ModelSpec
from workloads.models.weights import encode_tensors, num_parameters, weights_sha256
from workloads.package import package_digest
from workloads.train.fingerprint import deterministic_numerics, pick_device
from workloads.train.loop import Run, TrainingLoop
from workloads.train.recipe import Recipe
from workloads.train.samples import LabelledSamples
from workloads.train.schedule import Calendar
from workloads.train.state import RunState
from workloads.train.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParameters:
    """The identity's parameters of a job that trains."""

    model: ModelSpec
    recipe: Recipe
    seed: int

    @classmethod
    def of(cls, request: JobRequest) -> Self:
        """From a request. Raises ``UserError`` naming the field that is wrong."""
        parameters = request.parameters
        return cls(
            model=ModelSpec.from_mapping(parameters["model"]),
            recipe=Recipe.from_mapping(parameters["recipe"]),
            seed=int(parameters["seed"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that a task is built from."""

    request: JobRequest
    context: ExecutionContext
    stage: Stage
    parameters: TrainingParameters
    samples: LabelledSamples
    device: torch.device


class TrainedModel(Task, Protocol):
    """A task that knows its whole network."""

    @property
    def backbone(self) -> nn.Module:
        """Maps images to features."""

    @property
    def head(self) -> nn.Linear:
        """Maps features to logits."""

    @property
    def is_backbone_trained(self) -> bool:
        """Whether the backbone's weights are part of the artifact."""


TaskFactory = Callable[[Setting], TrainedModel]


def run_training(request: JobRequest, context: ExecutionContext, stage: Stage, make_task: TaskFactory) -> JobResult:
    """Train a task from its newest checkpoint and commit it.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    started_s = time.perf_counter()
    context.report(Progress(phase="setup"))
    with deterministic_numerics(request.execution.num_threads):
        setting = _open(request, context, stage)
        task = make_task(setting)
        initial = weights_sha256(task.backbone.state_dict())
        loop = TrainingLoop(task, _run_of(setting))
        state = loop.run()
        setup_s = loop.first_step_at_s - started_s
        measured = {"setup_s": setup_s, "train_s": time.perf_counter() - loop.first_step_at_s}
        context.report(Progress(phase="write", step=state.step, total_steps=state.step, metrics=state.latest))
        writer = ArtifactWriter(context.store, request)
        for name, content in _parts(setting, task).items():
            writer.add(name, content)
        metrics = _metrics(state, task)
        summary = _summary(state, task, initial) | {"measured": measured | {"images_per_s": loop.images_per_s}}
        outcome = writer.commit(now=time.time(), metrics=metrics, summary=summary, package_digest=package_digest())
        # Only after the record exists: until then the checkpoints are all there is of this job.
        loop.discard_checkpoints()
    return JobResult(
        attempt_id=request.attempt_id,
        key=request.key,
        outcome=outcome,
        metrics=metrics,
        timings=Timings(setup_s=setup_s),
        resumed_from_step=loop.resumed_from_step,
    )


def _open(request: JobRequest, context: ExecutionContext, stage: Stage) -> Setting:
    parameters = TrainingParameters.of(request)
    samples = LabelledSamples.open(request, context, image_size=parameters.model.image_size)
    device = pick_device()
    return Setting(request=request, context=context, stage=stage, parameters=parameters, samples=samples, device=device)


def _run_of(setting: Setting) -> Run:
    recipe = setting.parameters.recipe
    return Run(
        request=setting.request,
        context=setting.context,
        recipe=recipe,
        calendar=Calendar.of(recipe, setting.samples.num_train),
        stage=setting.stage,
        seed=setting.parameters.seed,
        device=setting.device,
    )


def _parts(setting: Setting, task: TrainedModel) -> dict[str, bytes]:
    parts = {"head.safetensors": encode_tensors(task.head.state_dict())}
    if task.is_backbone_trained:
        parts["backbone.safetensors"] = encode_tensors(task.backbone.state_dict())
    parts["model.json"] = json.dumps(_model_document(setting, task), indent=1, sort_keys=True).encode()
    return parts


def _model_document(setting: Setting, task: TrainedModel) -> dict[str, Any]:
    parameters, inputs = setting.parameters, setting.request.inputs
    return {
        **parameters.model.to_json(),
        "timm_kwargs": timm_kwargs(parameters.model),
        "timm_version": timm.__version__,
        "mean": parameters.recipe.mean,
        "std": parameters.recipe.std,
        "num_features": task.head.in_features,
        "num_classes": task.head.out_features,
        "labels": inputs["labels"],
        "backbone": inputs.get("backbone"),
    }


def _metrics(state: RunState, task: TrainedModel) -> dict[str, float]:
    return {
        **state.latest,
        "best_val_error": state.best_val_error,
        "num_parameters": num_parameters(task.backbone) + num_parameters(task.head),
        "num_trained_parameters": num_parameters(task.model),
        "num_classes": task.head.out_features,
        "num_steps": state.step,
    }


def _summary(state: RunState, task: TrainedModel, initial: str) -> dict[str, Any]:
    return {
        "weights_sha256": weights_sha256(_all_weights(task)),
        "backbone_sha256": weights_sha256(task.backbone.state_dict()),
        "init_weights_sha256": initial,
        "fingerprint": dict(state.fingerprint),
        "fingerprint_changes": state.fingerprint_changes,
        "resumed_steps": state.resumed_steps,
    }


def _all_weights(task: TrainedModel) -> Mapping[str, Tensor]:
    parts = {"backbone": task.backbone, "head": task.head}
    return {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
