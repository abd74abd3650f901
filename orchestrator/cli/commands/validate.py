"""``orchestrator validate``: checks a sweep.yaml, and shows what it would create."""

from __future__ import annotations

import sys
import time
from collections import Counter

from orchestrator.cli.arguments import ScaleOption, SetOption, SweepFile, scale_name
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document
from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile.load import Loaded, load_all
from orchestrator.sweepfile.parse.document import Changes

_NO_STORE = "file:///not-looked-at"
"""A placeholder for the store: keys and jobs are the same in every store, and validating needs none."""


def validate(
    sweep: SweepFile,
    *,
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Check a sweep.yaml; for each error print where it is, why, and how to fix it. Changes nothing."""
    loaded = load_all(sweep, Changes(overrides=overrides or (), scale=scale_name(scale)))
    deadline_s = loaded.sweep.policy.deadline_s
    if deadline_s is not None and deadline_s <= time.time():
        # Checked only here: other commands still read the file of a running sweep after its deadline.
        raise SpecError((loaded.tree.problem(("policy", "deadline"), "this moment has passed; name one to come"),))
    counts = _counts(loaded)
    # All scales are checked, so that a test with one scale also finds the typos of the others.
    others = () if scale else loaded.scales
    for name in others:
        _counts(load_all(sweep, Changes(overrides=overrides or (), scale=name)))
    if output is not DocumentForm.TABLE:
        print_document({"valid": True, "jobs": counts, "scales": list(others)}, output)
        return
    parts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    also = f"; also with --scale {', '.join(others)}" if others else ""
    # Of one plain line: importing rich for it would take a tenth of this command's time.
    sys.stdout.write(f"{sweep} is right: {sum(counts.values())} jobs ({parts}){also}\n")


def _counts(loaded: Loaded) -> dict[str, int]:
    plan = build_plan(loaded.sweep, store_uri=_NO_STORE)
    return dict(Counter(job.kind.value for job in plan.jobs))
