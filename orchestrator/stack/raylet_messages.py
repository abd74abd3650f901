"""What Ray's own daemons tell a driver ("A worker died or was killed ...") becomes a log record, not a line on stdout.

Ray prints it even with ``log_to_driver=False`` and has no setting against it; on stdout it would end up inside the
JSON of ``-o json``, coloured. What died, and what follows from that, our own lines say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

_LOG = logging.getLogger(__name__)
_PRINTER: Final = "print_to_stdstream"
"""Ray's function that its thread of error messages calls by this global name, without asking its dispatcher."""


def log_raylet_messages() -> None:
    """Make Ray's messages to a driver records of level DEBUG, which no command shows, for the rest of this process.

    Call it before ``ray.init``, as often as you like.
    Lines of workers that another connection of this process wants forwarded (``log_to_driver=True``) are printed as
    ever. A Ray without that function is left as it is.
    """
    try:
        from ray._private import worker
    except ImportError:
        return
    printer = getattr(worker, _PRINTER, None)
    if printer is None or isinstance(printer, _MessageLog):
        return
    setattr(worker, _PRINTER, _MessageLog(printer))


class _MessageLog:
    """Stands in for Ray's printer."""

    __slots__ = ("_printer",)

    def __init__(self, printer: Any) -> None:  # noqa: ANN401 - Ray's own function is untyped
        self._printer = printer

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on as they came
        if not _is_of_ray_itself(message):
            self._printer(message, *args, **kwargs)
            return
        for line in message.get("lines", ()):
            _LOG.debug("Ray: %s", line)


def _is_of_ray_itself(message: Any) -> bool:  # noqa: ANN401 - Ray's own and untyped
    # A line that is forwarded from a node's log files, a raylet's among them, names that node.
    return isinstance(message, Mapping) and message.get("pid") == "raylet" and "ip" not in message
