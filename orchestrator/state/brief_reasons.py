"""Reasons of failures as people read them: on one line, shortened before the advice and never in it."""

from __future__ import annotations

from orchestrator.state.snapshot import Failure

MAX_CHARACTERS = 160
"""Characters of a reason on a line of its own."""
WHOLE = 4000
"""Characters of a full reason; the journal keeps no more."""
_MAX_REMEDY = 480
"""A longer text after the semicolon is no advice."""
_MIN_PROBLEM = 80
"""Least characters of the failure itself, however long the advice is."""
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

    A text of more than ``limit`` characters is shortened before its advice, which follows the last semicolon.
    """
    plain = " ".join(text.split())
    if any(paragraph in plain.lower() for paragraph in _RAYS_PARAGRAPHS):
        return _RUNNER_DIED
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
    if len(first) <= limit:
        return first
    problem, _, remedy = first.rpartition("; ")
    if not problem or len(remedy) > _MAX_REMEDY:
        return _cut(first, limit)
    return f"{_cut(problem, max(limit - len(remedy) - 2, _MIN_PROBLEM))}; {remedy}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3].rstrip()}..."


def brief_reason(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The same for the reason of a failed job, which ends with its limits: ``node_lost: ... (5 of 5 losses)``."""
    body, bracket, spent = text.rstrip().rpartition(" (")
    if not bracket or not spent.endswith(")") or "\n" in spent:
        return brief_message(text, limit)
    kind, colon, message = body.partition(": ")
    is_kind = bool(colon) and kind.isidentifier()
    return f"{f'{kind}: ' if is_kind else ''}{brief_message(message if is_kind else body, limit)} ({spent}"
