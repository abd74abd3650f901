"""Actors that run a loop: the controller, its watchdog and the publisher.

They hold no state worth keeping: each can be killed at any moment and starts again from the store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from typing import Any

import ray

from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.core.security import redaction

BUSY_PAUSE_S = 0.005
"""Pause in which ends of attempts are collected into one round; short jobs wait longer if it is longer."""
ACTIVE_PAUSE_S = 0.1
IDLE_PAUSE_S = 0.5
MAX_BACKOFF_S = 10.0
_NOTE_WITHIN_S = 30.0
_NUM_LOOKS = 10
_LOG = logging.getLogger(__name__)


class LoopActor:
    """An actor whose work is one background thread; its methods only read. After a restart by Ray it continues."""

    final_errors: tuple[type[Exception], ...] = ()
    """Errors of a round that end the actor for good: after a restart they would occur again."""
    hangs_after_s: float | None = None
    """Seconds without progress after which the process ends itself, and Ray starts it again; None: others look after
    it."""

    def __init__(self) -> None:
        redaction.install()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._digest = code_digest()
        self._news = threading.Event()
        self._turned_at_s = time.monotonic()
        self._last_error = ""
        self._self = ray.get_runtime_context().current_actor
        threading.Thread(target=self._loop, name=type(self).__name__, daemon=True).start()
        if self.hangs_after_s is not None:
            threading.Thread(target=self._end_if_it_hangs, args=(self.hangs_after_s,), daemon=True).start()

    @abstractmethod
    def turn(self) -> float:
        """One round; returns for how many seconds to pause if there is no news."""

    def ping(self) -> dict[str, Any]:
        """Identity of this actor and state of its loop."""
        return {
            "pid": os.getpid(),
            "digest": self._digest,
            "turn_age_s": time.monotonic() - self._turned_at_s,
            "last_error": self._last_error,
        }

    def stamp(self) -> None:
        """Call it during a long round, from the loop's thread, to show that the loop does not hang."""
        self._turned_at_s = time.monotonic()

    def progress(self) -> object:
        """Differs from its last value if the loop has got on; read by another thread."""
        return self._turned_at_s

    def note_hang(self) -> None:
        """Called before the process of a loop that hangs ends itself; may hang, too."""

    def _end_if_it_hangs(self, limit_s: float) -> None:
        seen, num_looks = self.progress(), 0
        while num_looks < _NUM_LOOKS:  # looks are counted, not seconds: a process that was stopped did not hang
            time.sleep(limit_s / _NUM_LOOKS)
            progress = self.progress()
            seen, num_looks = progress, num_looks + 1 if progress == seen else 0
        _LOG.error(
            "%s has made no progress for %.0f s: its process ends and is started again", type(self).__name__, limit_s
        )
        note = threading.Thread(target=self.note_hang, daemon=True)
        note.start()
        note.join(_NOTE_WITHIN_S)
        os._exit(1)

    def _loop(self) -> None:
        backoff_s = ACTIVE_PAUSE_S
        while True:
            try:
                pause_s = self.turn()
            except self.final_errors as error:
                _LOG.warning("%s ends: %s", type(self).__name__, error)
                ray.kill(self._self, no_restart=True)
                return
            except Exception as error:  # noqa: BLE001 - the loop is all there is: it must outlive whatever one round meets
                _LOG.exception("a round of %s failed; the next one is in %.1f s", type(self).__name__, backoff_s)
                self._last_error = redaction.redacted(f"{type(error).__name__}: {error}")
                pause_s = backoff_s
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                self._last_error, backoff_s = "", ACTIVE_PAUSE_S
            self.stamp()
            self._news.wait(pause_s)
            self._news.clear()
