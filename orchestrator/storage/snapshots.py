"""States of a sweep at some points of its journal, so that a long journal need not be read from its beginning.

They are a shortcut, never truth: each says which segments it covers and the sha256 of the last of them, is sealed (see
``seals``), and may be deleted at any time. One that is damaged, or of another version, is passed over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from orchestrator.core.errors import CorruptObjectError, NotFoundError, PreconditionFailedError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import PLAN_BYTES, check_writable
from orchestrator.storage.layout import snapshot_name, snapshots_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal

KEPT = 2
"""The newest, and one more for readers that have just listed them, or should the newest be damaged."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A state and the place in the journal that it belongs to."""

    next_sequence: int
    """Of the first segment that it does not cover."""
    journal_sha256: str
    """Of the last segment that it covers; empty in snapshots of earlier versions."""
    document: dict[str, Any]


def write_snapshot(
    store: ObjectStore, sweep: str, next_sequence: int, document: Mapping[str, Any], *, journal_sha256: str = ""
) -> None:
    """Store the state after all segments before ``next_sequence``, and delete all but the newest ones.

    To be called by whoever wrote the last of these segments, after it is durable.

    Raises:
        StorageError: none may have been stored.
    """
    body = json.dumps(document, allow_nan=False)
    told = {
        "next_sequence": next_sequence,
        "journal_sha256": journal_sha256,
        "sha256": sha256(body.encode()).hexdigest(),  # for earlier versions, which refuse a snapshot without it
    }
    name = snapshot_name(sweep, next_sequence)
    content = seal(name, f"{json.dumps(told)}\n{body}\n".encode())
    check_writable(name, len(content), PLAN_BYTES, "the journal is read instead")
    try:
        store.put_if_absent(name, content)
    except PreconditionFailedError:
        return  # another controller of the same journal has got here: the state is the same
    for name in store.list_children(snapshots_folder(sweep))[:-KEPT]:
        store.delete(f"{snapshots_folder(sweep)}{name}")


def read_snapshots(store: ObjectStore, sweep: str) -> Iterator[StoredSnapshot]:
    """Intact states, the newest first."""
    for child in reversed(store.list_children(snapshots_folder(sweep))):
        name = f"{snapshots_folder(sweep)}{child}"
        try:
            yield parse_snapshot(name, store.get(name, max_bytes=PLAN_BYTES))
        except NotFoundError:
            continue  # a newer one has taken its place meanwhile
        except (ValueError, KeyError, TypeError, CorruptObjectError) as error:
            _LOG.warning("snapshot %s of sweep %s is damaged and passed over: %s", child, sweep, error)


def parse_snapshot(name: str, content: bytes) -> StoredSnapshot:
    """A snapshot out of the object of this name. Raises ``ValueError``, ``KeyError`` or ``TypeError`` if damaged."""
    is_sealed = check_seal(name, content)
    header, body = content.decode().split("\n", 1)
    told, body = parse_json(header), body.removesuffix("\n")
    if not is_sealed and sha256(body.encode()).hexdigest() != told["sha256"]:
        raise ValueError("the sha256 of its state does not match")
    next_sequence = int(told["next_sequence"])
    if not name.endswith(f"/{next_sequence:08d}.jsonl"):
        raise ValueError(f"its header says that segment {next_sequence} follows, which its name does not")
    document = parse_json(body)
    return StoredSnapshot(
        next_sequence=next_sequence, journal_sha256=str(told.get("journal_sha256", "")), document=document
    )
