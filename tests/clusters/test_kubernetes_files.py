"""The Kubernetes manifests: rendered by kubectl, valid for Kubernetes' own schemas, hardened, without secrets."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess

import kubernetes_validate  # type: ignore[import-untyped] # it ships no types
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter
from ray.autoscaler._private.kuberay.autoscaling_config import _node_type_from_group_spec

from orchestrator.backends.ray.capacity import node_groups, node_labels
from orchestrator.cluster import check_kubernetes
from orchestrator.cluster.check_kubernetes import (
    LABELS_VARIABLE,
    Reference,
    check_fields,
    check_groups,
    check_heads,
    check_images,
    check_labels,
    check_placeholders,
    check_references,
    kubernetes_checks,
    pod_templates,
    ray_clusters,
    references,
)
from orchestrator.cluster.check_launcher import ACCELERATOR_LABEL, EXPECTED_LABELS, MARKET_LABEL
from orchestrator.cluster.kinds import ToolError, read_cluster
from orchestrator.cluster.start_stop import KEEP_LABEL, status_commands
from orchestrator.core.checks import Verdict, run_checks
from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import GIB
from orchestrator.sweepfile import load_sweep
from tests.clusters.manifests import KUBERAY, RENDERED, SERVICES, containers, named, pods, rendered, rendered_with
from tests.golden_refusals import as_anywhere

CUSTOM = {"RayCluster", "RayJob", "ClusterQueue", "LocalQueue", "ResourceFlavor", "WorkloadPriorityClass"}
COMPONENTS = sorted(path.name for path in (KUBERAY / "components").iterdir())
COMBINED = [("eks", "shared-store"), ("shared-store", "eks"), ("gke", "shared-store")]
MORE_WORKERS = """
patches:
  - target: {kind: RayCluster}
    patch: |-
      - {op: replace, path: /spec/workerGroupSpecs/0/maxReplicas, value: 20}
"""
KNOWN_WORKERS = """
configMapGenerator: [{name: node-groups, behavior: replace, files: [raycluster.yaml=groups.yaml]}]
"""


num_bytes = TypeAdapter(ByteSize).validate_python


def copy_of(document):
    return yaml.safe_load(yaml.safe_dump(document))


@pytest.fixture
def cluster():
    return copy_of(named(rendered(KUBERAY), "RayCluster", "pretraining"))


@pytest.mark.parametrize("folder", RENDERED, ids=lambda folder: folder.name)
def test_objects_are_valid_for_kubernetes_own_schemas(folder):
    plain = [one for one in rendered(folder) if one["kind"] not in CUSTOM]
    for document in plain:
        kubernetes_validate.validate(copy_of(document), "1.37", strict=True)
    assert plain or folder.name == "kueue"


@pytest.mark.parametrize("folder", [KUBERAY, KUBERAY / "rayjob"], ids=lambda folder: folder.name)
def test_pods_of_ray_clusters_are_valid_for_kubernetes_own_schemas(folder):
    templates = [one for _, spec in ray_clusters(rendered(folder)) for one in pod_templates(spec)]
    assert len(templates) >= 3
    for name, template in templates:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": copy_of(template)}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def test_schemas_find_a_misspelt_field():
    document = copy_of(named(rendered(KUBERAY), "StatefulSet", "redis"))
    document["spec"]["template"]["spec"]["automountServiceAccount"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("components", [*((one,) for one in COMPONENTS), *COMBINED], ids="+".join)
def test_components_apply_to_every_group_of_workers(components, tmp_path):
    documents = rendered_with(tmp_path, *components)
    (spec,) = [spec for _, spec in ray_clusters(documents)]
    changed = [spec["workerGroupSpecs"][0]["template"]["spec"], spec["workerGroupSpecs"][2]["template"]["spec"]]
    original = named(rendered(KUBERAY), "RayCluster", "pretraining")["spec"]["workerGroupSpecs"]
    assert changed[0] != original[0]["template"]["spec"]
    assert changed[1] != original[2]["template"]["spec"]
    assert check_fields(documents)
    assert check_groups(documents)
    for name, template in pod_templates(spec):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": copy_of(template)}
        kubernetes_validate.validate(pod, "1.37", strict=True)


# What the providers write on their nodes; GKE's: "Run a batch workload by using Kueue", of version 1.26 and later.
MARKETS = {
    "eks": {"spot": {"karpenter.sh/capacity-type": "spot"}, "on-demand": {"karpenter.sh/capacity-type": "on-demand"}},
    "gke": {
        "spot": {"cloud.google.com/gke-spot": "true", "cloud.google.com/gke-provisioning": "spot"},
        "on-demand": {"cloud.google.com/gke-provisioning": "standard"},
    },
}


@pytest.mark.parametrize("provider", MARKETS)
def test_groups_run_on_nodes_of_their_own_market_alone(provider, tmp_path):
    (spec,) = [spec for _, spec in ray_clusters(rendered_with(tmp_path, provider))]
    markets = MARKETS[provider]
    keys = {key for labels in markets.values() for key in labels}
    for group in spec["workerGroupSpecs"]:
        asked = {key: value for key, value in group["template"]["spec"]["nodeSelector"].items() if key in keys}
        suitable = [market for market, labels in markets.items() if asked.items() <= labels.items()]
        assert suitable == [group["labels"][MARKET_LABEL]], group["groupName"]


def test_finished_jobs_are_deleted_because_their_pods_cannot_be_changed():
    documents = rendered(SERVICES / "overlays" / "small")
    jobs = [one for one in documents if one["kind"] == "Job"]
    assert jobs
    assert all("ttlSecondsAfterFinished" in one["spec"] for one in jobs)


@pytest.mark.parametrize("folder", RENDERED, ids=lambda folder: folder.name)
def test_containers_run_without_rights(folder):
    for document in rendered(folder):
        for pod in pods(document):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(document):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, container["name"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, container["name"]
            assert container["resources"]["limits"]["memory"], container["name"]
            is_pinned = re.search(r"@sha256:|:[\w.-]*\d[\w.-]*$", container["image"])
            assert is_pinned, f"{container['image']} is not pinned"


@pytest.mark.parametrize("folder", RENDERED, ids=lambda folder: folder.name)
def test_manifests_hold_no_secret(folder):
    kinds = {document["kind"] for document in rendered(folder)}
    assert "Secret" not in kinds
    for document in rendered(folder):
        for container in containers(document):
            for variable in container.get("env", []):
                secret = re.search(r"PASSWORD$|SECRET|TOKEN$", variable["name"])
                assert not (secret and variable.get("value")), variable["name"]


@pytest.mark.parametrize(
    "folder", [KUBERAY, *sorted((SERVICES / "overlays").iterdir())], ids=lambda folder: folder.name
)
def test_namespaces_let_nobody_in_by_default_and_hold_on_to_data(folder):
    documents = rendered(folder)
    assert named(documents, "NetworkPolicy", "deny-ingress")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    holders = [one for one in documents if one["kind"] in {"Namespace", "PersistentVolumeClaim"}]
    holders += [claim for one in documents for claim in one.get("spec", {}).get("volumeClaimTemplates", [])]
    assert all(one["metadata"]["labels"][KEEP_LABEL] == "true" for one in holders)


def secrets_of(overlay, directory):
    """The secrets, by name and part, that a Kubernetes has after ``secrets.sh``; a stand-in keeps them in ``made``."""
    programs, made = directory / "bin", directory / "made"
    programs.mkdir(exist_ok=True)
    made.mkdir(exist_ok=True)
    stand_in = programs / "kubectl"
    stand_in.write_text(
        """#!/bin/sh
case "$*" in
*" get secret "*go-template=*) part=${7#*\\"}; exec cat "$MADE/$5/${part%%\\"*}" ;;
*" get secret "*) test -e "$MADE/$5"; exit ;;
*" create secret generic "*) shift 5 ;;
*) exit 0 ;;
esac
mkdir "$MADE/$1" && cd "$MADE/$1" && shift
for option; do cp "${option#*=}" .; done
"""
    )
    stand_in.chmod(0o755)
    keys = {"AWS_ACCESS_KEY_ID": "AKIAMINE", "AWS_SECRET_ACCESS_KEY": "my-secret", "AWS_REGION": "eu-north-1"}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "MADE": str(made), **keys}
    subprocess.run([str(SERVICES / "secrets.sh"), overlay], env=environment, check=True, capture_output=True)
    return {one.name: {part.name: part.read_text() for part in one.iterdir()} for one in made.iterdir()}


def test_s3_server_has_the_keys_and_arguments_of_the_compose_stack():
    (pod,) = pods(named(rendered(SERVICES / "overlays" / "small"), "StatefulSet", "s3"))
    (security,), (server,) = pod["initContainers"], pod["containers"]
    compose = yaml.safe_load((SERVICES.parent / "compose" / "compose.yaml").read_text())["services"]
    assert security["command"] == compose["s3-security"]["command"]
    assert server["args"] == compose["s3"]["command"]
    assert server["workingDir"] == compose["s3"]["working_dir"]
    assert server["workingDir"] in {mount["mountPath"] for mount in server["volumeMounts"]}


@pytest.mark.parametrize("overlay", ["small", "production"])
def test_secrets_name_only_services_that_the_overlay_has(overlay, tmp_path):
    parts = [text for one in secrets_of(overlay, tmp_path).values() for text in one.values()]
    hosts = {host for text in parts for host in re.findall(r"http://([\w-]+)\.pretraining-services\b", text)}
    documents = rendered(SERVICES / "overlays" / overlay)
    assert "mlflow" in hosts
    assert hosts <= {one["metadata"]["name"] for one in documents if one["kind"] == "Service"}


def test_production_uses_the_bucket_and_the_keys_of_its_user(tmp_path):
    drawn = secrets_of("production", tmp_path)
    client = configparser.ConfigParser()
    client.read_string(drawn["services"]["s3_credentials"])
    mine = {"aws_access_key_id": "AKIAMINE", "aws_secret_access_key": "my-secret", "region": "eu-north-1"}
    assert dict(client["default"]) == mine
    documents = rendered(SERVICES / "overlays" / "production")
    every = [container for document in documents for container in containers(document)]
    variables = [{one["name"]: one.get("value") for one in container.get("env", [])} for container in every]
    clients = [one for one in variables if "AWS_SHARED_CREDENTIALS_FILE" in one]
    assert [one["MLFLOW_BUCKET"] for one in clients] == ["REPLACE-BUCKET"] * 2  # MLflow, and the nightly dump
    # The region is in the file of the keys, and the address is the provider's.
    assert not any({"AWS_ENDPOINT_URL_S3", "AWS_REGION"} & set(one) for one in variables)
    told = [str(one.get("args")) for one in every] + [
        text
        for one in documents
        if one["kind"] == "ConfigMap"
        for text in one["data"].values()
        if "mlflow server" in text
    ]
    assert not any("s3://mlflow" in text or '"mlflow", name' in text for text in told)


def test_secrets_that_an_interrupted_run_did_not_make_fit_those_that_it_made(tmp_path):
    whole = secrets_of("small", tmp_path)
    assert set(whole) == {"services", "store-credentials", "mlflow-credentials"}
    for name in ("store-credentials", "mlflow-credentials"):
        shutil.rmtree(tmp_path / "made" / name)
    assert secrets_of("small", tmp_path) == whole


def test_secrets_of_production_are_not_taken_for_those_of_the_small_overlay(tmp_path):
    whole = secrets_of("production", tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        secrets_of("small", tmp_path)
    assert b"give the argument production" in refused.value.stderr
    assert secrets_of("production", tmp_path) == whole  # nothing was added


def test_secrets_of_an_overlay_that_is_none_are_refused():
    done = subprocess.run([str(SERVICES / "secrets.sh"), "big"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "write small or production" in done.stderr


def test_ray_cluster_passes_its_own_rules():
    documents = rendered(KUBERAY)
    for rule in (check_fields, check_images, check_heads, check_labels):
        assert rule(documents)


def test_ray_cluster_grows_to_nodes_that_the_scheduler_can_choose():
    text = named(rendered(KUBERAY), "ConfigMap", "node-groups")["data"]["raycluster.yaml"]
    spot, on_demand, cpu = node_groups([yaml.safe_load(text)], "raycluster.yaml")
    assert (spot.resources.cpus, spot.resources.gpus, spot.resources.memory_gib) == (180.0, 8.0, 1800.0)
    assert spot.suits(Resources(cpus=1.0, gpus=1.0, accelerator="H100", spot=Spot.REQUIRE))
    assert on_demand.suits(Resources(cpus=1.0, gpus=1.0, accelerator="H100", spot=Spot.NEVER))
    assert cpu.resources.gpus == 0.0


def test_controller_knows_the_groups_as_the_autoscaler_does(cluster):
    types = [_node_type_from_group_spec(group, is_head=False) for group in cluster["spec"]["workerGroupSpecs"]]
    found = node_groups([cluster], "raycluster.yaml")
    for node, of_ray in zip(found, types, strict=True):
        sizes = node.resources
        assert (sizes.cpus, sizes.gpus) == (of_ray["resources"]["CPU"], of_ray["resources"].get("GPU", 0))
        assert sizes.memory_gib * GIB == of_ray["resources"]["memory"]
        assert node.max_count == of_ray["max_workers"]
        assert node.labels == node_labels(of_ray["labels"])
        assert node.labels.keys() >= set(EXPECTED_LABELS)
        assert node.accelerator == of_ray["labels"].get(ACCELERATOR_LABEL, "")
        assert node.is_spot == (of_ray["labels"][MARKET_LABEL] == "spot")


def test_labels_by_which_a_container_overrides_those_of_its_group_do_not_count_for_growth(cluster):
    for group in cluster["spec"]["workerGroupSpecs"]:
        override = {"name": LABELS_VARIABLE, "value": json.dumps(group.pop("labels"))}
        group["template"]["spec"]["containers"][0]["env"].append(override)
    found = node_groups([cluster], "raycluster.yaml")
    assert [(node.labels, node.accelerator, node.is_spot) for node in found] == [({}, "", False)] * 3


def test_workers_that_the_controller_does_not_know_are_refused(tmp_path):
    with pytest.raises(UserError, match="add a configMapGenerator with `behavior: replace`"):
        check_groups(rendered_with(tmp_path, further=MORE_WORKERS))
    (tmp_path / "groups.yaml").touch()
    patched = rendered_with(tmp_path, further=MORE_WORKERS + KNOWN_WORKERS)
    with pytest.raises(UserError, match="has other groups of workers than pretraining"):
        check_groups(patched)  # of an empty file
    (tmp_path / "groups.yaml").write_text(yaml.safe_dump_all(map(dict, patched)))  # kubectl kustomize . > groups.yaml
    documents = rendered_with(tmp_path, further=MORE_WORKERS + KNOWN_WORKERS)
    assert check_groups(documents) == "the controller knows 3 groups of workers that the autoscaler may add"


def test_line_of_the_page_for_changed_workers_is_the_one_that_works():
    assert KNOWN_WORKERS.strip() in (KUBERAY.parents[1] / "docs" / "deploy.md").read_text()


def test_cluster_reaches_the_services_by_their_namespace():
    (rule,) = [
        rule
        for rule in named(rendered(KUBERAY), "NetworkPolicy", "ray-cluster")["spec"]["egress"]
        if {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "pretraining-services"}}}
        in rule.get("to", [])
    ]
    small = rendered(SERVICES / "overlays" / "small")
    ports = {port["port"] for name in ("s3", "mlflow") for port in named(small, "Service", name)["spec"]["ports"]}
    assert {port["port"] for port in rule["ports"]} == ports


@pytest.mark.parametrize("folder", [KUBERAY, KUBERAY / "rayjob"], ids=lambda folder: folder.name)
def test_caches_of_workers_end_below_the_size_at_which_their_pod_is_evicted(folder):
    for _, spec in ray_clusters(rendered(folder)):
        for group in spec["workerGroupSpecs"]:
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            (limit,) = [one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "cache"]
            variables = {one["name"]: one["value"] for one in container["env"]}
            assert num_bytes(variables["ORCHESTRATOR_CACHE_BYTES"]) < num_bytes(f"{limit}B")
            requested = container["resources"]["requests"]["ephemeral-storage"]
            assert num_bytes(f"{requested}B") >= num_bytes(f"{limit}B")


def test_queue_counts_all_that_the_pods_of_a_sweep_request():
    (group,) = named(rendered(KUBERAY / "kueue"), "ClusterQueue", "pretraining")["spec"]["resourceGroups"]
    (spec,) = [spec for _, spec in ray_clusters(rendered(KUBERAY / "rayjob"))]
    pods = [template["spec"] for _, template in pod_templates(spec)]
    asked = {name for pod in pods for one in pod["containers"] for name in one["resources"]["requests"]}
    assert asked == set(group["coveredResources"])
    for flavor in group["flavors"]:
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]


def test_sweep_of_the_job_is_right_and_keeps_only_backbones_on_demand():
    with as_anywhere({}):
        sweep, _ = load_sweep(str(KUBERAY / "rayjob" / "sweep.yaml"))
    spots = {kind: sweep.resources[kind].spot for kind in (JobKind.DATASET, JobKind.PRETRAIN, JobKind.FINETUNE)}
    assert spots == {JobKind.DATASET: Spot.REQUIRE, JobKind.PRETRAIN: Spot.NEVER, JobKind.FINETUNE: Spot.REQUIRE}


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (103, 0), (100, 100), (1, 1)])
def test_sweep_that_was_cancelled_ends_its_job_and_one_that_failed_does_not(tmp_path, code, ended):
    stand_in = tmp_path / "orchestrator"
    stand_in.write_text(f"#!/bin/sh\nexit {code}\n")
    stand_in.chmod(0o755)
    entrypoint = named(rendered(KUBERAY / "rayjob"), "RayJob", "sweep")["spec"]["entrypoint"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", entrypoint], env={"PATH": path}, check=False)  # as Ray runs it
    assert done.returncode == ended


def test_workers_leave_before_their_pod_is_killed(cluster):
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        deadline_s = float(command[command.index("--deadline") + 1])
        assert command[:3] == ["python", "-m", "orchestrator.cluster.leave"]
        assert deadline_s < pod["terminationGracePeriodSeconds"]


def test_field_that_kuberay_does_not_know_is_refused(cluster):
    cluster["spec"]["workerGroupSpecs"][1]["minReplica"] = 1
    cluster["spec"]["gcsFaultTolerance"] = {}
    with pytest.raises(UserError, match=r"spec\.gcsFaultTolerance, spec\.workerGroupSpecs\[1\]\.minReplica"):
        check_fields([cluster])


def test_pods_of_different_images_are_refused(cluster):
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["image"] = "registry/other:2"
    with pytest.raises(UserError, match="the images differ"):
        check_images([cluster])


def test_another_ray_than_the_packages_is_refused(cluster):
    cluster["spec"]["rayVersion"] = "2.9.0"
    with pytest.raises(UserError, match=r"rayVersion '2\.9\.0', and this package runs Ray"):
        check_images([cluster])


def test_head_that_takes_work_is_refused(cluster):
    del cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"]
    with pytest.raises(UserError, match="takes work"):
        check_heads([cluster])


def test_workers_without_labels_are_refused(cluster):
    del cluster["spec"]["workerGroupSpecs"][2]["labels"]
    with pytest.raises(UserError, match="group cpu-spot of pretraining lacks the labels"):
        check_labels([cluster])


@pytest.mark.parametrize("group_labels", [{}, {"ray.io/market-type": "on-demand", "price": "0.60"}])
def test_labels_that_the_autoscaler_does_not_see_are_refused(cluster, group_labels):
    group = cluster["spec"]["workerGroupSpecs"][2]
    own, group["labels"] = group["labels"], group_labels
    group["template"]["spec"]["containers"][0]["env"] = [{"name": LABELS_VARIABLE, "value": json.dumps(own)}]
    with pytest.raises(UserError, match=r"group cpu-spot .* ray\.io/market-type.* from RAY_OVERRIDE_LABELS"):
        check_labels([cluster])
    cluster["spec"]["enableInTreeAutoscaling"] = False  # then nodes that exist are all that counts
    assert check_labels([cluster])


def test_workers_with_a_price_that_is_no_number_are_refused(cluster):
    cluster["spec"]["workerGroupSpecs"][0]["labels"]["price"] = "24 USD"
    with pytest.raises(UserError, match=r"has the label price: '24 USD', which is not a number"):
        check_labels([cluster])


def test_placeholders_are_named_with_their_objects(cluster):
    with pytest.raises(UserError, match="REPLACE-BUCKET in RayCluster pretraining"):
        check_placeholders([cluster])


def test_references_are_what_the_pods_need(cluster):
    found = set(references(cluster))
    assert found >= {
        Reference(kind="Secret", name="redis-password", namespace="pretraining"),
        Reference(kind="Secret", name="store-credentials", namespace="pretraining"),
        Reference(kind="PriorityClass", name="pretraining-spot"),
        Reference(kind="ConfigMap", name="node-groups", namespace="pretraining"),
    }
    assert "mlflow-credentials" not in {one.name for one in found}  # optional


def test_objects_are_looked_for_in_the_namespace_of_the_pods(monkeypatch):
    def ask_tool(command, **_):
        if command[4:6] != ["-n", "pretraining"] and command[2] != "priorityclass":
            raise ToolError('Error from server (NotFound): secrets "redis-password" not found')

    documents = rendered(KUBERAY)
    monkeypatch.setattr(check_kubernetes, "ask_tool", ask_tool)
    assert check_references(documents).endswith("are there")
    cluster = copy_of(named(documents, "RayCluster", "pretraining"))
    cluster["metadata"]["namespace"] = "other"
    with pytest.raises(UserError, match="Secret redis-password -n other"):
        check_references([cluster])


def test_status_shows_pods_in_the_namespace_of_their_cluster():
    pods = ["kubectl", "get", "pods", "-n", "pretraining", "-l", "ray.io/cluster"]
    assert status_commands(read_cluster(KUBERAY))[1:] == [pods]


def test_checks_without_a_cluster_say_what_was_not_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    found = {result.name: result for result in run_checks(list(kubernetes_checks(read_cluster(KUBERAY))))}
    for name in ("kubernetes", "secrets", "quota", "admission"):
        assert found[name].verdict is Verdict.WARNING
        assert found[name].detail.startswith("not asked")


def test_checks_of_a_directory_that_does_not_render_say_why(tmp_path):
    (tmp_path / "kustomization.yaml").write_text("resources: [absent.yaml]\n")
    found = {result.name: result for result in run_checks(list(kubernetes_checks(read_cluster(tmp_path))))}
    assert found["manifests"].verdict is Verdict.FAILED
    assert "absent.yaml" in found["manifests"].detail
    assert found["images"].verdict is Verdict.SKIPPED
