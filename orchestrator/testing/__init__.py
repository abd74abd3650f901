"""Fakes that we ship: a clock, a scripted backend and a store that fails on demand."""

from orchestrator.testing.clock import FakeClock
from orchestrator.testing.faults import Fault, FaultyStore, Moment, SimulatedCrash
from orchestrator.testing.scripted import Fail, Hang, Lose, Script, ScriptedBackend, Succeed

__all__ = [
    "Fail",
    "FakeClock",
    "Fault",
    "FaultyStore",
    "Hang",
    "Lose",
    "Moment",
    "Script",
    "ScriptedBackend",
    "SimulatedCrash",
    "Succeed",
]
