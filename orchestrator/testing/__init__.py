"""Fakes that we ship: a clock, a scripted backend and a store that fails on demand."""

from orchestrator.testing.clock import FakeClock
from orchestrator.testing.faults import Fault, FaultyStore, Harm, Moment, ReadFault, SimulatedCrash
from orchestrator.testing.scripted import Fail, Hang, Lose, Script, ScriptedBackend, Succeed

__all__ = [
    "Fail",
    "FakeClock",
    "Fault",
    "FaultyStore",
    "Hang",
    "Harm",
    "Lose",
    "Moment",
    "ReadFault",
    "Script",
    "ScriptedBackend",
    "SimulatedCrash",
    "Succeed",
]
