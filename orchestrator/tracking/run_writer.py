"""Writes runs through MLflow's client, several at once.

A run that is made and ends takes three requests (make it, parameters and values, its end), one more if it names data
sets, and one more for every further 1,000 values; a run that changes with a later revision is read first. No request is
repeated here: one without an answer may have had its effect. ``Publication`` finds out by the tags of the runs,
parameters are written only where they are missing, and MLflow drops values that a run has already (same name, step,
time and value).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from orchestrator.tracking.draft import PARENT_TAG, STORE_TAG, DatasetUse, FoundRun, RunDraft, milliseconds
from orchestrator.tracking.facts import factors_in

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Param, Run, RunTag


_MAX_METRICS_PER_CALL = 1000
_MAX_LABELS_PER_CALL = 100
"""Parameters or tags; with them a call may hold 1000 entities in all."""
_SEARCH_PAGE = 1000
_MAX_WAITING = 64
"""At most this many drafts wait for their answer to be taken: one long run can hold up that many others."""
_MAX_NAME = 250
"""Characters of a run's name: the width of the column in PostgreSQL."""
_NO_END = 0
"""An end time that MLflow reads as no end; its client cannot remove one."""

INVALID = "INVALID_PARAMETER_VALUE"
"""MLflow's error code for what it refuses whenever it is asked."""
_ABSENT = "RESOURCE_DOES_NOT_EXIST"
_DATABASE_REFUSAL = "BAD_REQUEST"
"""MLflow's error code for a write that the database refused; another writer at the same moment causes it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRun:
    """A run that MLflow does not take as it is: it refuses a name or a value."""

    run_id: str
    """Of the run, which is incomplete; empty if it was not made."""
    error: Exception


class RunWriter:
    """Writes runs by ``MlflowClient``. Each call may be repeated after a failure.

    ``num_threads``: runs at once. ``log_batch`` takes two of the fifteen connections that a process of MLflow's server
    has to its database: fifteen calls that have one each would wait for each other.
    """

    def __init__(self, client: MlflowClient, *, num_threads: int) -> None:
        self._client = client
        self._num_threads = num_threads

    def find_runs(self, experiment_id: str, sweep: str) -> list[FoundRun]:
        """The sweep's runs that are not deleted, oldest first."""
        found: list[FoundRun] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [experiment_id],
                f"tags.sweep = '{sweep}'",
                max_results=_SEARCH_PAGE,
                order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
                page_token=token,
            )
            found += [_found(run) for run in page]
            token = page.token
            if not token:
                return found

    def write(
        self, experiment_id: str, drafts: Iterable[RunDraft | None]
    ) -> Generator[tuple[RunDraft, Future[str | RefusedRun]], None, None]:
        """Write drafts; yields each, in order, with a future of its run id, which is empty where the run was deleted.

        A run that is refused does not keep the others.

        ``drafts`` are taken one by one while others are written. A None means: wait until all drafts before it are
        written and taken. An error of ``drafts`` is raised behind the drafts before it. Closing this generator drops
        what has not begun, and waits for the rest.
        """
        waiting = deque[tuple[RunDraft, Future[str | RefusedRun]]]()
        with ThreadPoolExecutor(max_workers=self._num_threads, thread_name_prefix="mlflow") as threads:
            try:
                for draft in drafts:
                    if draft is not None:
                        waiting.append((draft, threads.submit(self._write_or_miss, experiment_id, draft)))
                    while len(waiting) > (_MAX_WAITING if draft is not None else 0):
                        yield waiting.popleft()
                while waiting:
                    yield waiting.popleft()
            except Exception:
                while waiting:
                    yield waiting.popleft()
                raise
            finally:
                for _, answer in waiting:
                    answer.cancel()

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted."""
        run = self._get(run_id)
        return run is not None and bool(run.info.lifecycle_stage == "active")

    def find_run(self, run_id: str) -> FoundRun | None:
        """A run by its id, a deleted one included; None if there is none."""
        run = self._get(run_id)
        return None if run is None else _found(run)

    def _get(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == _ABSENT:
                return None
            raise

    def _write_or_miss(self, experiment_id: str, draft: RunDraft) -> str | RefusedRun:
        from mlflow.exceptions import MlflowException

        run_id = draft.run_id
        try:
            run_id = run_id or self._create(experiment_id, draft)
            self._fill(run_id, draft)
        except MlflowException as error:
            if run_id and _is_refusal(error) and not self.is_active(run_id):
                return ""
            if error.error_code == INVALID:
                return RefusedRun(run_id=run_id, error=error)
            raise
        return run_id

    def _fill(self, run_id: str, draft: RunDraft) -> None:
        self._log(run_id, draft, is_new=not draft.run_id)
        if draft.datasets:
            self._log_datasets(run_id, draft.datasets)
        self._end(run_id, draft)

    def _create(self, experiment_id: str, draft: RunDraft) -> str:
        """Make a run that can be found by its tags from its first moment on."""
        start_ms, name = milliseconds(draft.facts.start_s), draft.name[:_MAX_NAME]
        run = self._client.create_run(experiment_id, start_time=start_ms, tags=draft.all_tags, run_name=name)
        return str(run.info.run_id)

    def _log(self, run_id: str, draft: RunDraft, *, is_new: bool) -> None:
        from mlflow.entities import Metric, Param, RunTag

        # A run of a job that the plan no longer has keeps its tags.
        may_lose_tags = draft.is_revised and not (is_new or draft.only_points or draft.facts.is_superseded)
        is_bare = is_new or draft.is_bare
        known = self._client.get_run(run_id).data if may_lose_tags or (draft.params and not is_bare) else None
        params = [Param(*item) for item in draft.params.items() if known is None or item[0] not in known.params]
        tags = [] if is_new or draft.only_points else [RunTag(*item) for item in draft.all_tags.items()]
        points = [Metric(point.name, point.value, milliseconds(point.at_s), point.step) for point in draft.points]
        for name in factors_in(known.tags) if known is not None and may_lose_tags else ():
            if name not in draft.all_tags:
                self._client.delete_tag(run_id, name)
        for metrics, labels in _calls(points, [*params, *tags]):
            self._client.log_batch(
                run_id,
                metrics=metrics,
                params=[label for label in labels if isinstance(label, Param)],
                tags=[label for label in labels if isinstance(label, RunTag)],
                synchronous=True,
            )

    def _log_datasets(self, run_id: str, uses: Sequence[DatasetUse]) -> None:
        """Name what the run read; MLflow refuses a data set that is named elsewhere between its look and its write.

        Each refusal of that kind means that one more of them is known, so there are at most as many as data sets.
        """
        from mlflow.exceptions import MlflowException

        inputs = [_dataset_input(use) for use in uses]
        for num_left in reversed(range(1 + len(uses))):
            try:
                self._client.log_inputs(run_id, datasets=inputs)
            except MlflowException as error:
                if error.error_code != _DATABASE_REFUSAL or not num_left:
                    raise
            else:
                return

    def _end(self, run_id: str, draft: RunDraft) -> None:
        from mlflow.entities import RunStatus

        facts = draft.facts
        is_bare = not draft.run_id or draft.is_bare
        if facts.keeps_ending or draft.only_points or (is_bare and facts.status.value == "RUNNING"):
            return  # as it is there, or as MLflow makes them
        end_ms = _NO_END if facts.end_s is None else milliseconds(facts.end_s)
        # The client's own methods cannot take an end back.
        store = self._client._tracking_client.store  # noqa: SLF001
        store.update_run_info(run_id, RunStatus.from_string(facts.status.value), end_ms, None)


def _found(run: Run) -> FoundRun:
    tags = run.data.tags
    return FoundRun(
        job=tags.get("job", ""),
        key=tags.get("key", ""),
        run_id=run.info.run_id,
        parent_run_id=tags.get(PARENT_TAG, ""),
        status=run.info.status,
        attempts=tags.get("attempts", ""),
        store=tags.get(STORE_TAG, "") or run.data.params.get(STORE_TAG, ""),
    )


def _calls(
    metrics: Sequence[Metric], labels: Sequence[Param | RunTag]
) -> Iterator[tuple[list[Metric], list[Param | RunTag]]]:
    """Batches within MLflow's limits, as few as possible."""
    rest, left = iter(metrics), iter(labels)
    while True:
        some = list(islice(left, _MAX_LABELS_PER_CALL))
        first = list(islice(rest, _MAX_METRICS_PER_CALL - len(some)))
        if not some and not first:
            return
        yield first, some


def _dataset_input(use: DatasetUse) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput

    dataset = Dataset(
        name=use.name,
        digest=use.short_digest,
        source_type=use.source_type,
        source=use.source_json,
        profile=use.profile_json,
    )
    return DatasetInput(dataset=dataset, tags=[])


def _is_refusal(error: Exception) -> bool:
    """Whether the server refused the request; an outage is not a refusal."""
    return getattr(error, "error_code", "") in {INVALID, "INVALID_STATE", _ABSENT, _DATABASE_REFUSAL}
