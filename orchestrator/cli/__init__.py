"""The command line. Importing this package loads nothing heavy: ``orchestrator --help`` must answer at once."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script; ends the process with a documented exit code."""
    from orchestrator.cli.app import run_app

    run_app()
