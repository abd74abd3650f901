"""From the settings to whatever takes a submit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.cli.remote import Submitter, ThroughDashboard, ThroughStore, require_meeting_place
from orchestrator.cli.settings import UNKNOWN_STORE, Settings
from orchestrator.storage.open import is_initialised, open_store

_STORE_S = 4.0


@contextmanager
def reach(settings: Settings, store_uri: str, *, foreground: bool) -> Iterator[Submitter]:
    """Whatever leads to the cluster of the settings: its dashboard, its store, a connection to Ray, or the local stack.

    Raises:
        ClusterError, ControllerError: as ``connect``.
        SpecError: as ``require_meeting_place``.
    """
    if not foreground and not settings.is_remote and not settings.driver_address:
        from orchestrator.cli.stack_connection import connect_stack

        with connect_stack(settings, store_uri) as stack:
            yield stack
    elif foreground or not settings.is_remote:
        from orchestrator.cli.connect import connect  # Ray takes a second, which nobody else needs

        with connect(settings, store_uri, foreground=foreground) as connection:
            yield connection
    elif settings.jobs_address:
        is_known = store_uri != UNKNOWN_STORE and is_initialised(store_uri, deadline_s=_STORE_S)
        yield ThroughDashboard(settings=settings, store=open_store(store_uri) if is_known else None)
    else:
        require_meeting_place(settings, store_uri)
        yield ThroughStore(settings=settings, store=open_store(store_uri))
