"""``python -m workloads.data VERB ARGUMENTS``: the data plane's side of ``orchestrator data``; JSON in, JSON out."""

from __future__ import annotations

import json
import sys
from typing import Any

from orchestrator.core.errors import NotFoundError, OrchestratorError

_FAILURE, _NOT_FOUND, _INTERRUPTED = 1, 102, 130


def main(verb: str, arguments: dict[str, Any]) -> int:
    """Run a command; returns the exit code of ``docs/cli.md``."""
    from workloads.commands import data

    verbs = {
        "shard": data.shard,
        "listing": data.listing,
        "index": data.index,
        "verify": data.verify,
        "stats": data.stats,
        "sample": data.sample,
    }
    try:
        sys.stdout.write(json.dumps(verbs[verb](arguments)) + "\n")
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return _NOT_FOUND if isinstance(error, NotFoundError) else _FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; run the same command again to go on\n")
        return _INTERRUPTED
    return 0


if __name__ == "__main__":  # processes of a pool import this file under another name
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
