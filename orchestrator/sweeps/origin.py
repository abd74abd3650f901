"""``provenance-<rev>.json``: what a plan revision was made from, in one document. It explains and decides nothing.

What the client knows (commit, changes, packages, machine) comes with its message; the rest follows from the plan. What
each attempt ran on stands in the record of its artifact: processor or GPU, threads, versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.core.job_kinds import DATA_KINDS
from orchestrator.metrics.machine import describe_machine
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.layout import plan_name, provenance_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import seal
from orchestrator.sweeps.inbox import Submit
from orchestrator.sweeps.ledger import store_once

VERSION = 1
_SEED = "seed"


def keep_origin(store: ObjectStore, plan: Plan, revision: int, message: Submit, now: float) -> dict[str, str]:
    """Store the document of a revision and return its sha256 by its name; one that a dead controller left stays."""
    document = {
        **describe_plan(plan),
        "version": VERSION,
        "sweep": plan.sweep,
        "revision": revision,
        "message_id": message.message_id,
        "sender": message.sender,
        "accepted_at_s": now,
        "accepted_on": describe_machine(),
        "spec": spec_name(plan.sweep, revision),
        "spec_sha256": sha256_hex(message.spec_text.encode()),
        "plan": plan_name(plan.sweep, revision),
        "submitted_from": dict(message.provenance),
    }
    name = provenance_name(plan.sweep, revision)
    return store_once(store, name, seal(name, json.dumps(document, indent=1).encode()))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Seeds, data and code versions of a plan, and one digest of all its keys. Pure."""
    return {
        "keys_sha256": keys_digest(plan),
        "num_jobs": len(plan.jobs),
        "code_versions": {job.kind.value: job.identity.get("code_version") for job in plan.jobs},
        "seeds": _seeds(plan),
        "datasets": {
            job.name: {"key": job.key, **job.identity.get("parameters", {})}
            for job in plan.jobs
            if job.kind in DATA_KINDS
        },
    }


def keys_digest(plan: Plan) -> str:
    """Sha256 over names and keys: two plans with the same one want the same results under the same names."""
    return sha256_hex(canonical_json({job.name: job.key for job in plan.jobs}))


def _seeds(plan: Plan) -> Mapping[str, list[int]]:
    """All that are called a seed in facets and parameters, by kind of job or facet."""
    found: dict[str, set[int]] = {}
    for job in plan.jobs:
        facets = {name: value for name, value in job.facets.items() if name.endswith(_SEED)}
        parameters = job.identity.get("parameters", {})
        told = {**facets, **({job.kind.value: parameters[_SEED]} if _SEED in parameters else {})}
        for name, value in told.items():
            if isinstance(value, int):
                found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in sorted(found.items())}
