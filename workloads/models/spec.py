"""Which timm model a job trains, as its identity says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from orchestrator.core.errors import UserError

RESERVED = frozenset({"checkpoint_path", "features_only", "in_chans", "num_classes", "pretrained", "scriptable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A timm model name, the side of its square input in pixels, and further arguments of its constructor."""

    name: str
    image_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reserved = sorted(RESERVED & self.kwargs.keys())
        if reserved:
            raise UserError(f"model.kwargs sets {reserved}, which every job sets by itself: remove them")
        if self.image_size < 1:
            raise UserError(f"model.image_size is {self.image_size}; give the side of the input in pixels (>= 1)")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """From the ``model`` of a job's parameters."""
        return cls(name=mapping["name"], image_size=int(mapping["image_size"]), kwargs=dict(mapping.get("kwargs", {})))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return {"name": self.name, "image_size": self.image_size, "kwargs": dict(self.kwargs)}
