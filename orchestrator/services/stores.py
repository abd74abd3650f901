"""Opening the store that a command names, and finding a sweep: in a file, among the shipped ones, or in a store."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.errors import NotFoundError
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.settings import Settings
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweeps.client import list_sweeps, load_plan

ANSWER_S = 4.0
"""A store that does not answer for so long is said not to answer."""


def find_plan(reference: str, store_uri: str, planned_for: str = "", *, store: ObjectStore | None = None) -> Plan:
    """The plan of a file, of a submitted sweep of a store, or of a shipped sweep: the first that there is.

    Args:
        reference: path or name.
        store_uri: where submitted sweeps are looked for.
        planned_for: store of a plan made now; default: ``store_uri``.
        store: the one of ``store_uri``, if it is open already.

    Raises:
        SpecError: there is no such file, or it is wrong.
        StorageError: the store does not answer.
    """
    if not Path(reference).is_file():
        store = store or find_store(store_uri)
        if store is not None and reference in list_sweeps(store):
            return load_plan(store, reference)
    from orchestrator.planning.graph.build import build_plan  # what most commands, which only read a store, never need
    from orchestrator.sweepfile import load_sweep

    sweep, _ = load_sweep(reference)
    return build_plan(sweep, store_uri=planned_for or store_uri)


def find_store(uri: str) -> ObjectStore | None:
    """The store at a URI; None where nothing was ever written."""
    return open_store(uri) if is_initialised(uri) else None


def open_existing_store(uri: str) -> ObjectStore:
    """The store that commands read. Raises ``NotFoundError`` where nothing was ever written, else as settings do."""
    resolved = Settings().known_store_uri(uri)
    if not is_initialised(resolved, deadline_s=ANSWER_S):
        message = f"there is no store at {resolved}: submit a sweep first, or name another with --store"
        raise NotFoundError(message)
    return open_store(resolved)


def require_sweep(store: ObjectStore, sweep: str) -> None:
    """Raise ``NotFoundError`` with the nearest name if the store does not know the sweep."""
    known = list_sweeps(store)
    if sweep not in known:
        message = f"store {store.uri} has no sweep '{sweep}': {did_you_mean(sweep, known)}"
        raise NotFoundError(message)
