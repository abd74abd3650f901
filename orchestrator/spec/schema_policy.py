"""What ``policy:`` may say."""

from __future__ import annotations

from pydantic import Field

from orchestrator.spec.fields import Count, Strict


class PolicySpec(Strict):
    """What to do when jobs fail."""

    failures: Count = Field(3, description="Failed attempts before a job fails; preemptions do not count.")
