"""What an object store must do; ``tests/contract/test_object_store.py`` holds every implementation to it.

Names are ``/``-separated, without empty, ``.`` or ``..`` parts. All methods raise ``StorageError`` or its subclasses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult

from orchestrator.core.errors import StorageError

_PART = r"[A-Za-z0-9_=@+,#~-][A-Za-z0-9._=@+,#~-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_MAX_NAME = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """Metadata of one object; ``etag`` changes whenever the content does."""

    name: str
    size_bytes: int
    etag: str
    modified_at_s: float = field(default=math.inf, compare=False)
    """Unix seconds of the last write, by the store's clock. ``list_objects`` and ``stat`` always know it; a write need
    not: then it is infinite, which makes the object younger than anything."""


class ObjectStore(Protocol):
    """A flat namespace of objects, immutable by convention, with conditional writes."""

    @property
    def uri(self) -> str:
        """Absolute URI of the root; ``open_store(store.uri)`` opens the same store elsewhere."""

    def put(self, name: str, content: bytes) -> ObjectStat:
        """Write an object, replacing any earlier one atomically; durable on return."""

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """Write an object from a local file, as ``put`` does."""

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """Write an object only if none has this name: exactly one of many racing writers wins.

        Raises:
            PreconditionFailedError: the object exists with other content. The very same content is success, because a
                retried write finds its own first try after a lost acknowledgement; callers add a nonce where the
                difference matters.
        """

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """Replace an object only if it still has ``etag``. Never write equal content twice this way (ABA).

        Raises:
            PreconditionFailedError: the object has another etag or does not exist.
        """

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object.

        Raises:
            NotFoundError: no object has this name.
            TooLargeError: it has more than ``max_bytes``, and was not read.
        """

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        """As ``get``, with the etag of exactly these bytes."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes from ``start``; fewer at the end of the object. Raises ``NotFoundError``."""

    def download(self, name: str, path: Path) -> None:
        """Stream an object into a local file, atomically. Raises ``NotFoundError``."""

    def stat(self, name: str) -> ObjectStat:
        """Size and etag. Raises ``NotFoundError``."""

    def exists(self, name: str) -> bool:
        """Whether an object has this name."""

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """All objects whose name starts with ``prefix``, in no promised order.

        What others put there under names that are refused (``check_name``) is no object.
        """

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Distinct next name parts below a folder ``prefix`` (which ends in ``/`` or is empty), sorted; as in
        ``list_objects``, none that is refused. Only those that sort behind ``start_after``.
        """

    def delete(self, name: str) -> None:
        """Delete an object; deleting a missing one is success."""


def is_name(name: str) -> bool:
    """Whether an object may have this name."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return the name, or raise ``StorageError`` if it could leave the store or is ambiguous."""
    if not is_name(name):
        message = f"object name {name!r} is refused: "
        message += "use parts of letters, digits and ._=@+,#~- (no leading dot) joined by single '/'"
        raise StorageError(message)
    return name


class OpenableStore(ObjectStore, Protocol):
    """A store that a URI names."""

    @property
    def is_reachable(self) -> bool:
        """Whether it exists. Raises ``StorageError`` if it does not answer."""

    def refused_children(self, prefix: str) -> list[str]:
        """What ``list_children`` leaves out, because others put it there under names that are refused; but nothing that
        begins with a dot.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A kind of stores, by the scheme of their URIs; ``storage.open`` has the list of them."""

    name: str
    example: str
    """A URI, for people."""
    check: Callable[[SplitResult, str], object]
    """Refuses (``StorageError``) a split URI, given whole as well, that names no store of this kind. Pure."""
    open: Callable[[SplitResult, str, float | None], OpenableStore]
    """Opens the store; seconds after which a silent server counts as gone, none = as the settings say."""
