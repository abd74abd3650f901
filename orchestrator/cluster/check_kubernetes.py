"""Checks of a Ray cluster on Kubernetes: of its manifests alone, and compared with the target cluster.

Only the fields of KubeRay's objects (``ray.io/v1``) that are checked here are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from orchestrator.cluster.check_launcher import (
    ACCELERATOR_LABEL,
    EXPECTED_LABELS,
    MARKET_LABEL,
    check_price,
    placeholders,
    refuse_mismatched,
    refuse_placeholders,
)
from orchestrator.cluster.kinds import ClusterFile, ToolError, ask_tool, find_tool, parse_documents
from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import UserError

GROUPS_VARIABLE = "ORCHESTRATOR_NODE_GROUPS"
"""As ``backends.ray.capacity`` has it, which loads Ray."""
LABELS_VARIABLE = "RAY_OVERRIDE_LABELS"
"""Environment variable of a worker's container: labels of its Ray node, as JSON. They override the group's ``labels``,
and the autoscaler does not know them."""
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
_FIELDS = (
    ("secretKeyRef", "Secret", "name"),
    ("secretRef", "Secret", "name"),
    ("secret", "Secret", "secretName"),
    ("configMapKeyRef", "ConfigMap", "name"),
    ("configMapRef", "ConfigMap", "name"),
    ("configMap", "ConfigMap", "name"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)
_LIMIT_S = 45.0
_KUBECTL_S = 15.0
Documents = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Reference:
    """An object that a pod needs."""

    kind: str
    name: str
    namespace: str = ""
    """Empty = it has none, or kubectl's own."""


def ray_clusters(documents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and specification of every Ray cluster, those that jobs bring along included."""
    for document in documents:
        spec = document.get("spec") or {}
        if document.get("kind") == "RayCluster":
            yield document["metadata"]["name"], spec
        elif document.get("kind") == "RayJob" and spec.get("rayClusterSpec"):
            yield document["metadata"]["name"], spec["rayClusterSpec"]


def namespaces(documents: Documents) -> list[str]:
    """The namespaces of the Ray clusters; an empty one is kubectl's own."""
    own = [_namespace(one) for one in documents if one.get("kind") in {"RayCluster", "RayJob"}]
    return list(dict.fromkeys(own))


def in_namespace(namespace: str) -> list[str]:
    """Arguments of kubectl, which asks in the namespace of its context by itself."""
    return ["-n", namespace] if namespace else []


def _namespace(document: Mapping[str, Any]) -> str:
    return str((document.get("metadata") or {}).get("namespace") or "")


def pod_templates(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and pod template of the head and of every group of workers of a Ray cluster."""
    yield "head", spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs") or ():
        yield str(group.get("groupName", "")), group["template"]


def labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Labels that a container itself gives its Ray node; none where they are no JSON object."""
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
    yield from _references(document.get("spec"), _namespace(document))


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


def _references(part: Any, namespace: str) -> Iterator[Reference]:  # noqa: ANN401 - any part of a manifest
    if isinstance(part, list):
        for one in part:
            yield from _references(one, namespace)
    if not isinstance(part, Mapping):
        return
    for field, kind, name_field in _FIELDS:
        value = part.get(field)
        if isinstance(value, Mapping) and value.get(name_field) and not value.get("optional"):
            yield Reference(kind=kind, name=str(value[name_field]), namespace=namespace)
    if isinstance(part.get("priorityClassName"), str):
        yield Reference(kind="PriorityClass", name=part["priorityClassName"])
    if isinstance(part.get("serviceAccountName"), str):
        yield Reference(kind="ServiceAccount", name=part["serviceAccountName"], namespace=namespace)
    for value in part.values():
        yield from _references(value, namespace)


def kubernetes_checks(file: ClusterFile) -> Iterator[Check]:
    """Checks of the rendered manifests, and then of the Kubernetes cluster, if one can be reached."""
    manifests = _Manifests(file)
    yield Check(name="tools", run=lambda: f"kubectl is {find_tool('kubectl')}")
    yield Check(name="manifests", run=manifests.describe, needs=("tools",), limit_s=_LIMIT_S)
    rules: dict[str, Callable[[Documents], str]] = {
        "fields": check_fields,
        "placeholders": check_placeholders,
        "images": check_images,
        "head": check_heads,
        "labels": check_labels,
        "groups": check_groups,
    }
    for name, rule in rules.items():
        yield Check(name=name, run=manifests.applied(rule), needs=("manifests",))
    questions: dict[str, Callable[[Documents], str]] = {"secrets": check_references, "quota": check_gpus}
    yield Check(name="kubernetes", run=_reach, needs=("tools",), limit_s=_LIMIT_S)
    after = ("manifests", "kubernetes")
    for name, question in questions.items():
        yield Check(name=name, run=_with_context(manifests.applied(question)), needs=after, limit_s=_LIMIT_S)
    yield Check(name="admission", run=_with_context(lambda: _dry_run(file)), needs=after, limit_s=_LIMIT_S)


class _Manifests:
    """Documents of a file, or of a directory as kubectl renders it; rendered once."""

    def __init__(self, file: ClusterFile) -> None:
        self._file = file
        self._documents: Documents = file.documents

    def describe(self) -> str:
        if not self._documents:
            self._documents = render(self._file)
        if not list(ray_clusters(self._documents)):
            raise UserError(f"{self._file.path} holds no RayCluster and no RayJob; name the directory of one")
        return f"{len(self._documents)} objects"

    def applied(self, rule: Callable[[Documents], str]) -> Callable[[], str]:
        return lambda: rule(self._documents)


def render(file: ClusterFile) -> Documents:
    """The objects of a kustomize directory. Raises ``ToolError`` with what kubectl says is wrong."""
    return parse_documents(ask_tool(["kubectl", "kustomize", str(file.path)], timeout_s=_KUBECTL_S), str(file.path))


def check_fields(documents: Documents) -> str:
    """Raises ``UserError`` for fields that KubeRay does not have, which Kubernetes would drop silently."""
    unknown = [field for document in documents for field in unknown_fields(document)]
    if unknown:
        raise UserError(f"KubeRay has no field {', '.join(unknown[:6])}; Kubernetes would ignore it")
    return "every field of RayCluster and RayJob is one that KubeRay knows"


def check_placeholders(documents: Documents) -> str:
    """Raises ``UserError`` with the objects that still hold an example's value."""
    found = [
        f"{value} in {document.get('kind')} {document['metadata']['name']}"
        for document in documents
        if document.get("kind") != "ConfigMap"  # a copy of a file that is checked itself
        for value, _ in placeholders(json.dumps(document, indent=1))
    ]
    return refuse_placeholders(list(dict.fromkeys(found)))


def check_images(documents: Documents) -> str:
    """Raises where a Ray cluster's pods run different images, or one that is not pinned, or of another Ray."""
    lines = []
    for name, spec in ray_clusters(documents):
        images = {who: template["spec"]["containers"][0].get("image", "") for who, template in pod_templates(spec)}
        refuse_mismatched(images)
        lines.append(f"all pods of {name} run {next(iter(images.values()))}")
        _check_ray_version(name, str(spec.get("rayVersion", "")))
    return ", ".join(lines)


def check_heads(documents: Documents) -> str:
    """Raises ``UserError`` for a head that takes work, or whose end would end the cluster."""
    for name, spec in ray_clusters(documents):
        parameters = spec["headGroupSpec"].get("rayStartParams") or {}
        if str(parameters.get("num-cpus")) != "0":
            raise UserError(f"the head of {name} takes work; give headGroupSpec.rayStartParams num-cpus: '0'")
        if not spec.get("gcsFaultToleranceOptions"):
            message = (
                f"{name} has no gcsFaultToleranceOptions: a new head pod ends every worker (sweeps then resume from "
            )
            raise ConcernError(f"{message}checkpoints); name a Redis to keep them")
    return "heads take no work, and workers outlive them"


def check_labels(documents: Documents) -> str:
    """Raises ``UserError`` for workers without the labels they need, or with labels that the autoscaler cannot see."""
    count = 0
    for name, spec in ray_clusters(documents):
        for group in spec.get("workerGroupSpecs") or ():
            container = group["template"]["spec"]["containers"][0]
            seen, own = group.get("labels") or {}, labels_of(container)
            labels = {**seen, **own}
            limits = (container.get("resources") or {}).get("limits") or {}
            wanted = [MARKET_LABEL, *([ACCELERATOR_LABEL] if "nvidia.com/gpu" in limits else []), *EXPECTED_LABELS]
            missing = [label for label in wanted if label not in labels]
            place = f"group {group.get('groupName')} of {name}"
            if missing:
                raise UserError(f"{place} lacks the labels {', '.join(missing)}; put them into the group's `labels`")
            unseen = [label for label, value in own.items() if seen.get(label) != value]
            if unseen and spec.get("enableInTreeAutoscaling"):
                raise UserError(
                    f"{place} gets the labels {', '.join(unseen)} from {LABELS_VARIABLE}, which the autoscaler does "
                    "not read: it adds no node, or a wrong one, for jobs that ask for them; put them into the group's "
                    "`labels`"
                )
            check_price(place, labels)
            count += 1
    return f"{count} groups of workers say their accelerator, market, price and domain"


def check_groups(documents: Documents) -> str:
    """Raises ``UserError`` for workers that differ from the groups which the controller reads in the head's file."""
    from orchestrator.backends.ray.capacity import node_groups  # with Ray, which takes a second

    texts = {
        (one["metadata"]["name"], _namespace(one)): one.get("data") or {}
        for one in documents
        if one.get("kind") == "ConfigMap"
    }
    count = 0
    for document in documents:
        for name, spec in ray_clusters([document]):
            for map_name, key in _groups_files(spec["headGroupSpec"]["template"]["spec"]):
                known = parse_documents(str(texts.get((map_name, _namespace(document)), {}).get(key, "")), map_name)
                groups = node_groups([{"kind": "RayCluster", "spec": spec}], name)
                if not known or groups != node_groups(list(known), map_name):
                    raise UserError(
                        f"the ConfigMap {map_name}, which the controller reads, has other groups of workers than {name}"
                        "; add a configMapGenerator with `behavior: replace` to the overlay (docs/deploy.md)"
                    )
                count += len(groups)
    return f"the controller knows {count} groups of workers that the autoscaler may add"


def _groups_files(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """ConfigMap and key of the file that the head's variable names, if it is in one."""
    container = pod["containers"][0]
    variables = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
    file = PurePosixPath(variables.get(GROUPS_VARIABLE, ""))
    mounts = {one["name"]: PurePosixPath(one["mountPath"]) for one in container.get("volumeMounts") or ()}
    for volume in pod.get("volumes") or ():
        if "configMap" in volume and mounts.get(volume["name"]) == file.parent:
            yield str(volume["configMap"].get("name", "")), file.name


def check_references(documents: Documents) -> str:
    """Raises ``UserError`` for secrets, claims and classes that are neither among the objects nor in the cluster."""
    made = {(one.get("kind"), one["metadata"]["name"], _namespace(one)) for one in documents}
    wanted = sorted({one for document in documents for one in references(document)})
    outside = [one for one in wanted if (one.kind, one.name, one.namespace) not in made]
    missing = [one for one in outside if not _exists(one)]
    if missing:
        names = ", ".join(f"{one.kind} {' '.join([one.name, *in_namespace(one.namespace)])}" for one in missing)
        raise UserError(f"missing in the cluster: {names}; docs/deploy.md says how each is made")
    return f"{len(wanted)} secrets, claims and classes that the pods name are there"


def check_gpus(documents: Documents) -> str:
    """Raises where no node of the Kubernetes cluster has as many GPUs as a worker asks for."""
    nodes = json.loads(ask_tool(["kubectl", "get", "nodes", "-o", "json"], timeout_s=_KUBECTL_S))["items"]
    sizes = [int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes]
    requested = [
        int((template["spec"]["containers"][0].get("resources") or {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for _, spec in ray_clusters(documents)
        for _, template in pod_templates(spec)
    ]
    if max(requested, default=0) > max(sizes, default=0):
        message = (
            f"a worker asks for {max(requested)} GPUs, the largest of {len(sizes)} nodes has {max(sizes, default=0)}; "
        )
        raise ConcernError(f"{message}that is fine only where Kubernetes adds nodes by itself")
    return f"{sum(sizes)} GPUs on {len(sizes)} nodes, {max(requested, default=0)} asked for by the largest worker"


def _check_ray_version(name: str, version: str) -> None:
    from importlib.metadata import version as version_of

    mine = version_of("ray")
    if version != mine:
        raise UserError(f"{name} says rayVersion {version!r}, and this package runs Ray {mine}; make them agree")


def _reach() -> str:
    context = _context()
    try:
        ask_tool(["kubectl", "get", "crd", "rayclusters.ray.io"], timeout_s=_KUBECTL_S)
    except ToolError as error:
        if "NotFound" in str(error):
            raise UserError(
                f"the cluster of {context} has no KubeRay operator; install it first (docs/deploy.md)"
            ) from error
        raise
    return f"context {context} has the KubeRay operator"


def _context() -> str:
    try:
        return ask_tool(["kubectl", "config", "current-context"], timeout_s=_KUBECTL_S).strip()
    except ToolError as error:
        if "current-context is not set" not in str(error):
            raise
        message = "not asked: kubectl has no current context; choose a cluster: kubectl config use-context"
        raise ConcernError(message) from error


def _with_context(question: Callable[[], str]) -> Callable[[], str]:
    """A check that needs a Kubernetes cluster. Raises ``ConcernError`` if kubectl has no current context."""

    def call() -> str:
        _context()
        return question()

    return call


def _exists(one: Reference) -> bool:
    try:
        command = ["kubectl", "get", one.kind.lower(), one.name, *in_namespace(one.namespace), "-o", "name"]
        ask_tool(command, timeout_s=_KUBECTL_S)
    except ToolError as error:
        if "NotFound" in str(error):
            return False
        raise
    return True


def _dry_run(file: ClusterFile) -> str:
    flag = "-k" if file.path.is_dir() else "-f"
    ask_tool(["kubectl", "apply", "--dry-run=server", "--validate=strict", flag, str(file.path)], timeout_s=_KUBECTL_S)
    return "Kubernetes would take all of it"
