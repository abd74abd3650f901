"""Ray's reasons for the end of an actor's process or node, in one line, and what they mean."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from ray.exceptions import RayActorError

from orchestrator.backends.classify import Diagnosis, diagnose_exit
from orchestrator.core.errors import FailureKind

_EXIT_CODE = re.compile(r"exit code (\d+)")
_MEMORY_MONITOR = "killed due to the node running low on memory"
_SIGTERM = "receives a SIGTERM"
_NODE_DIED = re.compile(r"its node has died(?:\..*?node was terminated[^:\n]*: (?P<why>[^\n]+))?", re.DOTALL)
_PROCESS_DIED = "worker process has died"
"""The node's daemon, which was alive, reported this to Ray's control store."""
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)", re.DOTALL)
_NOTHING_MORE = "connection error code 2. End of file"
"""All that Ray knows of a process that was killed or that crashed."""
_KILLED = "was killed (as by signal 9) or crashed; dmesg there tells if memory ran out"


class Ended(StrEnum):
    """Whether the actor's process or its whole node ended."""

    PROCESS = "process"
    """Only the actor's process: its node was alive."""
    NODE = "node"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a process."""

    description: str
    """One line for people."""
    kind: FailureKind = FailureKind.NODE_LOST
    """``NODE_LOST`` where the cause is not known: the policy is the same for a lost process and a lost node."""
    ended: Ended = Ended.UNKNOWN

    def describe(self, runner: str, node: str) -> str:
        """The description with the names of runner and node. The node's name is quoted, so that messages of
        the same cause are grouped whatever the node.

        Args:
            runner: its name.
            node: name of its node; empty = not known.
        """
        shown = f"node '{node}'" if node else "its node"
        if self.ended is Ended.NODE:
            return f"{shown} died: {self.description} ({runner})"
        if self.ended is Ended.PROCESS:
            description, semicolon, advice = self.description.partition("; ")
            return f"its process {description}, while {shown} was alive ({runner}){semicolon}{advice}"
        return f"{runner} has died: {self.description}"


def death_of(error: RayActorError) -> Death:
    """The cause of death that Ray's error gives for an actor that it cannot reach any more."""
    text = str(error).strip()
    found = _diagnose(text)
    advice = f"; {found.advice}" if found.advice else ""
    is_known = found.kind is not FailureKind.UNKNOWN
    description, ended = _what_ended(text)
    return Death(
        description=f"{description}{advice}", kind=found.kind if is_known else FailureKind.NODE_LOST, ended=ended
    )


def _what_ended(text: str) -> tuple[str, Ended]:
    if node := _NODE_DIED.search(text):
        return node["why"] or "Ray gives no reason", Ended.NODE
    if _NOTHING_MORE in text:
        return _KILLED, Ended.PROCESS
    if _MEMORY_MONITOR in text:
        return f"was {_MEMORY_MONITOR}", Ended.PROCESS
    if detail := _DETAIL.search(text):
        return f"ended ({detail.group(1).strip().rstrip('.')})", Ended.PROCESS
    if _PROCESS_DIED in text:
        return _KILLED, Ended.PROCESS
    # The first line of Ray's text says only that the actor died; the cause follows after a list of fields.
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return lines[-1] if lines else "Ray gives no reason", Ended.UNKNOWN


def _diagnose(text: str) -> Diagnosis:
    if _MEMORY_MONITOR in text:
        return diagnose_exit(-signal.SIGKILL, _MEMORY_MONITOR)
    if _SIGTERM in text:
        return diagnose_exit(-signal.SIGTERM)
    code = _EXIT_CODE.search(text)
    return diagnose_exit(int(code.group(1))) if code else Diagnosis(kind=FailureKind.UNKNOWN)
