"""Tells a search, at the rungs that it asked for, how good a training is so far. Changes no bit of the training."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from orchestrator.core.contract import Evaluation, Watch
from workloads.train.schedule import Calendar

Metrics = Mapping[str, float]


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
        return self._subject.epochs if is_last else float(bisect_left(calendar.epoch_ends, step) + 1)
