"""Where the log of a search job lies: in a folder that its head, ``log.json``, names.

A log that is begun anew gets a folder of its own, so that garbage collection may still be deleting the one before it:
without its head a log is as if it had never been.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from orchestrator.core.errors import NotFoundError
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import search_log_head, search_log_segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

HEAD_VERSION = 1


def encode_head(key: str, folder: str) -> bytes:
    """The head of the log of the search job ``key`` in ``folder``."""
    return seal(search_log_head(key), json.dumps({"version": HEAD_VERSION, "folder": folder}).encode())


def folder_in(key: str, content: bytes) -> str:
    """Inverse of ``encode_head``.

    Raises:
        ValueError: it is no head, or one of a newer version.
    """
    try:
        document = parse_sealed(search_log_head(key), content)
        version, folder = int(document["version"]), document["folder"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the head of a search's log is damaged ({error!r})") from error
    if version > HEAD_VERSION:
        raise ValueError(f"the head of a search's log has version {version}, this program reads {HEAD_VERSION}")
    if not isinstance(folder, str) or not folder or "/" in folder:
        raise ValueError(f"the head of a search's log names {folder!r}, which is no folder")
    return folder


def find_folder(store: ObjectStore, key: str) -> str:
    """The folder of a search job's log; empty if it has not begun, or is in the trash.

    Raises:
        ValueError: see ``folder_in``.
    """
    try:
        return folder_in(key, store.get(search_log_head(key), max_bytes=SMALL_BYTES))
    except NotFoundError:
        return ""


def is_whole(key: str, content: bytes, names: Collection[str]) -> bool:
    """Whether of a log with such a head no segment is missing among some objects; any prefix of a log is one.

    Raises:
        ValueError: see ``folder_in``.
    """
    folder = folder_in(key, content)
    inside = {name for name in names if name.startswith(search_log_segment(key, folder, 0).rpartition("/")[0] + "/")}
    return inside == {search_log_segment(key, folder, sequence) for sequence in range(len(inside))}
