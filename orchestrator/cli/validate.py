"""``orchestrator validate``: whether a sweep.yaml is right, and what it would make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.cli.console import stdout_console
from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.cli.settings import Settings
from orchestrator.plan.build import build_plan
from orchestrator.spec.document import SCALES, Changes
from orchestrator.spec.load import load_all, scales_of


def validate_sweep(reference: str, overrides: Sequence[str], scale: str, form: DocumentForm) -> None:
    """Read and plan a sweep, and print how many jobs it has.

    Without a scale, the scales that the file has are read and planned as well: who rehearses should not find its typos.

    Raises:
        SpecError: what is wrong with it.
    """
    counts = _counts(reference, overrides, scale)
    others = [] if scale else [name for name in SCALES if name in scales_of(reference)]
    for name in others:
        _counts(reference, overrides, name)
    if form is not DocumentForm.TABLE:
        print_document({"valid": True, "jobs": counts, "scales": others}, form)
        return
    parts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    also = f"; also with --scale {', '.join(others)}" if others else ""
    stdout_console().print(f"{reference} is right: {sum(counts.values())} jobs ({parts}){also}", soft_wrap=True)


def _counts(reference: str, overrides: Sequence[str], scale: str) -> dict[str, int]:
    sweep = load_all(reference, Changes(overrides=overrides, scale=scale)).sweep
    plan = build_plan(sweep, store_uri=Settings().store_uri(sweep))
    return dict(Counter(job.kind.value for job in plan.jobs))
