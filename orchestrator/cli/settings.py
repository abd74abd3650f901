"""The one reader of the environment on the control plane's client side."""

from __future__ import annotations

import socket
from hashlib import sha256
from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.spec.model import Sweep


class Settings(BaseSettings):
    """Environment variables; each is also the name of a field with the prefix ``ORCHESTRATOR_``."""

    model_config = SettingsConfigDict(env_prefix="ORCHESTRATOR_", extra="ignore", populate_by_name=True)

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
    mlflow_tracking_uri: str = Field("", validation_alias=AliasChoices("MLFLOW_TRACKING_URI"))
    """Tracking server; default: the project's own database."""

    @property
    def home(self) -> Path:
        """Absolute project directory."""
        return self.directory.absolute()

    @property
    def cluster(self) -> str:
        """Name of the cluster in leases: one per Ray address, or per project directory and host."""
        place = self.ray_address or f"{socket.gethostname()}:{self.home}"
        kind = "ray" if self.ray_address else "local"
        return f"{kind}-{sha256(f'{place}#{self.namespace}'.encode()).hexdigest()[:12]}"

    def store_uri(self, sweep: Sweep | None = None) -> str:
        """The sweep's store, else the setting, else the project's own."""
        given = (sweep.store if sweep else "") or self.store
        return given or (self.home / "store").as_uri()

    def tracking_uri(self, sweep_uri: str = "") -> str:
        """The sweep's tracking URI, else the setting, else the project's own database."""
        return sweep_uri or self.mlflow_tracking_uri or f"sqlite:///{self.home / 'mlflow.db'}"
