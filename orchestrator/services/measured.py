"""The history of a store: what committed results measured, read from a bounded sample of their records."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.job_kinds import BACKBONE_TRAINING_KINDS, KINDS, JobKind
from orchestrator.planning.estimate.history import Measurement, SpeedHistory, index_size, measure
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.asking import ask_all
from orchestrator.services.look_up import Seen, read_seen
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore

DEADLINE_S = 10.0
_PER_MODEL = 24
_PER_KIND = 24
"""Records read of a kind: of each model of the plan, and of any, for models that have none."""
_UNREADABLE = re.compile(r"[^a-z0-9]+")


def history_of(plan: Plan, known: Mapping[str, Seen], *, deadline_s: float = DEADLINE_S) -> SpeedHistory:
    """What results of a plan's store say about its jobs; empty if the store cannot be asked in time.

    Args:
        plan: names its store and models.
        known: records by key that were read already.
        deadline_s: seconds.
    """
    until_s = time.monotonic() + deadline_s
    more: Mapping[str, Seen | None] = {}
    try:
        if ask_all(is_initialised, [plan.store_uri], deadline_s=until_s)[plan.store_uri]:
            more = _sample(open_store(plan.store_uri), plan, known, until_s)
    except (OrchestratorError, OSError, TimeoutError, ValueError):
        more = {}  # an estimate is better than none: the model of speed knows something, too
    return make_history([*known.values(), *(seen for seen in more.values() if seen is not None)])


def make_history(records: Iterable[Seen]) -> SpeedHistory:
    """From records, in any order."""
    seen = list(records)
    found = (measure(record.identity, record.metrics, record.summary) for record in seen)
    measurements: list[Measurement] = [measurement for measurement in found if measurement is not None]
    sizes = {record.key: index_size(record.metrics) for record in seen if record.identity.get("kind") == JobKind.INDEX}
    return SpeedHistory(measurements, sizes)


def _sample(store: ObjectStore, plan: Plan, known: Mapping[str, Seen], until_s: float) -> dict[str, Seen | None]:
    kinds = [
        kind.value for kind, row in KINDS.items() if row.is_measured and any(job.kind is kind for job in plan.jobs)
    ]
    kinds = sorted({*kinds, *_trained_alike(kinds)})
    listed = ask_all(lambda kind: store.list_children(f"artifacts/{kind}/"), kinds, deadline_s=until_s)
    wanted: set[str] = set()
    for kind, keys in listed.items():
        wanted.update(_spread(keys, _PER_KIND))
        for prefix in _prefixes(plan.jobs, kind):
            wanted.update(_spread([key for key in keys if key.startswith(prefix)], _PER_MODEL))
    return ask_all(lambda key: read_seen(store, key), sorted(wanted - known.keys()), deadline_s=until_s)


def _trained_alike(kinds: Sequence[str]) -> list[str]:
    """A pretraining tells about fine-tuning, and the other way round."""
    both = sorted(kind.value for kind in BACKBONE_TRAINING_KINDS)
    return both if set(both) & set(kinds) else []


def _prefixes(jobs: Iterable[Job], kind: str) -> list[str]:
    """How keys of this kind begin whose model the plan has; see ``make_key``."""
    models = {
        str(job.identity["parameters"]["model"]["name"]) for job in jobs if job.identity["parameters"].get("model")
    }
    return [f"{kind}-{_UNREADABLE.sub('-', model.lower()).strip('-')}-" for model in sorted(models)]


def _spread(keys: Sequence[str], number: int) -> list[str]:
    """Some keys at even distances; they end in a hash, so any choice is as good."""
    step = max(1, len(keys) // number)
    return list(keys[::step][:number])
