"""The one place that talks to MLflow: few, bulk calls, and every failure a ``TrackingError``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from orchestrator.tracking.errors import RunGoneError, TrackingError
from orchestrator.tracking.facts import RunFacts

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
    # The publisher has its own retries; MLflow's defaults (7 retries of 120 s) would hide an outage for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_MAX_METRICS_PER_CALL = 1000
_MAX_LABELS_PER_CALL = 100
"""Parameters or tags; with them a call may hold 1000 entities in all."""
_SEARCH_PAGE = 1000
_DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One value of a run's metric history."""

    name: str
    value: float
    step: int
    at_s: float


class TrackingServer:
    """An MLflow tracking URI: ``http(s)://...`` or ``sqlite:///...``. Connects on first use."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._connected: MlflowClient | None = None

    def ensure_experiment(self, name: str) -> str:
        """Id of the experiment with this name, made if there is none."""
        with self._failures_named(f"finding the experiment {name!r}"):
            found = self._client.get_experiment_by_name(name)
            if found is None:
                return self._create_experiment(name)
        if found.lifecycle_stage == _DELETED:
            message = (
                f"the MLflow experiment {name!r} is deleted, and MLflow keeps its name; restore it, purge it with "
            )
            raise TrackingError(message + "`mlflow gc`, or give the sweep another tracking experiment")
        return str(found.experiment_id)

    def find_runs(self, experiment_id: str, sweep: str) -> list[tuple[str, str, str]]:
        """(job, key, run id) of the sweep's runs that are not deleted, oldest first."""
        runs: list[Run] = []
        token: str | None = None
        with self._failures_named(f"searching the runs of sweep {sweep}"):
            while True:
                page = self._client.search_runs(
                    [experiment_id],
                    f"tags.sweep = '{sweep}'",
                    max_results=_SEARCH_PAGE,
                    order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
                    page_token=token,
                )
                runs += page
                token = page.token
                if not token:
                    break
        return [(run.data.tags.get("job", ""), run.data.tags.get("key", ""), run.info.run_id) for run in runs]

    def create_run(self, experiment_id: str, facts: RunFacts, name: str, tags: Mapping[str, str]) -> str:
        """Make a run that can be found by its tags from its first moment on; returns its id."""
        with self._failures_named(f"creating the run of {facts.job}"):
            run = self._client.create_run(
                experiment_id, start_time=_milliseconds(facts.start_s), tags={**facts.tags, **tags}, run_name=name
            )
        return str(run.info.run_id)

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted."""
        from mlflow.exceptions import MlflowException

        with self._failures_named(f"reading run {run_id}"):
            try:
                return bool(self._client.get_run(run_id).info.lifecycle_stage != _DELETED)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise

    def log(
        self, run_id: str, *, points: Sequence[MetricPoint], params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        """Add metrics, parameters and tags to a run; saying the same twice changes nothing."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(point.name, point.value, _milliseconds(point.at_s), point.step) for point in points]
        labels = iter([*(Param(*item) for item in params.items()), *(RunTag(*item) for item in tags.items())])
        with self._failures_named("logging", run_id):
            while chunk := list(islice(labels, _MAX_LABELS_PER_CALL)):
                first, metrics = _split(metrics, _MAX_METRICS_PER_CALL - len(chunk))
                self._client.log_batch(
                    run_id,
                    metrics=first,
                    params=[label for label in chunk if isinstance(label, Param)],
                    tags=[label for label in chunk if isinstance(label, RunTag)],
                    synchronous=True,
                )
            while metrics:
                first, metrics = _split(metrics, _MAX_METRICS_PER_CALL)
                self._client.log_batch(run_id, metrics=first, synchronous=True)

    def set_status(self, run_id: str, facts: RunFacts) -> None:
        """Give a run its status and, if that is final, its end."""
        with self._failures_named("setting the status", run_id):
            if facts.end_s is None:
                self._client.update_run(run_id, status=facts.status.value)
            else:
                self._client.set_terminated(run_id, facts.status.value, end_time=_milliseconds(facts.end_s))

    def delete_run(self, run_id: str) -> None:
        """Mark a run deleted; one that is gone already is success."""
        if self.is_active(run_id):
            with self._failures_named(f"deleting run {run_id}"):
                self._client.delete_run(run_id)

    def attach(self, run_id: str, folder: Path) -> None:
        """Attach all files of a folder to a run."""
        with self._failures_named("attaching files", run_id):
            self._client.log_artifacts(run_id, str(folder))

    @property
    def _client(self) -> MlflowClient:
        if self._connected is None:
            for name, value in _QUIET.items():
                os.environ.setdefault(name, value)
            logging.getLogger("alembic").setLevel(logging.WARNING)
            from mlflow import MlflowClient  # 4 s

            if database := _sqlite_path(self.uri):
                database.parent.mkdir(parents=True, exist_ok=True)
            self._connected = MlflowClient(tracking_uri=self.uri)
        return self._connected

    def _create_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(name, artifact_location=_artifact_location(self.uri, name)))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self.ensure_experiment(name)  # another publisher was first

    @contextmanager
    def _failures_named(self, action: str, run_id: str = "") -> Iterator[None]:
        """Turn whatever MLflow, HTTP or SQL raises into a ``TrackingError`` that names the action."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            if not _comes_from_server(error):
                raise
            if run_id and _is_refusal(error) and not self.is_active(run_id):
                message = f"run {run_id} was deleted on the tracking server while it was being published"
                raise RunGoneError(message) from error
            host = urlsplit(self.uri).hostname or self.uri  # never the URI with its password
            message = (
                f"{action} on MLflow ({host}) failed: {error}; nothing is lost, it is published once MLflow answers"
            )
            raise TrackingError(message) from error


def _comes_from_server(error: Exception) -> bool:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError | OSError)


def _is_refusal(error: Exception) -> bool:
    """Whether the server answered and said no, which is worth a second look; an outage is not."""
    return getattr(error, "error_code", "") in {
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "RESOURCE_DOES_NOT_EXIST",
        "BAD_REQUEST",
    }


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Next to a sqlite database (MLflow's own default is the working directory); a server knows its own place."""
    database = _sqlite_path(uri)
    return None if database is None else (database.parent / "mlflow-artifacts" / quote(experiment, safe="")).as_uri()


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _milliseconds(at_s: float) -> int:
    return round(1000 * at_s)


def _split(metrics: list[Metric], count: int) -> tuple[list[Metric], list[Metric]]:
    return metrics[:count], metrics[count:]
