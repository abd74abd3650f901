"""Asks the data plane what a source holds that is to be converted; it runs as a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.schema_datasets import ConversionSpec

_TIMEOUT_S: Final = 7200.0
_PATHS: Final = ("source", "labels", "root")
_NOT_ASKED: Final = frozenset({"listing", "shard_mib", "shuffle"})

_FIELDS: Final = {
    "split": "splits",
    **{name.replace("_", "-"): name for name in ("val_fraction", "labels", "separator", "path_column", "label_column")},
    "follow-links": "follow_links: true",
}
_FLAG: Final = re.compile(rf"(?<!\S)--({'|'.join(_FIELDS)})(?![\w-])")


def source_arguments(entry: ConversionSpec) -> dict[str, Any]:
    """How the data plane lists a source, as JSON, with paths as the file has them. Pure."""
    # Left out at its default: nodes with an older version of this program do not know the field.
    not_asked = _NOT_ASKED if entry.follow_links else _NOT_ASKED | {"follow_links"}
    return entry.model_dump(exclude=set(not_asked))


def with_absolute_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as jobs need them, which run in other directories."""
    return {**arguments, **{name: _absolute(arguments[name]) for name in _PATHS if arguments[name]}}


def ask_listing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a source holds: ``listing``, ``num_samples``, ``num_classes``, ``levels``, ``multi_label``, ``classes``.

    Raises:
        UserError: it is not there, does not fit the format, or cannot be listed in two hours.
    """
    command = [sys.executable, "-m", "workloads.data", "listing", json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        message = (
            f"{arguments['source']} was not listed within {_TIMEOUT_S:g} s; declare convert.listing, or convert it"
        )
        raise UserError(message + " with `orchestrator data shard`") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"the source cannot be listed: {_in_fields(lines[-1].removeprefix('error: '))}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _in_fields(message: str) -> str:
    """A message of the converters, which speak of the flags of ``orchestrator data shard``, in fields of the sweep."""
    message = re.sub(r"--split (\w+)=([^\s;,]+)", r"splits: {\1: \2}", message)
    return _FLAG.sub(lambda flag: _FIELDS[flag.group(1)], message)


def _absolute(path: str) -> str:
    return str(Path(path.removeprefix("file://")).absolute())
