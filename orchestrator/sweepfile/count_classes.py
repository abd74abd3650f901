"""Asks the data plane how many classes label spaces have, where that does not follow from the sweep.yaml.

It runs as a process of its own (``python -m workloads.labels count``), because the control plane never imports the
data plane; the answer also holds the digests of the files that were read, which become identity.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.counted import Counted, Definition
from orchestrator.sweepfile.model import Dataset

_TIMEOUT_S = 300.0
_COUNTING = "label spaces could not be counted"
_TASKS = {"changes": "validation images could not be compared"}
"""What a command failed to do, where that is not counting."""


def count_classes(dataset: Dataset, spaces: Sequence[Definition], files: Mapping[str, str]) -> Sequence[Counted]:
    """See ``CountClasses``. Raises ``UserError``: the data plane does not answer."""
    # Jobs run in other directories, on other machines: paths become absolute here.
    places = {role: place if "://" in place else str(Path(place).resolve()) for role, place in files.items()}
    request = {"dataset": table_of(dataset), "num_train": dataset.num_train, "spaces": spaces, "files": places}
    reply = ask_labels("count", request)
    return [Counted(**counted, files=places) for counted in reply["counted"]]


def read_table(dataset: Dataset) -> Sequence[Mapping[str, Any]]:
    """The class table of a built-in data set. Raises ``UserError``: the data plane does not answer."""
    rows: list[dict[str, Any]] = ask_labels("table", {"dataset": table_of(dataset)})["rows"]
    return rows


def table_of(dataset: Dataset) -> dict[str, Any]:
    """How the data plane gets the class table of a data set."""
    if dataset.location or dataset.components or dataset.listing:
        return {"rows": dataset.class_table, "num_classes": dataset.num_classes}
    return {"builtin": dataset.parameters}


def ask_labels(verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command of the data plane's side of label spaces. Raises ``UserError`` with what it says."""
    command = [sys.executable, "-m", "workloads.labels", verb]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"{_TASKS.get(verb, _COUNTING)} within {_TIMEOUT_S:g} s; look at the files and images they name"
        raise UserError(message) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{_TASKS.get(verb, _COUNTING)}: {lines[-1].removeprefix('error: ')}")
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply
