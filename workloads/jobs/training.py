"""From a request to a committed record: the common part of ``pretrain``, ``finetune`` and ``probe``.

A trial of a search also reports, at the rungs of the search, how good its training is so far; this does not change the
training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from orchestrator.core.activity import Activity
from orchestrator.core.code import package_digest
from orchestrator.core.contract import (
    Evaluation,
    ExecutionContext,
    JobRequest,
    JobResult,
    Outcome,
    Progress,
    Timings,
    Watch,
)
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD, SampleOutcomes
from workloads.checkpoint.retention import add_kept_parts
from workloads.checkpoint.snapshot import Checkpoint
from workloads.checkpoint.writer import retry_in_outage
from workloads.models.weights import encode_tensors, num_parameters, weights_sha256
from workloads.runtime.fingerprint import deterministic_numerics
from workloads.runtime.precision import Arithmetic, keep_compiled_code
from workloads.runtime.publish import check_finite
from workloads.runtime.ranks import check_same_request
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EvalInputs, evaluate
from workloads.train.learner import RunState
from workloads.train.loop import TrainingLoop
from workloads.train.objective import build_objective
from workloads.train.samples import LabelledSamples, LabelledSplit
from workloads.train.schedule import Calendar
from workloads.train.task import JobContext, Task

_OPTIONAL = ("rewinds", "notes", "bad_samples")
"""Of a record's summary: only there if there is something to say."""
Metrics = Mapping[str, float]


class TrainedModel(Task, Protocol):
    """A task that knows its whole network."""

    @property
    def backbone(self) -> nn.Module:
        """Maps images to features."""

    @property
    def head(self) -> nn.Linear:
        """Maps features to logits."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """What the record says of where the weights came from."""

    def held_out_batches(self, split: LabelledSplit) -> Iterable[EvalInputs]:
        """Samples that are evaluated without being validation, each once on some rank."""


TaskFactory = Callable[[JobContext, LabelledSamples], TrainedModel]


def run_training(request: JobRequest, context: ExecutionContext, stage: Stage, make_task: TaskFactory) -> JobResult:
    """Train a task from its newest checkpoint and commit it; in a gang, all ranks call this and the first one commits.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError, PeerLostError: why there is no commit.
    """
    started_s = time.perf_counter()
    context.report(Progress(phase="setup"))
    job = JobContext.of(request, context, stage)
    ranks, arithmetic = job.ranks, Arithmetic.of(job.recipe, request.execution, job.device)
    with ranks.aborted_on_error(), deterministic_numerics(request.execution.num_threads), arithmetic.numerics():
        context.activity.stage = "setup"
        check_same_request(ranks, request)
        with context.activity.during(Activity.STORE):
            samples = LabelledSamples.open(job)
        # Only now: opening the data has made sure that the node's folder is ours, and compiled code is executed.
        keep_compiled_code(context.cache / "compiled")
        with context.activity.during(Activity.STORE):  # weights to begin from
            task = make_task(job, samples)
        initial = weights_sha256(task.backbone.state_dict())
        loop = TrainingLoop(task, job, arithmetic)

        def select() -> dict[str, float]:
            return _select_metrics(job, samples.held_out, task, arithmetic, loop.state.step)

        loop.on_evaluation = _judge_of(job, task, loop, select)
        state = loop.run()
        setup_s = loop.first_step_at_s - started_s
        measured = {"setup_s": setup_s, "train_s": time.perf_counter() - loop.first_step_at_s}
        bad_samples, notes = samples.bad.summary(), [*job.notes, *loop.notes]
        speed = {"images_per_s": loop.images_per_s} if loop.images_per_s else {}  # only the last evaluation was left
        summary = _summary(state, notes, task.origin, bad_samples, initial) | {
            "measured": measured | speed | {"compile_s": loop.compile_s}
        }
        with loop.learner.averaged():
            state.latest.update(select())
            # This attempt has evaluated the weights: a checkpoint of the last step awaits its evaluation.
            outcomes = loop.outcomes.of_split(samples.val.source.split, ranks)
            summary |= _hashes(task) | {SUMMARY_FIELD: outcomes.summary()}
            # No rank leaves before the record is there: a launcher may end a gang with its first rank. Kept checkpoints
            # may take long to read and write.
            with ranks.at_own_pace():
                outcome = _commit(job, task, loop, summary, outcomes) if ranks.is_first else Outcome.ALREADY_COMMITTED
    return JobResult(
        attempt_id=request.attempt_id,
        key=request.key,
        outcome=outcome,
        metrics=_metrics(state, task),
        timings=Timings(setup_s=setup_s),
        resumed_from_step=loop.resumed_from_step,
    )


def _judge_of(
    job: JobContext, task: TrainedModel, loop: TrainingLoop, select: Callable[[], dict[str, float]]
) -> Judge | None:
    """Who tells a search how this training is going; None if it is no trial."""
    if job.context.watch is None:
        return None
    # Not above: it knows jobs of other kinds, and they know this module.
    from workloads.jobs.target_probe import target_probe_of

    subject = Subject(
        calendar=loop.calendar,
        epochs=job.recipe.epochs,
        backbone=task.backbone,
        averaged=loop.learner.averaged,
        select=select,
    )
    document = {"mean": job.recipe.mean, "std": job.recipe.std}
    probe = target_probe_of(job.request, job.context, document=document, device=job.device)
    return Judge(job.context.watch, subject, probe)


def _commit(
    job: JobContext, task: TrainedModel, loop: TrainingLoop, summary: dict[str, Any], outcomes: SampleOutcomes
) -> Outcome:
    """Write the artifact; inside, the model holds the weights to commit."""
    state, context = loop.state, job.context
    told = Progress(
        phase="write", step=state.step, total_steps=state.step, metrics=state.latest, counters=loop.counters()
    )
    context.report(told)
    with context.activity.during(Activity.STORE):
        return _write(job, task, loop, summary, outcomes.parts(), told=told)


def _write(
    job: JobContext,
    task: TrainedModel,
    loop: TrainingLoop,
    summary: dict[str, Any],
    outcomes: Mapping[str, bytes],
    *,
    told: Progress,
) -> Outcome:
    state, context = loop.state, job.context
    # The training is done: all of it since the newest checkpoint would be repeated, on all devices.
    writer = ArtifactWriter(context.store, job.request, persist=retry_in_outage)
    for name, content in {**_parts(job, task), **outcomes}.items():
        writer.add(name, content)
    # The record hashes the final weights; kept ones are loaded over them.
    metrics = _metrics(state, task)
    if not loop.keeper.is_idle:
        summary["kept"] = loop.keeper.summary()
        _add_kept(writer, task, loop, lambda phase: context.report(replace(told, phase=phase)))
    outcome = writer.commit(now=time.time(), metrics=metrics, summary=summary, package_digest=package_digest())
    # Only after the record exists: until then the checkpoints are all there is of this job.
    loop.discard_checkpoints()
    return outcome


def _add_kept(writer: ArtifactWriter, task: TrainedModel, loop: TrainingLoop, tell: Callable[[str], None]) -> None:
    def parts_of(checkpoint: Checkpoint) -> dict[str, bytes]:
        # A phase each: many may take longer than one phase may without a step, and the training has reached its last.
        tell(f"write weights of step {checkpoint.step}")
        loop.learner.load_committed(checkpoint)
        return _weights(task)

    add_kept_parts(
        writer,
        loop.keeper,
        final_step=loop.state.step,
        final_parts=tuple(_weights(task)),
        load=lambda kept: retry_in_outage(partial(loop.load_kept, kept)),
        parts_of=parts_of,
    )


def _parts(job: JobContext, task: TrainedModel) -> dict[str, bytes]:
    document = json.dumps(_model_document(job, task), indent=1, sort_keys=True).encode()
    return _weights(task) | {"model.json": document}


def _weights(task: TrainedModel) -> dict[str, bytes]:
    parts = {"head.safetensors": encode_tensors(task.head.state_dict())}
    if task.is_backbone_trained:
        parts["backbone.safetensors"] = encode_tensors(task.backbone.state_dict())
    return parts


def _model_document(job: JobContext, task: TrainedModel) -> dict[str, Any]:
    import timm

    from workloads.models.table import timm_kwargs

    inputs = job.request.inputs
    return {
        **job.model.to_json(),
        "timm_kwargs": timm_kwargs(job.model),
        "timm_version": timm.__version__,
        "mean": job.recipe.mean,
        "std": job.recipe.std,
        "num_features": task.head.in_features,
        "num_classes": task.head.out_features,
        "labels": inputs["labels"],
        "backbone": inputs.get("backbone"),
    }


def _select_metrics(
    job: JobContext, held_out: LabelledSplit | None, task: TrainedModel, arithmetic: Arithmetic, step: int
) -> dict[str, float]:
    """Error and loss on the training samples that were held out, if any were; all ranks call this.

    Raises:
        NumericsError: one of them is not finite.
    """
    if held_out is None:
        return {}
    with arithmetic.uncompiled(), arithmetic.autocast():
        found = evaluate(
            task.model,
            task.held_out_batches(held_out),
            (),
            objective=build_objective(job.recipe, task.num_classes, is_multi_label=task.is_multi_label),
            ranks=job.ranks,
        )
    select = {f"select_{name}": found[f"val_{name}"] for name in ("error", "loss") if f"val_{name}" in found}
    what = f"the evaluation of the training samples held out, at step {step}, gives"
    check_finite(select, what, "lower recipe.lr or clip gradients", step)
    return select


def _metrics(state: RunState, task: TrainedModel) -> dict[str, float]:
    return {
        **state.latest,
        "best_val_error": state.best_val_error,
        "peak_epoch": state.peak_epoch,
        "num_parameters": num_parameters(task.backbone) + num_parameters(task.head),
        "num_trained_parameters": sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        "num_classes": task.head.out_features,
        "num_steps": state.step,
    }


def _summary(
    state: RunState, notes: list[str], origin: Mapping[str, Any], bad_samples: Mapping[str, Any], initial: str
) -> dict[str, Any]:
    summary = {
        **origin,
        "init_weights_sha256": initial,
        "fingerprint": dict(state.fingerprint),
        "fingerprint_changes": state.fingerprint_changes,
        "resumed_steps": state.resumed_steps,
        "rewinds": [asdict(rewind) for rewind in state.rewinds],
        "notes": notes,
        "bad_samples": bad_samples,
    }
    return {name: value for name, value in summary.items() if value or name not in _OPTIONAL}


def _hashes(task: TrainedModel) -> dict[str, str]:
    return {
        "weights_sha256": weights_sha256(_all_weights(task)),
        "backbone_sha256": weights_sha256(task.backbone.state_dict()),
    }


def _all_weights(task: TrainedModel) -> Mapping[str, Tensor]:
    parts = {"backbone": task.backbone, "head": task.head}
    return {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is judged: a training in which evaluations happen now and then."""

    calendar: Calendar
    epochs: float
    """Of the whole training."""
    backbone: nn.Module
    averaged: Callable[[], AbstractContextManager[None]]
    """Within it the model holds the weights that are evaluated and committed."""
    select: Callable[[], Metrics]
    """Metrics on the training samples that were held out; nothing if none were."""


class Judge:
    """Called after every evaluation of one training."""

    def __init__(self, watch: Watch, subject: Subject, probe: Callable[[nn.Module], Metrics] | None) -> None:
        self._watch, self._subject, self._probe = watch, subject, probe
        self._rungs = list(watch.rungs)
        self._started_s, self._waited_s = time.perf_counter(), 0.0

    def __call__(self, step: int, metrics: Metrics) -> None:
        """Tell the evaluation of a step, if one of the rungs is reached by it, or it is the last one.

        Raises:
            OrchestratorError: whatever keeps the probe from judging.
        """
        epoch, is_last = self._epoch(step), step == self._subject.calendar.total_steps
        if not is_last and not any(rung <= epoch for rung in self._rungs):
            return
        self._rungs = [rung for rung in self._rungs if rung > epoch]
        found = {**metrics, **self._more()}
        now_s = time.perf_counter()
        spent_s = now_s - self._started_s - self._waited_s
        self._watch.tell(Evaluation(step=step, epoch=epoch, metrics=found, spent_s=spent_s))
        self._waited_s += time.perf_counter() - now_s

    def _more(self) -> Metrics:
        with self._subject.averaged():
            if self._probe is None:
                return self._subject.select()
            return self._probe(self._subject.backbone)

    def _epoch(self, step: int) -> float:
        """Number of the epoch that ends with a step; the length of the training at its end."""
        calendar = self._subject.calendar
        is_last = step == calendar.total_steps
        return self._subject.epochs if is_last else float(calendar.ended_epoch(step))
