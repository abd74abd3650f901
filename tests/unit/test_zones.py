"""A gang never lies in two zones of a cluster."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.backends.ray.capacity import node_labels, zone_label
from orchestrator.backends.ray.runner.runner import selector_of
from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.commands import FailJob, LaunchJob
from orchestrator.state.nodes import Node
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import after, decide, launched, of_type, plan_of

NUM_NODES = 6


def zoned(zones: str) -> tuple[Node, ...]:
    """Nodes of 8 GPUs, one for each letter, in the zones of these letters."""
    nodes = gpu_nodes(8 * len(zones))
    return tuple(replace(node, labels={"zone": zone}) for node, zone in zip(nodes, zones, strict=True))


def gang(name: str, num_nodes: int) -> Job:
    return gpu_job(name, gpus=8 * num_nodes)


def zones_of(command: LaunchJob, nodes: tuple[Node, ...]) -> set[str]:
    return {node.labels.get("zone", "") for node in nodes if node.name in command.nodes}


def test_gang_goes_into_one_zone_even_if_two_halves_are_free_elsewhere() -> None:
    nodes, job = zoned("abbaab"), gang("pretrain/x", 2)
    (command,) = of_type(decide(after(plan_of("s", job)), nodes=nodes), LaunchJob)
    assert len(zones_of(command, nodes)) == 1
    assert len(set(command.nodes)) == 2


def test_gang_takes_the_smaller_zone_while_the_larger_one_is_busy() -> None:
    nodes = zoned("aaabb")
    busy, job = gang("pretrain/busy", 2), gang("pretrain/next", 2)
    first = [node.name for node in nodes if node.labels["zone"] == "a"][:2]
    held = launched(busy, *(name for name in first for _ in range(8)))
    (command,) = of_type(decide(after(plan_of("s", busy, job), held), nodes=nodes), LaunchJob)
    assert zones_of(command, nodes) == {"b"}


def test_gang_that_only_both_zones_together_would_hold_is_refused() -> None:
    job = gang("pretrain/x", 4)
    commands = decide(after(plan_of("s", job)), nodes=zoned("aaabbb"))
    assert of_type(commands, LaunchJob) == []
    assert [command.job for command in of_type(commands, FailJob)] == ["pretrain/x"]
    assert len(of_type(decide(after(plan_of("s", job)), nodes=gpu_nodes(8 * 6)), LaunchJob)) == 1


def test_gang_that_nodes_to_come_would_hold_only_in_both_zones_together_is_refused() -> None:
    job = gang("pretrain/x", 3)
    for zones, max_count, is_refused in (("ab", 2, True), ("ab", 3, False), (("", "b"), 2, False)):
        kinds = [replace(zoned("a")[0], name="", labels={"zone": zone}, max_count=max_count) for zone in zones]
        commands = decide(after(plan_of("s", job)), nodes=(), maximum=tuple(kinds))
        assert bool(of_type(commands, FailJob)) is is_refused
        assert bool(of_type(commands, LaunchJob)) is not is_refused


def test_gangs_of_one_node_use_all_zones() -> None:
    jobs = [gpu_job(f"finetune/{number}", gpus=8) for number in range(NUM_NODES)]
    assert len(of_type(decide(after(plan_of("s", *jobs)), nodes=zoned("aaabbb")), LaunchJob)) == NUM_NODES


def test_zone_that_ray_was_told_reaches_the_scheduler() -> None:
    assert node_labels({"ray.io/availability-zone": "eu-1a", "ray.io/node-id": "x"}) == {"zone": "eu-1a"}
    assert node_labels({"ray.io/availability-zone": "eu-1a", "zone": "own"}) == {"zone": "own"}


def test_zone_is_asked_for_by_the_label_that_the_nodes_have() -> None:
    asked = Resources(gpus=8.0, labels=(("zone", "eu-1a"),))
    for labels in ({"ray.io/availability-zone": "eu-1a"}, {"ray.io/availability-zone": "us-2b", "zone": "eu-1a"}):
        node = replace(gpu_nodes(8)[0], labels=node_labels(labels), zone_label=zone_label(labels))
        assert node.suits(asked)
        selector = selector_of(asked, [node])
        assert selector
        assert selector.items() <= labels.items()


def asked(nodes: tuple[Node, ...], kinds: tuple[Node, ...], busy: int, *waiting: Job, asks: Job) -> bool:
    """Whether a job asks for nodes while the first ones are busy and others have asked."""
    runs = [gpu_job(f"finetune/runs{number}", gpus=8) for number in range(busy)]
    journal = [launched(job, node.name) for job, node in zip(runs, nodes[:busy], strict=True)]
    journal += [launched(job, awaits_room=True) for job in waiting]
    found = of_type(decide(after(plan_of("s", *runs, *waiting, asks), *journal), nodes=nodes, maximum=kinds), LaunchJob)
    return any(command.awaits_room and command.job == asks.name for command in found)


def kind(zone: str, max_count: int, accelerator: str = "") -> Node:
    (node,) = zoned(zone)
    return replace(node, name="", max_count=max_count, accelerator=accelerator)


def test_nodes_of_one_zone_or_accelerator_are_none_of_the_kind_of_another() -> None:
    job = gpu_job("probe/x", gpus=1)
    assert asked(zoned("aa"), (kind("a", 2), kind("b", 2)), 2, asks=job)
    assert not asked(zoned("aa"), (kind("a", 2),), 2, asks=job)
    a100 = tuple(replace(node, accelerator="A100") for node in zoned("aa"))
    assert asked(a100, (kind("a", 2, "A100"), kind("a", 2, "H100")), 2, asks=job)


def test_gang_asks_for_nodes_where_one_zone_will_hold_it() -> None:
    nodes = zoned("aaaabbb")  # the first five are busy: two are free in b
    assert asked(nodes, (kind("a", 4), kind("b", 4)), 5, asks=gang("pretrain/x", 3))
    assert not asked(nodes, (kind("a", 4), kind("b", 3)), 5, asks=gang("pretrain/x", 3))
    assert not asked(zoned("aaab"), (kind("a", 3), kind("b", 2)), 2, asks=gang("pretrain/x", 3))


def test_those_that_wait_are_packed_into_the_nodes_to_come() -> None:
    small = [gpu_job(f"probe/{number}", gpus=1) for number in range(4)]
    nodes = zoned("a" * 8)
    assert asked(nodes, (kind("a", 10),), 8, *small, asks=gpu_job("finetune/x", gpus=8))
    assert not asked(nodes, (kind("a", 9),), 8, *small, asks=gpu_job("finetune/x", gpus=8))
