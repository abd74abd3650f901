"""What an attempt is allowed before it is ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from orchestrator.state.codec import decode_value

GRACE_S = 120.0
"""Time for a checkpoint: a network of 1e9 parameters with its optimizer is 16 GB, which takes a minute to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long an attempt may go without a further step."""

    multiple: float = 30.0
    """Times its own step; a step that waits for a slow store or a busy node takes a few."""
    floors_s: Mapping[str, float] = field(
        default_factory=lambda: (
            {
                # Steps are short, but a rank that fetches its shards again after an outage takes minutes.
                "train": 600.0,
                "embed": 600.0,
                # Importing, downloading the index, compiling the network.
                "starting": 1800.0,
                "setup": 1800.0,
                # These report no steps while they go on.
                "evaluate": 3600.0,
                "write": 1800.0,
            }
        )
    )
    """Least time by phase, seconds."""
    other_s: float = 3600.0
    """Least time in any other phase, seconds."""

    def limit_s(self, phase: str, step_s: float) -> float:
        """Seconds without a further step after which an attempt hangs."""
        return max(self.floors_s.get(phase, self.other_s), self.multiple * step_s)


class PreflightRule(StrEnum):
    """When one job of a sort goes ahead of the others, until it has trained a few steps."""

    LARGE = "large"
    """Where they take more than a few GPU-hours."""
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """All limits of one controller's attempts."""

    grace_s: float = GRACE_S
    """From the request to write a checkpoint and end to the end by force."""
    hangs: HangLimits = field(default_factory=HangLimits)
    preflight: PreflightRule = PreflightRule.LARGE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return decode_value(cls, document)
