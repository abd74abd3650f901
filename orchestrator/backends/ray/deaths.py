"""What Ray says of the end of an actor's process or node, in one line, and what that means."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ray.exceptions import RayActorError

from orchestrator.backends.classify import Diagnosis, diagnose_exit
from orchestrator.errors import FailureKind

_EXIT_CODE = re.compile(r"exit code (\d+)")
_MEMORY_MONITOR = "killed due to the node running low on memory"
_SIGTERM = "receives a SIGTERM"
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)", re.DOTALL)
_NOTHING_MORE = "connection error code 2. End of file"
"""All that Ray knows of a process that was killed or that crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a process."""

    told: str
    """One line for people."""
    kind: FailureKind = FailureKind.NODE_LOST
    """``NODE_LOST`` where nobody knows better."""


def death_of(error: RayActorError) -> Death:
    """What an error of Ray's says of the actor that it could not reach any more."""
    text = str(error).strip()
    detail = _DETAIL.search(text)
    told = detail.group(1).strip() if detail else text.partition("\n")[0]
    found = _diagnose(text)
    if _NOTHING_MORE in text:
        told = "it was killed, or crashed; the kernel's log of its node (dmesg) tells if memory ran out"
    advice = f" ({found.advice})" if found.advice else ""
    is_known = found.kind is not FailureKind.UNKNOWN
    return Death(told=told + advice, kind=found.kind if is_known else FailureKind.NODE_LOST)


def _diagnose(text: str) -> Diagnosis:
    if _MEMORY_MONITOR in text:
        return diagnose_exit(-signal.SIGKILL, _MEMORY_MONITOR)
    if _SIGTERM in text:
        return diagnose_exit(-signal.SIGTERM)
    code = _EXIT_CODE.search(text)
    return diagnose_exit(int(code.group(1))) if code else Diagnosis(kind=FailureKind.UNKNOWN)
