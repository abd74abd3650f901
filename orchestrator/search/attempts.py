"""Numbers of attempts at trials, which are jobs like any other: over all searches and sweeps they differ."""

from __future__ import annotations

import json
import secrets

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage.layout import attempt_name, attempts_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import seal


def allocate_trial_attempt(store: ObjectStore, search: JobRequest, key: str, trial: int) -> int:
    """Take the next attempt number of a trial's key; numbers start at 1."""
    taken = store.list_children(attempts_folder(key))
    number = 1 + max((int(name.removesuffix(".json")) for name in taken), default=0)
    document = {"sweep": search.sweep, "job": f"{search.job}#{trial}", "search": search.attempt_id}
    while True:
        name = attempt_name(key, number)
        content = json.dumps({**document, "nonce": secrets.token_hex(8)}).encode()
        try:
            store.put_if_absent(name, seal(name, content))
        except PreconditionFailedError:
            number += 1
        else:
            return number
