"""The training loop of every job that trains: resume, update, evaluate, checkpoint, stop when asked.

Bit-exact resume needs no random state: samples, crops and dropout masks are functions of the step alone, so weights,
optimiser state and the step are all of it.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import closing
from dataclasses import dataclass

import torch

from orchestrator.contract import ExecutionContext, JobRequest, Progress
from orchestrator.errors import NumericsError, PreemptedError
from workloads.checkpoint.interval import AutoInterval
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter, WhenBusy
from workloads.data.streams import Purpose, Stage
from workloads.models.batchnorm import resolve_norm_group
from workloads.train.evaluate import evaluate
from workloads.train.fingerprint import difference, numerics_fingerprint
from workloads.train.metrics import MetricsLog, Tally
from workloads.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar, LearningRate
from workloads.train.state import RunState
from workloads.train.step import Update
from workloads.train.streams import seed_device, torch_seed
from workloads.train.task import Task, TrainInputs

_LOG = logging.getLogger(__name__)
_REPORT_EVERY_S = 0.3
_SHORTEST_S = 1e-9
_NAMED_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the loop needs to know besides the task."""

    request: JobRequest
    context: ExecutionContext
    recipe: Recipe
    calendar: Calendar
    stage: Stage
    seed: int
    device: torch.device


class TrainingLoop:
    """Trains one task to its end; use once."""

    def __init__(self, task: Task, run: Run) -> None:
        recipe, model = run.recipe, task.model
        group_size = resolve_norm_group(model, recipe.batch_size, recipe.norm_group)
        self._task, self._run = task, run
        self._optimizer = build_optimizer(recipe, model)
        self._update = Update(model, self._optimizer, recipe, group_size)
        self._learning_rate = LearningRate.of(recipe, run.calendar)
        self._checkpoints = CheckpointFolder(run.context.store, run.request.key)
        self._writer = CheckpointWriter(self._checkpoints)
        self._interval = AutoInterval(run.request.execution.checkpoint_mtbf_s)
        self._fingerprint = numerics_fingerprint(
            run.device, num_threads=run.request.execution.num_threads, micro_batch=group_size
        )
        self.state = self._resumed_state()
        self._resumed_at = self.state.step
        self._saved_step = self.state.step
        self._log = MetricsLog(run.context.store, run.request, self.state.step)
        self._clock = _Clock()

    @property
    def resumed_from_step(self) -> int | None:
        """Step of the checkpoint that this attempt started from; None without one."""
        return self._resumed_at or None

    @property
    def first_step_at_s(self) -> float:
        """Value of ``time.perf_counter`` when the first update began (or would have)."""
        return self._clock.started_s

    @property
    def images_per_s(self) -> float:
        """Training throughput of this attempt, evaluation and checkpoints included."""
        return self._clock.images_per_s()

    def run(self) -> RunState:
        """Train to the last step and close the metrics.

        Raises:
            PreemptedError: the attempt was asked to stop; a checkpoint of the last finished step is committed.
            NumericsError: a loss is not finite.
            StorageError: a checkpoint could not be written, at most a step ago.
        """
        self._task.model.train()
        total = self._run.calendar.total_steps
        _LOG.info("%s: step %d of %d, %s", self._run.request.job, self.state.step, total, self._run.recipe)
        # Whatever ends the loop, a checkpoint that is being written is let through.
        with closing(self._writer), closing(self._task.batches(self.state.step)) as batches:
            for batch in batches:
                self._clock.start()
                self._stop_if_asked()
                self._writer.check()
                self._advance(batch)
                self._after_step()
            self._writer.drain()
        self._log.close_segment(self.state.step)
        return self.state

    def discard_checkpoints(self) -> None:
        """Delete the job's checkpoints; call it only after the commit."""
        self._checkpoints.delete_all()

    def _resumed_state(self) -> RunState:
        checkpoint = self._checkpoints.load_newest()
        if checkpoint is None:
            return RunState(fingerprint=self._fingerprint)
        model = self._task.model
        model.load_state_dict(dict(checkpoint.model))
        load_optimizer_tensors(self._optimizer, model, checkpoint.optimizer)
        state = RunState.from_json(checkpoint.step, checkpoint.state)
        changes = difference(state.fingerprint, self._fingerprint)
        if changes:
            _LOG.warning("resuming %s under other numerics, no longer bit-exact: %s", self._run.request.job, changes)
        state.resumed_steps.append(state.step)
        state.fingerprint_changes += changes
        state.fingerprint = self._fingerprint
        return state

    def _stop_if_asked(self) -> None:
        if not self._run.context.should_stop():
            return
        step = self.state.step
        self._save(WhenBusy.WAIT)
        self._writer.drain()
        raise PreemptedError(f"{self._run.request.job} stopped at step {step} as asked; it resumes from there")

    def _advance(self, batch: TrainInputs) -> None:
        run, step = self._run, self.state.step
        # Dropout masks depend on the step alone, so that a resumed run draws the same ones without stored state.
        seed_device(run.device, torch_seed(run.seed, run.stage, Purpose.DROPOUT, step))
        loss, errors = self._update(batch.inputs, batch.targets_B, self._learning_rate.at(step))
        if not math.isfinite(loss):
            raise NumericsError(self._not_finite(loss, batch))
        self.state.step = step + 1
        for tally in (self.state.since_line, self.state.in_epoch):
            tally.add(loss, errors, len(batch.targets_B))
        self._clock.count(len(batch.targets_B))

    def _after_step(self) -> None:
        state, calendar = self.state, self._run.calendar
        step = state.step
        evaluated = self._evaluate() if calendar.is_evaluated(step) else {}
        if calendar.has_line(step):
            self._add_line(evaluated)
        if calendar.is_epoch_end(step):
            state.latest.update(state.in_epoch.means("train"))
            state.in_epoch = Tally()
        if self._is_checkpoint_due():
            self._save(WhenBusy.SKIP)
        self._report("train")

    def _evaluate(self) -> dict[str, float]:
        self._report("evaluate")
        metrics = evaluate(self._task.model, self._task.eval_batches(), self._task.subset_names)
        if not all(math.isfinite(value) for value in metrics.values()):
            raise NumericsError(
                f"evaluation at step {self.state.step} gives {metrics}; lower recipe.lr or clip gradients"
            )
        self.state.latest.update(metrics)
        self.state.best_val_error = min(self.state.best_val_error, metrics["val_error"])
        return metrics

    def _add_line(self, evaluated: dict[str, float]) -> None:
        state = self.state
        measured = {"lr": self._learning_rate.at(state.step - 1), "images_per_s": self._clock.lap_images_per_s()}
        epoch, metrics = self._run.calendar.epoch(state.step), state.since_line.means("train") | measured | evaluated
        self._log.add(state.step, epoch, metrics)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        _LOG.info("step %d  epoch %.2f  %s", state.step, epoch, shown)
        state.since_line = Tally()

    def _is_checkpoint_due(self) -> bool:
        execution, calendar, step = self._run.request.execution, self._run.calendar, self.state.step
        if execution.checkpoint_every_steps or not execution.checkpoint_mtbf_s:
            return calendar.has_checkpoint(step, execution.checkpoint_every_steps)
        is_due = self._interval.is_due(cost_s=self._writer.cost_s, now_s=time.perf_counter())
        return is_due and step < calendar.total_steps

    def _save(self, when_busy: WhenBusy) -> None:
        state = self.state
        if state.step == self._saved_step or not self._writer.has_room(when_busy):
            return
        checkpoint = Checkpoint(
            step=state.step,
            model=self._task.model.state_dict(),
            optimizer=optimizer_tensors(self._optimizer, self._task.model),
            state=state.to_json(),
        )
        # The metrics up to this step are durable before the checkpoint is: a run that resumes from it never writes
        # them again.
        self._writer.save(checkpoint, before=self._log.seal(state.step))
        self._saved_step = state.step
        self._interval.saved(time.perf_counter())

    def _report(self, phase: str) -> None:
        if self._clock.is_report_due():
            state = self.state
            metrics = state.latest | state.in_epoch.means("train")
            total = self._run.calendar.total_steps
            self._run.context.report(Progress(phase=phase, step=state.step, total_steps=total, metrics=metrics))

    def _not_finite(self, loss: float, batch: TrainInputs) -> str:
        names = self._task.sample_names([int(ordinal) for ordinal in batch.ordinals_B[:_NAMED_SAMPLES]])
        return (
            f"loss is {loss} at step {self.state.step} of {self._run.request.job}; lower recipe.lr, raise "
            f"warmup_epochs or set grad_clip; the batch's first samples: {', '.join(names)}"
        )


class _Clock:
    """Times and throughput of one attempt; none of them influences a result."""

    def __init__(self) -> None:
        self.started_s = 0.0
        self._report_s = -math.inf
        self._lap_s = 0.0
        self._lap_images = 0
        self._all_images = 0

    def start(self) -> None:
        """Remember when the first update began; later calls change nothing."""
        if not self.started_s:
            self.started_s = self._lap_s = time.perf_counter()

    def count(self, num_images: int) -> None:
        """Count the images of one update."""
        self._lap_images += num_images
        self._all_images += num_images

    def lap_images_per_s(self) -> float:
        """Training throughput since the last call, evaluation and checkpoints included."""
        now, images = time.perf_counter(), self._lap_images
        elapsed_s, self._lap_s, self._lap_images = now - self._lap_s, now, 0
        return images / max(elapsed_s, _SHORTEST_S)

    def images_per_s(self) -> float:
        """Training throughput of the whole attempt so far."""
        return self._all_images / max(time.perf_counter() - self.started_s, _SHORTEST_S)

    def is_report_due(self) -> bool:
        """Whether the last report is old enough for the next; if so, this moment counts as the last report."""
        now = time.perf_counter()
        if now - self._report_s < _REPORT_EVERY_S:
            return False
        self._report_s = now
        return True
