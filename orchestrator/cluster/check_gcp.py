"""Checks whether Google Cloud offers what a launcher configuration asks for. Reads only; creates nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from orchestrator.cluster.check_launcher import is_bought_on_spot, most_of
from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import UserError

_LIMIT_S = 40.0
_API = "https://compute.googleapis.com/compute/v1/projects"
_ZONE = re.compile(r"([a-z]+-[a-z]+\d+)-[a-z]")
# Machines that come with their GPUs: https://cloud.google.com/compute/docs/gpus
_BUILT_IN = {
    "a2-highgpu": "nvidia-tesla-a100",
    "a2-megagpu": "nvidia-tesla-a100",
    "a2-ultragpu": "nvidia-a100-80gb",
    "a3-highgpu": "nvidia-h100-80gb",
    "a3-megagpu": "nvidia-h100-mega-80gb",
    "a3-ultragpu": "nvidia-h200-141gb",
    "a4-highgpu": "nvidia-b200",
}
"""Their names end with the number of GPUs."""
_L4S = {"4": 1, "8": 1, "12": 1, "16": 1, "24": 2, "32": 1, "48": 4, "96": 8}
"""GPUs of ``g2-standard`` machines, whose names end with the number of CPUs."""
_OF_GPUS = re.compile(r"[ag]\d")
"""How the names of all machines that come with GPUs begin, and of no others."""
Fetch = Callable[[str], Mapping[str, Any]]
"""Fetches the document at a URL of the Compute Engine API."""


def gcp_checks(config: Mapping[str, Any], fetch: Fetch | None = None) -> Iterator[Check]:
    """Zones and machines are checked without an account; quotas are checked if there are credentials."""
    fetch_json = fetch or fetch_document
    yield Check(name="client", run=_find_client)
    yield Check(name="region", run=lambda: check_zone(config))
    yield Check(name="machines", run=lambda: check_machines(config))
    yield Check(name="project", run=lambda: check_project(config))
    yield Check(
        name="quota", run=lambda: check_quota(config, fetch_json), needs=("region", "project"), limit_s=_LIMIT_S
    )


def check_zone(config: Mapping[str, Any]) -> str:
    """Raises ``UserError`` for a zone that is not in the region. Makes no request."""
    provider: Mapping[str, Any] = config.get("provider") or {}
    region, zone = str(provider.get("region", "")), str(provider.get("availability_zone", ""))
    found = _ZONE.fullmatch(zone)
    if found is None:
        raise UserError(f"provider.availability_zone {zone!r} is not a zone; write one such as us-central1-a")
    if found.group(1) != region:
        raise UserError(f"zone {zone} is not in provider.region {region!r}; write {found.group(1)}, or another zone")
    return zone


def check_machines(config: Mapping[str, Any]) -> str:
    """Raises ``UserError`` for GPUs that do not fit the machine, or a machine with GPUs that would be migrated.

    Raises ``ConcernError`` for machines whose GPUs are not known.
    """
    names, unknown = [], []
    for name, one in (config.get("available_node_types") or {}).items():
        settings: Mapping[str, Any] = one.get("node_config") or {}
        machine, gpus = str(settings.get("machineType", "")).rpartition("/")[2], gpus_of(settings)
        promised = int((one.get("resources") or {}).get("GPU", 0))
        if not gpus and _OF_GPUS.match(machine):
            unknown.append(machine)
        elif sum(gpus.values()) != promised:
            raise UserError(
                f"{name} promises {promised} GPUs, but {machine} would have {sum(gpus.values())}; make them agree"
            )
        scheduling = settings.get("scheduling") or {}
        maintenance = scheduling.get("onHostMaintenance") if isinstance(scheduling, Mapping) else ""
        if gpus and maintenance != "TERMINATE":
            raise UserError(f"{name} has GPUs, which cannot be moved; set scheduling.onHostMaintenance: TERMINATE")
        names.append(machine)
    if unknown:
        listed = ", ".join(dict.fromkeys(unknown))
        raise ConcernError(
            f"not checked: the number of GPUs of {listed} is not known here; compare it with `resources`"
        )
    return ", ".join(dict.fromkeys(names))


def check_project(config: Mapping[str, Any]) -> str:
    """Raises ``UserError`` without a project."""
    project = str((config.get("provider") or {}).get("project_id") or "")
    if not re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", project):
        raise UserError(f"provider.project_id {project!r} is not a project id (6-30 small letters, digits, -)")
    return project


def check_quota(config: Mapping[str, Any], fetch: Fetch) -> str:
    """Raises ``UserError`` where the region's quota of GPUs is below what the cluster may grow to."""
    provider = config["provider"]
    document = fetch(f"{_API}/{provider['project_id']}/regions/{provider['region']}")
    limits = {one["metric"]: float(one["limit"]) for one in document.get("quotas", ())}
    needed = _needed(config, limits)
    unknown = [metric for metric in needed if metric not in limits]
    if unknown:
        raise ConcernError(f"the region tells no quota {', '.join(unknown)}; look at the console's quota page")
    short = [f"{metric}: {limits[metric]:.0f} of {count}" for metric, count in needed.items() if limits[metric] < count]
    if short:
        raise UserError(f"quota: {', '.join(short)}; ask for more on the console's quota page, or lower max_workers")
    return ", ".join(f"{metric}: {count} of {limits[metric]:.0f}" for metric, count in needed.items()) or "no GPUs"


def gpus_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """GPUs of a machine by their type, including those that are part of its machine type (``a3-highgpu-8g``)."""
    attached = {
        str(one["acceleratorType"]).rpartition("/")[2]: int(one["acceleratorCount"])
        for one in settings.get("guestAccelerators") or ()
    }
    machine = str(settings.get("machineType", "")).rpartition("/")[2]
    family, _, size = machine.rpartition("-")
    if not attached and family in _BUILT_IN and size.endswith("g"):
        return {_BUILT_IN[family]: int(size[:-1])}
    if not attached and family == "g2-standard" and size in _L4S:
        return {"nvidia-l4": _L4S[size]}
    return attached


def fetch_document(url: str) -> Mapping[str, Any]:
    """A document of the API. Raises ``ConcernError`` where it cannot be asked."""
    try:
        import google.auth  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from google.auth.transport.requests import AuthorizedSession  # type: ignore[import-not-found,import-untyped,unused-ignore]

        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/compute.readonly"])
        session: Any = AuthorizedSession(credentials)  # type: ignore[no-untyped-call,unused-ignore]
        response = session.get(url, timeout=15)
        response.raise_for_status()
        document: Mapping[str, Any] = response.json()
    except ImportError as error:
        raise ConcernError("not asked: google-auth is not installed; pip install google-auth requests") from error
    except Exception as error:
        message = f"not asked: Google Cloud gave no answer ({type(error).__name__}); log in with gcloud auth "
        raise ConcernError(f"{message}application-default login") from error
    return document


def _needed(config: Mapping[str, Any], limits: Collection[str]) -> dict[str, int]:
    """GPUs that the cluster may grow to, by the name of their quota among those of the region."""
    most = int(config.get("max_workers", 0))
    heads: dict[str, int] = defaultdict(int)
    workers: dict[str, list[tuple[int, int]]] = {}
    for name, one in (config.get("available_node_types") or {}).items():
        settings = one.get("node_config") or {}
        for gpu, size in gpus_of(settings).items():
            metric = _metric(gpu, limits, is_spot=is_bought_on_spot(settings))
            kinds = workers.setdefault(metric, [])
            if name == config.get("head_node_type"):
                heads[metric] += size
            else:
                kinds.append((size, int(one.get("max_workers", most))))
    return {metric: heads[metric] + most_of(kinds, most) for metric, kinds in workers.items()}


def _metric(gpu: str, limits: Collection[str], *, is_spot: bool) -> str:
    """The quota of a type: ``nvidia-a100-80gb`` counts in ``NVIDIA_A100_80GB_GPUS``, which not every type has so long.

    ``NVIDIA_H100_GPUS`` leaves the memory out, since there is no other H100.
    """
    name = gpu.removeprefix("nvidia-").removeprefix("tesla-")
    short = re.sub(r"-\d+gb$", "", name)
    long_metric, metric = (
        f"{'PREEMPTIBLE_' if is_spot else ''}NVIDIA_{each.upper().replace('-', '_')}_GPUS" for each in (name, short)
    )
    return long_metric if long_metric in limits else metric


def _find_client() -> str:
    if find_spec("googleapiclient") is None:
        raise UserError("Ray's launcher for Google Cloud needs its client; pip install google-api-python-client")
    return "google-api-python-client is installed"
