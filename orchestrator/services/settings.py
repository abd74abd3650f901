"""The one reader of the environment on the control plane's client side."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.core.errors import SpecError
from orchestrator.services.setting_values import as_reference
from orchestrator.services.settings_sources import Code, apply, chosen_context
from orchestrator.stack.description import database_behind, tracking_uri
from orchestrator.storage.open import check_tracking

if TYPE_CHECKING:
    from orchestrator.sweepfile.values import ResolvedSweep


UNKNOWN_STORE = "file:///the-store-of-the-cluster"
"""Placeholder for the unknown store of a cluster; it is always empty."""


def shown_store(uri: str) -> str:
    """A store's name for people."""
    return "the cluster's own" if uri == UNKNOWN_STORE else uri


class Settings(BaseSettings):
    """Environment variables; each is also the name of a field with the prefix ``ORCHESTRATOR_``."""

    model_config = SettingsConfigDict(
        env_prefix="ORCHESTRATOR_", extra="ignore", populate_by_name=True, env_ignore_empty=True
    )

    directory: Path = Path(".orchestrator")
    """The project's own directory: store, MLflow database, stack."""
    namespace: str = "orchestrator"
    """Ray namespace of controller and runners."""
    store: str = ""
    """Object store URI; default: ``store/`` in the project's directory."""
    store_shared: bool = False
    """Whether all nodes of the cluster see the directory of a ``file://`` store."""
    ray_address: str = Field("", validation_alias=AliasChoices("RAY_ADDRESS", "ORCHESTRATOR_RAY_ADDRESS"))
    """An existing cluster to use instead of the local stack."""
    dashboard_address: str = Field(
        "", validation_alias=AliasChoices("RAY_API_SERVER_ADDRESS", "ORCHESTRATOR_DASHBOARD_ADDRESS")
    )
    """A cluster to submit to through its dashboard."""
    cluster_name: str = Field("", validation_alias=AliasChoices("ORCHESTRATOR_CLUSTER"))
    """Of the cluster in leases; default: made of its address."""
    ray_token: str = ""
    """Where the cluster's token is, never the token; default: what Ray itself finds."""
    code: Code = Code.IMAGE
    """Which code a submit through the dashboard runs."""
    mlflow_tracking_uri: str = Field("", validation_alias=AliasChoices("MLFLOW_TRACKING_URI"))
    """Tracking server; default: the project's own database."""
    prices: str = ""
    """Path of the table of prices that commands use without ``--prices``."""

    @property
    def home(self) -> Path:
        """Absolute project directory."""
        return self.directory.absolute()

    @property
    def driver_address(self) -> str:
        """Of a cluster that this process joins; empty = the local stack, or only reached by its dashboard or store."""
        return "" if self._has_http else self.ray_address

    @property
    def jobs_address(self) -> str:
        """Of the dashboard to submit through; empty where the cluster is joined. Ray's tools take both alike."""
        if self._has_http:
            return self.ray_address
        return "" if self.ray_address else self.dashboard_address

    @property
    def is_remote(self) -> bool:
        """Whether submits go to a cluster that this process does not join."""
        return bool(self.jobs_address) or bool(self.cluster_name and not self.driver_address)

    @property
    def _has_http(self) -> bool:
        return self.ray_address.startswith(("http://", "https://"))

    @property
    def cluster(self) -> str:
        """Name of the cluster in leases: as set, else one per Ray address, or per project directory and host."""
        if self.cluster_name:
            return self.cluster_name
        place = self.ray_address or f"{socket.gethostname()}:{self.home}"
        kind = "ray" if self.ray_address else "local"
        return f"{kind}-{sha256(f'{place}#{self.namespace}'.encode()).hexdigest()[:12]}"

    def read_token(self) -> str:
        """The cluster's token; empty if none is named. Raises ``UserError`` if it is not where it should be."""
        if not self.ray_token:
            return ""
        from orchestrator.core.security.references import resolve_secret

        return resolve_secret(as_reference(self.ray_token), what="the cluster's token (ray_token)")

    def store_uri(self, sweep: ResolvedSweep | None = None) -> str:
        """The sweep's store, else the setting, else the project's own, or that of a cluster behind its dashboard."""
        given = (sweep.store if sweep else "") or self.store
        return given or (UNKNOWN_STORE if self.jobs_address else "") or self.own_store_uri

    def known_store_uri(self, given: str = "", sweep: ResolvedSweep | None = None) -> str:
        """``given``, else ``store_uri``, to read or write there.

        Raises:
            SpecError: only the cluster knows its store.
        """
        uri = given or self.store_uri(sweep)
        if uri == UNKNOWN_STORE:
            behind = f"the store of the cluster behind {self.jobs_address or 'its dashboard'} is not known here"
            raise SpecError((f"{behind}: set store=... {_where_to_set()}, or --store",))
        return uri

    def known_cluster(self, given: str = "") -> str:
        """``given``, else ``cluster``, to read or write what the store has of the cluster itself.

        Raises:
            SpecError: only the cluster knows its name; one made of the dashboard's address would be another's.
        """
        if self.jobs_address and not (given or self.cluster_name):
            behind = f"the name of the cluster behind {self.jobs_address} is not known here"
            how = f"set cluster=... {_where_to_set()}, or --cluster, to its head's ORCHESTRATOR_CLUSTER"
            raise SpecError((f"{behind}: {how}; submit prints it",))
        return given or self.cluster

    def require_meeting_place(self, store_uri: str) -> None:
        """Refuse to leave a message where the cluster certainly does not read it.

        Raises:
            SpecError: the cluster is only reached through its store, and the store is this project's own folder.
        """
        by_store = self.is_remote and not self.jobs_address
        if by_store and store_uri == self.own_store_uri and not self.store and not self.store_shared:
            where = "its context (orchestrator config set-context NAME store=s3://...) or --store"
            raise SpecError((f"cluster {self.cluster} is reached through its store: set store=... in {where}",))

    @property
    def own_store_uri(self) -> str:
        """Of the project's own directory."""
        return (self.home / "store").as_uri()

    def tracking_uri(self, sweep_uri: str = "") -> str:
        """The sweep's tracking URI, else the setting, else the project's own database."""
        named = sweep_uri or self.mlflow_tracking_uri
        return database_behind(named, self.home) if named else tracking_uri(self.home)

    def publishing_uri(self, sweep_uri: str = "") -> str:
        """``tracking_uri``, to log in there.

        Raises:
            StorageDeniedError: the sweep names a server that may not see the login, see ``check_tracking``.
        """
        uri = self.tracking_uri(sweep_uri)
        if uri != self.tracking_uri():
            check_tracking(uri)
        return uri


_PUT: dict[str, tuple[str | None, str | None]] = {}
"""Variables that ``load_settings`` has changed, with the values before and after; None = not set."""


def load_settings() -> Settings:
    """The settings as commands have them: with the files of the current directory, and the user's.

    Their values are put into the environment, where S3 clients, Ray and child processes read them. Values that an
    earlier call put there are removed first, unless they were changed since: it may have had another directory.

    Raises:
        SpecError: a file is wrong, or there is no such context.
    """
    environment = os.environ
    for name, (earlier, put) in _PUT.items():
        if environment.get(name) == put:
            _set(environment, name, earlier)
    _PUT.clear()
    before = dict(environment)
    try:
        apply(Path.cwd(), environment)
    finally:
        names = before.keys() | environment.keys()
        _PUT.update(
            (name, (before.get(name), environment.get(name)))
            for name in names
            if before.get(name) != environment.get(name)
        )
    return Settings()


def _set(environment: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        environment.pop(name, None)
    else:
        environment[name] = value


def _where_to_set() -> str:
    choice = chosen_context(Path.cwd(), os.environ)
    return f"in context {choice.name}" if choice else "in orchestrator.toml or a context"
