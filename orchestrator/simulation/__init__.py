"""The real controller, scheduler, journal and store code in virtual time."""

from orchestrator.simulation.forecast import Assumptions, ControllerLoop, Forecast, Pace, forecast

__all__ = ["Assumptions", "ControllerLoop", "Forecast", "Pace", "forecast"]
