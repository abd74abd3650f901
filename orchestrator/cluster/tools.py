"""Running the programs that clusters are driven by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.core.errors import OrchestratorError

_INSTALL = {
    "ray": "it comes with this package: activate the environment that has it",
    "kubectl": "install Kubernetes' kubectl and point KUBECONFIG at the cluster",
    "sbatch": "run this on a login node of the Slurm cluster",
    "squeue": "run this on a login node of the Slurm cluster",
    "scancel": "run this on a login node of the Slurm cluster",
    "ssh": "install an OpenSSH client",
    "rsync": "install rsync, which carries the checkout to the nodes",
}
_MAX_TOLD = 2000


class ToolError(OrchestratorError):
    """A program is missing, does not answer, or failed."""


def find_tool(name: str) -> str:
    """Path of a program, of this interpreter's environment first. Raises ``ToolError`` with what to install."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if not found:
        raise ToolError(f"{name} is not on this machine; {_INSTALL.get(name, f'install {name}')}")
    return found


def ask_tool(command: Sequence[str], *, timeout_s: float = 30.0, standard_input: str | None = None) -> str:
    """What a program prints.

    Raises:
        ToolError: it is missing, takes too long, or fails; with the end of what it said.
    """
    program = find_tool(command[0])
    try:
        done = subprocess.run(
            [program, *command[1:]],
            input=standard_input,
            stdin=subprocess.DEVNULL if standard_input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{_shown(command)} did not end in {timeout_s:g} s; is what it talks to reachable?") from error
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip())[-_MAX_TOLD:]
        raise ToolError(f"{_shown(command)} failed with status {done.returncode}: {told}")
    return done.stdout


def run_tool(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> int:
    """Run a program in the foreground, with this process's terminal; its exit status. Raises ``ToolError``."""
    program = find_tool(command[0])
    return subprocess.run([program, *command[1:]], check=False, env={**os.environ, **(environment or {})}).returncode


def _shown(command: Sequence[str]) -> str:
    return " ".join(command[:4]) + (" ..." if len(command) > 4 else "")
