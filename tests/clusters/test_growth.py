"""What the controller is told of nodes that leave and of nodes that may come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _node_type_from_group_spec

from orchestrator.backends.ray import capacity
from orchestrator.backends.ray.capacity import GROUPS_VARIABLE, growth, node_groups
from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import GIB
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.commands import FailJob, LaunchJob
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state.nodes import Node
from tests.scheduler_cases import after, of_type, plan_of
from tests.scripted_sweep import make_job

AWS = Path(__file__).parents[2] / "clusters" / "aws.yaml"
HEAD = Resources(cpus=0.0)


@pytest.fixture(autouse=True)
def forgotten():
    capacity._growth_of.cache_clear()


def of_ray(name, cpus):
    return {"Alive": True, "NodeID": name, "NodeManagerHostname": "host", "Resources": {"CPU": cpus}}


def decided(job, maximum):
    return Scheduler().decide(
        ClusterView(snapshots=[after(plan_of("sweep", job))], total=HEAD, nodes=(HEAD,), maximum=maximum, now=1.0)
    )


def gpu_job(**asked) -> Job:
    job = make_job("pretrain/a")
    return Job(name=job.name, kind=job.kind, key=job.key, identity=job.identity, resources=Resources(**asked))


def test_changed_file_of_nodes_counts_at_once(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    monkeypatch.setenv(GROUPS_VARIABLE, str(path))
    for max_workers in (2, 40):
        path.write_text(f"available_node_types: {{gpu: {{resources: {{CPU: 8}}, max_workers: {max_workers}}}}}\n")
        assert [kind.max_count for kind in growth() or ()] == [max_workers]


@pytest.mark.parametrize(
    ("of_all", "of_type", "expected"),
    [(4, 8, [4]), (8, 4, [4]), (4, None, [4]), (None, 4, [4]), (None, None, [None]), (0, None, []), (4, 0, [])],
)
def test_type_of_nodes_grows_up_to_its_own_limit_and_that_of_all_types(of_all, of_type, expected):
    kind = {"resources": {"CPU": 8}} | ({} if of_type is None else {"max_workers": of_type})
    config = {"available_node_types": {"cpu": kind}} | ({} if of_all is None else {"max_workers": of_all})
    assert [node.max_count for node in node_groups([config], "cluster.yaml")] == expected


def test_capacity_counts_no_node_that_leaves(monkeypatch):
    monkeypatch.setattr(capacity, "_nodes", lambda: [of_ray("aaaaaaaa1", 8.0), of_ray("bbbbbbbb2", 4.0)])
    monkeypatch.setattr(capacity, "leaving_nodes", lambda: {"aaaaaaaa1": 100.0})
    read = capacity.ClusterCapacity()
    found = read.read()
    assert found.total.cpus == 4.0
    assert {machine.name: machine.leaves_at_s for machine in found.machines} == {
        "host/aaaaaaaa": 100.0,
        "host/bbbbbbbb": None,
    }
    assert read.is_leaving("host/aaaaaaaa")
    assert not read.is_leaving("host/bbbbbbbb")


def test_growth_is_what_the_named_file_says(monkeypatch):
    monkeypatch.setenv(GROUPS_VARIABLE, str(AWS))
    found = growth()
    assert found is not None
    assert [(node.accelerator, node.is_spot) for node in found] == [("H100", True), ("H100", False), ("", True)]


def test_cluster_without_the_variable_does_not_grow(monkeypatch):
    monkeypatch.delenv(GROUPS_VARIABLE, raising=False)
    assert growth() is None


_NO_QUANTITY = """
kind: RayCluster
spec: {workerGroupSpecs: [{template: {spec: {containers: [{resources: {limits: {cpu: "many"}}}]}}}]}
"""


@pytest.mark.parametrize(
    "text",
    ["a: [", "version: 1", "kind: RayCluster", "available_node_types: [1]", _NO_QUANTITY, "kind: RayJob\nspec: 1"],
)
def test_growth_of_a_wrong_file_is_none_and_told(monkeypatch, tmp_path, caplog, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    monkeypatch.setenv(GROUPS_VARIABLE, str(path))
    assert growth() is None
    assert "the cluster counts as one that does not grow" in caplog.text


def test_job_for_nodes_that_may_come_is_launched_and_one_for_none_is_refused(monkeypatch):
    monkeypatch.setenv(GROUPS_VARIABLE, str(AWS))
    maximum = growth()
    fits = gpu_job(cpus=96.0, gpus=8.0, accelerator="H100", spot=Spot.NEVER)
    assert [command.nodes for command in of_type(decided(fits, maximum), LaunchJob)] == [()]
    too_large = gpu_job(cpus=96.0, gpus=16.0)
    (refusal,) = of_type(decided(too_large, maximum), FailJob)
    assert "infeasible" in refusal.reason


def group_of(container: str, **fields) -> dict[str, Any]:
    """A group of workers of a ``RayCluster``; ``container``: the resources of its container, as YAML."""
    pod = {"containers": [{"name": "ray-worker", "resources": yaml.safe_load(container)}]}
    group = {"groupName": "workers", "minReplicas": 0, "maxReplicas": 3, "rayStartParams": {}}
    return {**group, "template": {"spec": pod}, **fields}


def grown(group) -> tuple[Node, ...]:
    return node_groups([{"kind": "RayCluster", "spec": {"workerGroupSpecs": [group]}}], "groups.yaml")


_LIMITS = "{requests: {cpu: 3500m, memory: 10Gi}, limits: {cpu: 7500m, memory: 16G, nvidia.com/gpu: '2'}}"
GROUPS = {
    "requests alone": group_of("{requests: {cpu: 7500m, memory: 64Gi}, limits: {memory: 65Gi}}"),
    "limits before requests": group_of(_LIMITS),
    "parameters before limits": group_of(_LIMITS, rayStartParams={"num-cpus": "30", "num-gpus": "4", "memory": "1000"}),
    "resources before all": group_of(_LIMITS, resources={"CPU": "6", "GPU": "1", "memory": "3Gi"}),
    "no GPUs in spite of limits": group_of(_LIMITS, rayStartParams={"num-cpus": "8", "num-gpus": "0"}),
    "GPUs of another maker": group_of("{limits: {cpu: 8, amd.com/gpu: 4}}"),
    "several hosts": group_of("{limits: {cpu: 8}}", numOfHosts=2),
    "labels": group_of("{limits: {cpu: 8}}", labels={"ray.io/market-type": "spot", "rack": "r1"}),
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_groups_of_a_manifest_are_what_the_autoscaler_takes_them_for(group):
    of_ray = _node_type_from_group_spec(group, is_head=False)
    (node,) = grown(group)
    resources = {"CPU": node.resources.cpus, "GPU": node.resources.gpus, "memory": node.resources.memory_gib * GIB}
    assert resources == {"GPU": 0, "memory": 0, **of_ray["resources"]}
    assert node.max_count == of_ray["max_workers"]
    assert node.is_spot == (of_ray["labels"].get("ray.io/market-type") == "spot")


def test_job_waits_for_pods_of_which_only_the_requests_say_how_many_cpus_they_have():
    commands = decided(gpu_job(cpus=8.0), grown(GROUPS["requests alone"]))
    assert [type(command) for command in commands] == [LaunchJob]


def test_fields_that_are_null_count_as_absent():
    group = group_of("{limits: {cpu: 8}, requests: null}", rayStartParams=None, labels=None, resources=None)
    assert grown(group) == grown(group_of("{limits: {cpu: 8}}"))


def test_group_of_which_the_autoscaler_cannot_tell_the_cpus_is_named():
    with pytest.raises(OrchestratorError, match="group workers: Autoscaler failed to detect `CPU` resources"):
        grown(group_of("{limits: {memory: 8Gi}}"))
