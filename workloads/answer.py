"""``python -m workloads.answer QUESTION``: answers one question of ``orchestrator.core.data_plane``."""

from __future__ import annotations

import os
import sys

from orchestrator.core.data_plane import NODE, answer

if __name__ == "__main__":  # processes of a pool import this file under another name
    code = answer(sys.argv[1])
    if sys.argv[1] == NODE.name:
        os._exit(code)  # a thread that waits for a store may keep others of its library alive
    sys.exit(code)
