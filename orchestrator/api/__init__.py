"""The Python API: what the commands do, for notebooks and scripts. ``from orchestrator import Sweep`` is enough."""

from orchestrator.api.plan_view import PlanView
from orchestrator.api.revision import Changed
from orchestrator.api.status_view import StatusView
from orchestrator.api.sweep import Sweep, Where

__all__ = ["Changed", "PlanView", "StatusView", "Sweep", "Where"]
