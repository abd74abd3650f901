"""The training loop of every job that trains: resume, update, evaluate, checkpoint, stop when asked.

Bit-exact resume needs no random state: samples, crops and dropout masks are functions of the step alone, so weights,
optimiser state, averages and the step are all of it. In a gang every rank runs this loop; all decisions follow from
numbers that are the same on all ranks, so that none waits for a collective which another never reaches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import NoReturn

import torch
from torch import Tensor

from orchestrator.core.contract import Progress
from orchestrator.core.errors import NumericsError, PreemptedError
from workloads.checkpoint.retention import Keeper, KeepPolicy, Kept
from workloads.checkpoint.snapshot import Checkpoint
from workloads.checkpoint.writer import WhenBusy
from workloads.models.build import checkpoint_activations
from workloads.runtime.enums import Precision
from workloads.runtime.fingerprint import (
    GRAD_REDUCTION,
    Fingerprint,
    difference,
    joined_fingerprint,
    numerics_fingerprint,
)
from workloads.runtime.precision import Arithmetic
from workloads.runtime.streams import Purpose, seed_device, torch_seed
from workloads.train.evaluate import OutcomeTally, evaluate
from workloads.train.freezing import train_mode
from workloads.train.large_head import LossForward
from workloads.train.learner import Learner, RunState
from workloads.train.micro_batch import out_of_memory_in
from workloads.train.objective import build_objective
from workloads.train.recipe import tell_recipe
from workloads.train.safety import (
    FailedUpdateError,
    Reading,
    Rewind,
    RewindPoints,
    batch_of,
    failed_samples,
    failure_message,
    rank_at_fault,
    rewind_to,
    steps_before_gap,
)
from workloads.train.saver import Saver
from workloads.train.schedule import Calendar, LearningRate
from workloads.train.step import Update, Votes
from workloads.train.step_metrics import Clock, ReadStats, StepMetrics, Tally, Throughput, reset_gpu_peak, usage
from workloads.train.task import JobContext, Task, TrainInputs
from workloads.train.warmup_step import MicroBatchSearch

_LOG = logging.getLogger(__name__)
_NORM_GROUPS = "norm_groups"
"""In fingerprints of models with BatchNorm: how the code passes several norm groups through a layer, also where no pass
of this rank holds several, so that all ranks and all attempts agree; not there: one by one, as before."""
_BACKWARD = "norm_groups_backward"
"""In fingerprints where several norm groups pass through compiled layers; not there: by autograd, as before."""
_MOST_REWINDS = 20
"""More numerics failures than this are no accident of single batches."""


class TrainingLoop:
    """Trains one task to its end; use once. Freeze what is frozen before."""

    def __init__(self, task: Task, job: JobContext, arithmetic: Arithmetic | None = None) -> None:
        recipe, request = job.recipe, job.request
        self._task, self._job, self._ranks = task, job, job.ranks
        self.calendar = Calendar.of(recipe, task.num_train)
        keep = KeepPolicy.of(request.parameters)
        self._throughput = _throughput(task, job)
        arithmetic = arithmetic or Arithmetic.of(recipe, request.execution, job.device)
        # Before anything is compiled or measured.
        recomputes = request.execution.activation_checkpointing and checkpoint_activations(task.model)
        self._learner = Learner(task.model, recipe, self.calendar, arithmetic)
        self._objective = build_objective(recipe, task.num_classes, is_multi_label=task.is_multi_label)
        losses_of = LossForward(task.model, self._objective, arithmetic.compiled)
        self._micro_batch_search = MicroBatchSearch(learner=self._learner, losses_of=losses_of, task=task, job=job)
        self._layout = self._micro_batch_search.layout()
        self._update = Update(
            self._learner,
            losses_of,
            self._layout,
            max_norm=recipe.grad_clip,
            ranks=self._ranks,
            grad_reduction=Precision(recipe.grad_reduction),
            recomputes=recomputes,
        )
        self._learning_rate = LearningRate.of(recipe, self.calendar)
        self._step_metrics = StepMetrics(job.device, self._ranks.activity)
        self._losses: dict[int, Tensor] = {}
        """By step, of updates whose readings are not there yet, and of the newest that is."""
        self._newest: Reading | None = None
        self._points = RewindPoints(recipe.rewind_steps)
        self._saver = Saver(request, job.context, self._ranks)
        own = numerics_fingerprint(
            job.device,
            num_threads=request.execution.num_threads,
            # Of rank 0, which writes the checkpoints: shares, and so passes, may differ by a unit.
            micro_batch=int(self._ranks.broadcast_(torch.tensor(self._layout.micro_batch))),
            world_size=self._ranks.world_size,
            grad_reduction=Precision(recipe.grad_reduction),
        )
        self._fingerprint = (
            joined_fingerprint(own | arithmetic.fingerprint(), self._ranks)
            | ({_NORM_GROUPS: "at once"} if self._layout.has_batchnorm else {})
            | ({_BACKWARD: "written out"} if arithmetic.is_compiled and self._layout.has_groups_at_once else {})
        )
        self._num_recalled = 0
        """Bad samples of training that earlier attempts met."""
        self._resumed_under: Fingerprint | None = None
        """That of the checkpoint from which this attempt goes on."""
        self._changes_before: Sequence[str] = ()
        """Of numerics, between earlier attempts."""
        self.state = self._first_state()
        self._resumed_at = self.state.step
        self.keeper = Keeper(keep, self.calendar, self.state.kept)
        self._clock, self._read_stats = Clock(self._ranks.activity), ReadStats(self._ranks)
        self._wants_stop = self._wants_save = False
        self.outcomes = OutcomeTally()
        """Of this attempt's newest evaluation, as this rank sees it."""
        self.compile_s = 0.0
        """Seconds that compilation took before the first update."""
        self.on_evaluation: Callable[[int, Mapping[str, float]], None] | None = None
        """Called on every rank with the step and metrics of each evaluation; may block, must change nothing."""

    @property
    def learner(self) -> Learner:
        """What is trained."""
        return self._learner

    @property
    def notes(self) -> list[str]:
        """What could not be done as asked, and changes no result."""
        return self._learner.arithmetic.notes

    @property
    def resumed_from_step(self) -> int | None:
        """Step of the checkpoint that this attempt started from; None without one."""
        return self._resumed_at or None

    @property
    def first_step_at_s(self) -> float:
        """Value of ``time.perf_counter`` when the first update began, or the evaluation with which a run goes on."""
        return self._clock.started_s

    @property
    def images_per_s(self) -> float:
        """Training throughput of this attempt, evaluation and checkpoints included; 0 without an update."""
        return self._clock.images_per_s()

    def counters(self) -> dict[str, float]:
        """Sums of this attempt for metrics, see ``Progress.counters``."""
        stats = self._task.stats()
        read = {"cache_hits", "cache_misses"} & stats.keys()
        slowest, unsaved_s = self._update.times.slowest(), self._saver.unsaved_s
        return {
            **(slowest.counters() if slowest is not None else {}),
            **({"uncompiled": 1.0} if self.notes else {}),
            **({"unsaved_s": unsaved_s} if unsaved_s else {}),
            **self._clock.counters(),
            **{name: stats[name] for name in read},
            **({"bad_samples": stats["bad_samples"] - self._num_recalled} if "bad_samples" in stats else {}),
            "data_wait_s": stats.get("wait_s", 0.0),
            "store_read_bytes": stats.get("bytes_from_store", 0.0),
            "checkpoint_stall_s": self._saver.stalled_s,
        }

    def run(self) -> RunState:
        """Train to the last step and close the metrics.

        Raises:
            PreemptedError: some rank was asked to stop; a checkpoint of the last finished step is committed.
            NumericsError: a loss or gradient is not finite, and the recipe says to stop, or says so too often.
            PeerLostError: another rank is gone.
            StorageError: a checkpoint could not be written, at most a step ago.
        """
        total, layout = self.calendar.total_steps, self._layout
        told = tell_recipe(self._job.recipe)
        _LOG.info("%s: step %d of %d, %s; %s", self._job.request.job, self.state.step, total, layout, told)
        with ExitStack() as stack:
            # Whatever ends the loop, a checkpoint that is being written is let through.
            stack.enter_context(closing(self._saver))
            stack.enter_context(self._ranks.aborted_on_error())
            train_mode(self._task.model)
            reset_gpu_peak(self._job.device)
            self.compile_s = stack.enter_context(
                self._micro_batch_search.training(layout, one_by_one=_NORM_GROUPS not in self._fingerprint)
            )
            self._compare_numerics()
            if not self.state.awaits_evaluation:  # which may show that the state is one to go back behind
                self._hold_if_due(is_first=True)
            while self.state.step < total or self.state.awaits_evaluation:
                try:
                    self._train()
                except FailedUpdateError as failed:
                    self._recover(failed.reading, failed.reason)
            self._saver.finish(self.state.step)
        return self.state

    def load_kept(self, kept: Kept) -> Checkpoint:
        """A checkpoint that the keeper kept. Raises ``StorageError`` if it is lost."""
        return self._saver.folder.load_kept(kept)

    def discard_checkpoints(self) -> None:
        """Delete the job's checkpoints; call it only after the commit."""
        self._saver.folder.delete_all()

    def _first_state(self) -> RunState:
        self._learner.share_weights(self._ranks)
        self._points.begin(self._learner.checkpoint(RunState(fingerprint=self._fingerprint)))
        checkpoint = self._saver.load()
        if checkpoint is None:
            return RunState(fingerprint=self._fingerprint)
        state = self._learner.restore(checkpoint)
        self._task.recall_bad_samples(state.bad_samples)
        self._num_recalled = len(state.bad_samples.get("train", ()))
        if _NORM_GROUPS not in state.fingerprint:
            self._fingerprint.pop(_NORM_GROUPS, None)  # a run that began with the former operation ends with it
        before = dict(state.fingerprint)
        if before.get("world_size") == self._ranks.world_size and GRAD_REDUCTION in self._fingerprint:
            before.setdefault(GRAD_REDUCTION, self._fingerprint[GRAD_REDUCTION])  # earlier versions did not write it
        state.resumed_steps.append(state.step)
        self._resumed_under, self._changes_before = before, tuple(state.fingerprint_changes)
        state.fingerprint_changes += difference(before, self._fingerprint)
        state.fingerprint = self._fingerprint
        return state

    def _compare_numerics(self) -> None:
        """Again, once it is known whether what was to be compiled is. Before the first update and its checkpoints."""
        self._fingerprint |= joined_fingerprint(self._learner.arithmetic.fingerprint(), self._ranks)
        if self.notes:
            self._fingerprint.pop(_BACKWARD, None)
        changes = [] if self._resumed_under is None else difference(self._resumed_under, self._fingerprint)
        self.state.fingerprint_changes = [*self._changes_before, *changes]
        if changes:
            _LOG.warning("resuming %s under other numerics, no longer bit-exact: %s", self._job.request.job, changes)

    def _train(self) -> None:
        """Updates up to the end, to a gap in the batches, or to one that fails."""
        state, total = self.state, self.calendar.total_steps
        if state.awaits_evaluation:
            self._finish_step()
        if state.step == total:
            return
        first = batch_of(state.step, state.rewinds)
        stop = first + steps_before_gap(state.step, total, state.rewinds)
        with closing(self._task.batches(first, stop, unit=self._layout.unit)) as batches:
            for batch in self._clock.timed(batches):
                votes = self._ask()
                self._saver.check()
                self._advance(batch, votes)
                self._after_step()

    def _finish_step(self) -> None:
        """Do what is left of a step in whose evaluation the run stopped."""
        step = self.state.step
        # What an evaluation blames that is not finite. Loss and gradients of this update were: it was applied.
        self._newest = Reading(step=step - 1, loss=0.0, num_wrong=0, grad_norm=0.0)
        self._losses[step - 1] = torch.zeros(self._layout.share)
        self._clock.begin()
        self._after_step()

    def _ask(self) -> Votes:
        """Alone, a request to stop counts at once; in a gang, once all ranks have read of it."""
        wants_stop = self._job.context.should_stop()
        if wants_stop and self._ranks.is_solo:
            self._stop()
        return Votes(stop=wants_stop, save=self._saver.wants_save(), data_wait_s=self._clock.wait_s)

    def _stop(self) -> NoReturn:
        self._take(self._step_metrics.drain())
        step = self.state.step
        self._save(WhenBusy.WAIT)
        self._saver.drain()
        # No rank leaves before the checkpoint is there: a launcher may end a gang with its first rank.
        self._ranks.barrier()
        raise PreemptedError(f"{self._job.request.job} stopped at step {step} as asked; it resumes from there")

    def _advance(self, batch: TrainInputs, votes: Votes) -> None:
        job, step, offset = self._job, self.state.step, self._layout.offset
        # Dropout masks depend on the step (and the share) alone, so that a resumed run draws the same ones without
        # stored state.
        details = (step, offset) if offset else (step,)
        seed_device(job.device, torch_seed(job.seed, job.stage, Purpose.DROPOUT, *details))
        with self._micro_batch_search.step(self._layout):
            sums = self._update(batch, self._learning_rate.at(step), votes)
            if self._learner.average is not None:
                self._learner.average.update(step + 1)
        self.state.step = step + 1
        self._losses[step] = self._update.losses_B
        self._clock.count(self._layout.batch_size)
        self._take(self._step_metrics.put(step, sums))

    def _take(self, readings: Iterable[Reading]) -> None:
        """Book what finished updates say. Raises ``FailedUpdateError``."""
        state, recipe = self.state, self._job.recipe
        for reading in readings:
            may_overflow = self._learner.arithmetic.skips_steps
            reason = reading.failure(state.norms, spike_factor=recipe.grad_spike, may_overflow=may_overflow)
            if reason:
                raise FailedUpdateError(reading, reason)
            self._losses.pop(reading.step - 1, None)
            self._newest = reading
            for tally in (state.since_line, state.in_epoch):
                tally.add(reading.loss, reading.num_wrong, self._layout.batch_size)
            state.norms.add(reading.grad_norm)
            self._update.times.take(reading.rank_times)
            self._wants_stop |= reading.wants_stop
            self._wants_save |= reading.wants_save

    def _after_step(self) -> None:
        state, calendar, step = self.state, self.calendar, self.state.step
        is_evaluated = calendar.is_evaluated(step) or self.keeper.is_listed(step)
        has_line, is_saved = calendar.has_line(step) or is_evaluated, self._is_checkpoint_due()
        if has_line or is_saved or self._points.is_due(step):
            # Only numbers that are known to be right are written down. All ranks come here at the same steps.
            self._take(self._step_metrics.drain())
        evaluated = self._evaluate_or_stop() if is_evaluated else {}
        if evaluated and self.on_evaluation is not None:
            self._judge(self.on_evaluation, step, evaluated)
        if has_line:
            self._add_line(evaluated)
        if calendar.is_epoch_end(step):
            state.latest.update(state.in_epoch.means("train"))
            state.in_epoch = Tally()
        if self.keeper.must_keep(step):
            self._save(WhenBusy.WAIT)
        elif is_saved:
            self._save(WhenBusy.SKIP)
        self._hold_if_due()
        self._report("train")
        if self._wants_stop and step < calendar.total_steps:
            self._stop()

    def _judge(
        self, judge: Callable[[int, Mapping[str, float]], None], step: int, evaluated: Mapping[str, float]
    ) -> None:
        try:
            with (
                out_of_memory_in(f"what a search measures in the evaluation at step {step}"),
                self._learner.arithmetic.uncompiled(),
            ):
                judge(step, evaluated)
        except PreemptedError:
            if step == self.calendar.total_steps:
                # The result must not be committed before the search has been told: the next attempt begins with that.
                self.state.awaits_evaluation = True
                self._stop()
            self._wants_stop = True  # what was trained is saved first; the next evaluation tells the search

    def _evaluate_or_stop(self) -> dict[str, float]:
        self.state.awaits_evaluation = True
        try:
            evaluated = self._evaluate()
        except PreemptedError:  # on all ranks
            self._stop()
        self.state.awaits_evaluation = False
        return evaluated

    def _evaluate(self) -> dict[str, float]:
        self._report("evaluate")
        state, task, arithmetic = self.state, self._task, self._learner.arithmetic
        self.outcomes = OutcomeTally()
        with (
            out_of_memory_in(f"the evaluation at step {state.step}"),
            self._learner.averaged(),
            arithmetic.uncompiled(),
            arithmetic.autocast(),
        ):
            metrics = evaluate(
                task.model,
                task.eval_batches(),
                task.subset_names,
                objective=self._objective,
                levels=task.levels,
                ranks=self._ranks,
                tally=self.outcomes,
            )
        if not all(math.isfinite(value) for value in metrics.values()):
            if self._job.recipe.rewind_steps is not None and self._newest is not None:
                # Its loss and gradient were measured before it was applied: only this shows what it did to the weights.
                wrong = ", ".join(f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value))
                raise FailedUpdateError(self._newest, f"the evaluation after the update gives {wrong}")
            message = f"evaluation at step {state.step} gives {metrics}; lower recipe.lr or clip gradients"
            raise NumericsError(message, state.step)
        state.latest.update(metrics)
        if not state.peak_epoch or metrics["val_error"] < state.best_val_error:
            state.best_val_error, state.peak_epoch = metrics["val_error"], self.calendar.epoch(state.step)
        self.keeper.after_evaluation(state.step, metrics)
        state.kept = self.keeper.to_json()
        return metrics

    def _add_line(self, evaluated: dict[str, float]) -> None:
        state = self.state
        calendar, lap = self.calendar, self._clock.lap()
        reads = self._read_stats.lap(self._task.stats(), ends_epoch=calendar.is_epoch_end(state.step))
        images_per_s = lap.get("images_per_s", 0.0) / self._ranks.world_size
        used = usage(self._throughput if lap else None, self._job.device, images_per_s)
        measured = {"lr": self._learning_rate.at(state.step - 1)} | state.norms.take_line() | lap | reads | used
        epoch, metrics = calendar.epoch(state.step), state.since_line.means("train") | measured | evaluated
        state.since_line = Tally()
        if self._ranks.is_first:
            self._saver.add_line(state.step, epoch, metrics)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            _LOG.info("step %d  epoch %.2f  %s", state.step, epoch, shown)

    def _is_checkpoint_due(self) -> bool:
        execution, calendar, step = self._job.request.execution, self.calendar, self.state.step
        if not self._saver.is_timed:
            return calendar.has_checkpoint(step, execution.checkpoint_every_steps, execution.checkpoint_every_epochs)
        # Rank 0's clock decides, and every rank has read its decision.
        return self._wants_save and step < calendar.total_steps

    def _save(self, when_busy: WhenBusy) -> None:
        self._wants_save = False
        bad_samples = self._task.bad_samples()  # on all ranks, of which only the first has room for a checkpoint
        if self._saver.has_room(self.state, when_busy):
            self.state.bad_samples = bad_samples
            self._saver.save(self._learner.checkpoint(self.state), self._points.kept_steps())

    def _hold_if_due(self, *, is_first: bool = False) -> None:
        if self._points.is_due(self.state.step) or (is_first and self._job.recipe.rewind_steps):
            self._points.hold(self._learner.checkpoint(self.state))

    def _recover(self, reading: Reading, reason: str) -> None:
        """Go back behind a failed update and leave out what led to it, if the recipe says so."""
        state, step = self.state, reading.step
        batch, losses_B = batch_of(step, state.rewinds), self._losses[step]
        samples = failed_samples(self._task, batch, losses_B, self._layout, self._ranks)
        self._step_metrics.clear()
        message = failure_message(self._job.request.job, step, reason, samples)
        rank = rank_at_fault(losses_B, self._ranks)
        if self._job.recipe.rewind_steps is None or len(state.rewinds) >= _MOST_REWINDS:
            raise NumericsError(message, step, rank)
        to_step = self._points.target(step)
        checkpoint = self._points.find(to_step) or self._saver.load_at_most(to_step) or self._points.replayed(to_step)
        # Of a run that was resumed within an evaluation, no state is held.
        checkpoint = checkpoint or self._saver.load_at_most(step)
        if checkpoint is None:
            raise NumericsError(message, step, rank)
        to_step = max(to_step, checkpoint.step)
        rewind = rewind_to(to_step, step, state.rewinds, reason=reason, samples=samples)
        _LOG.warning("%s; back to step %d, without batches %d to %d", message, to_step, rewind.first_batch, rewind.end)
        self._go_back(checkpoint, [*state.rewinds, rewind])

    def _go_back(self, checkpoint: Checkpoint, rewinds: list[Rewind]) -> None:
        before, self.state = self.state, self._learner.restore(checkpoint)
        state = self.state
        state.rewinds, state.resumed_steps = rewinds, before.resumed_steps
        state.fingerprint, state.fingerprint_changes = before.fingerprint, before.fingerprint_changes
        self.keeper.restore(state.kept)
        self._losses.clear()
        self._points.forget_after(state.step)
        state.bad_samples = self._task.bad_samples()
        self._saver.go_back(self._learner.checkpoint(state), self._points.kept_steps())
        self._hold_if_due()

    def _report(self, phase: str) -> None:
        if self._ranks.is_first and self._clock.is_report_due(phase):
            state = self.state
            read = {**self._task.stats(), **self._read_stats.of_last_epoch}
            metrics = {**read, **state.latest, **state.in_epoch.means("train")}
            if state.rewinds:
                metrics["num_rewinds"] = len(state.rewinds)
            total, step_s = self.calendar.total_steps, self._clock.step_s()
            progress = Progress(
                phase=phase,
                step=state.step,
                total_steps=total,
                metrics=metrics,
                images_per_s=self._clock.images_per_s() if step_s else 0.0,
                step_s=step_s,
                eta_s=step_s * (total - state.step),
                counters=self.counters(),
            )
            self._job.context.report(progress)


def _throughput(task: Task, job: JobContext) -> Throughput | None:
    """None where not the whole network learns: an image is then less than three forward passes, or none at all."""
    recipe = job.recipe
    if not task.is_backbone_trained or recipe.freeze:
        return None
    precision = Precision(recipe.precision)
    return Throughput.of(job.model, job.device, precision, tf32=recipe.tf32, num_classes=task.num_classes)
