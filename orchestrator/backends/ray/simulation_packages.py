"""Packages of simulations in plain files: kept by the Ray cluster itself, read by the runners of their jobs.

Invariants:

- A package comes from a submit that had to show the cluster's token, and never from the store: whoever may write
  results may not thereby say what code runs. It is kept in the tables of Ray's head under the digest of its sources.
- A runner opens it for each attempt and compares its digest with that of the job. Without one it reads the file where
  it lies.

They live as long as the head's tables do; after a head that was lost for good, its sweep is submitted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_get, _internal_kv_put

from orchestrator.core.contract import JobRequest
from orchestrator.core.simulation_files import FILE_ROLE, SimulationCode, file_identity
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.open import check_allowed

_NAMESPACE: Final = b"pretraining-orchestrator-simulations"


def keep_packages(packages: Mapping[str, bytes]) -> None:
    """Keep packages by the digest of their sources, for all runners of the connected cluster."""
    for digest, package in packages.items():
        _internal_kv_put(digest.encode(), package, overwrite=True, namespace=_NAMESPACE)


def why_absent(plan: Plan) -> str:
    """Why this cluster cannot run the simulations of a plan; empty if it can."""
    for digest, file in sorted(plan.simulation_files.items()):
        if not _internal_kv_exists(digest.encode(), namespace=_NAMESPACE) and not _is_here(file):
            return (
                f"no package of the simulation {Path(file).name} (sha256 {digest[:12]}) came with the submit, and "
                f"{file} is not on this node: a plain file does not travel through the store; submit through the "
                "cluster's dashboard, or put the file into a folder that all nodes share"
            )
    return ""


def with_unpacked(request: JobRequest, folder: Path) -> JobRequest:
    """A request whose simulation is run from its package, unpacked into an empty folder; else the request as it is.

    Raises:
        UserError: the package is not that of the job's identity.
        StorageDeniedError: there is no package, and the file is not below any of the allowed URIs.
    """
    wanted = file_identity(str(request.parameters.get("simulation", ""))) if FILE_ROLE in _files(request) else None
    package = _internal_kv_get(wanted[0].encode(), namespace=_NAMESPACE) if wanted else None
    if wanted is None:
        return request
    if package is None:
        check_allowed(Path(_files(request)[FILE_ROLE]).absolute().as_uri())
        return request
    file = SimulationCode.from_package(package, wanted[0]).write(folder)
    execution = replace(request.execution, label_files={**_files(request), FILE_ROLE: str(file)})
    return replace(request, execution=execution)


def _is_here(file: str) -> bool:
    """Whether a path that a sender chose is a file; one that may not be looked at, or cannot be a path, is none."""
    try:
        return Path(file).is_file()
    except OSError:
        return False


def _files(request: JobRequest) -> Mapping[str, str]:
    return request.execution.label_files
