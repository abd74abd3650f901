"""One module for each command, or for a few that belong together: options, call and what is printed.

``orchestrator.cli.app`` names them all, and imports one when its command is called.
"""
