"""What the control plane asks about simulations: whether they are there, and their complete parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.errors import OrchestratorError
from workloads.theory.loading import ParametersError, Simulation
from workloads.theory.shipped import SIMULATIONS


def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at simulations and their cells without running any.

    Args:
        request: ``simulations``: each ``{"name", "sources", "cells": [parameters]}``; a name that is neither shipped
            nor of a package is unknown.

    Returns:
        ``shipped``: all names; ``checked``: for each simulation ``{"problem": why}``, ``{"is_unknown": true}`` or
        ``{"cells": [...]}``, each cell ``{"parameters"}`` with all defaults or ``{"problems": [[where, why]]}``.
    """
    return {"shipped": sorted(SIMULATIONS), "checked": [_checked(asked) for asked in request["simulations"]]}


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked["name"] not in SIMULATIONS and ":" not in asked["name"]:
        return {"is_unknown": True}
    try:
        simulation = Simulation.load(asked["name"], asked["sources"])
    except (OrchestratorError, ImportError, AttributeError) as error:
        return {"problem": str(error)}
    return {"cells": [_cell(simulation, parameters) for parameters in asked["cells"]]}


def _cell(simulation: Simulation, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"parameters": simulation.complete(parameters)}
    except ParametersError as error:
        return {"problems": [[list(at), why] for at, why in error.problems]}
