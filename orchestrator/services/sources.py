"""Where sweeps and plans come from: a file, a shipped sweep, or what was submitted to a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.values import ResolvedSweep
from orchestrator.sweeps.client import list_sweeps, load_plan


def read_sweep(reference: str, overrides: Sequence[str] = (), *, scale: str = "") -> tuple[ResolvedSweep, str]:
    """As ``load_sweep``: the sweep, and the text that a submit stores.

    Args:
        reference: path of a sweep.yaml, or name of a shipped sweep.
        overrides: ``a.b.c=value``, as ``--set`` takes them.
        scale: name of a block of the file that is merged over it, such as ``tiny``.
    """
    return load_sweep(reference, tuple(overrides), scale=scale)


def find_plan(reference: str, store_uri: str, planned_for: str = "") -> Plan:
    """The plan of a file, of a submitted sweep of a store, or of a shipped sweep: the first that there is.

    Args:
        reference: path or name.
        store_uri: where submitted sweeps are looked for.
        planned_for: store of a plan made now; default: ``store_uri``.

    Raises:
        SpecError: there is no such file, or it is wrong.
        StorageError: the store does not answer.
    """
    if not Path(reference).is_file() and is_initialised(store_uri):
        store = open_store(store_uri)
        if reference in list_sweeps(store):
            return load_plan(store, reference)
    sweep, _ = read_sweep(reference)
    return build_plan(sweep, store_uri=planned_for or store_uri)
