"""Names of the objects that retention and garbage collection own, and the way back from a name to its folder."""

from __future__ import annotations

from orchestrator.storage.layout import artifact_folder, sweep_folder

ARTIFACTS, METRICS, LOGS = "artifacts/", "metrics/", "logs/"
ARTIFACT_DEPTH, METRICS_DEPTH, LOGS_DEPTH = 3, 2, 2
"""Name parts of ``artifacts/<kind>/<key>/``, ``metrics/<key>/`` and ``logs/<sweep>/``."""
CHECKPOINT_DEPTH = ARTIFACT_DEPTH + 2
"""Of ``artifacts/<kind>/<key>/checkpoints/<step>-<nonce>/``, and of an attempt's parts."""
SEARCHES, TRIALS, SEARCH_DEPTH = "searches/", "trials/", 2
"""Of ``searches/<key>/`` and ``trials/<key>/``: the log of a search job, and what people see of its trials."""
PINS = "pins/"
PROBES = "probes/"
"""What ``probe_store`` writes and deletes at once."""
TRASH = "trash/"
LOCK = "trash/lock.json"
RECORD, MANIFEST = "record.json", "manifest.json"


def folder_of(name: str, depth: int) -> str:
    """The first ``depth`` parts of a name with a final ``/``; empty if the object does not lie below that many."""
    parts = name.split("/", depth)
    return "/".join(parts[:depth]) + "/" if len(parts) > depth else ""


def last_part(folder: str) -> str:
    """``a/b/`` -> ``b``: the key of an artifact's or a metrics folder, the sweep of a folder of logs."""
    return folder.rstrip("/").rpartition("/")[2]


def whole_artifact(key: str) -> str:
    """The folder of everything of a key, with its final ``/``."""
    return artifact_folder(key) + "/"


def pin_name(pin: str) -> str:
    """The object that is a pin."""
    return f"{PINS}{pin}.json"


def forgotten_name(sweep: str) -> str:
    """The object that says that a sweep's results may go."""
    return f"{sweep_folder(sweep)}/forgotten.json"


def tombstones_name(run: str, number: int) -> str:
    """One batch of tombstones of one run."""
    return f"{TRASH}{run}/{number:06d}.json"
