"""A Prometheus of one project directory: it follows the nodes of its Ray cluster and watches the alert rules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import yaml

import orchestrator
from orchestrator.errors import ClusterError
from orchestrator.stack.children import Child, ray_directory
from orchestrator.stack.environment import LOOPBACK

RETENTION: Final = "30d"
_DISCOVERY_FILE = "prom_metrics_service_discovery.json"


def shipped_file(name: str) -> Path:
    """A file of ``infra/prometheus``, of this checkout or as the wheel brings it.

    Raises:
        ClusterError: it is in neither.
    """
    package = Path(orchestrator.__file__).parent
    places = (package / "observability" / name, package.parent / "infra" / "prometheus" / name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        message = f"{name} belongs to {places[0].parent} and is not there; install pretraining-orchestrator again"
        raise ClusterError(message)
    return found


def write_configuration(home: Path, ray_home: Path) -> Path:
    """The shipped configuration, for the Ray cluster that keeps its sessions in ``ray_home``; returns its path."""
    document: dict[str, Any] = yaml.safe_load(shipped_file("prometheus.yml").read_text(encoding="utf-8"))
    document["rule_files"] = [str(shipped_file(name)) for name in document["rule_files"]]
    (scrape,) = document["scrape_configs"]
    scrape["file_sd_configs"] = [{"files": [str(ray_home / _DISCOVERY_FILE)]}]
    path = home / "prometheus.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def start_prometheus(directory: Path, *, port: int) -> Child:
    """Start it on the data of ``directory``, which is a part of the project's.

    Raises:
        ClusterError: it is not installed.
    """
    home = directory / "prometheus"
    home.mkdir(parents=True, exist_ok=True)
    command = [
        "nice", "-n", "10", program(), f"--config.file={write_configuration(home, ray_directory(directory))}",
        f"--storage.tsdb.path={home / 'data'}", f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address={LOOPBACK}:{port}", "--log.level=warn",
    ]  # fmt: skip
    return Child("prometheus", command, directory, {"PATH": _PATH})


_PATH = "/usr/local/bin:/usr/bin:/bin"


def program() -> str:
    """Path of the server. Raises ``ClusterError`` if it is not installed."""
    found = shutil.which("prometheus")
    if found is None:
        raise ClusterError("Prometheus is not installed (no program prometheus); on Debian: apt-get install prometheus")
    return found
