"""Two ways to write runs: through the interface of MLflow, or straight into the tables of its database.

MLflow's own interface writes one run per call, in several transactions, over HTTP several runs at once. Where its
database can be reached, the rows that those calls would write are written here, many runs in one transaction. The rows
of such a batch equal those of MLflow (a test compares the tables), and a batch is written completely or not at all. The
tables are written only where ``known_tables`` finds them to be exactly those that this module knows.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any

from orchestrator.tracking.draft import DatasetUse, Experiment, MetricPoint, RunDraft, milliseconds

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Param, RunTag
    from sqlalchemy import Connection, Engine, Table


_MAX_METRICS_PER_CALL = 1000
_MAX_LABELS_PER_CALL = 100
"""Parameters or tags; with them a call may hold 1000 entities in all."""
_SEARCH_PAGE = 1000
_NO_END = 0
"""As an end time: over HTTP there is no other way to take one back, and MLflow reads 0 as no end."""

_DATABASE_REFUSAL = "BAD_REQUEST"
"""As an error code: what the database says no to, which is not always the caller's fault."""
Row = dict[str, Any]
_BUSY_TIMEOUT_MS = 20_000
"""How long a SQLite connection waits for another writer; MLflow's own figure."""
_MAX_NAME_CHARACTERS = 250
DIALECTS = ("sqlite", "postgresql")
"""Databases whose INSERT ... ON CONFLICT this module writes."""
COLUMNS = {
    "runs": "run_uuid name source_type source_name entry_point_name user_id status start_time end_time deleted_time "
    "source_version lifecycle_stage artifact_uri experiment_id",
    "tags": "key value run_uuid",
    "params": "key value run_uuid",
    "metrics": "key value timestamp step is_nan run_uuid",
    "latest_metrics": "key value timestamp step is_nan run_uuid",
    "datasets": "dataset_uuid experiment_id name digest dataset_source_type dataset_source dataset_schema "
    "dataset_profile",
    "inputs": "input_uuid source_type source_id destination_type destination_id step",
    "input_tags": "input_uuid name value",
}
"""The columns that these tables have in the releases of MLflow that this module was tested with."""


class OneByOneWriter:
    """Writes runs by ``MlflowClient``. Each call may be repeated after a failure."""

    def __init__(self, client: MlflowClient, *, num_threads: int) -> None:
        self._client = client
        self._num_threads = num_threads

    def find_runs(self, experiment_id: str, sweep: str) -> list[tuple[str, str, str]]:
        """(job, key, run id) of the sweep's runs that are not deleted, oldest first."""
        found: list[tuple[str, str, str]] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [experiment_id],
                f"tags.sweep = '{sweep}'",
                max_results=_SEARCH_PAGE,
                order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
                page_token=token,
            )
            found += [(run.data.tags.get("job", ""), run.data.tags.get("key", ""), run.info.run_id) for run in page]
            token = page.token
            if not token:
                return found

    def write(self, experiment_id: str, drafts: Sequence[RunDraft]) -> Iterator[str]:
        """Write each draft; yields its run id, or nothing but an empty string where the run was deleted meanwhile."""
        with ThreadPoolExecutor(max_workers=self._num_threads, thread_name_prefix="mlflow") as threads:
            yield from threads.map(lambda draft: self._write_or_miss(experiment_id, draft), drafts)

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _write_or_miss(self, experiment_id: str, draft: RunDraft) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._write(experiment_id, draft)
        except MlflowException as error:
            if draft.run_id and _is_refusal(error) and not self.is_active(draft.run_id):
                return ""
            raise

    def _write(self, experiment_id: str, draft: RunDraft) -> str:
        run_id = draft.run_id or self._create(experiment_id, draft)
        self._log(run_id, draft, is_new=not draft.run_id)
        if draft.datasets:
            self._log_datasets(run_id, draft.datasets)
        self._end(run_id, draft)
        return run_id

    def _create(self, experiment_id: str, draft: RunDraft) -> str:
        """Make a run that can be found by its tags from its first moment on."""
        start_ms = milliseconds(draft.facts.start_s)
        run = self._client.create_run(experiment_id, start_time=start_ms, tags=draft.all_tags, run_name=draft.name)
        return str(run.info.run_id)

    def _log(self, run_id: str, draft: RunDraft, *, is_new: bool) -> None:
        from mlflow.entities import Metric, Param, RunTag

        known = {} if is_new or not draft.params else self._client.get_run(run_id).data.params
        params = [Param(*item) for item in draft.params.items() if item[0] not in known]
        tags = [] if is_new else [RunTag(*item) for item in draft.all_tags.items()]
        points = [Metric(point.name, point.value, milliseconds(point.at_s), point.step) for point in draft.points]
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
        if facts.keeps_ending or (not draft.run_id and facts.status.value == "RUNNING"):
            return  # as it is there, or as MLflow makes them
        end_ms = _NO_END if facts.end_s is None else milliseconds(facts.end_s)
        # The client's own methods cannot take an end back.
        store = self._client._tracking_client.store  # noqa: SLF001
        store.update_run_info(run_id, RunStatus.from_string(facts.status.value), end_ms, None)


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
    """Whether the server answered and said no, which is worth a second look; an outage is not."""
    return getattr(error, "error_code", "") in {
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "RESOURCE_DOES_NOT_EXIST",
        _DATABASE_REFUSAL,
    }


def known_tables() -> dict[str, Table] | None:
    """MLflow's tables; None if the installed release has other columns in them than this module knows."""
    import mlflow.store.tracking.dbmodels.models  # noqa: F401 - fills in the tables
    from mlflow.store.db.base_sql_model import Base

    tables: Mapping[str, Table] = Base.metadata.tables
    for name, columns in COLUMNS.items():
        if name not in tables or {column.name for column in tables[name].columns} != set(columns.split()):
            return None
    return {name: tables[name] for name in COLUMNS}


class BulkWriter:
    """Writes batches of runs into one database. Safe beside MLflow servers and other publishers on the same one."""

    def __init__(self, engine: Engine, tables: Mapping[str, Table]) -> None:
        self._engine = engine
        self._tables = tables

    def find_runs(self, experiment_id: str, sweep: str) -> list[tuple[str, str, str]]:
        """(job, key, run id) of the sweep's runs that are not deleted, oldest first."""
        from sqlalchemy import and_, select

        runs, tags = self._tables["runs"], self._tables["tags"]
        found, job, key = (tags.alias(name) for name in ("found", "job", "key"))
        query = (
            select(job.c.value, key.c.value, runs.c.run_uuid)
            .join(found, and_(found.c.run_uuid == runs.c.run_uuid, found.c.key == "sweep", found.c.value == sweep))
            .join(job, and_(job.c.run_uuid == runs.c.run_uuid, job.c.key == "job"))
            .join(key, and_(key.c.run_uuid == runs.c.run_uuid, key.c.key == "key"))
            .where(runs.c.experiment_id == int(experiment_id), runs.c.lifecycle_stage == "active")
            .order_by(runs.c.start_time, runs.c.run_uuid)
        )
        with self._engine.connect() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(query)]

    def write(self, experiment: Experiment, drafts: Sequence[RunDraft]) -> list[str]:
        """Write a batch; returns the run id of each draft, empty where the run was deleted meanwhile."""
        ids = [draft.run_id or _new_run_id() for draft in drafts]
        with self._transaction() as connection:
            absent = self._absent(connection, [draft.run_id for draft in drafts if draft.run_id])
            kept = [(run_id, draft) for run_id, draft in zip(ids, drafts, strict=True) if run_id not in absent]
            self._write_runs(connection, experiment, kept)
            self._ignore(connection, "params", _params(kept))
            self._write_metrics(connection, kept)
            self._write_datasets(connection, experiment, kept)
            self._overwrite(connection, "tags", _tags(kept), ["value"])
        return ["" if run_id in absent else run_id for run_id in ids]

    # ------------------------------------------------------------------------------------------------------------ runs
    def _absent(self, connection: Connection, run_ids: list[str]) -> set[str]:
        """Which runs are deleted; the others cannot be before the transaction ends."""
        from sqlalchemy import select

        runs = self._tables["runs"]
        query = (
            select(runs.c.run_uuid)
            .where(runs.c.run_uuid.in_(run_ids), runs.c.lifecycle_stage == "active")
            .order_by(runs.c.run_uuid)  # one order for all writers: no deadlocks
            .with_for_update()
        )
        return set(run_ids) - set(connection.execute(query).scalars())

    def _write_runs(
        self, connection: Connection, experiment: Experiment, drafts: Sequence[tuple[str, RunDraft]]
    ) -> None:
        from sqlalchemy import bindparam

        runs = self._tables["runs"]
        rows = [_run_row(experiment, run_id, draft) for run_id, draft in drafts if not draft.run_id]
        if rows:
            connection.execute(runs.insert(), rows)
        ending = [(run_id, draft) for run_id, draft in drafts if draft.run_id and not draft.facts.keeps_ending]
        known = [{"known": run_id, **_ending(draft)} for run_id, draft in ending]
        if known:
            connection.execute(runs.update().where(runs.c.run_uuid == bindparam("known")), known)

    # --------------------------------------------------------------------------------------------------------- metrics
    def _write_metrics(self, connection: Connection, drafts: Sequence[tuple[str, RunDraft]]) -> None:
        from sqlalchemy import tuple_

        rows = [_metric_row(run_id, point) for run_id, draft in drafts for point in draft.points]
        self._ignore(connection, "metrics", rows)
        latest: dict[tuple[str, str], Row] = {}
        for row in rows:
            place = (row["run_uuid"], row["key"])
            if place not in latest or _age(row) > _age(latest[place]):
                latest[place] = row
        table = self._tables["latest_metrics"]
        insert = self._insert("latest_metrics")
        offered, order = insert.excluded, ("step", "timestamp", "value")
        newer = tuple_(*(offered[name] for name in order)) > tuple_(*(table.c[name] for name in order))
        self._overwrite(connection, "latest_metrics", latest.values(), [*order, "is_nan"], where=newer)

    # -------------------------------------------------------------------------------------------------------- data sets
    def _write_datasets(
        self, connection: Connection, experiment: Experiment, drafts: Sequence[tuple[str, RunDraft]]
    ) -> None:
        from sqlalchemy import select

        uses = {(use.name, use.short_digest): use for _, draft in drafts for use in draft.datasets}
        if not uses:
            return
        number = int(experiment.experiment_id)
        self._ignore(
            connection,
            "datasets",
            [
                {
                    "dataset_uuid": secrets.token_hex(16),
                    "experiment_id": number,
                    "name": name,
                    "digest": digest,
                    "dataset_source_type": use.source_type,
                    "dataset_source": use.source_json,
                    "dataset_schema": None,
                    "dataset_profile": use.profile_json,
                }
                for (name, digest), use in uses.items()
            ],
        )
        table = self._tables["datasets"]
        query = select(table.c.name, table.c.digest, table.c.dataset_uuid).where(table.c.experiment_id == number)
        ids = {(row[0], row[1]): row[2] for row in connection.execute(query)}
        rows = [
            _input_row(ids[use.name, use.short_digest], run_id) for run_id, draft in drafts for use in draft.datasets
        ]
        self._ignore(connection, "inputs", rows)

    # ------------------------------------------------------------------------------------------------------------- SQL
    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
                connection.commit()
                # The write lock first: a reader that becomes a writer later fails at once if another one wrote.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    def _insert(self, table: str) -> Any:  # noqa: ANN401 - of one class per dialect
        from sqlalchemy.dialects import postgresql, sqlite

        dialect = sqlite if self._engine.dialect.name == "sqlite" else postgresql
        return dialect.insert(self._tables[table])

    def _ignore(self, connection: Connection, table: str, rows: Iterable[Row]) -> None:
        """Insert the rows whose primary key is not there yet."""
        if found := list(rows):
            connection.execute(self._insert(table).on_conflict_do_nothing(), found)

    def _overwrite(
        self,
        connection: Connection,
        table: str,
        rows: Iterable[Row],
        columns: Sequence[str],
        where: Any = None,  # noqa: ANN401 - a condition of SQLAlchemy
    ) -> None:
        """Insert rows; where the primary key is there already, give these columns their new values."""
        if found := list(rows):
            insert = self._insert(table)
            keys = [column.name for column in self._tables[table].primary_key]
            values = {name: insert.excluded[name] for name in columns}
            connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=values, where=where), found)


def _new_run_id() -> str:
    """32 hexadecimal digits like MLflow's own, beginning with the time as a UUID of version 7 does (RFC 9562).

    Ids that grow land at the end of every index: with random ones the same 10,000 runs took more than twice as long.
    """
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _run_row(experiment: Experiment, run_id: str, draft: RunDraft) -> Row:
    return {
        "run_uuid": run_id,
        "name": draft.name[:_MAX_NAME_CHARACTERS],
        "source_type": "UNKNOWN",
        "source_name": "",
        "entry_point_name": "",
        "user_id": draft.all_tags.get("mlflow.user", "unknown"),
        "start_time": milliseconds(draft.facts.start_s),
        "deleted_time": None,
        "source_version": "",
        "lifecycle_stage": "active",
        "artifact_uri": f"{experiment.artifact_location.rstrip('/')}/{run_id}/artifacts",
        "experiment_id": int(experiment.experiment_id),
        **_ending(draft),
    }


def _ending(draft: RunDraft) -> Row:
    end_s = draft.facts.end_s
    return {"status": draft.facts.status.value, "end_time": None if end_s is None else milliseconds(end_s)}


def _params(drafts: Sequence[tuple[str, RunDraft]]) -> Iterator[Row]:
    for run_id, draft in drafts:
        for name, value in draft.params.items():
            yield {"run_uuid": run_id, "key": name, "value": value}


def _tags(drafts: Sequence[tuple[str, RunDraft]]) -> Iterator[Row]:
    for run_id, draft in drafts:
        named = {} if draft.run_id else {"mlflow.runName": draft.name[:_MAX_NAME_CHARACTERS]}
        for name, value in {**draft.all_tags, **named}.items():
            yield {"run_uuid": run_id, "key": name, "value": value}


def _metric_row(run_id: str, point: MetricPoint) -> Row:
    return {
        "run_uuid": run_id,
        "key": point.name,
        "value": point.value,
        "timestamp": milliseconds(point.at_s),
        "step": point.step,
        "is_nan": False,
    }


def _age(row: Row) -> tuple[int, int, float]:
    """What MLflow orders the values of one metric by to find the latest."""
    return row["step"], row["timestamp"], row["value"]


def _input_row(dataset_id: str, run_id: str) -> Row:
    return {
        "input_uuid": sha256(f"{dataset_id} {run_id}".encode()).hexdigest()[:32],
        "source_type": "DATASET",
        "source_id": dataset_id,
        "destination_type": "RUN",
        "destination_id": run_id,
        "step": 0,
    }
