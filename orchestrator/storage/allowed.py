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

from orchestrator.errors import StorageDeniedError

VARIABLE = "ORCHESTRATOR_ALLOWED_URIS"
"""URIs between blanks or commas; empty: all are allowed. ``s3://`` allows all buckets."""


def check_allowed(uri: str) -> None:
    """Compare a valid URI with what the environment allows.

    Raises:
        StorageDeniedError: it is not below any of the allowed ones.
    """
    allowed = [entry for entry in re.split(r"[\s,]+", os.environ.get(VARIABLE, "")) if entry]
    if allowed and not any(_is_below(uri, entry) for entry in allowed):
        message = f"{uri} is not below any of the allowed URIs ({', '.join(allowed)}); use one of them or change "
        raise StorageDeniedError(message + VARIABLE)


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
