"""The objects of KubeRay (``ray.io/v1``) as far as they are looked at here. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LABELS_VARIABLE = "RAY_OVERRIDE_LABELS"
"""Environment variable of a worker's container: the labels of its Ray node, as JSON."""
# Of KubeRay 1.4 and later: https://docs.ray.io/en/latest/cluster/kubernetes/references.html
_CLUSTER = frozenset(
    [
        "suspend",
        "managedBy",
        "autoscalerOptions",
        "headServiceAnnotations",
        "enableInTreeAutoscaling",
        "gcsFaultToleranceOptions",
        "headGroupSpec",
        "rayVersion",
        "workerGroupSpecs",
        "authOptions",
        "upgradeStrategy",
    ]
)
_AUTOSCALER = frozenset(
    [
        "resources",
        "image",
        "imagePullPolicy",
        "securityContext",
        "idleTimeoutSeconds",
        "upscalingMode",
        "version",
        "env",
        "envFrom",
        "volumeMounts",
        "command",
        "args",
    ]
)
_GCS = frozenset(["redisUsername", "redisPassword", "externalStorageNamespace", "redisAddress"])
_HEAD = frozenset(["template", "headService", "enableIngress", "rayStartParams", "serviceType", "labels", "resources"])
_WORKERS = frozenset(
    [
        "suspend",
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "idleTimeoutSeconds",
        "rayStartParams",
        "template",
        "scaleStrategy",
        "numOfHosts",
        "labels",
        "resources",
    ]
)
_JOB = frozenset(
    [
        "activeDeadlineSeconds",
        "backoffLimit",
        "rayClusterSpec",
        "submitterPodTemplate",
        "metadata",
        "clusterSelector",
        "submitterConfig",
        "managedBy",
        "deletionStrategy",
        "entrypoint",
        "runtimeEnvYAML",
        "jobId",
        "submissionMode",
        "entrypointResources",
        "entrypointNumCpus",
        "entrypointNumGpus",
        "ttlSecondsAfterFinished",
        "shutdownAfterJobFinishes",
        "suspend",
        "preRunningDeadlineSeconds",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Reference:
    """An object that a pod needs, by kind and name."""

    kind: str
    name: str


def ray_clusters(documents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and specification of every Ray cluster, those that jobs bring along included."""
    for document in documents:
        spec = document.get("spec") or {}
        if document.get("kind") == "RayCluster":
            yield document["metadata"]["name"], spec
        elif document.get("kind") == "RayJob" and spec.get("rayClusterSpec"):
            yield document["metadata"]["name"], spec["rayClusterSpec"]


def pod_templates(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and pod template of the head and of every group of workers of a Ray cluster."""
    yield "head", spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs") or ():
        yield str(group.get("groupName", "")), group["template"]


def labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Labels that a container gives its Ray node; none where they are no JSON object."""
    values = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
    try:
        found = json.loads(values.get(LABELS_VARIABLE) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def unknown_fields(document: Mapping[str, Any]) -> Iterator[str]:
    """Paths of the fields of a RayCluster or RayJob that KubeRay does not know; pod templates are Kubernetes' own."""
    spec = document.get("spec") or {}
    if document.get("kind") == "RayJob":
        yield from (f"spec.{name}" for name in sorted(set(spec) - _JOB))
        yield from _unknown_of_cluster(spec.get("rayClusterSpec") or {}, "spec.rayClusterSpec")
    elif document.get("kind") == "RayCluster":
        yield from _unknown_of_cluster(spec, "spec")


def references(document: Mapping[str, Any]) -> Iterator[Reference]:
    """What the pods of any object need to exist: secrets, config maps, claims, priority classes, service accounts."""
    yield from _references(document.get("spec"))


def _unknown_of_cluster(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    parts = {
        path: (spec, _CLUSTER),
        f"{path}.autoscalerOptions": (spec.get("autoscalerOptions") or {}, _AUTOSCALER),
        f"{path}.gcsFaultToleranceOptions": (spec.get("gcsFaultToleranceOptions") or {}, _GCS),
        f"{path}.headGroupSpec": (spec.get("headGroupSpec") or {}, _HEAD),
    }
    for number, group in enumerate(spec.get("workerGroupSpecs") or ()):
        parts[f"{path}.workerGroupSpecs[{number}]"] = (group, _WORKERS)
    for place, (found, known) in parts.items():
        yield from (f"{place}.{name}" for name in sorted(set(found) - known))


def _references(part: Any) -> Iterator[Reference]:  # noqa: ANN401 - any part of a manifest
    if isinstance(part, list):
        for one in part:
            yield from _references(one)
    if not isinstance(part, Mapping):
        return
    for field, kind, name_field in _FIELDS:
        value = part.get(field)
        if isinstance(value, Mapping) and value.get(name_field) and not value.get("optional"):
            yield Reference(kind=kind, name=str(value[name_field]))
    if isinstance(part.get("priorityClassName"), str):
        yield Reference(kind="PriorityClass", name=part["priorityClassName"])
    if isinstance(part.get("serviceAccountName"), str):
        yield Reference(kind="ServiceAccount", name=part["serviceAccountName"])
    for value in part.values():
        yield from _references(value)


_FIELDS = (
    ("secretKeyRef", "Secret", "name"),
    ("secretRef", "Secret", "name"),
    ("secret", "Secret", "secretName"),
    ("configMapKeyRef", "ConfigMap", "name"),
    ("configMapRef", "ConfigMap", "name"),
    ("configMap", "ConfigMap", "name"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)
