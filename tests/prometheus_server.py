"""A real Prometheus for tests: it follows the nodes of a project's Ray cluster and watches the shipped alert rules."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from orchestrator.stack.children import Child, ray_directory, ray_sessions
from orchestrator.stack.description import LOOPBACK

SHIPPED: Final = Path(__file__).parents[1] / "infra" / "prometheus"
_DISCOVERY_FILE = "prom_metrics_service_discovery.json"


def write_configuration(home: Path, ray_home: Path) -> Path:
    """The shipped configuration, for the Ray cluster that keeps its sessions in ``ray_home``; returns its path."""
    document: dict[str, Any] = yaml.safe_load((SHIPPED / "prometheus.yml").read_text(encoding="utf-8"))
    document["rule_files"] = [str(SHIPPED / name) for name in document["rule_files"]]
    (scrape,) = document["scrape_configs"]
    scrape["file_sd_configs"] = [{"files": [str(ray_home / _DISCOVERY_FILE)]}]
    path = home / "prometheus.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def start_prometheus(directory: Path, *, port: int) -> Child:
    """Start it for the stack of a project; its data lie below the project's directory. Skips where it is missing."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus (Debian: the package prometheus)")
    home = directory / "prometheus"
    home.mkdir(parents=True, exist_ok=True)
    configuration = write_configuration(home, ray_sessions(ray_directory(directory)))
    command = [
        "nice", "-n", "10", program, f"--config.file={configuration}",
        f"--storage.tsdb.path={home / 'data'}", f"--web.listen-address={LOOPBACK}:{port}", "--log.level=warn",
    ]  # fmt: skip
    return Child("prometheus", command, directory, {"PATH": os.defpath})
