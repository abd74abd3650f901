"""Which places may be read and written at all: ``ORCHESTRATOR_ALLOWED_URIS``, by scheme, bucket and prefix.

A sweep.yaml names places, and whoever runs it reads them with the rights of the cluster. Where people submit who should
not read all that the cluster may, its operators say here what sweeps may name. Part by part: ``s3://lab/public`` allows
``s3://lab/public/x`` and not ``s3://lab/public-not``; links on disks are followed before they are compared.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from orchestrator.core.errors import StorageDeniedError

VARIABLE = "ORCHESTRATOR_ALLOWED_URIS"
"""URIs between blanks or commas; empty: all are allowed. ``s3://`` allows all buckets."""

_SERVERS = frozenset({"http", "https"})
_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def check_allowed(uri: str) -> None:
    """Compare a valid URI with what the environment allows.

    Raises:
        StorageDeniedError: it is not below any of the allowed ones.
    """
    allowed = _entries()
    if allowed and not any(_is_below(uri, entry) for entry in allowed):
        message = f"{uri} is not below any of the allowed URIs ({', '.join(allowed)}); use one of them or change "
        raise StorageDeniedError(message + VARIABLE)


def check_may_see_login(uri: str) -> None:
    """Refuse a tracking server that a sweep names and that would be shown this process's login for such servers.

    MLflow sends what these variables hold to whichever server it talks to. One that the operators have listed may see
    it; anybody else's may not, even where the list is empty and all places are allowed.

    Raises:
        StorageDeniedError: it is a server that is not listed, and there is a login.
    """
    if urlsplit(uri).scheme not in _SERVERS or not any(os.environ.get(name) for name in _LOGIN):
        return
    if not any(_is_below(uri, entry) for entry in _entries()):
        raise StorageDeniedError(
            f"{uri} would be shown this cluster's login for tracking servers; if it may see it, list it in {VARIABLE} "
            "(along with the places that sweeps read and write)"
        )


def _entries() -> list[str]:
    return [entry for entry in re.split(r"[\s,]+", os.environ.get(VARIABLE, "")) if entry]


def _is_below(uri: str, entry: str) -> bool:
    asked, given = urlsplit(uri), urlsplit(entry)
    if asked.scheme != given.scheme:
        return False
    if asked.scheme == "file":
        return _resolved(asked.path).is_relative_to(_resolved(given.path or "/"))
    if given.netloc and asked.netloc != given.netloc:
        return False
    return PurePosixPath(asked.path or "/").is_relative_to(PurePosixPath(given.path or "/"))


def _resolved(path: str) -> Path:
    return Path(unquote(path)).resolve()
