"""The environment of Ray's processes: access, addresses, and the place of the code."""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from orchestrator.backends.ray.settings import CACHE_VARIABLE, KEEP_ALIVE_VARIABLE
from orchestrator.stack.description import MLFLOW_TOKEN_FILE, TOKEN_FILE, TOUCH_FILE
from orchestrator.stack.ports import free_ports
from orchestrator.storage.files import write_private

STACK_VARIABLE = "ORCHESTRATOR_STACK_DIRECTORY"
"""Environment variable with the project's directory, for jobs of other machines that run on the stack."""
MLFLOW_TOKEN_VARIABLE = "ORCHESTRATOR_MLFLOW_TOKEN_PATH"  # noqa: S105 - the variable's name
"""Environment variable for all processes of the stack, so that they hide the token in their output."""
METRICS_VARIABLE = "RAY_enable_metrics_collection"
"""Ray's variable; 1 in the environment of the start of a stack opens its metrics to all users of this machine."""
_METRIC_PORTS = ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")
_NO_PORT = "65536"  # Ray has no switch for two of its three metrics servers; one that cannot start is a line in a log
_FOREIGN = ("RAY_", "MLFLOW_")
_LOGINS = frozenset(f"MLFLOW_TRACKING_{name}" for name in (
    "USERNAME", "PASSWORD", "TOKEN", "AUTH", "SERVER_CERT_PATH", "CLIENT_CERT_PATH", "INSECURE_TLS"
))  # fmt: skip
"""The login of the publisher at the tracking server; ``storage.open.check_tracking`` says which servers get it."""
# Ray then takes 127.0.0.1 for the node's address, and all of its servers listen there only. The name is Ray's: it was
# made for systems without support for clusters of several nodes, which is what a local stack needs.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def renew_token(directory: Path) -> Path:
    """The file with a new token, which every client of this directory's Ray must present; only the user may read it.

    Each start of a Ray has another one: the token of the last start may have come with a copied directory, or was shown
    to another user's program that had taken the port before Ray did.
    """
    path = directory / TOKEN_FILE
    write_private(path, secrets.token_hex(32))
    return path


def renew_mlflow_token(directory: Path) -> Path:
    """The file with the token of this project's MLflow server, made anew: each start of a stack has another one.

    So an old link, whose port another user's server may have now, reveals nothing.
    """
    path = directory / MLFLOW_TOKEN_FILE
    write_private(path, secrets.token_hex(32))
    return path


def client_environment(token_path: Path | str) -> dict[str, str]:
    """Variables with which a process connects to a stack's Ray; to be set before."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path), **_LOOPBACK_ONLY}


def child_environment(directory: Path) -> dict[str, str]:
    """Environment of Ray's head and all its workers: this process's own, without variables for other clusters."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN) or name in _LOGINS}
    return {
        **inherited,
        **client_environment(directory / TOKEN_FILE),
        **_metrics(os.environ),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # 30 s by default, for services; our actors never drain
        "RAY_gcs_server_port_wait_time_s": "120",  # 20 s by default, too little for a busy machine; see ray_hook, too
        # 15 by default: beside any program that computes, the controller would lose its lease, and jobs stand still.
        "RAY_worker_niceness": "0",
        "RAY_START_HOOK": "orchestrator.stack.ray_hook.prepare_start",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        # Ray's agents call pip and python by name, also where no shell has activated this environment.
        "PATH": os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *_path(os.environ)])),
        STACK_VARIABLE: str(directory),
        MLFLOW_TOKEN_VARIABLE: str(directory / MLFLOW_TOKEN_FILE),
        CACHE_VARIABLE: str(directory / "cache"),
        KEEP_ALIVE_VARIABLE: str(directory / TOUCH_FILE),
        "PYTHONPATH": python_path(os.environ),
        "PYTHONUNBUFFERED": "1",
    }


def _metrics(environment: Mapping[str, str]) -> dict[str, str]:
    """Ray's metrics ports require no token, and name sweeps and actors: they are opened only on request."""
    if environment.get(METRICS_VARIABLE, "0").lower() in {"1", "true"}:
        # Ray has one number for each of them, which another cluster of this machine may have: then it starts without.
        chosen = dict(zip(_METRIC_PORTS, map(str, free_ports(len(_METRIC_PORTS))), strict=True))
        given = {name: environment.get(name, "") for name in _METRIC_PORTS}
        return {METRICS_VARIABLE: "1", **chosen} | {n: port for n, port in given.items() if port not in {"", _NO_PORT}}
    return {METRICS_VARIABLE: "0"} | dict.fromkeys(_METRIC_PORTS, _NO_PORT)


def python_path(environment: Mapping[str, str]) -> str:
    """``PYTHONPATH`` under which workers import what this process imports: a checkout that is not installed, too."""
    root = Path(__file__).resolve().parents[2]  # the folder that holds the package
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    # The current directory may come first in ``sys.path`` ('' or '.'): it would mean another one in a worker.
    mine = [] if root in installed else [str(root)]
    return os.pathsep.join(dict.fromkeys([*(str(Path(path).absolute()) for path in given), *mine]))


def _path(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PATH", os.defpath).split(os.pathsep) if folder]


def python() -> str:
    """The interpreter of all processes of the stack."""
    return sys.executable
