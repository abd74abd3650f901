"""Where a runner may come up, in Ray's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.protocol import Placement
from orchestrator.backends.ray import capacity, placement_groups
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.gang.mailbox import COORDINATOR, NODE_LABEL, GangShape
from orchestrator.backends.ray.gang.train import _selectors
from orchestrator.backends.ray.runner.runner import RunnerSite, _constraints, selector_of
from orchestrator.core.contract import Resources, Spot
from orchestrator.state.nodes import Node

ASKED = Resources(cpus=4.0, gpus=1.0, accelerator="A100", spot=Spot.NEVER, labels=(("zone", "b"),))
SELECTOR = {"zone": "b", "ray.io/market-type": "!spot", "ray.io/accelerator-type": "A100"}


A100 = Node(resources=Resources(cpus=8.0, gpus=8.0), accelerator="A100", labels={"zone": "b"})
GROUPS = """
available_node_types:
  gpu:
    resources: {CPU: 8, GPU: 8}
    labels: {ray.io/accelerator-type: A100, ray.io/availability-zone: b}
    max_workers: 2
"""


def test_conditions_of_an_attempt_become_rays_labels() -> None:
    assert selector_of(ASKED, [A100]) == SELECTOR
    assert selector_of(ASKED, []) == SELECTOR
    assert selector_of(Resources(spot=Spot.REQUIRE), [A100]) == {"ray.io/market-type": "spot"}
    assert selector_of(Resources(gpus=8.0), [A100]) == {}


def test_type_of_gpu_is_asked_for_as_the_nodes_that_suit_write_it() -> None:
    asked = replace(ASKED, accelerator="a100")
    others = [replace(A100, accelerator="H100"), replace(A100, is_spot=True, accelerator="a100")]
    assert selector_of(asked, [A100, *others]) == SELECTOR
    nodes = [A100, replace(A100, accelerator="A100"), replace(A100, accelerator="a100")]
    assert selector_of(asked, nodes)["ray.io/accelerator-type"] == "in(A100,a100)"


def test_runner_for_a_node_that_is_yet_to_come_asks_for_what_the_groups_and_the_nodes_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    present = {"ray.io/accelerator-type": "a100", "ray.io/availability-zone": "b"}
    node = {"Alive": True, "NodeID": "ab" * 8, "NodeManagerHostname": "gpu-7", "Resources": {"GPU": 8.0}}
    monkeypatch.setattr(capacity, "_nodes", lambda: [{**node, "Labels": present}])
    monkeypatch.setattr(capacity, "leaving_nodes", dict)
    (tmp_path / "groups.yaml").write_text(GROUPS)
    monkeypatch.setenv(capacity.GROUPS_VARIABLE, str(tmp_path / "groups.yaml"))
    asked = Resources(gpus=8.0, accelerator="A100", labels=(("zone", "b"),))
    site = RayBackend("namespace")._site(asked, Placement())
    assert site.selector == {"ray.io/availability-zone": "b", "ray.io/accelerator-type": "in(A100,a100)"}


def test_runner_for_a_node_that_is_yet_to_come_asks_for_its_sort_and_avoids_excluded_ones() -> None:
    site = RunnerSite(excluded=("bad/1234",), excluded_ids=("1234",), selector=SELECTOR)
    assert _constraints(ASKED, site) == {"label_selector": {**SELECTOR, NODE_LABEL: "!in(1234)"}}
    assert _constraints(ASKED, RunnerSite()) == {}


def test_runner_for_a_chosen_node_goes_there_and_nowhere_else() -> None:
    (strategy,) = _constraints(ASKED, RunnerSite(node="a/1", node_id="ab" * 28)).values()
    assert strategy.node_id == "ab" * 28
    assert not strategy.soft
    coordinator = _constraints(COORDINATOR, RunnerSite(node="a/1", node_id="ab" * 28))
    assert coordinator == {"label_selector": {NODE_LABEL: "ab" * 28}}  # which waits for a node that has just joined


def test_coordinators_that_may_go_anywhere_spread_over_the_largest_nodes_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for all gangs would end all of them with itself."""
    head, leaves, excluded, small, *largest, dead = (f"{number:056x}" for number in range(7))
    gpus = {head: 9, leaves: 9, excluded: 9, small: 4, **dict.fromkeys(largest, 8), dead: 9}
    nodes = [{"NodeID": one, "Alive": one != dead, "Resources": {"GPU": gpus[one]}} for one in gpus]
    nodes[0]["Resources"] = {"GPU": 9, "node:__internal_head__": 1.0}
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(placement_groups, "leaving_nodes", lambda: {leaves: 1.0})
    site = RunnerSite(excluded=("bad",), excluded_ids=(excluded,), selector=SELECTOR)
    found = [_constraints(COORDINATOR, site)["scheduling_strategy"] for _ in range(64)]
    assert {strategy.node_id for strategy in found} == set(largest)
    assert all(strategy.soft for strategy in found)
    del nodes[3:]
    assert _constraints(COORDINATOR, site)["scheduling_strategy"].node_id in {leaves, excluded}, "better than the head"
    del nodes[1:]
    assert _constraints(COORDINATOR, RunnerSite()) == {}


def test_workers_of_a_gang_go_to_their_nodes_or_to_nodes_of_their_sort() -> None:
    free = GangShape(num_workers=2, total=ASKED, excluded_ids=("1234",), selector=SELECTOR)
    assert _selectors(free) == {**SELECTOR, NODE_LABEL: "!in(1234)"}
    placed = GangShape(num_workers=2, total=ASKED, node_ids=("1", "2"), selector=SELECTOR)
    assert _selectors(placed) == [{NODE_LABEL: "1"}, {NODE_LABEL: "2"}]
    assert _selectors(GangShape(num_workers=2, total=ASKED)) is None
    assert GangShape.from_json(free.to_json()) == free
