"""Who is told what of a sweep: the resolved form of ``notify:``. It changes no result and holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class Occasion(StrEnum):
    """What people are told about."""

    FINISHED = "finished"
    """The sweep has ended with a result for every job, or was cancelled."""
    FAILED = "failed"
    """The sweep has ended without some results, or the circuit breaker stopped it."""
    STALLED = "stalled"
    """Nothing has happened for long though nobody paused it."""
    BUDGET = "budget"
    """A budget is nearly or wholly spent, or a deadline has passed."""


class Security(StrEnum):
    """How a connection to a mail server is protected."""

    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """A mail server and who writes to whom."""

    to: tuple[str, ...]
    sender: str
    server: str
    """``host:port``"""
    user: str = ""
    password: str = ""
    """Reference to a secret; empty = none."""
    security: Security = Security.STARTTLS

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**document, "to": tuple(document["to"]), "security": Security(document["security"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One way to tell somebody; exactly one of ``webhook``, ``slack`` and ``email`` is there."""

    on: tuple[Occasion, ...] = tuple(Occasion)
    webhook: str = ""
    """URL, or a reference to it."""
    secret: str = ""
    """Reference to the key that signs what a webhook gets; empty = not signed."""
    slack: str = ""
    """Reference to an incoming webhook of Slack or what understands the same."""
    email: Email | None = None
    stalled_after_s: float = 1800.0

    @property
    def kind(self) -> str:
        """``webhook``, ``slack`` or ``email``."""
        return "email" if self.email else "slack" if self.slack else "webhook"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        email = document.get("email")
        occasions = tuple(Occasion(name) for name in document["on"])
        return cls(**{**document, "on": occasions, "email": Email.from_json(email) if email else None})
