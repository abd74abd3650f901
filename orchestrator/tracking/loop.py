"""The loop that publishes one sweep until it has ended, through outages of the tracking server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from orchestrator.tracking.server import TrackingError, TrackingRefusedError

_MAX_BACKOFF_S = 60.0
_SOON_S = 0.1
_LOG = logging.getLogger(__name__)


class PublishesSweeps(Protocol):
    """What the loop needs of a ``Publisher``."""

    @property
    def num_written(self) -> int:
        """Runs that the tracking server took so far."""

    def publish_once(self, sweep: str) -> bool:
        """Publish what is new; True if everything known at this moment is published."""

    def has_ended(self, sweep: str) -> bool:
        """Whether nothing more will happen to the sweep."""


def publish_until_done(
    publisher: PublishesSweeps,
    sweep: str,
    *,
    poll_s: float = 2.0,
    give_up_s: float | None = None,
    wait: Callable[[float], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Publish until the sweep has ended and all of it is published.

    Args:
        publisher: what to publish with.
        sweep: its name.
        poll_s: pause between two looks at the journal.
        give_up_s: longest outage of the tracking server to sit out; None for any. A server that refuses is given up at
            once, unless it is None.
        wait: sleeps for some seconds (replaced in tests; may raise to end the loop).
        clock: seconds, monotonic.

    Raises:
        TrackingError: an outage lasted longer than ``give_up_s``.
    """
    pause = wait or threading.Event().wait
    outage_since: float | None = None
    backoff_s, told, num_written = poll_s, "", publisher.num_written
    while True:
        try:
            # Asked first: what happens after the answer may be missed, what happened before it is published.
            ended = publisher.has_ended(sweep)
            published = publisher.publish_once(sweep)
        except TrackingError as error:
            now = clock()
            if publisher.num_written > num_written:  # it works now and then: this is another outage
                outage_since, backoff_s, num_written = None, poll_s, publisher.num_written
            outage_since = now if outage_since is None else outage_since
            if give_up_s is not None and (isinstance(error, TrackingRefusedError) or now - outage_since >= give_up_s):
                raise
            if str(error) != told:
                _LOG.warning("%s; trying again", error)
            told = str(error)
            pause(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            continue
        if ended and published:
            return
        outage_since, backoff_s, told = None, poll_s, ""
        pause(poll_s if published else _SOON_S)
