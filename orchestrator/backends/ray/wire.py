"""What runners and backend say to each other: plain JSON documents under these words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self


class Answer(StrEnum):
    """A runner's answer to a command."""

    ACCEPTED = "accepted"
    STALE_EPOCH = "stale_epoch"
    """A controller with a higher epoch has spoken before: this command has no effect."""
    BUSY = "busy"
    """Another attempt is here, running or not yet released."""
    LEAVING = "leaving"
    """This runner takes nothing any more."""
    OTHER_CODE = "other_code"
    """This runner's code is not the controller's."""
    RUNNING = "running"
    """The attempt that should be released has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDescription:
    """What a runner says of itself."""

    name: str
    pid: int
    node_id: str
    epoch: int
    digest: str
    """Code that the runner started with."""
    attempt_id: str = ""
    """The attempt here, running or waiting for its release; empty = idle."""
    has_ended: bool = False
    """Whether that attempt has ended."""
    jobs_done: int = 0
    is_warm: bool = False
    """Whether the data plane is loaded."""
    leaving: str = ""
    """Why it takes nothing any more; empty = it does."""
    gang: dict[str, Any] | None = None
    """Shape of the gang that works on its attempt; none for an attempt of one worker."""
    placement_group: str = ""
    """Id of that gang's reservation, hexadecimal."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What its node is; see ``metrics.machine``."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)
