"""What a sweep looks like while Python waits for it: one view that renews itself in a notebook, lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api.views import StatusView


class ProgressDisplay:
    """Shows a sweep whenever it has changed; a notebook is recognised by the shell that runs its kernel."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._said = ""

    def show(self, status: StatusView) -> None:
        """Put the present state on display, if it is another one than before."""
        told = repr(status)
        if told == self._said:
            return
        self._said = told
        if not in_notebook():
            sys.stderr.write(f"{told.strip('<>')}\n")
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(status, display_id=True)
        else:
            self._handle.update(status)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Never imports IPython by itself."""
    loaded = sys.modules.get("IPython")
    shell = loaded.get_ipython() if loaded is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
