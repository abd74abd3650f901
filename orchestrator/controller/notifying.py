"""Notifications of a controller, in a thread of its process that never delays or ends it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.core.errors import OrchestratorError, SpecError
from orchestrator.notifications.notifier import Notifier
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.open import open_store
from orchestrator.sweepfile.notify import parse_notify_file
from orchestrator.sweepfile.values import Channel

NOTIFY_FILE_VARIABLE = "ORCHESTRATOR_NOTIFY_FILE"
"""Environment variable of the head's workers: a YAML file ``notify: [...]`` that counts for all sweeps."""
EVERY_S = 2.0
_MAX_BACKOFF_S = 60.0
_MAX_BYTES = 1_000_000
_LOG = logging.getLogger(__name__)


class GeneralChannels:
    """The channels that count for every sweep, read again when their file has changed; an error is logged once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[float, int] | None = None
        self._channels: tuple[Channel, ...] = ()
        self._logged: set[str] = set()
        """Errors since the file was last read."""

    def __call__(self) -> Sequence[Channel]:
        """The file's present channels; while it cannot be read, the previous ones."""
        if not self._path:
            return ()
        try:
            stat = Path(self._path).stat()
            seen = (stat.st_mtime, stat.st_size)
            if seen != self._seen:
                self._read()
                self._seen = seen  # not after an error of the disk, which may pass: it is read again
        except OSError as error:
            self._log(error)
        return self._channels

    def _read(self) -> None:
        try:
            self._channels = read_notify_file(self._path)
            self._logged.clear()
        except SpecError as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        if str(error) not in self._logged:
            _LOG.error("changes of the channels in %s have no effect: %s", self._path, error)
            self._logged.add(str(error))


def read_notify_file(path: str) -> tuple[Channel, ...]:
    """The channels of a file.

    Raises:
        SpecError: it is too large, no text, or wrong.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise SpecError((f"{path}:1:1: larger than {_MAX_BYTES} bytes; name a file of notify: [...]",))
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise SpecError((f"{path}:1:1: not UTF-8 text; save it as UTF-8",)) from None
    return parse_notify_file(text, path)


def start_notifying(store_uri: str, cluster: str, read_snapshots: Callable[[], Sequence[Snapshot]]) -> None:
    """Start the thread; it ends with the process."""
    channels = GeneralChannels(os.environ.get(NOTIFY_FILE_VARIABLE, ""))

    def notify() -> None:
        notifier = Notifier(open_store(store_uri), cluster, read_snapshots, channels)
        pause_s = EVERY_S
        while True:
            try:
                notifier.turn()
                pause_s = EVERY_S
            except OrchestratorError as error:
                _LOG.warning("notifications wait: %s", error)
                pause_s = min(2 * pause_s, _MAX_BACKOFF_S)
            except Exception:  # noqa: BLE001 - a failed notification must not end the controller
                _LOG.exception("a round of notifications failed")
                pause_s = min(2 * pause_s, _MAX_BACKOFF_S)
            time.sleep(pause_s)

    threading.Thread(target=notify, name="notifications", daemon=True).start()
