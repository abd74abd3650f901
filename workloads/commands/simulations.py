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
        request: ``simulations``: each ``{"run", "plugin", "cells": [parameters]}``. ``plugin`` is the reference of the
            simulation of a package that ``run`` names, empty without one. Shipped simulations go first.

    Returns:
        ``shipped``: all names; ``checked``: for each simulation ``{"problem": why}``, ``{"is_unknown": true}`` or
        ``{"name", "cells"}``, each cell ``{"parameters"}`` with all defaults, or ``{"problems": [[where,
        why]]}``.
    """
    return {"shipped": sorted(SIMULATIONS), "checked": [_checked(asked) for asked in request["simulations"]]}


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    is_shipped = asked["run"] in SIMULATIONS
    if not is_shipped and not asked["plugin"]:
        return {"is_unknown": True}
    name = asked["run"] if is_shipped else asked["plugin"]
    try:
        simulation = Simulation.load(name)
    except (OrchestratorError, ImportError, AttributeError) as error:
        return {"problem": str(error)}
    return {
        "name": name,
        "cells": [_cell(simulation, parameters) for parameters in asked["cells"]],
    }


def _cell(simulation: Simulation, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"parameters": simulation.complete(parameters)}
    except ParametersError as error:
        return {"problems": [[list(at), why] for at, why in error.problems]}
