"""The Python API: what the commands do, for notebooks and scripts. ``from orchestrator import Sweep`` is enough."""

from orchestrator.api.sweep import Changed, Sweep, Where
from orchestrator.api.views import PlanView, StatusView

__all__ = ["Changed", "PlanView", "StatusView", "Sweep", "Where"]
