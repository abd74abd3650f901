"""The shape of a gang: one attempt that runs on several workers at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from orchestrator.core.contract import JobKind, JobRequest, Resources
from orchestrator.state.codec import decode_value

NODE_LABEL = "ray.io/node-id"
"""Ray's own label of every node."""
COORDINATOR = Resources(cpus=0.0)
"""A gang's runner only waits for the workers, which hold the resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """``num_workers`` processes of equal size; together they hold what the attempt was given."""

    num_workers: int
    total: Resources = field(default_factory=Resources)
    node_ids: tuple[str, ...] = ()
    """Ray's ids of the nodes for the workers, one each; empty = wherever there is room."""
    excluded_ids: tuple[str, ...] = ()
    """Ray's ids of nodes where none may go."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Ray labels that all of their nodes must have, where these are yet to come."""

    @classmethod
    def of(
        cls,
        request: JobRequest,
        total: Resources,
        node_ids: tuple[str, ...] = (),
        excluded_ids: tuple[str, ...] = (),
        selector: Mapping[str, str] | None = None,
    ) -> Self | None:
        """Shape of an attempt's gang, or of a search's trials; ``None`` for one of one worker, which needs no gang."""
        num_workers = request.execution.num_workers
        if num_workers == 1 and request.kind is not JobKind.SEARCH:
            return None
        return cls(
            num_workers=num_workers, total=total, node_ids=node_ids, excluded_ids=excluded_ids, selector=selector or {}
        )

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
        return decode_value(cls, document)
