"""Canonical identities of jobs: what changes a result, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.contract import JobKind
from orchestrator.ids import make_key

CODE_VERSIONS: Mapping[JobKind, int] = {
    JobKind.DATASET: 1,
    JobKind.INDEX: 2,
    JobKind.EMBED: 1,
    JobKind.CLUSTER: 1,
    JobKind.LABELS: 1,
    JobKind.PRETRAIN: 1,
    JobKind.FINETUNE: 1,
    JobKind.PROBE: 1,
}
"""Bumped by hand whenever the code of a kind computes another result from the same parameters."""


def make_identity(kind: JobKind, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The identity that a key is the address of; ``inputs`` maps roles to artifact keys."""
    return {
        "kind": kind.value,
        "code_version": CODE_VERSIONS[kind],
        "parameters": dict(parameters),
        "inputs": dict(inputs),
    }


def key_of(identity: Mapping[str, Any], readable: str) -> str:
    """Key of an identity; ``readable`` must be made of identity fields only, since it is part of the key."""
    return make_key(identity["kind"], readable, identity)
