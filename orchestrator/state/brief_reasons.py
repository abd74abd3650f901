"""Reasons of failures as people read them: on one line, shortened before the advice and never in it."""

from __future__ import annotations

from orchestrator.state.snapshot import Failure

MAX_CHARACTERS = 160
"""Of a reason on a line of its own."""
WHOLE = 4000
"""Of a reason that is not to be cut; the journal keeps no more."""
_MAX_REMEDY = 480
"""What is longer than that is no advice to a person."""
_MIN_TOLD = 80
"""Of what failed, however long the advice is."""
_RUNNER_DIED = (
    "the worker process died: ended from outside (kill, out of memory, preemption), or crashed in native code"
)
# Ray lists every possible cause of a dead worker in one paragraph, whatever has happened.
_RAYS_PARAGRAPHS = (
    "worker unexpectedly exits",
    "the actor died unexpectedly",
    "worker process has died",
    "worker died unexpectedly",
    "the actor is dead because its worker process has died",
)


def brief(failure: Failure) -> str:
    """``node_lost: the worker process died: ...``."""
    return f"{failure.kind.value}: {brief_message(failure.message)}"


def brief_message(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The first line of a failure's message; Ray's paragraphs about dead workers in our words.

    What has more characters than ``limit`` is shortened before what to do about it, which follows the last semicolon.
    """
    plain = " ".join(text.split())
    if any(paragraph in plain.lower() for paragraph in _RAYS_PARAGRAPHS):
        return _RUNNER_DIED
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
    if len(first) <= limit:
        return first
    told, _, remedy = first.rpartition("; ")
    if not told or len(remedy) > _MAX_REMEDY:
        return _cut(first, limit)
    return f"{_cut(told, max(limit - len(remedy) - 2, _MIN_TOLD))}; {remedy}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3].rstrip()}..."


def brief_reason(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The same of why a job was given up, which ends with what it had left: ``node_lost: ... (5 of 5 losses)``."""
    body, bracket, spent = text.rstrip().rpartition(" (")
    if not bracket or not spent.endswith(")") or "\n" in spent:
        return brief_message(text, limit)
    kind, colon, message = body.partition(": ")
    is_kind = bool(colon) and kind.isidentifier()
    return f"{f'{kind}: ' if is_kind else ''}{brief_message(message if is_kind else body, limit)} ({spent}"
