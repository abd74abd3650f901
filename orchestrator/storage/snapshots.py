"""States of a sweep at some points of its journal, so that a long journal need not be read from its beginning.

They are a shortcut, never truth: each says which segments it covers, carries its own sha256, and may be deleted at any
time. One that is damaged, or of another version, is passed over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from orchestrator.errors import NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.security.json_text import parse_json
from orchestrator.storage.bounds import PLAN_BYTES, check_writable
from orchestrator.storage.layout import snapshot_name, snapshots_folder
from orchestrator.storage.protocol import ObjectStore

KEPT = 2
"""The newest, and one more for readers that have just listed them, or should the newest be damaged."""
_LOG = logging.getLogger(__name__)


def write_snapshot(store: ObjectStore, sweep: str, next_sequence: int, document: Mapping[str, Any]) -> None:
    """Store the state after all segments before ``next_sequence``, and delete all but the newest ones.

    To be called by whoever wrote the last of these segments, after it is durable.

    Raises:
        StorageError: none may have been stored.
    """
    body = json.dumps(document, allow_nan=False)
    header = json.dumps({"next_sequence": next_sequence, "sha256": sha256(body.encode()).hexdigest()})
    name, content = snapshot_name(sweep, next_sequence), f"{header}\n{body}\n".encode()
    check_writable(name, len(content), PLAN_BYTES, "the journal is read instead")
    try:
        store.put_if_absent(name, content)
    except PreconditionFailedError:
        return  # another controller of the same journal has got here: the state is the same
    for name in store.list_children(snapshots_folder(sweep))[:-KEPT]:
        store.delete(f"{snapshots_folder(sweep)}{name}")


def read_snapshots(store: ObjectStore, sweep: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Intact states, the newest first, each with the sequence number of the segment that follows it."""
    for name in reversed(store.list_children(snapshots_folder(sweep))):
        try:
            content = store.get(f"{snapshots_folder(sweep)}{name}", max_bytes=PLAN_BYTES)
            header, body = content.decode().split("\n", 1)
            told, body = parse_json(header), body.removesuffix("\n")
            if sha256(body.encode()).hexdigest() != told["sha256"]:
                _LOG.warning("snapshot %s of sweep %s is damaged, so an older one or the journal is read", name, sweep)
                continue
            yield int(told["next_sequence"]), parse_json(body)
        except NotFoundError:
            continue  # a newer one has taken its place meanwhile
        except (ValueError, KeyError, TypeError, TooLargeError) as error:
            _LOG.warning("snapshot %s of sweep %s cannot be read: %r", name, sweep, error)
