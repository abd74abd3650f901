"""What a submit asks for, whichever way it takes to the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.settings import Settings
from orchestrator.core.code import package_digest
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import Consent, Ownership, submit
from orchestrator.tracking import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A plan, and how much its sender insists."""

    plan: Plan
    text: str
    """The sweep.yaml."""
    ownership: Ownership = Ownership.KEEP
    consent: Consent = Consent.ASK
    replaces: bool = False
    """Whether the sender agrees to replace another plan of this name, should there be one."""

    def leave(self, store: ObjectStore, settings: Settings) -> str:
        """Put it into the inbox of its sweep; returns the message's id."""
        origin = capture()
        message = submit(
            store,
            self.plan,
            self.text,
            settings.cluster,
            ownership=self.ownership,
            consent=self.consent,
            provenance=origin.to_json(),
        )
        provenance.save(store, self.plan.sweep, message, origin)
        return message


def capture() -> provenance.Provenance:
    """Where this process submits from: commit and changes of the directory, packages, machine."""
    return provenance.capture_all(Path.cwd(), package_digest())


def captured_document() -> Mapping[str, Any]:
    """The same as JSON."""
    return capture().to_json()
