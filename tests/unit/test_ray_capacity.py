"""From Ray's list of nodes to what the scheduler is told."""

import time
from pathlib import Path

import pytest
from torch.distributed.distributed_c10d import Backend, BackendConfig

from orchestrator.backends.ray import capacity
from orchestrator.backends.ray.gang.train import collectives
from orchestrator.core.contract import Resources


def test_capacity_of_mixed_nodes_keeps_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 64.0}]
    nodes = [*({"Alive": True, "Resources": one} for one in resources), {"Alive": False, "Resources": {"CPU": 99.0}}]
    monkeypatch.setattr(capacity, "_nodes", lambda: nodes)
    monkeypatch.setattr(capacity, "leaving_nodes", dict)
    found = capacity.ClusterCapacity().read()
    assert found.total == Resources(cpus=136.0, gpus=1.0, memory_gib=0.0)
    assert set(found.nodes) == {
        Resources(cpus=64.0, memory_gib=0.0),
        Resources(cpus=8.0, gpus=1.0, memory_gib=0.0),
    }


def test_capacity_tells_each_machine_its_labels_accelerator_and_market(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {
        "Alive": True,
        "NodeID": "abcdef0123456789",
        "NodeManagerHostname": "gpu-7",
        "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0},
        "Labels": {"ray.io/market-type": "spot", "ray.io/node-id": "abcdef0123456789", "rack": "r1"},
    }
    monkeypatch.setattr(capacity, "_nodes", lambda: [node])
    monkeypatch.setattr(capacity, "leaving_nodes", dict)
    found = capacity.ClusterCapacity()
    (machine,) = found.read().machines
    assert (machine.accelerator, machine.is_spot, dict(machine.labels)) == ("A100", True, {"rack": "r1"})
    assert machine.name == "gpu-7/abcdef01"
    assert found.ids_of([machine.name, "gpu-8/00000000"]) == ("abcdef0123456789",)
    assert found.name_of("abcdef0123456789") == machine.name


def test_capacity_remembers_a_lost_node_until_it_is_too_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Alive": True, "NodeID": "ab" * 8, "NodeManagerHostname": "gpu-7", "Resources": {"CPU": 8.0}}
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0] + 1e6)
    monkeypatch.setattr(capacity, "_nodes", lambda: [node])
    monkeypatch.setattr(capacity, "leaving_nodes", dict)
    found = capacity.ClusterCapacity()
    assert found.read().absent == ()
    node["Alive"] = False
    now_s[0] = 60.0
    assert [(one.name, one.is_alive) for one in found.read().absent] == [("gpu-7/abababab", False)]
    node["Alive"] = True
    now_s[0] = 120.0
    assert found.read().absent == ()
    node["Alive"] = False
    now_s[0] = 120.0 + capacity._MAY_COME_BACK_S + 1.0
    assert found.read().absent == ()


def test_capacity_is_settled_an_hour_after_its_start_and_some_minutes_after_the_last_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = [{"Alive": True, "NodeID": "ab" * 8, "NodeManagerHostname": "head", "Resources": {"CPU": 8.0}}]
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0] + 1e6)
    monkeypatch.setattr(capacity, "_nodes", lambda: nodes)
    monkeypatch.setattr(capacity, "leaving_nodes", dict)
    monkeypatch.delenv(capacity.GROUPS_VARIABLE, raising=False)
    found = capacity.ClusterCapacity()

    def is_settled(at_s: float) -> bool:
        now_s[0] = at_s
        return found.read().is_settled

    assert not is_settled(0.0)
    assert not is_settled(capacity._MAY_COME_BACK_S - 1.0)
    assert is_settled(capacity._MAY_COME_BACK_S + 2.0)
    nodes.append({"Alive": True, "NodeID": "cd" * 8, "NodeManagerHostname": "gpu-1", "Resources": {"GPU": 8.0}})
    joined_s = capacity._MAY_COME_BACK_S + 10.0
    assert not is_settled(joined_s)
    nodes.pop()
    assert is_settled(joined_s + capacity._SETTLES_AFTER_S), "a loss is no reason to expect another node"
    groups = tmp_path / "groups.yaml"
    groups.write_text("{available_node_types: {gpu: {resources: {GPU: 8}, max_workers: 2}}}")
    monkeypatch.setenv(capacity.GROUPS_VARIABLE, str(groups))
    found = capacity.ClusterCapacity()
    assert found.read().is_settled, "which nodes may come is declared"


@pytest.mark.parametrize(("gpus", "devices"), [(1.0, {"cpu": "gloo", "cuda": "nccl"}), (0.0, {"cpu": "gloo"})])
def test_gang_ranks_can_agree_on_numbers_of_the_host(gpus: float, devices: dict[str, str]) -> None:
    backends = BackendConfig(Backend(collectives(Resources(cpus=4.0, gpus=gpus)))).get_device_backend_map()
    assert devices.items() <= backends.items()
