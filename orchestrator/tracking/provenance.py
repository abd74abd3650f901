"""Where a sweep was submitted from: commit and uncommitted changes of the directory, packages and machine.

Never part of an identity: it is only information about results.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Self

from orchestrator.core.errors import CorruptObjectError
from orchestrator.core.security.diffs import redacted_diff
from orchestrator.core.security.redaction import redacted
from orchestrator.metrics.machine import describe_machine
from orchestrator.storage.layout import submission_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

_TIMEOUT_S = 10.0
_MAX_DIFF_BYTES = 1_000_000
_MAX_UNTRACKED = 1000
_DIFF = (
    *("-c", "diff.relative=false", "-c", "diff.suppressBlankEmpty=false"),
    *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0", "--submodule=short"),
)
"""As ``redacted_diff`` and ``git apply`` read it, whatever the user's settings: a ``textconv`` shows what is stored
encrypted. What releases of git before 2.28 refuse as an option is a setting here.
"""


def installed_packages() -> dict[str, str]:
    """Versions of all installed distributions by their normalised names, sorted (PEP 503).

    Copies that a package brings inside its own folder (Ray does) are part of it: nobody installs them.
    """
    found = {}
    for one in distributions():
        metadata = one.metadata  # read and parsed each time that it is asked for
        if metadata["Name"] and not _is_inside_package(Path(str(one.locate_file("")))):
            found[re.sub(r"[-_.]+", "-", metadata["Name"]).lower()] = metadata["Version"]
    return dict(sorted(found.items()))


def requirements_text(packages: dict[str, str]) -> str:
    """The packages as a requirements file, to be installed with ``pip install --no-deps -r``."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def _is_inside_package(folder: Path) -> bool:
    """Whether a folder that distributions lie in, or the one above it, is an importable package."""
    return any((one / "__init__.py").is_file() for one in (folder, folder.parent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What git says of a directory (nothing outside of a repository), and what ran there."""

    commit: str = ""
    branch: str = ""
    repository: str = ""
    """URL of the remote ``origin``, without credentials."""
    diff: str = ""
    """Uncommitted changes of tracked files, cut after a megabyte; without secrets, as ``git apply`` takes them."""
    untracked: tuple[str, ...] = ()
    """Files that git does not know and does not ignore, at most a thousand of them."""
    package_digest: str = ""
    """Of this program's own code, as records name it."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of all installed packages."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """See ``machine.describe_machine``."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``. What an older or newer version wrote is read as far as it is known here."""
        known = {item.name for item in fields(cls)}
        told = {name: value for name, value in document.items() if name in known}
        return cls(**{**told, "untracked": tuple(told.get("untracked", ()))})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return {**asdict(self), "untracked": list(self.untracked)}

    def tags(self) -> dict[str, str]:
        """The tags by which MLflow's pages show the version of the code; empty where it is not known."""
        return {
            "mlflow.source.git.commit": self.commit,
            "mlflow.source.git.branch": self.branch,
            "mlflow.source.git.repoURL": self.repository,
            "git_dirty": ("yes" if self.diff else "no") if self.commit else "",
        }


def capture_all(directory: Path, package_digest: str) -> Provenance:
    """As ``capture``, with the packages and the machine of this process."""
    return replace(
        capture(directory),
        package_digest=package_digest,
        packages=installed_packages(),
        machine=describe_machine(),
    )


def capture(directory: Path) -> Provenance:
    """Ask git about a directory; never raises, because nothing depends on the answer."""
    commit = _git(directory, "rev-parse", "HEAD").strip()
    if not commit:
        return Provenance()
    untracked = _git(directory, "ls-files", "--others", "--exclude-standard").splitlines()
    return Provenance(
        commit=commit,
        branch=redacted(_git(directory, "rev-parse", "--abbrev-ref", "HEAD").strip()),
        repository=_without_credentials(_git(directory, "config", "--get", "remote.origin.url").strip()),
        diff=redacted_diff(_git(directory, *_DIFF)),
        untracked=tuple(map(redacted, untracked[:_MAX_UNTRACKED])),
    )


def save(store: ObjectStore, sweep: str, message_id: str, provenance: Provenance) -> None:
    """Keep it beside the submit's message."""
    name = submission_name(sweep, message_id)
    store.put(name, seal(name, json.dumps(provenance.to_json(), indent=1).encode()))


def load(store: ObjectStore, sweep: str, message_id: str) -> Provenance:
    """What was kept. Raises ``NotFoundError``, and ``CorruptObjectError`` if it was changed since."""
    name = submission_name(sweep, message_id)
    try:
        return Provenance.from_json(parse_sealed(name, store.get(name)))
    except (ValueError, TypeError, AttributeError) as error:
        message = f"{name} cannot be read ({error}): delete it, and MLflow shows the sweep without its commit"
        raise CorruptObjectError(message) from error


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
