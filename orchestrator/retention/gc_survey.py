"""Everything in a store that no root reaches, and how a collection counts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.errors import NotFoundError
from orchestrator.retention.gc_layout import (
    LOGS,
    LOGS_DEPTH,
    METRICS,
    METRICS_DEPTH,
    SEARCH_DEPTH,
    SEARCHES,
    TRIALS,
    last_part,
)
from orchestrator.retention.gc_rules import (
    Reason,
    Roots,
    Unit,
    classify_artifact,
    classify_logs,
    classify_metrics,
    classify_search,
    folders_of,
)
from orchestrator.retention.inventory import Amount, named_objects, walk_artifacts, walk_folders
from orchestrator.storage.layout import record_name
from orchestrator.storage.protocol import ObjectStat, ObjectStore

DAY_S = 86_400.0


class Action(StrEnum):
    """What a collection does with garbage, in the order in which garbage meets them."""

    WAIT_FOR_GRACE = "wait_for_grace"
    """Too young: it may belong to something that is about to be committed."""
    HIDE = "hide"
    """Move to the trash: invisible from now on, and restorable."""
    WAIT_IN_TRASH = "wait_in_trash"
    DESTROY = "destroy"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a collection did, or would do."""

    amounts: dict[tuple[Action, Reason], Amount] = field(default_factory=lambda: defaultdict(Amount))
    restored: list[str] = field(default_factory=list)
    """Folders taken back out of the trash, because a root reaches them again."""

    def add(self, action: Action, unit: Unit) -> None:
        """Count one folder."""
        self.amounts[action, unit.reason] += unit.amount

    def total(self, action: Action) -> Amount:
        """Sum over all reasons."""
        return sum((amount for (did, _), amount in self.amounts.items() if did is action), Amount())


@dataclass(frozen=True, slots=True, kw_only=True)
class Graces:
    """How long garbage stays, in seconds."""

    age_s: float = DAY_S
    """Objects younger than this are never touched."""
    trash_s: float = DAY_S
    """How long it stays restorable once hidden."""


def survey(store: ObjectStore, roots: Roots) -> tuple[Iterator[Unit], ...]:
    """Everything that no root reaches, of any age, streamed: of artifacts, of metrics, of searches, and of logs."""
    return (
        (unit for key, stats in walk_artifacts(store) for unit in classify(store, key, stats, roots)),
        (
            unit
            for folder, stats in walk_folders(store, METRICS, METRICS_DEPTH)
            for unit in classify_metrics(last_part(folder), folder, stats, roots)
        ),
        *(
            (
                unit
                for folder, stats in walk_folders(store, root, SEARCH_DEPTH)
                for unit in classify_search(last_part(folder), folder, stats, roots)
            )
            for root in (SEARCHES, TRIALS)
        ),
        (
            unit
            for folder, stats in walk_folders(store, LOGS, LOGS_DEPTH)
            for unit in classify_logs(last_part(folder), folder, stats, roots)
        ),
    )


def leftover(stat: ObjectStat) -> Unit:
    """A single object of a writer that died, as garbage."""
    amount = Amount(num_objects=1, num_bytes=stat.size_bytes)
    return Unit(name=stat.name, reason=Reason.LEFTOVER, amount=amount, newest_at_s=stat.modified_at_s)


def classify(store: ObjectStore, key: str, stats: Sequence[ObjectStat], roots: Roots) -> list[Unit]:
    """Garbage among all objects of a key; reads its record where that decides."""
    return classify_artifact(key, stats, roots, lambda: _named_folders(store, key))


def _named_folders(store: ObjectStore, key: str) -> AbstractSet[str] | None:
    head = record_name(key)
    try:
        return folders_of(named_objects(head, store.get(head)))
    except (NotFoundError, ValueError):
        return None  # gone meanwhile, or damaged: fsck reports that, and nothing of the key is touched
