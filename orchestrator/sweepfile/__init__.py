"""The sweep language: sweep.yaml -> strict schema -> frozen dataclasses, with file:line:column in every error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.sweepfile.load import load_sweep, parse_sweep
    from orchestrator.sweepfile.values import ResolvedSweep

__all__ = ["ResolvedSweep", "load_sweep", "parse_sweep"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of several types
    # On demand: whoever reads a stored plan needs a few of these modules, and not the schema, which takes a tenth of
    # a second.
    if name in {"load_sweep", "parse_sweep"}:
        from orchestrator.sweepfile import load

        return getattr(load, name)
    if name == "ResolvedSweep":
        from orchestrator.sweepfile.values import ResolvedSweep

        return ResolvedSweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
