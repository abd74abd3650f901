"""What travels with a submit to another machine: everything that it needs, and no secret."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from orchestrator.core.code import package_digest
from orchestrator.core.errors import UserError
from orchestrator.core.security.json_text import parse_json
from orchestrator.sweeps.client import Consent, Ownership

PAYLOAD_VERSION = 1
FILE = "payload.json"
DISTRIBUTION = "pretraining-orchestrator"
_TOLD = ("ray", "torch", "timm", "torchvision", "numpy")
"""Libraries whose versions change results or may not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Which code and libraries a process has."""

    release: str
    digest: str
    """Of the code of both packages."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions by name."""

    @classmethod
    def here(cls) -> Self:
        """Of this process; imports none of the libraries."""
        libraries = {name: found for name in _TOLD if (found := _version(name))}
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(
            release=_version(DISTRIBUTION) or "a source tree",
            digest=package_digest(),
            libraries={"python": python, **libraries},
        )

    def differences(self, there: Program) -> list[str]:
        """What to tell a user whose own program this is of the one that will run; empty if they are alike."""
        told = []
        if self.digest != there.digest:
            told.append(
                f"the cluster runs release {there.release} (code {there.digest[:12]}), this is {self.release} (code "
                f"{self.digest[:12]}): its code runs the sweep; send yours along with --code wheel"
            )
        for name in sorted(self.libraries.keys() & there.libraries.keys()):
            mine, theirs = self.libraries[name], there.libraries[name]
            if mine != theirs:
                told.append(f"the cluster has {name} {theirs}, here is {mine}; the cluster's counts")
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One submit. Sent twice, it is followed once: its message has one id."""

    message_id: str
    plan: Mapping[str, Any]
    """JSON form of the plan; its store is ``store_uri``, or the cluster's own if that is empty."""
    spec_text: str
    program: Program
    """Of the command that sends it."""
    provenance: Mapping[str, Any]
    """Where it was sent from."""
    sender: str = ""
    consent: Consent = Consent.ASK
    ownership: Ownership = Ownership.KEEP
    replaces: bool = False
    """Whether the sender knows that a sweep of this name may have another plan, and wants it replaced."""
    store_uri: str = ""
    cluster: str = ""
    """Name in leases; empty = as the cluster itself says."""
    namespace: str = ""
    version: int = PAYLOAD_VERSION

    def to_bytes(self) -> bytes:
        """JSON document."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Inverse of ``to_bytes``.

        Raises:
            UserError: it is of another version of this program, or damaged.
        """
        try:
            document = parse_json(content)
            number = document["version"]
            if number != PAYLOAD_VERSION:
                message = (
                    f"this submit has form {number} and the cluster's program reads {PAYLOAD_VERSION}: install the "
                    "same release on both sides, or send the code along with --code wheel"
                )
                raise UserError(message)
            program = Program(**document.pop("program"))
            consent, ownership = Consent(document.pop("consent")), Ownership(document.pop("ownership"))
            return cls(**document, program=program, consent=consent, ownership=ownership)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"this submit cannot be read: {error!r}; send it with the release that the cluster runs"
            raise UserError(message) from error


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
