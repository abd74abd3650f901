"""Opening the store that a command names, and finding a sweep: in a file, among the shipped ones, or in a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.core.errors import NotFoundError, SpecError, StorageError
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import say
from orchestrator.stack.description import read_description
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_plan

ANSWER_S = 4.0
"""Limit after which a store counts as not answering."""
_RESTART_S = 60.0
"""The S3 server of a stack that starts again answers within seconds; a busy machine takes longer."""
_POLL_S = 0.2
_MAX_SWEEPS_NAMED = 20
"""Sweeps of the store that an error names."""


def find_plan(reference: str, store_uri: str, planned_for: str = "", *, store: ObjectStore | None = None) -> Plan:
    """The plan of a file, of a submitted sweep of a store, or of a shipped sweep: the first that exists.

    Args:
        reference: path or name.
        store_uri: where submitted sweeps are looked for.
        planned_for: store of a plan made now; default: ``store_uri``.
        store: the one of ``store_uri``, if it is open already.

    Raises:
        SpecError: there is none of these, or the file is wrong.
        StorageError: the store does not answer.
    """
    submitted: list[str] = []
    if not Path(reference).is_file():
        store = store or find_store(store_uri)
        submitted = list_sweeps(store) if store is not None else []
        if store is not None and reference in submitted:
            return load_plan(store, reference)
    from orchestrator.planning.graph.build import build_plan  # not needed by commands that only read a store
    from orchestrator.sweepfile import load_sweep
    from orchestrator.sweepfile.load import find_sweep

    try:
        find_sweep(reference)
    except SpecError as error:
        named = ", ".join(submitted[-_MAX_SWEEPS_NAMED:]) or "none"
        message = f"store {store_uri} has no sweep of this name either; submitted there: {named}"
        raise SpecError((f"{error}; {message}",)) from None
    sweep, _ = load_sweep(reference)
    return build_plan(sweep, store_uri=planned_for or store_uri)


def find_store(uri: str) -> ObjectStore | None:
    """The store at a URI; None if nothing was ever written there."""
    return open_store(uri) if is_initialised(uri) else None


def open_existing_store(uri: str) -> ObjectStore:
    """The store that commands read. Raises ``NotFoundError`` where nothing was ever written, else as settings do."""
    resolved = Settings().known_store_uri(uri)
    revive_killed_store(resolved)
    if not is_initialised(resolved, deadline_s=ANSWER_S):
        message = f"there is no store at {resolved}: submit a sweep first, or name another with --store"
        raise NotFoundError(message)
    return open_store(resolved)


def revive_killed_store(uri: str) -> bool:
    """Start the project's stack again if it was killed and its S3 server holds the store; wait until the store answers.

    Returns whether it is such a store and answers again. A stack that was stopped in order is not started.
    """
    if not uri.startswith("s3://"):
        return False
    home = Settings().home
    stack = read_description(home)
    if stack is None or not stack.s3_url or not stack.is_here or (stack.is_alive and not stack.trouble):
        return False
    from orchestrator.storage.s3.settings import S3Settings  # a tenth of the time of commands that read a directory

    if S3Settings().endpoint_url.rstrip("/") != stack.s3_url.rstrip("/"):
        return False
    restart_killed(home)
    deadline_s = time.monotonic() + _RESTART_S
    while time.monotonic() < deadline_s:
        with suppress(StorageError):
            if is_initialised(uri, deadline_s=ANSWER_S):
                return True
        time.sleep(_POLL_S)
    return False


def restart_killed(home: Path) -> None:
    """Begin to start the stack of a directory again if its supervisor was killed, and print a message."""
    from orchestrator.stack.start import restart_killed_stack

    if (killed := restart_killed_stack(home)) is not None:
        died = f"The supervisor of the local stack (pid {killed.pid}) has died"
        say(f"{died}; the stack is started again, and the sweep resumes from its checkpoints.")


def require_sweep(store: ObjectStore, sweep: str) -> None:
    """Raise ``NotFoundError`` with the nearest name if the store does not know the sweep."""
    known = list_sweeps(store)
    if sweep not in known:
        message = f"store {store.uri} has no sweep '{sweep}': {did_you_mean(sweep, known)}"
        raise NotFoundError(_wrongly_a_file(sweep, store, known) or message)


def _wrongly_a_file(given: str, store: ObjectStore, known: Sequence[str]) -> str:
    """What to write in place of the file of a sweep; empty if there is none at that path."""
    if not Path(given).is_file():
        return ""
    from orchestrator.sweepfile.load import read_text  # not needed where the name is right
    from orchestrator.sweepfile.parse.tree import parse_tree

    try:
        name = str(parse_tree(read_text(given, given), given).value.get("name", given))
    except SpecError:
        name = given
    if name in known:
        return f"'{given}' is a file; its sweep is called '{name}': give that name"
    return f"'{given}' is a file; give the name of a sweep that store {store.uri} has: {did_you_mean(name, known)}"
