"""``fsck --repair``: what can be made again from the rest of the store, byte for byte, or done without."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.ids import sha256_hex
from orchestrator.planning.graph.build import build_plan
from orchestrator.retention.fsck import Finding
from orchestrator.retention.sweep_check import SweepFindings
from orchestrator.state.events import PlanAccepted
from orchestrator.storage.layout import plan_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.load import load_all
from orchestrator.sweepfile.parse.document import Changes
from orchestrator.sweeps.ledger import plan_content, read_document

_DISPENSABLE: Mapping[str, str] = {
    r"sweeps/[^/]+/snapshots/[^/]+": "deleted; the sweep is read from its journal",
    r"sweeps/[^/]+/notified\.json": "deleted; the journal is read again, and nothing is sent twice",
    r"sweeps/[^/]+/tracking/[^/]+": "deleted; the runs are found again on the tracking server",
    r"controllers/[^/]+/lease\.json": "deleted; the next controller starts above every epoch that the journals name",
    r"jobs/[^/]+/claim\.json": "deleted; a cluster that works on the job claims it again",
}
"""Objects that the rest of the store makes up for, by their names, and what becomes of them."""


def repair(store: ObjectStore, finding: Finding, sweep: SweepFindings | None = None) -> str:
    """Repair one object if that is possible; returns what was done, or an empty text.

    Args:
        store: that holds it.
        finding: what is wrong with it.
        sweep: of the sweep that it belongs to; plans are made again from the spec that its journal names.
    """
    for pattern, done in _DISPENSABLE.items():
        if re.fullmatch(pattern, finding.name):
            store.delete(finding.name)
            return done
    for event in sweep.accepted if sweep is not None else ():
        if sweep is not None and finding.name == plan_name(finding.name.split("/")[1], event.revision):
            return _restore_plan(store, finding.name, event, sweep)
    return ""


def _restore_plan(store: ObjectStore, name: str, event: PlanAccepted, sweep: SweepFindings) -> str:
    for content in _planned_again(store, name.split("/")[1], event, sweep):
        if sha256_hex(content) == event.documents.get(name):
            store.delete(name)
            store.put_if_absent(name, content)
            return "restored: planned again from the sweep's spec, with the sha256 that the journal names"
    return ""


def _planned_again(store: ObjectStore, sweep: str, event: PlanAccepted, found: SweepFindings) -> Iterator[bytes]:
    """The plan as each of the sweep's submitters would own it."""
    try:
        text = read_document(store, spec_name(sweep, event.revision), event.documents).decode()
        with tempfile.TemporaryDirectory(prefix="orchestrator-repair-") as folder:
            file = Path(folder, f"{sweep}.yaml")
            file.write_text(text, encoding="utf-8")
            loaded = load_all(str(file), Changes())
    except (OrchestratorError, ValueError):
        return
    document = build_plan(loaded.sweep, store_uri=store.uri).to_json()
    for owner in dict.fromkeys(["", *(accepted.sender for accepted in found.accepted)]):
        yield plan_content({**document, "owner": owner}, event.revision)
