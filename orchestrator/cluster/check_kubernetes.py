"""What can be wrong with a Ray cluster on Kubernetes: of its manifests alone, and against the cluster it is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from orchestrator.cluster.kinds import ClusterFile, parse_documents
from orchestrator.cluster.kuberay import LABELS_VARIABLE, Reference, labels_of, pod_templates, ray_clusters, references
from orchestrator.cluster.kuberay import unknown_fields as find_unknown_fields
from orchestrator.cluster.tools import ToolError, ask_tool, find_tool
from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import UserError

_LIMIT_S = 45.0
_KUBECTL_S = 15.0
Documents = Sequence[Mapping[str, Any]]


def kubernetes_checks(file: ClusterFile) -> Iterator[Check]:
    """The manifests, rendered first; then what the Kubernetes cluster says of them, if one can be reached."""
    manifests = _Manifests(file)
    yield Check(name="tools", run=lambda: f"kubectl is {find_tool('kubectl')}")
    yield Check(name="manifests", run=manifests.tell, needs=("tools",), limit_s=_LIMIT_S)
    rules: dict[str, Callable[[Documents], str]] = {
        "fields": check_fields,
        "placeholders": check_placeholders,
        "images": check_images,
        "head": check_heads,
        "labels": check_labels,
    }
    for name, rule in rules.items():
        yield Check(name=name, run=manifests.applied(rule), needs=("manifests",))
    questions: dict[str, Callable[[Documents], str]] = {"secrets": check_references, "quota": check_gpus}
    yield Check(name="kubernetes", run=_reach, needs=("tools",), limit_s=_LIMIT_S)
    after = ("manifests", "kubernetes")
    for name, question in questions.items():
        yield Check(name=name, run=_asked(manifests.applied(question)), needs=after, limit_s=_LIMIT_S)
    yield Check(name="admission", run=_asked(lambda: _dry_run(file)), needs=after, limit_s=_LIMIT_S)


class _Manifests:
    """Documents of a file, or of a directory as kubectl renders it; rendered once."""

    def __init__(self, file: ClusterFile) -> None:
        self._file = file
        self._documents: Documents = file.documents

    def tell(self) -> str:
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
    """Raises ``UserError`` for fields that KubeRay does not have, which Kubernetes would drop without a word."""
    unknown = [field for document in documents for field in find_unknown_fields(document)]
    if unknown:
        raise UserError(f"KubeRay has no field {', '.join(unknown[:6])}; Kubernetes would ignore it")
    return "every field of RayCluster and RayJob is one that KubeRay knows"


def check_placeholders(documents: Documents) -> str:
    """Raises ``UserError`` with the objects that still hold an example's value."""
    found = [
        f"{value} in {document.get('kind')} {document['metadata']['name']}"
        for document in documents
        if document.get("kind") != "ConfigMap"  # a copy of a file that is looked at itself
        for value, _ in placeholders(json.dumps(document, indent=1))
    ]
    return refuse_placeholders(list(dict.fromkeys(found)))


def check_images(documents: Documents) -> str:
    """Raises where a Ray cluster's pods run different images, or one that is not pinned, or of another Ray."""
    told = []
    for name, spec in ray_clusters(documents):
        images = {who: template["spec"]["containers"][0].get("image", "") for who, template in pod_templates(spec)}
        refuse_mismatched(images)
        told.append(f"all pods of {name} run {next(iter(images.values()))}")
        _check_ray_version(name, str(spec.get("rayVersion", "")))
    return ", ".join(told)


def check_heads(documents: Documents) -> str:
    """Raises ``UserError`` for a head that takes work, or that loses the cluster with itself."""
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
    """Raises ``UserError`` for workers that do not say what the scheduler chooses nodes by."""
    count = 0
    for name, spec in ray_clusters(documents):
        for group in spec.get("workerGroupSpecs") or ():
            container = group["template"]["spec"]["containers"][0]
            labels = {**(group.get("labels") or {}), **labels_of(container)}
            limits = (container.get("resources") or {}).get("limits") or {}
            wanted = [MARKET_LABEL, *([ACCELERATOR_LABEL] if "nvidia.com/gpu" in limits else []), *EXPECTED_LABELS]
            missing = [label for label in wanted if label not in labels]
            place = f"group {group.get('groupName')} of {name}"
            if missing:
                raise UserError(f"{place} lacks the labels {', '.join(missing)}; put them into {LABELS_VARIABLE}")
            check_price(place, labels)
            count += 1
    return f"{count} groups of workers say their accelerator, market, price and domain"


def check_references(documents: Documents) -> str:
    """Raises ``UserError`` for secrets, claims and classes that are neither among the objects nor in the cluster."""
    made = {(one.get("kind"), one["metadata"]["name"]) for one in documents}
    wanted = sorted({one for document in documents for one in references(document)})
    outside = [one for one in wanted if (one.kind, one.name) not in made]
    missing = [one for one in outside if not _exists(one)]
    if missing:
        told = ", ".join(f"{one.kind} {one.name}" for one in missing)
        raise UserError(f"missing in the cluster: {told}; docs/deploy.md says how each is made")
    return f"{len(wanted)} secrets, claims and classes that the pods name are there"


def check_gpus(documents: Documents) -> str:
    """Raises where no node of the Kubernetes cluster has as many GPUs as a worker asks for."""
    nodes = json.loads(ask_tool(["kubectl", "get", "nodes", "-o", "json"], timeout_s=_KUBECTL_S))["items"]
    sizes = [int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes]
    asked = [
        int((template["spec"]["containers"][0].get("resources") or {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for _, spec in ray_clusters(documents)
        for _, template in pod_templates(spec)
    ]
    if max(asked, default=0) > max(sizes, default=0):
        message = (
            f"a worker asks for {max(asked)} GPUs, the largest of {len(sizes)} nodes has {max(sizes, default=0)}; "
        )
        raise ConcernError(f"{message}that is fine only where Kubernetes adds nodes by itself")
    return f"{sum(sizes)} GPUs on {len(sizes)} nodes, {max(asked, default=0)} asked for by the largest worker"


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


def _asked(question: Callable[[], str]) -> Callable[[], str]:
    """A question that only a Kubernetes cluster can answer; without one, that is said."""

    def ask() -> str:
        _context()
        return question()

    return ask


def _exists(one: Reference) -> bool:
    try:
        ask_tool(["kubectl", "get", one.kind.lower(), one.name, "-o", "name"], timeout_s=_KUBECTL_S)
    except ToolError as error:
        if "NotFound" in str(error):
            return False
        raise
    return True


def _dry_run(file: ClusterFile) -> str:
    flag = "-k" if file.path.is_dir() else "-f"
    ask_tool(["kubectl", "apply", "--dry-run=server", "--validate=strict", flag, str(file.path)], timeout_s=_KUBECTL_S)
    return "Kubernetes would take all of it"
