"""The control plane: plans sweeps, schedules them on Ray, and reports the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Changed, Sweep, Where
    from orchestrator.core.errors import InfeasibleError, SpecError

__all__ = ["Changed", "InfeasibleError", "SpecError", "Sweep", "Where"]
_API = ("Changed", "Sweep", "Where")
_ERRORS = ("InfeasibleError", "SpecError")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of several types
    # On demand: what commands do not need would cost each of them start-up time.
    if name in _API:
        from orchestrator import api

        return getattr(api, name)
    if name in _ERRORS:
        from orchestrator.core import errors

        return getattr(errors, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("pretraining-orchestrator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
