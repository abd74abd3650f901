"""``python -m workloads.labels VERB``: the data plane's side of label spaces; JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys

from orchestrator.core.errors import OrchestratorError


def main(verb: str) -> int:
    """Run a command; returns the exit code."""
    from workloads.commands import labels

    verbs = {"count": labels.count, "show": labels.show, "table": labels.table, "changes": labels.changes}
    try:
        sys.stdout.write(json.dumps(verbs[verb](json.load(sys.stdin))) + "\n")
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
