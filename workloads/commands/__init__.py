"""Answers to questions of the control plane, each in a separate process; see ``orchestrator.core.data_plane``."""
