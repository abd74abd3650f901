"""Why a sweep is not published, kept in the store: who publishes is another process than who asks."""

from __future__ import annotations

import json

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import redacted
from orchestrator.storage.layout import publication_name
from orchestrator.storage.protocol import ObjectStore


class PublishingTrouble:
    """What the publisher of a store last told of each sweep; use from one thread.

    Only what changes is written. A sweep that is published for the first time by this process loses what an earlier
    publisher has left.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._told: dict[str, str] = {}

    def tell(self, sweep: str, why: str) -> bool:
        """Note why a sweep is not published now; whether that is news."""
        if self._told.get(sweep) == why:
            return False
        self._told[sweep] = why
        try:
            self._store.put(publication_name(sweep), json.dumps({"problem": redacted(why)}).encode())
        except OrchestratorError:  # the store's own outage is told by everybody else
            self._told.pop(sweep)
        return True

    def clear(self, sweep: str) -> None:
        """Note that a sweep is published."""
        if self._told.get(sweep) != "":
            self._store.delete(publication_name(sweep))
            self._told[sweep] = ""


def read_trouble(store: ObjectStore, sweep: str) -> tuple[str, ...]:
    """Why a sweep is not published, at most one line; empty if it is."""
    try:
        problem = parse_json(store.get(publication_name(sweep))).get("problem")
    except (OrchestratorError, ValueError, AttributeError):
        return ()  # absent, as it should be; what people read about a sweep must not fail for this
    return (f"not published to MLflow: {problem}",) if problem else ()
