"""The real controller, scheduler, journal and store code on virtual time."""

from orchestrator.simulation.forecast import Assumptions, Forecast, forecast
from orchestrator.simulation.loop import ControllerLoop, Pace

__all__ = ["Assumptions", "ControllerLoop", "Forecast", "Pace", "forecast"]
