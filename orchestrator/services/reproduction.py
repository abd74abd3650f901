"""Writes a submitted sweep so that it gives the same keys again, and lists what prevents it."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.code import package_digest
from orchestrator.core.errors import NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.simulation_files import FILE_ROLE
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import PlanDiff, diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import provenance_name, spec_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed
from orchestrator.sweepfile.load import load_all
from orchestrator.sweepfile.parse.document import Changes
from orchestrator.sweeps.client import load_snapshot
from orchestrator.sweeps.ledger import DocumentDamagedError, read_document, read_plan
from orchestrator.tracking.provenance import Provenance, installed_packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """One revision of a sweep, planned again here."""

    submitted: Plan
    text: str
    """A sweep.yaml that is complete in itself: recipes written out, data sets pinned by their digests."""
    planned: Plan
    """Its plan as made here and now."""
    provenance: Mapping[str, Any]
    """The revision's document; empty if it has none."""
    nodes: Mapping[str, Mapping[str, Any]]
    """Hardware of the nodes on which attempts of the sweep ran, by name; empty if not recorded."""

    @property
    def origin(self) -> Provenance:
        """Its provenance at the submit; empty if unknown."""
        return Provenance.from_json(self.provenance.get("submitted_from", {}))

    @property
    def diff(self) -> PlanDiff:
        """The difference between the submitted plan and the present one."""
        return diff_plans(self.submitted, self.planned)

    @property
    def is_exact(self) -> bool:
        """Whether all jobs have the names and keys that they had."""
        return [(job.name, job.key) for job in self.submitted.jobs] == [
            (job.name, job.key) for job in self.planned.jobs
        ]

    @property
    def hardware(self) -> dict[str, int]:
        """Number of nodes by hardware: ``8 x NVIDIA H100 80GB HBM3, driver 550.54.15``."""
        return dict(Counter(describe_hardware(machine) for machine in self.nodes.values()).most_common())

    def other_packages(self) -> dict[str, tuple[str, str]]:
        """Packages with another version here: ``{name: (then, now)}``; an empty text = not installed."""
        then, now = self.origin.packages, installed_packages()
        names = sorted(then.keys() | now.keys()) if then else []
        return {name: (then.get(name, ""), now.get(name, "")) for name in names if then.get(name) != now.get(name)}

    @property
    def has_other_code(self) -> bool:
        """Whether this program's code differs from that of the submitting client."""
        return self.origin.package_digest not in {"", package_digest()}


def reproduce(store: ObjectStore, sweep: str, revision: int) -> Reproduction:
    """Plan a revision of a submitted sweep again.

    Raises:
        NotFoundError: there is no such revision.
        SpecError: its text cannot be planned here, because its data are missing, or it names a Python file
            outside of the current directory.
    """
    snapshot = load_snapshot(store, sweep)
    submitted = read_plan(store, sweep, revision, snapshot.documents)
    text = read_document(store, spec_name(sweep, revision), snapshot.documents).decode()
    with tempfile.TemporaryDirectory(prefix="orchestrator-reproduce-") as folder:
        file = Path(folder, f"{sweep}.yaml")
        file.write_text(text, encoding="utf-8")
        pins = tuple(dict.fromkeys(_pins(submitted, text)))
        loaded = load_all(str(file), Changes(overrides=pins), code_below=Path.cwd())
    planned = build_plan(loaded.sweep, store_uri=submitted.store_uri)
    return Reproduction(
        submitted=submitted,
        text=loaded.canonical,
        planned=planned,
        provenance=_provenance(store, snapshot, revision),
        nodes=snapshot.nodes,
    )


def describe_hardware(machine: Mapping[str, Any]) -> str:
    """GPUs and their driver, or the processor; as in ``metrics.machine``."""
    gpus = Counter(map(str, machine.get("gpus", ())))
    if gpus:
        models = " + ".join(f"{count} x {model}" for model, count in gpus.items())
        return f"{models}, driver {machine.get('driver') or 'unknown'}"
    return f"{machine.get('num_cpus', '?')} cores, {machine.get('cpu') or 'processor unknown'}"


def _pins(plan: Plan, text: str) -> Iterator[str]:
    """Overrides that hold external data sets to the digests that they had, and simulations to where their files lay.

    Earlier versions kept paths of such files as they were written, relative to a folder that the text does not name.
    """
    for job in plan.jobs:
        file = job.execution.label_files.get(FILE_ROLE, "") if job.kind is JobKind.THEORY else ""
        if file and file not in text:
            run = f"{file}:{job.identity['parameters']['simulation'].rpartition(':')[2]}"
            yield f"simulate.{job.facets['simulation']}.run={json.dumps(run)}"
        digest = job.identity.get("parameters", {}).get("digest") if job.kind is JobKind.INDEX else None
        dataset = job.facets.get("dataset")
        if digest and dataset and digest not in text:
            yield f"datasets.{dataset}.digest={digest}"


def _provenance(store: ObjectStore, snapshot: Snapshot, revision: int) -> Mapping[str, Any]:
    """Empty for revisions of earlier versions.

    Raises:
        DocumentDamagedError: it was changed since it was written.
    """
    name = provenance_name(snapshot.sweep, revision)
    try:
        document = parse_sealed(name, read_document(store, name, snapshot.documents))
    except NotFoundError:
        return {}
    except ValueError as error:
        raise DocumentDamagedError(name, str(error)) from error
    return document if isinstance(document, dict) else {}
