"""What a run must remember besides weights and optimiser state, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from workloads.train.fingerprint import Fingerprint
from workloads.train.metrics import Tally
from workloads.train.safety import NormTrend, Rewind


@dataclass(slots=True, kw_only=True)
class RunState:
    """Where a run is after ``step`` updates. Every number survives JSON exactly (Python prints floats reversibly)."""

    step: int = 0
    since_line: Tally = field(default_factory=Tally)
    """Training samples since the last metrics line."""
    in_epoch: Tally = field(default_factory=Tally)
    """Training samples of the present epoch."""
    norms: NormTrend = field(default_factory=NormTrend)
    """Gradient norms so far."""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last complete epoch and the last evaluation."""
    best_val_error: float = 1.0
    peak_epoch: float = 0.0
    """Epoch of the first evaluation with ``best_val_error``; 0 before any."""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """Steps whose weights the artifact will hold besides the last one's; see ``workloads.checkpoint.retention``."""
    rewinds: list[Rewind] = field(default_factory=list)
    """Numerics failures that this run went back behind, in the order in which they happened."""
    bad_samples: dict[str, Any] = field(default_factory=dict)
    """As of the last checkpoint, those that were counted so far; see ``RunMemory``."""
    resumed_steps: list[int] = field(default_factory=list)
    fingerprint: Fingerprint = field(default_factory=dict)
    fingerprint_changes: list[str] = field(default_factory=list)
    """Differences of numerics that this run met when it resumed; empty = bit-exact."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form without the step, which the checkpoint itself carries."""
        return {name: value for name, value in asdict(self).items() if name != "step"}

    @classmethod
    def from_json(cls, step: int, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``; what an older program did not write is as at the start."""
        parsed: dict[str, Any] = {name: Tally(**document[name]) for name in ("since_line", "in_epoch")}
        parsed["norms"] = NormTrend(**document.get("norms", {}))
        parsed["rewinds"] = [Rewind.from_json(rewind) for rewind in document.get("rewinds", ())]
        return cls(**{**document, **parsed, "step": step})
