"""The one place that talks to MLflow. Every failure is a ``TrackingError``, and none affects a sweep.

Before anything is written, it is checked once that a supported MLflow answers at the tracking URI.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.redaction import redacted
from orchestrator.core.security.urls import forbidden_host
from orchestrator.storage.open import VARIABLE, is_allowed, is_below, is_listed
from orchestrator.tracking.draft import FoundRun, RunDraft
from orchestrator.tracking.run_writer import INVALID, RefusedRun, RunWriter

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment


_MAX_CAUSE_CHARACTERS = 300
_READ_ONLY = ("readonly database", "read-only", "permission denied")
_FORBIDDEN = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
OLDEST_SERVER = (2, 4)
"""The interface that the publisher uses is the same since then: it brought the request that names data sets."""
_LOG = logging.getLogger(__name__)
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_MAX_RETRIES_VARIABLE = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
"""Always 0: the publisher has its own retries, which look first at what a request without an answer has left. MLflow's
would make a run twice, and hide an outage for minutes (7 of 120 s)."""
_TO_OTHER_HOSTS = ("MLFLOW_ALLOW_HTTP_REDIRECTS", "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD")
"""Always false: ``forbidden_host`` has judged the server that was named, not those to which it leads."""
_CLOUDS = frozenset({"s3", "gs", "wasbs"})
"""Object storage whose URIs name no server; that of ``abfss`` does, and would get a login."""
_PROXIED = "mlflow-artifacts"
_FILES = "/api/2.0/mlflow-artifacts/artifacts/"
"""Where MLflow serves files; another program may have the same host."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]|^ | $")
"""What some parsers of URLs drop or take for another sign."""
_NUM_THREADS = 8
_OWNER_TAG = "owner"
_OWNER = "pretraining-orchestrator"
_DELETED = "deleted"


class TrackingError(OrchestratorError):
    """The tracking server cannot be reached or refuses a call; what was not published is published later."""


class TrackingRefusedError(TrackingError):
    """What will not pass by itself: somebody must change the sweep, the server or the environment first."""


@contextmanager
def failures_named(action: str, server: str) -> Iterator[None]:
    """Turn whatever MLflow, HTTP or SQL raises into a ``TrackingError`` that names the action.

    ``server`` is shown to people: never a URI that may hold a password.
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        if not _comes_from_server(error):
            raise
        message, remedy = f"{action} on MLflow ({server}) failed: {_cause(error)}", _remedy(error)
        if remedy:
            raise TrackingRefusedError(f"{message}; training goes on; {remedy}") from error
        raise TrackingError(f"{message}; nothing is lost, it is published once MLflow answers") from error


def _comes_from_server(error: Exception) -> bool:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError | OSError)


def _cause(error: Exception) -> str:
    """The first line, without the SQL and its parameters that SQLAlchemy appends, and without credentials."""
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    first = text.partition("\n")[0].partition("[SQL:")[0].strip()
    return redacted(re.sub(r"//[^/@\s]+@", "//", first))[:_MAX_CAUSE_CHARACTERS]


def _remedy(error: Exception) -> str:
    """What somebody must do; empty where waiting is enough."""
    text = str(error).lower()
    if getattr(error, "error_code", "") in _FORBIDDEN or " 401" in text or " 403" in text:
        login = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN,"
        return f"set {login} to those of a user who may write there"
    if any(sign in text for sign in _READ_ONLY):
        return "let the publisher write there, or name another tracking.uri"
    if getattr(error, "error_code", "") == INVALID:
        return "it refuses this whenever it is asked: change what it names"
    return ""


def check_server(uri: str) -> None:
    """Ask a server for its version.

    Raises:
        TrackingRefusedError: it is not MLflow, or too old a one.
        Exception: whatever HTTP raises if nobody answers.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    credentials = get_default_host_creds(uri)  # type: ignore[no-untyped-call]
    answer = http_request(credentials, "/version", "GET", raise_on_status=False)  # type: ignore[no-untyped-call]
    if answer.status_code in {401, 403}:
        return  # a missing permission is reported by the first call that matters
    text = answer.text.strip()[:20]
    version = re.match(r"(\d+)\.(\d+)", text)
    if answer.status_code != 200 or version is None:
        message = (
            f"what answers at the tracking URI is not an MLflow server (HTTP {answer.status_code} to /version); "
            "correct tracking.uri or MLFLOW_TRACKING_URI. Training goes on"
        )
        raise TrackingRefusedError(message)
    if (int(version[1]), int(version[2])) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        message = f"the tracking server runs MLflow {text}, and {oldest} is the oldest that works; upgrade it"
        raise TrackingRefusedError(f"{message}. Training goes on, and everything is published afterwards")


def check_database(uri: str) -> None:
    """Refuse a database of another release: MLflow itself would change an older one where it finds tables missing.

    Raises:
        TrackingRefusedError: its tables are older or newer than those of the installed MLflow.
        SQLAlchemyError: it cannot be reached.
    """
    import mlflow
    from alembic.migration import MigrationContext
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.pool import NullPool

    engine = create_engine(uri, poolclass=NullPool)
    with engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        is_empty = found is None and not inspect(connection).has_table("experiments")
    expected = _schema_revision()
    if not is_empty and found != expected:
        message = (
            f"the MLflow database has tables of version {found}, and the installed MLflow {mlflow.__version__} needs "
            f"{expected}: install the release that made them, or back it up and run `mlflow db upgrade`. Training "
            "goes on, and everything is published afterwards"
        )
        raise TrackingRefusedError(message)


@cache
def _schema_revision() -> str:
    """Of the tables that the installed MLflow makes; it loads scores of scripts to find out."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())  # type: ignore[no-untyped-call]


def missing_driver(uri: str, error: ImportError) -> str:
    """What to say where the program that talks to a kind of database is not installed."""
    return (
        f"the program that talks to {urlsplit(uri).scheme} databases is not installed ({error}); for PostgreSQL: "
        "pip install 'pretraining-orchestrator[postgres]'"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """Files of a run, to be registered as a version of a model."""

    name: str
    run_id: str
    folder: str
    """Among the run's artifacts."""
    tags: Mapping[str, str]
    unless_tagged: tuple[str, str]
    """A tag and its value: a model that has a version with it gets no other."""
    description: str


class TrackingServer:
    """An MLflow tracking URI: ``http(s)://...``, ``sqlite:///...`` or ``postgresql://...``. Connects on first use.

    ``artifact_root`` is where new experiments of a database that is not a file put their files.
    """

    def __init__(self, uri: str, artifact_root: str = "") -> None:
        self.uri = uri
        self._artifact_root = artifact_root
        self.num_written = 0
        """Runs that it took so far, each time it took them."""
        self._connected: MlflowClient | None = None

    @property
    def shown(self) -> str:
        """Name of the server for people; never the user, password or options of the URI."""
        address = urlsplit(self.uri)
        # A database's own socket has no host name, and may have a user and password all the same.
        return address.hostname or f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"

    def find_experiment(self, name: str, *, known_id: str = "", known_as: str = "") -> str:
        """Id of the experiment with this name; empty if there is none.

        Args:
            name: what the sweep calls it.
            known_id: of the experiment that was used so far. It is used further unless the sweep was changed, also if
                somebody renamed it on the server.
            known_as: what the sweep called it when it was chosen; empty if that is not known, so that it is taken to
                be its name on the server.

        Raises:
            TrackingError: the server does not answer, or the experiment is deleted or somebody else's.
        """
        with failures_named(f"finding the experiment {name!r}", self.shown):
            found = self._known_experiment(known_id) if known_id else None
            if found is None or name not in {found.name, known_as}:
                found = self._client.get_experiment_by_name(name)
            if found is None:
                return ""
            if found.lifecycle_stage == _DELETED:
                message = (
                    f"the MLflow experiment {name!r} is deleted, and MLflow keeps its name; restore it, purge it with "
                )
                raise TrackingRefusedError(message + "`mlflow gc`, or give the sweep another tracking.experiment")
            if found.tags.get(_OWNER_TAG) != _OWNER:
                self._adopt(found.experiment_id, name)
            return str(found.experiment_id)

    def make_experiment(self, name: str, tags: Mapping[str, str]) -> str:
        """Id of the experiment with this name, made now with these tags; empty if there is one, and nothing is done."""
        from mlflow.exceptions import MlflowException

        location = f"{self._own_root}/{quote(name, safe='')}" if self._own_root else None
        with failures_named(f"making the experiment {name!r}", self.shown):
            try:
                made = self._client.create_experiment(name, location, {_OWNER_TAG: _OWNER, **tags})
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                return ""
            return str(made)

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        """Give an experiment tags; equal ones are not written again."""
        with failures_named("tagging the experiment", self.shown):
            known = self._client.get_experiment(experiment_id).tags
            for name, value in tags.items():
                if known.get(name) != value:
                    self._client.set_experiment_tag(experiment_id, name, value)

    def find_runs(self, experiment_id: str, sweep: str) -> list[FoundRun]:
        """Runs of sweeps of this name that are not deleted, oldest first."""
        with failures_named(f"searching the runs of sweep {sweep}", self.shown):
            return self._writer.find_runs(experiment_id, sweep)

    def write(
        self, experiment_id: str, drafts: Iterable[RunDraft | None]
    ) -> Iterator[tuple[RunDraft, str | RefusedRun]]:
        """Write runs; yields each draft, in order, with its run id once it is there, an empty one where it was deleted
        meanwhile, or what MLflow said to a run that it refuses as it is. A caller that stops at an error has been given
        all that was written for certain.

        Args:
            experiment_id: where runs are made.
            drafts: taken one by one while others are written. A None means: wait until all drafts before it are written
                and given to the caller.

        Raises:
            TrackingError: the server does not answer.
        """
        with closing(self._writer.write(experiment_id, drafts)) as written:
            for draft, answer in written:
                with failures_named("writing runs", self.shown):
                    told = answer.result()
                self.num_written += not isinstance(told, RefusedRun)
                yield draft, told

    def refusal(self, refused: Sequence[tuple[RunDraft, RefusedRun]]) -> TrackingRefusedError:
        """The error that says which runs MLflow refuses as they are; all others were written."""
        draft, answer = refused[0]
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        error = TrackingRefusedError(
            f"MLflow ({self.shown}) refuses the run of {draft.name}{more}: {_cause(answer.error)}; training goes "
            "on, and all other runs are published; change in the sweep what MLflow names, and submit it again (a "
            "metric of a committed record stays as it is, and the run of its job incomplete)"
        )
        error.__cause__ = answer.error
        return error

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted."""
        with failures_named(f"reading run {run_id}", self.shown):
            return self._writer.is_active(run_id)

    def find_run(self, run_id: str) -> FoundRun | None:
        """A run by its id, a deleted one included; None if there is none."""
        with failures_named(f"reading run {run_id}", self.shown):
            return self._writer.find_run(run_id)

    def delete_runs(self, run_ids: Iterable[str]) -> None:
        """Mark runs deleted; one that is gone already is success."""
        for run_id in run_ids:
            if self.is_active(run_id):
                with failures_named(f"deleting run {run_id}", self.shown):
                    self._client.delete_run(run_id)

    def restore_runs(self, run_ids: Iterable[str]) -> None:
        """Take runs out of the server's trash."""
        for run_id in run_ids:
            with failures_named(f"restoring run {run_id}", self.shown):
                self._client.restore_run(run_id)

    def place_of(self, run_id: str) -> str:
        """URI of the folder for the files of a run.

        Raises:
            TrackingRefusedError: it is a place that the server may not choose.
        """
        with failures_named("attaching files", self.shown):
            place = str(self._client.get_run(run_id).info.artifact_uri)
            if not may_hold_files(place, self.uri, self._own_root):
                raise TrackingRefusedError(
                    f"MLflow ({self.shown}) keeps the files of this run at {redacted(place)}, which is not "
                    f"an allowed place: they are not attached. If it is the right place, list it in {VARIABLE} (along "
                    "with the places that sweeps read and write); else give the sweep another tracking.experiment"
                )
            return place

    def attach(self, run_id: str, folder: Path, below: str = "") -> None:
        """Attach all files of a folder to a run, in the folder ``below`` of its artifacts.

        Raises:
            TrackingRefusedError: see ``place_of``.
        """
        # Not by the client's own method, which would ask again, and might be answered otherwise.
        place = self.place_of(run_id)
        with failures_named("attaching files", self.shown):
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            files: Any = get_artifact_repository(place, tracking_uri=self.uri)
            files.log_artifacts(str(folder), below or None)

    def number_of(self, version: ModelVersion) -> str:
        """Number of the registered model's version that is like this one; empty without one."""
        with failures_named(f"reading the registered model {version.name!r}", self.shown):
            known = self._client.search_model_versions(f"name = '{version.name}'")
            name, value = version.unless_tagged
            return next((str(found.version) for found in known if found.tags.get(name) == value), "")

    def registered_runs(self, model: str) -> set[str]:
        """Runs that hold the files of a version of a registered model."""
        with failures_named(f"reading the registered model {model!r}", self.shown):
            return {str(found.run_id) for found in self._client.search_model_versions(f"name = '{model}'")}

    def register(self, version: ModelVersion) -> None:
        """Make files of a run the newest version of a model, which the alias `best` points to from now on."""
        from mlflow.exceptions import MlflowException

        with failures_named(f"registering the model {version.name!r}", self.shown):
            try:
                self._client.create_registered_model(version.name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            root = self._client.get_run(version.run_id).info.artifact_uri
            made = self._client.create_model_version(
                version.name,
                f"{root}/{version.folder}",
                version.run_id,
                tags=dict(version.tags),
                description=version.description,
            )
        self.call_best(version.name, made.version)

    def call_best(self, model: str, number: str) -> None:
        """Let the alias `best` of a registered model point to a version."""
        with failures_named(f"naming the best version of the model {model!r}", self.shown):
            self._client.set_registered_model_alias(model, "best", number)

    # ------------------------------------------------------------------------------------------------------ connection
    @property
    def client(self) -> MlflowClient:
        """MLflow's own client of this server, for calls about few things."""
        return self._client

    @property
    def _client(self) -> MlflowClient:
        if self._connected is None:
            _set_environment()
            logging.getLogger("alembic").setLevel(logging.WARNING)
            from mlflow import MlflowClient  # 4 s

            if database := _sqlite_path(self.uri):
                database.parent.mkdir(parents=True, exist_ok=True)
            with failures_named("connecting", self.shown):
                self._check()
                self._connected = MlflowClient(tracking_uri=self.uri)
            _drop_databricks_headers()
        return self._connected

    @property
    def database(self) -> Path | None:
        """The file of an SQLite database; None of anything else."""
        return _sqlite_path(self.uri)

    def check(self) -> None:
        """Ask whether it can be published to. Nothing is written, but for the empty file of a missing database.

        Raises:
            TrackingError: it cannot be used, or does not answer; no message shows the URI, which may hold a password.
        """
        _set_environment()
        with failures_named("connecting", self.shown):
            self._check()

    def _check(self) -> None:
        """Raise for what cannot, or must not, be written to."""
        for host in _hosts(self.uri):
            if reason := forbidden_host(host):  # a plan in the store is not read as strictly as a sweep.yaml
                raise TrackingRefusedError(f"the tracking server is {host}, {reason}; name your own tracking server")
        if self._is_http:
            check_server(self.uri)
            return
        try:
            check_database(self.uri)
        except ImportError as error:
            raise TrackingRefusedError(missing_driver(self.uri, error)) from error

    @property
    def _is_http(self) -> bool:
        return self.uri.startswith(("http://", "https://"))

    @property
    def _writer(self) -> RunWriter:
        # SQLite has one writer at a time, whoever waits for it.
        return RunWriter(self._client, num_threads=1 if _sqlite_path(self.uri) else _NUM_THREADS)

    # ----------------------------------------------------------------------------------------------------- experiments
    def _known_experiment(self, experiment_id: str) -> Experiment | None:
        """None if it is deleted, or not there any more."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return None if found.lifecycle_stage == _DELETED else found

    @property
    def _own_root(self) -> str:
        """Below it are the locations of the experiments that it makes; empty where a server chooses them.

        MLflow's default for databases is the working directory, whichever that is.
        """
        if self._is_http:
            return ""
        if (database := _sqlite_path(self.uri)) is not None:
            return (database.parent / "mlflow-artifacts").as_uri()
        return f"{self._artifact_root}/mlflow" if self._artifact_root else ""

    def _adopt(self, experiment_id: str, name: str) -> None:
        """Make an experiment ours that holds no runs but ours.

        Raises:
            TrackingRefusedError: it holds others.
        """
        newest = self._client.search_runs([experiment_id], max_results=100)
        if any(not {"sweep", "job", "key"} <= run.data.tags.keys() for run in newest):
            message = (
                f"the MLflow experiment {name!r} holds runs of something else, and sweeps do not mix with them; give "
                f"the sweep another tracking.experiment, or set the experiment's tag {_OWNER_TAG} to {_OWNER} if it "
                "is meant to hold both"
            )
            raise TrackingRefusedError(message)
        self._client.set_experiment_tag(experiment_id, _OWNER_TAG, _OWNER)


def _set_environment() -> None:
    """For MLflow, which reads it when it is imported, and at each request."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ[_MAX_RETRIES_VARIABLE] = "0"
    os.environ.update(dict.fromkeys(_TO_OTHER_HOSTS, "false"))


def _drop_databricks_headers() -> None:
    """Have MLflow's client not look at every request for the modules of a service that no supported URI leads to.

    The imports that fail seven times take a third of its time.
    """
    from mlflow.tracking.request_header import registry

    # Private to MLflow: where it is called otherwise, nothing happens.
    known = getattr(getattr(registry, "_request_header_provider_registry", None), "_registry", None)
    if isinstance(known, list):
        known[:] = [one for one in known if type(one).__name__ != "DatabricksRequestHeaderProvider"]


def may_hold_files(place: str, tracking_uri: str, own_root: str = "") -> bool:
    """Whether files may be written to a run's ``artifact_uri``, which whoever made its experiment has chosen.

    They may go to the tracking server itself, below ``own_root``, to places that the environment lists, and to object
    storage if it lists none. MLflow's client would send the login of the tracking server to any other server, and write
    to any path of this machine.
    """
    if _UNSAFE.search(place):
        return False
    try:
        parts, server = urlsplit(place), urlsplit(tracking_uri)
        is_served = _is_served_by(parts, server)
    except ValueError:
        return False
    if is_served:
        return True
    if parts.scheme in {"", "file"}:
        # MLflow unquotes paths, too.
        path = unquote(parts.path if parts.scheme else place)
        uri = Path(path).absolute().as_uri()
        is_plain = place.startswith("file:") and not (parts.netloc or parts.query or parts.fragment)
        return (is_plain or not parts.scheme) and ((bool(own_root) and is_below(uri, own_root)) or is_listed(uri))
    is_own = bool(own_root) and is_below(place, own_root)
    return is_own or (is_allowed(place) if parts.scheme in _CLOUDS else is_listed(place))


def _is_served_by(place: SplitResult, server: SplitResult) -> bool:
    """Whether MLflow's client would send files for this place to the tracking server, and nowhere else on its host."""
    if server.scheme not in _DEFAULT_PORTS or ".." in unquote(place.path).split("/") or "@" in place.netloc:
        return False
    is_same_host = _host_and_port(place.netloc, server.scheme) == _host_and_port(server.netloc, server.scheme)
    if place.scheme == _PROXIED:
        return is_same_host or not place.netloc
    return place.scheme == server.scheme and is_same_host and place.path.startswith(server.path.rstrip("/") + _FILES)


def _host_and_port(netloc: str, scheme: str) -> tuple[str, int]:
    parts = urlsplit(f"//{netloc}")
    return parts.hostname or "", parts.port or _DEFAULT_PORTS.get(scheme, 0)


def _hosts(uri: str) -> list[str]:
    """The hosts of an address; that of a database may name others in its query, each with a port."""
    parts = urlsplit(uri)
    texts = [text for name, text in parse_qsl(parts.query) if name in {"host", "hostaddr"}]
    named = [one for text in texts for one in text.split(",")]
    return [parts.hostname or "", *(one if one.count(":") > 1 else one.partition(":")[0] for one in named)]


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None
