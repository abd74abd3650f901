"""Questions of the control plane about simulations: whether they exist, and their complete parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.simulation_files import SimulationCode, file_reference
from orchestrator.storage.open import check_allowed
from workloads.theory.loading import ParametersError, Simulation
from workloads.theory.shipped import METRICS, SIMULATIONS


def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at simulations and their cells without running any.

    Args:
        request: ``simulations``: each ``{"run", "plugin", "folder", "cells": [parameters]}``. ``plugin`` is the
            reference of the simulation of a package that ``run`` names, empty without one; ``folder`` is that of the
            sweep file, to which the path of a plain file is relative. Shipped simulations go first.

    Returns:
        ``shipped``: all names; ``checked``: for each simulation ``{"problem": why}``, ``{"is_unknown": true}`` or
        ``{"name", "file", "metrics", "cells"}``: ``file`` is empty but for a plain file, ``metrics`` but for a shipped
        simulation, and each cell is ``{"parameters"}`` with all defaults, or ``{"problems": [[where, why]]}``.
    """
    return {"shipped": sorted(SIMULATIONS), "checked": [_checked(asked) for asked in request["simulations"]]}


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    is_shipped, reference = asked["run"] in SIMULATIONS, file_reference(asked["run"])
    if not is_shipped and not asked["plugin"] and reference is None:
        return {"is_unknown": True}
    name, file = asked["run"] if is_shipped else asked["plugin"], ""
    try:
        if reference is not None:
            path = Path(asked["folder"], reference[0]).resolve()
            check_allowed(path.as_uri())
            name, file = f"{SimulationCode.read(path).digest}.py:{reference[1]}", str(path)
        simulation = Simulation.load(name, file)
    except (OrchestratorError, ImportError, AttributeError) as error:
        return {"problem": str(error)}
    return {
        "name": name,
        "file": file,
        "metrics": METRICS.get(name, "").split(),
        "cells": [_cell(simulation, parameters) for parameters in asked["cells"]],
    }


def _cell(simulation: Simulation, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"parameters": simulation.complete(parameters)}
    except ParametersError as error:
        return {"problems": [[list(at), why] for at, why in error.problems]}
