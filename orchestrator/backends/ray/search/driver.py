"""Runs one attempt at a search as a Ray Tune job: this process drives it, and each trial has its own actor.

Ray Tune places the trials and reports how they end. It makes no decisions, no retries and keeps no state: the study
chooses trials, stops them and records results, in a log that outlives this process.
"""

from __future__ import annotations

import os
import threading
import time

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.gang.mailbox import GangHome
from orchestrator.backends.ray.search.mailbox import TrialMailbox
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Outcome
from orchestrator.core.errors import PreemptedError
from orchestrator.search.outcome import commit_search
from orchestrator.search.study import Study
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no files of Tune: the store has everything
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # no pickles of its state
    "TUNE_DISABLE_AUTO_INIT": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_THRESHOLD_S": "10",  # a decision waits for the store
}


def run_search(
    request: JobRequest, mailbox: TrialMailbox, settings: RunnerSettings, home: GangHome, stop: threading.Event
) -> JobResult | JobFailure:
    """Run an attempt to its end; blocks. ``stop`` asks it to end; it then asks its trials to end."""
    store = open_store(request.store_uri)
    try:
        return _run(request, mailbox, settings, home, stop, store=store)
    except Exception as error:  # noqa: BLE001 - whatever ends an attempt is a value
        return failure_from(error, request)


def _run(
    request: JobRequest,
    mailbox: TrialMailbox,
    settings: RunnerSettings,
    home: GangHome,
    stop: threading.Event,
    *,
    store: ObjectStore,
) -> JobResult:
    if is_committed(store, request.key):
        record = read_record(store, request.key, identity=request.identity)
        return JobResult(
            attempt_id=request.attempt_id, key=request.key, outcome=Outcome.ALREADY_COMMITTED, metrics=record.metrics
        )
    study = Study(request, store, time.time)
    if not study.is_over:
        os.environ.update(_ENVIRONMENT)
        from orchestrator.backends.ray.search.tune import tune  # imports ray.tune, which takes seconds

        tune(study, mailbox, settings, home, stop)
    if stop.is_set() and not study.is_over:
        raise PreemptedError(f"{request.job} was asked to stop; it goes on from its log when it runs again")
    return commit_search(study, request, store, time.time())
