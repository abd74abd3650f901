"""The environment of Ray's processes: who may connect, from where, and where the code is."""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import orchestrator
from orchestrator.backends.ray.settings import CACHE_VARIABLE, KEEP_ALIVE_VARIABLE
from orchestrator.stack.description import TOKEN_FILE, TOUCH_FILE

LOOPBACK = "127.0.0.1"
STACK_VARIABLE = "ORCHESTRATOR_STACK_DIRECTORY"
"""The project's directory, told to all that runs on its stack: jobs that come from elsewhere need to know."""
_FOREIGN = ("RAY_", "MLFLOW_")
# Ray then takes 127.0.0.1 for the node's address, and all of its servers listen there only. The name is Ray's: it was
# made for systems where a cluster of several nodes is not supported, which is the very thing wanted here.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def ensure_token(directory: Path) -> Path:
    """The file with the token that every client of this project's Ray must present; only the user may read it."""
    path = directory / TOKEN_FILE
    if not path.exists():
        partial = directory / f"{TOKEN_FILE}.{secrets.token_hex(4)}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        partial.replace(path)
    return path


def client_environment(token_path: Path | str) -> dict[str, str]:
    """What a process needs to connect to a stack's Ray; must be set before it does."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path), **_LOOPBACK_ONLY}


def child_environment(directory: Path) -> dict[str, str]:
    """Environment of Ray's head and thereby of all its workers: this process's own, less what is for other clusters."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **inherited,
        **client_environment(directory / TOKEN_FILE),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # 30 s by default, for services; our actors never drain
        "RAY_START_HOOK": "orchestrator.stack.ray_hook.leave_out_ray_client",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        # Ray's agents call pip and python by name, also where no shell has activated this environment.
        "PATH": os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *_path(os.environ)])),
        STACK_VARIABLE: str(directory),
        CACHE_VARIABLE: str(directory / "cache"),
        KEEP_ALIVE_VARIABLE: str(directory / TOUCH_FILE),
        "PYTHONPATH": python_path(os.environ),
        "PYTHONUNBUFFERED": "1",
    }


def python_path(environment: Mapping[str, str]) -> str:
    """``PYTHONPATH`` under which workers import what this process imports: a checkout that is not installed, too."""
    root = Path(orchestrator.__file__).resolve().parents[1]
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
