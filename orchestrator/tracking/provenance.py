"""Where a sweep was submitted from: the commit and the uncommitted changes of the directory, kept in the store.

Never part of an identity: it explains results and decides nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from orchestrator.storage.layout import sweep_folder
from orchestrator.storage.protocol import ObjectStore

_TIMEOUT_S = 10.0
_MAX_DIFF_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What git says of a directory; empty outside of a repository."""

    commit: str = ""
    branch: str = ""
    repository: str = ""
    """URL of the remote ``origin``, without credentials."""
    diff: str = ""
    """Uncommitted changes of tracked files, cut after a megabyte."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**document)

    def tags(self) -> dict[str, str]:
        """The tags by which MLflow's pages show the version of the code."""
        tags = {
            "mlflow.source.git.commit": self.commit,
            "mlflow.source.git.branch": self.branch,
            "mlflow.source.git.repoURL": self.repository,
            "git_dirty": ("yes" if self.diff else "no") if self.commit else "",
        }
        return {name: value for name, value in tags.items() if value}


def capture(directory: Path) -> Provenance:
    """Ask git about a directory; never raises, because nothing depends on the answer."""
    commit = _git(directory, "rev-parse", "HEAD").strip()
    if not commit:
        return Provenance()
    return Provenance(
        commit=commit,
        branch=_git(directory, "rev-parse", "--abbrev-ref", "HEAD").strip(),
        repository=_without_credentials(_git(directory, "config", "--get", "remote.origin.url").strip()),
        diff=_git(directory, "diff", "HEAD", "--no-color", "--no-ext-diff"),
    )


def provenance_name(sweep: str, message_id: str) -> str:
    """The object that says where a submit came from, by the id of its message."""
    return f"{sweep_folder(sweep)}/provenance/{message_id}.json"


def save(store: ObjectStore, sweep: str, message_id: str, provenance: Provenance) -> None:
    """Keep it beside the submit's message."""
    store.put(provenance_name(sweep, message_id), json.dumps(asdict(provenance), indent=1).encode())


def load(store: ObjectStore, sweep: str, message_id: str) -> Provenance:
    """What was kept. Raises ``NotFoundError``."""
    return Provenance.from_json(json.loads(store.get(provenance_name(sweep, message_id))))


def _git(directory: Path, *arguments: str) -> str:
    """The command's output; empty if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],  # noqa: S607 - whichever git the user has
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:_MAX_DIFF_BYTES].decode(errors="replace") if done.returncode == 0 else ""


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else url
