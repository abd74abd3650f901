"""A cluster of made-up nodes on virtual time, and the ``Backend`` through which a real controller uses it."""

from orchestrator.backends.simulated.account import Account, Purpose, Span
from orchestrator.backends.simulated.backend import SimulatedBackend, Turbulence
from orchestrator.backends.simulated.clock import Alarm, VirtualClock
from orchestrator.backends.simulated.cluster import SimulatedCluster
from orchestrator.backends.simulated.hardware import LLAMA3_GPU_MTBF_H, ClusterSpec, Hazards, NodeGroup
from orchestrator.backends.simulated.work import Ending, Fate, JobWork, Stint

__all__ = [
    "LLAMA3_GPU_MTBF_H",
    "Account",
    "Alarm",
    "ClusterSpec",
    "Ending",
    "Fate",
    "Hazards",
    "JobWork",
    "NodeGroup",
    "Purpose",
    "SimulatedBackend",
    "SimulatedCluster",
    "Span",
    "Stint",
    "Turbulence",
    "VirtualClock",
]
