"""A cluster of simulated nodes in virtual time, and the ``Backend`` through which a real controller uses it."""

from orchestrator.backends.simulated.attempt import (
    Fate,
    JobWork,
    Purpose,
    ResourceAccount,
    SimulatedEnding,
    Span,
    Stint,
)
from orchestrator.backends.simulated.backend import SimulatedBackend, Turbulence
from orchestrator.backends.simulated.clock import Alarm, VirtualClock
from orchestrator.backends.simulated.cluster import SimulatedCluster
from orchestrator.backends.simulated.hardware import LLAMA3_GPU_MTBF_H, ClusterSpec, Hazards, NodeGroup

__all__ = [
    "LLAMA3_GPU_MTBF_H",
    "Alarm",
    "ClusterSpec",
    "Fate",
    "Hazards",
    "JobWork",
    "NodeGroup",
    "Purpose",
    "ResourceAccount",
    "SimulatedBackend",
    "SimulatedCluster",
    "SimulatedEnding",
    "Span",
    "Stint",
    "Turbulence",
    "VirtualClock",
]
