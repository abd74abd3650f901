"""The shape of a gang: one attempt that runs on several workers at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from orchestrator.contract import JobRequest, Resources

COORDINATOR = Resources(cpus=0.0)
"""A gang's runner only waits for the workers, which hold the resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """``num_workers`` processes of equal size; together they hold what the attempt was given."""

    num_workers: int
    total: Resources = field(default_factory=Resources)

    @classmethod
    def of(cls, request: JobRequest, total: Resources) -> Self | None:
        """Shape of an attempt's gang; ``None`` for an attempt of one worker, which needs no gang."""
        num_workers = request.execution.num_workers
        return cls(num_workers=num_workers, total=total) if num_workers > 1 else None

    @property
    def worker(self) -> Resources:
        """What each of the workers holds."""
        return self.total.share(self.num_workers)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(num_workers=document["num_workers"], total=Resources(**document["total"]))
