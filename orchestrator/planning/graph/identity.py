"""Canonical identities of jobs, and the keys that are their addresses.

Invariants:

- An identity holds everything that changes a result, and nothing else: kind, code version, parameters with every
  default filled in, and the keys of its inputs.
- The readable part of a key is made of identity fields alone.
- ``KeyMaker`` gives the keys that ``make_key`` gives, in less time.

A new rule of label spaces has its short name, which is part of the readable part of keys, in ``_SHORT``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.core.ids import canonical_json, key_of_canonical, sha256_hex
from orchestrator.core.job_kinds import KINDS, JobKind


def make_identity(kind: JobKind, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The identity that a key is the address of; ``inputs`` maps roles to artifact keys."""
    return {
        "kind": kind.value,
        "code_version": KINDS[kind].code_version,
        "parameters": dict(parameters),
        "inputs": dict(inputs),
    }


def subject_of(identity: Mapping[str, Any]) -> str:
    """What speed depends on besides the kind, in canonical form: the model, or a simulation with its parameters.

    Empty where an identity names neither.
    """
    parameters = identity.get("parameters", {})
    if "simulation" in parameters:
        return json.dumps({name: parameters[name] for name in ("simulation", "parameters")}, sort_keys=True)
    model = parameters.get("model")
    return json.dumps(model, sort_keys=True) if model else ""


def has_its_key(key: str, identity: Mapping[str, Any]) -> bool:
    """Whether a key is the address of an identity. The readable part of a key follows from no identity alone, so that
    only its kind and its hash are compared.
    """
    kind, digest = str(identity.get("kind")), sha256_hex(canonical_json(identity))[:16]
    return key.startswith(f"{kind}-") and key.rpartition("-")[2] == digest


class KeyMaker:
    """Keys of many identities that share large parts, such as recipes: each of those is encoded once.

    The mappings in identities must not change while this lives.
    """

    _LARGE = 6
    """Fields from which on remembering costs less than encoding."""

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[object, bytes]] = {}

    def key_of(self, identity: Mapping[str, Any], readable: str) -> str:
        """Key of an identity; ``readable`` must be made of identity fields only, since it is part of the key."""
        return key_of_canonical(identity["kind"], readable, self.encode(identity))

    def encode(self, identity: Mapping[str, Any]) -> bytes:
        """The identity's canonical JSON."""
        fields = {name: canonical_json(value) for name, value in identity.items() if name != "parameters"}
        parameters = {name: self._part(value) for name, value in identity["parameters"].items()}
        return _joined({**fields, "parameters": _joined(parameters)})

    def _part(self, value: object) -> bytes:
        if not isinstance(value, Mapping) or len(value) < self._LARGE:
            return canonical_json(value)
        known = self._encoded.get(id(value))
        if known is None:
            known = self._encoded[id(value)] = (value, canonical_json(value))  # kept alive, so that the id stays its
        return known[1]


def _joined(fields: Mapping[str, bytes]) -> bytes:
    """An object of RFC 8785: its names in the order of their UTF-16 code units."""
    names = sorted(fields, key=lambda name: name.encode("utf-16-be"))
    return b"{" + b",".join(canonical_json(name) + b":" + fields[name] for name in names) + b"}"


_SHORT: Mapping[str, Callable[[Any], str]] = {
    "hierarchy": str,
    "random": lambda rule: f"random{rule['num_classes']}" + ("within" if "within" in rule else ""),
    "modulo": lambda divisor: f"mod{divisor}",
    "split": lambda rule: f"split{rule['num']}",
    "merge": lambda rule: f"merged{rule['num_classes'] if 'num_classes' in rule else len(rule['groups'])}",
    "binary": lambda _: "binary",
    "wordnet": lambda rule: f"wordnet{rule.get('level', '')}{rule.get('contains', '')}",
    "taxonomy": lambda rule: str(rule["level"]),
    "clusters": lambda rule: (
        (f"clusters{rule['k']}" if "k" in rule else f"rebalanced{rule['rebalanced']['min_samples']}")
        + ("within" if rule["within"] else "")
    ),
    "plugin": lambda rule: str(rule["name"]).rpartition(":")[2],
}


def readable_rule(space: Mapping[str, Any]) -> str:
    """Such as ``genus``, ``random128`` or ``wordnet4``; spaces that differ in small print may share one."""
    rule = next(name for name in _SHORT if name in space)
    return _SHORT[rule](space[rule])
