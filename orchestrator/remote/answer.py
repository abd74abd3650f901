"""What a cluster says to a submit: one line among all that the job prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Self

from orchestrator.core.security.json_text import parse_json

MARK = "ORCHESTRATOR-ANSWER "


class Verdict(StrEnum):
    """What became of a submit."""

    ACCEPTED = "accepted"
    """Its controller has taken it."""
    WAITING = "waiting"
    """It is in the inbox; the controller is busy."""
    DIFFERS = "differs"
    """Nothing was submitted: a sweep of this name has another plan, and the sender has not agreed to replace it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The cluster's answer."""

    verdict: Verdict
    message: str = ""
    """Why it is refused, or how the plans differ."""
    notices: tuple[str, ...] = ()
    store_uri: str = ""
    cluster: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Jobs of the plan by what becomes of them."""
    exit_code: int = 0
    """Of the command that sent the submit."""

    def to_line(self) -> str:
        """``ORCHESTRATOR-ANSWER {...}``."""
        return MARK + json.dumps(asdict(self))

    @classmethod
    def find(cls, log: str) -> Self | None:
        """The last answer in a job's log; None without one."""
        lines = [line for line in log.splitlines() if line.startswith(MARK)]
        if not lines:
            return None
        try:
            document = parse_json(lines[-1].removeprefix(MARK))
            verdict, notices = Verdict(document.pop("verdict")), tuple(document.pop("notices"))
            return cls(**document, verdict=verdict, notices=notices)
        except (ValueError, TypeError, KeyError):
            return None
