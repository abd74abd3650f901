"""From URIs to stores and objects: which schemes there are, what may be opened at all, and patterns of object names.

``ORCHESTRATOR_ALLOWED_URIS`` says which places may be read and written, by scheme, bucket and prefix. A sweep.yaml
names places, and its jobs read them with the rights of the cluster. If people submit who should not read everything
that the cluster may read, operators restrict here what sweeps may name. Parts are compared: ``s3://lab/public`` allows
``s3://lab/public/x`` and not ``s3://lab/public-not``; links on disks are followed before they are compared.

A new scheme is an entry of ``_SCHEMES``, and a store that passes ``tests/contract``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from math import prod
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from braceexpand import braceexpand

from orchestrator.core.errors import StorageDeniedError, StorageError
from orchestrator.storage.local import FILE
from orchestrator.storage.protocol import OpenableStore, check_name
from orchestrator.storage.s3 import S3, bucket_and_prefix

VARIABLE = "ORCHESTRATOR_ALLOWED_URIS"
"""URIs between blanks or commas; empty: all are allowed. ``s3://`` allows all buckets."""

_SERVERS = frozenset({"http", "https"})
_PLACES = frozenset({"host", "hostaddr", "port", "service"})
_OF_MLFLOW = tuple(f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH"))
_LOGINS = {**dict.fromkeys(_SERVERS, _OF_MLFLOW), "postgresql": ("PGPASSWORD",)}
"""By scheme of a tracking server, the variables whose values its client sends there (AUTH names who makes a token)."""
_SCHEMES = {scheme.name: scheme for scheme in (FILE, S3)}
_SUPPORTED = ", ".join(scheme.example for scheme in _SCHEMES.values())
_EXAMPLES = " or ".join(scheme.example for scheme in _SCHEMES.values())
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|\\\\")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_EXPANDED: Final = 1_000_000
"""Largest number of names of one pattern: a typing error must not fill the memory."""
_RANGE = re.compile(r"\{(-?[0-9]{1,30})\.\.(-?[0-9]{1,30})")


def check_allowed(uri: str) -> None:
    """Compare a valid URI with what the environment allows.

    Raises:
        StorageDeniedError: it is not below any of the allowed ones.
    """
    if not is_allowed(uri):
        message = f"{uri} is not below any of the allowed URIs ({', '.join(_entries())}); use one of them or change "
        raise StorageDeniedError(message + VARIABLE)


def is_allowed(uri: str) -> bool:
    """Whether a valid URI is below one that the environment names, or it names none."""
    return not _entries() or is_listed(uri)


def is_listed(uri: str) -> bool:
    """Whether a valid URI is below one that the environment names."""
    return any(is_below(uri, entry) for entry in _entries())


def check_tracking(uri: str) -> None:
    """Refuse a tracking server that a sweep names: a place that is not allowed, or that would get this process's login.

    MLflow and the clients of databases send the login that they find to whichever server they talk to. One that the
    operators have listed may see it; anybody else's may not, even where the list is empty and all places are allowed.

    Raises:
        StorageDeniedError: it is not listed, and there is a list or a login.
    """
    check_allowed(uri)
    if _has_login(urlsplit(uri).scheme.partition("+")[0]) and not is_listed(uri):
        raise StorageDeniedError(
            f"{uri} would be shown the publisher's login for tracking servers; if it may see it, list it in {VARIABLE} "
            "(along with the places that sweeps read and write), or set MLFLOW_TRACKING_URI to it"
        )


def _has_login(scheme: str) -> bool:
    # As MLflow looks for it: pathlib raises for a user without a home, or who may not read it.
    has_file = os.path.isfile(os.path.expanduser("~/.mlflow/credentials"))  # noqa: PTH111, PTH113
    return (scheme in _SERVERS and has_file) or any(os.environ.get(name) for name in _LOGINS.get(scheme, ()))


def _entries() -> list[str]:
    return [entry for entry in re.split(r"[\s,]+", os.environ.get(VARIABLE, "")) if entry]


def is_below(uri: str, entry: str) -> bool:
    """Whether a place is another one, or inside it."""
    requested, allowed = urlsplit(uri), urlsplit(entry)
    if requested.scheme != allowed.scheme:
        return False
    if requested.scheme == "file":
        return _resolved(requested.path).is_relative_to(_resolved(allowed.path or "/"))
    if allowed.netloc and requested.netloc != allowed.netloc:
        return False
    if _places_in(requested.query) not in ([], _places_in(allowed.query)):
        return False
    if ".." in unquote(requested.path).split("/"):  # clients resolve it, to a place that is not below
        return False
    return PurePosixPath(requested.path or "/").is_relative_to(PurePosixPath(allowed.path or "/"))


def is_same_place(uri: str, other: str) -> bool:
    """Whether two URIs name one place: links on disks are followed, and a final slash means nothing."""
    return is_below(uri, other) and is_below(other, uri)


def _places_in(query: str) -> list[tuple[str, str]]:
    """What names other hosts in the address of a database."""
    return [(name, text) for name, text in parse_qsl(query) if name in _PLACES]


def _resolved(path: str) -> Path:
    return Path(unquote(path)).resolve()


def open_store(uri: str) -> OpenableStore:
    """Open the store at an absolute ``file://`` or ``s3://bucket/prefix`` URI. Creates nothing until the first write.

    Raises:
        StorageError: the scheme is unknown, the path is not absolute, or anything in the URI is ambiguous.
        StorageDeniedError: the settings do not allow this place.
    """
    return _open(uri)


def check_store_uri(uri: str) -> None:
    """Refuse a URI that ``open_store`` would refuse whatever the environment says. Pure.

    Raises:
        StorageError: as ``open_store``.
    """
    parts = _split(uri)
    _SCHEMES[parts.scheme].check(parts, uri)


def has_scheme(place: str) -> bool:
    """Whether a place is no path: ``s3://bucket``, but also ``pipe:...`` and a Windows share, which no store has."""
    return _SCHEME.match(place) is not None


def as_uri(place: str, folder: str = "") -> str:
    """A path as a ``file://`` URI with its braces and its final slash; a place with a scheme as it is.

    Args:
        place: what somebody wrote.
        folder: absolute path from which a relative path starts; default: the working directory.
    """
    if has_scheme(place):
        return place
    path = os.path.normpath(os.path.join(folder or Path.cwd(), place))  # noqa: PTH118 - of texts, links unfollowed
    return "file://" + quote(path, safe="/{},.+=@~") + ("/" if place.endswith("/") and path != "/" else "")


def is_s3(uri: str) -> bool:
    """Whether a URI names a bucket. Raises ``StorageError`` for what ``check_store_uri`` refuses."""
    check_store_uri(uri)
    return _split(uri).scheme == S3.name


def split_s3(uri: str) -> tuple[str, str]:
    """Bucket and prefix of an ``s3://`` URI. Raises as ``is_s3``."""
    return bucket_and_prefix(_split(uri), uri)


def is_initialised(uri: str, *, deadline_s: float | None = None) -> bool:
    """Whether the store exists; creates nothing.

    Args:
        uri: of the store.
        deadline_s: seconds after which a silent server counts as unavailable; default: that of the settings.

    Raises:
        StorageError: as ``open_store``, or the store does not answer.
    """
    return _open(uri, deadline_s).is_reachable


def _open(uri: str, deadline_s: float | None = None) -> OpenableStore:
    parts = _split(uri)
    check_allowed(uri)
    return _SCHEMES[parts.scheme].open(parts, uri, deadline_s)


def _split(uri: str) -> SplitResult:
    # None of these messages shows the URI: what stands before an @ may be a password.
    if _CONTROL.search(uri):
        # urlsplit would leave out some of them, and so mean another place.
        raise StorageError("the store URI holds control characters; write them as %0A and the like, or leave them out")
    try:
        parts = urlsplit(uri)
    except ValueError:
        message = f"the store is not a URI: its host is malformed; write {_EXAMPLES}"
        raise StorageError(message) from None
    if "@" in parts.netloc:
        raise StorageError("a store URI with a user or password is refused; credentials belong into the environment")
    if not parts.scheme:
        hint = f"write file://{uri}; " if uri.startswith("/") else ""
        raise StorageError(f"store {uri!r} has no scheme; {hint}supported: {_SUPPORTED}")
    if parts.scheme not in _SCHEMES:
        raise StorageError(f"store {uri!r} has the scheme {parts.scheme!r}; supported: {_SUPPORTED}")
    path = unquote(parts.path)
    if parts.query or parts.fragment or ".." in path.split("/") or "\0" in path:
        message = f"store {uri!r} is refused: '..', '?', '#' and NUL could mean another place than it seems"
        raise StorageError(message)
    return parts


def expand_braces(pattern: str) -> tuple[str, ...]:
    """The URIs of a pattern, in its order; ``{000..127}`` counts, ``{a,b}`` lists, nesting multiplies.

    Raises:
        StorageError: braces do not match, or there are more than ``MAX_EXPANDED``.
    """
    ranges = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern)]
    try:
        if prod(ranges) > MAX_EXPANDED:  # before braceexpand makes a list of it
            raise StorageError(_too_many(pattern))
        found = tuple(islice(braceexpand(pattern, escape=False), MAX_EXPANDED + 1))
    except ValueError as error:
        raise StorageError(f"{pattern!r} has braces that do not match; write train-{{000000..001023}}.tar") from error
    if len(found) > MAX_EXPANDED:
        raise StorageError(_too_many(pattern))
    return found


def split_object_uri(uri: str) -> tuple[str, str]:
    """Store URI (the folder) and object name (the basename) of a single object's URI.

    Raises:
        StorageError: the URI is none that a store can hold: another scheme (``pipe:`` included), a user or password,
            ``..``, or no name at its end.
    """
    folder, _, name = uri.rpartition("/")
    check_store_uri(uri)  # the whole URI: messages then name what was written
    if not name or folder.endswith((":/", "://")):
        raise StorageError(f"{uri!r} names no object; write s3://bucket/folder/name or file:///folder/name")
    return folder, check_name(name)


def find_objects(patterns: Iterable[str]) -> dict[str, tuple[str, str]]:
    """``{object name: (store URI, object name)}`` of all URIs that some patterns stand for.

    Raises:
        StorageError: a URI is refused, or two have one basename.
    """
    found: dict[str, tuple[str, str]] = {}
    for uri in (uri for pattern in patterns for uri in expand_braces(pattern)):
        place = split_object_uri(uri)
        if found.setdefault(place[1], place) != place:
            raise StorageError(f"{uri!r} has the name of a shard in {found[place[1]][0]}; names must be unique")
    return found


def _too_many(pattern: str) -> str:
    return f"{pattern!r} stands for more than {MAX_EXPANDED} names; check its ranges"
