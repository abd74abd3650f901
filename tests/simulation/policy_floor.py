"""How soon at the earliest a job may be tried again: read once, before anything is broken on purpose."""

from __future__ import annotations

from orchestrator.core.errors import FailureKind
from orchestrator.state.failure_policy import MAX_BACKOFF_S, POLICY

_BACKOFFS_S = {kind.value: rule.backoff_s for kind, rule in POLICY.items()}
_JITTER = 0.5
"""Waits may be shortened at random by up to this part."""


def min_backoff_s(kind: str, count: int) -> float:
    """Seconds between the ``count``-th failure of a kind and the next attempt, at least."""
    backoff_s: float = min(MAX_BACKOFF_S, _BACKOFFS_S[FailureKind(kind).value] * 2.0 ** min(count - 1, 30))
    return backoff_s * (1.0 - _JITTER)
