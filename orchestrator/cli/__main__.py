"""``python -m orchestrator.cli``: the same as the console script."""

from orchestrator.cli import main

main()
