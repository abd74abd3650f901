"""What can go wrong between the publisher and a tracking server. None of it ever touches a sweep's truth."""

from __future__ import annotations

from orchestrator.errors import OrchestratorError


class TrackingError(OrchestratorError):
    """The tracking server cannot be reached or refuses a call; what was not published is published later."""


class RunGoneError(TrackingError):
    """A run was deleted on the tracking server while it was being published; it is made anew."""
