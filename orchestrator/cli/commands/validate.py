"""``orchestrator validate``: whether a sweep.yaml is right, and what it would make."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from orchestrator.cli.arguments import ScaleOption, SetOption, SweepFile, scale_name
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile.load import Loaded, load_all
from orchestrator.sweepfile.parse.document import Changes

_NO_STORE = "file:///not-looked-at"
"""Keys and jobs are the same in every store, and validating needs none."""


def validate(
    sweep: SweepFile,
    *,
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Say whether a sweep.yaml is right, and if not, where, why and what to do. Changes nothing."""
    validate_sweep(sweep, overrides or (), scale_name(scale), output)


def validate_sweep(reference: str, overrides: Sequence[str], scale: str, form: DocumentForm) -> None:
    """Read and plan a sweep, and print how many jobs it has.

    Without a scale, the scales that the file has are read and planned as well: who rehearses should not find its typos.

    Raises:
        SpecError: what is wrong with it.
    """
    loaded = load_all(reference, Changes(overrides=overrides, scale=scale))
    counts = _counts(loaded)
    others = () if scale else loaded.scales
    for name in others:
        _counts(load_all(reference, Changes(overrides=overrides, scale=name)))
    if form is not DocumentForm.TABLE:
        print_document({"valid": True, "jobs": counts, "scales": list(others)}, form)
        return
    parts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    also = f"; also with --scale {', '.join(others)}" if others else ""
    # Of one plain line: importing rich for it would take a tenth of this command's time.
    sys.stdout.write(f"{reference} is right: {sum(counts.values())} jobs ({parts}){also}\n")


def _counts(loaded: Loaded) -> dict[str, int]:
    plan = build_plan(loaded.sweep, store_uri=_NO_STORE)
    return dict(Counter(job.kind.value for job in plan.jobs))
