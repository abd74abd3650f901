"""The sweep language: sweep.yaml -> strict schema -> frozen dataclasses, with file:line:column in every error."""

from orchestrator.spec.load import load_sweep, parse_sweep
from orchestrator.spec.model import Sweep

__all__ = ["Sweep", "load_sweep", "parse_sweep"]
