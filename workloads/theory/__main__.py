"""``python -m workloads.theory check``: the data plane's side of simulations; JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys


def main(verb: str) -> int:
    """Run a command; returns the exit code."""
    from workloads.commands import simulations

    sys.stdout.write(json.dumps({"check": simulations.check}[verb](json.load(sys.stdin))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
