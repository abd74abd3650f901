"""``policy:`` and ``resources:``: what they resolve to, and where their mistakes are shown."""

from datetime import UTC, datetime
from typing import Any

import pytest

from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.policy import PolicySpec, moment_s, resolve_policy
from orchestrator.sweepfile.problems import Complaints, validate
from orchestrator.sweepfile.resources import ResourceGroups, ResourcesSpec, resolve_resources
from orchestrator.sweepfile.values import Policy, PriorityClass

NO_RESOURCES: dict[str, Any] = {}


def policy(text: str, resources: dict[str, Any] = NO_RESOURCES) -> Policy:
    tree = parse_tree(f"policy: {text}\n", "sweep.yaml")
    spec = validate(PolicySpec, tree.value["policy"], tree, ("policy",))
    complaints = Complaints(tree)
    found = resolve_policy(spec, ResourceGroups.model_validate(resources), complaints)
    complaints.raise_any()
    return found


def resources(text: str) -> ResourcesSpec:
    tree = parse_tree(f"resources: {text}\n", "sweep.yaml")
    return validate(ResourcesSpec, tree.value["resources"], tree, ("resources",))


def test_policy_without_fields_is_the_default_one() -> None:
    assert policy("{}") == Policy()


def test_policy_with_everything_resolves() -> None:
    text = (
        "{priority: high, weight: 3, max_gpus: 64, max_concurrent: 10, failures: 5, preemptions: 1, breaker: 0, "
        "budget: {gpu_hours: 500, cost: 900, gpu_hour_price: 2}, deadline: 36h, users: [ada]}"
    )
    found = policy(text)
    assert found == Policy(
        priority=PriorityClass.HIGH,
        weight=3,
        max_gpus=64,
        max_concurrent=10,
        max_failures=5,
        max_preemptions=1,
        breaker=0,
        gpu_hours=500,
        cost=900,
        gpu_hour_price=2,
        time_limit_s=36 * 3600.0,
        users=("ada",),
    )
    assert found.gpu_hour_budget == 450.0


def test_deadline_with_a_time_zone_is_a_moment() -> None:
    moment = datetime(2026, 12, 1, 17, 0, tzinfo=UTC).timestamp()
    assert policy("{deadline: '2026-12-01T18:00:00+01:00'}").deadline_s == moment
    assert moment_s("2026-12-01T18:00:00") is None


def test_bound_that_no_job_of_a_group_fits_into_is_refused() -> None:
    with pytest.raises(SpecError, match=r"resources\.pretrain from ever starting, which ask for 8 GPUs"):
        policy("{max_gpus: 4}", {"pretrain": {"gpus": 8.0}})
    assert policy("{max_gpus: 4}", {"pretrain": {"gpus": 8.0, "min_gpus": 4.0}}).max_gpus == 4


def test_resources_with_conditions_resolve() -> None:
    spec = resources("{gpus: 8, min_gpus: 2, accelerator: H100, spot: never, labels: {rack: b, zone: a}}")
    labels = (("rack", "b"), ("zone", "a"))
    assert resolve_resources(spec) == Resources(
        gpus=8.0, min_gpus=2.0, accelerator="H100", spot=Spot.NEVER, labels=labels
    )


def test_resources_survive_json_with_their_labels() -> None:
    asked = Resources(gpus=1.0, labels={"rack": "b"}, spot=Spot.REQUIRE)  # type: ignore[arg-type]
    document = {"gpus": 1.0, "labels": [["rack", "b"]], "spot": "require"}
    assert Resources(**document) == asked  # type: ignore[arg-type]
    assert hash(Resources(**document)) == hash(asked)  # type: ignore[arg-type]
    assert asked.bare == Resources(gpus=1.0)
