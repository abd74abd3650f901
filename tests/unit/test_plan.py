"""The planner: which jobs, in which order, under which keys."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.planning.graph.reuse import Disposition, dispositions
from orchestrator.sweepfile import ResolvedSweep, parse_sweep

TEXT = """\
version: 1
name: small
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}
  unused: {builtin: digits}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
  random: {dataset: tree, random: {num_classes: [16, 32]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*", "random/16"]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
transfer:
  - {name: top, target: levels/depth1, protocol: finetune, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}, seeds: [0, 1]}
  - {name: linear, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}
report: {baseline: levels/depth1}
"""


def sweep_of(text: str = TEXT) -> ResolvedSweep:
    return parse_sweep(text, "sweep.yaml", {})


def plan_of(text: str = TEXT) -> Plan:
    return build_plan(sweep_of(text), store_uri="file:///store")


def keys_of(text: str = TEXT) -> dict[str, str]:
    return {job.name: job.key for job in plan_of(text).jobs}


def descendants(plan: Plan, kinds: set[JobKind]) -> set[str]:
    """Names of the jobs of these kinds and of all that need them."""
    found: set[str] = set()
    for job in plan.jobs:
        if job.kind in kinds or found.intersection(job.needs):
            found.add(job.name)
    return found


def changed_by(old: str, new: str) -> set[str]:
    assert old in TEXT
    before, after = keys_of(), keys_of(TEXT.replace(old, new))
    return {name for name in before if before[name] != after.get(name)}


def test_plan_small_sweep_has_every_job_once() -> None:
    counts = Counter(job.kind.value for job in plan_of().jobs)
    assert counts == {"dataset": 1, "index": 1, "labels": 3, "pretrain": 6, "finetune": 12, "probe": 6}


def test_plan_order_is_topological() -> None:
    seen: set[str] = set()
    for job in plan_of().jobs:
        assert seen.issuperset(job.needs)
        seen.add(job.name)


def test_plan_names_are_paths() -> None:
    names = set(plan_of().by_name())
    expected = {
        "dataset/tree",
        "labels/random/16",
        "pretrain/levels/depth2/seed1",
        "finetune/top/levels/depth2/seed0/seed1",
    }
    assert expected <= names


def test_plan_keys_are_all_different() -> None:
    keys = [job.key for job in plan_of().jobs]
    assert len(set(keys)) == len(keys)


def test_plan_json_round_trip_is_the_same_plan() -> None:
    plan = plan_of()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.to_json() == plan.to_json()
    assert isinstance(again.jobs[0], Job)


def test_plan_keys_do_not_follow_the_address_of_the_store() -> None:
    elsewhere = build_plan(sweep_of(), store_uri="file:///elsewhere")
    assert {job.name: job.key for job in elsewhere.jobs} == keys_of()


EXECUTION = [
    ("name: small", "name: other"),
    ("report: {baseline: levels/depth1}", "report: {baseline: levels/depth2, metric: best_val_error}"),
    ("report:", "resources: {pretrain: {cpus: 4, memory_gib: 2}}\nreport:"),
    ("report:", "resources: {pretrain: {gpus: 8, workers: 8}}\nreport:"),
    ("report:", "policy: {failures: 7}\nreport:"),
    ("report:", "tracking: {experiment: mine}\nreport:"),
    ("  unused: {builtin: digits}\n", ""),
    ("model: {name: test_vit, image_size: 32}", "model: {image_size: 32, name: test_vit, kwargs: {}}"),
    ("lr: 1e-3", "lr: 0.001"),
    ("epochs: 2", "epochs: 2.0"),
    ("lr: 1e-3", "lr: 1e-3, momentum: 0.9"),
]


@pytest.mark.parametrize(("old", "new"), EXECUTION)
def test_keys_execution_or_spelling_changed_stay_the_same(old: str, new: str) -> None:
    assert changed_by(old, new) == set()


TRANSFER = {JobKind.FINETUNE, JobKind.PROBE}
IDENTITY = [
    ("num_train: 512", "num_train: 513", {JobKind.DATASET}),
    ("branching: [2, 4]", "branching: [2, 4], noise: 0.5", {JobKind.DATASET}),
    ("name: test_vit", "name: test_resnet", {JobKind.PRETRAIN}),
    ("image_size: 32", "image_size: 48", {JobKind.PRETRAIN}),
    ("image_size: 32", "image_size: 32, kwargs: {depth: 3}", {JobKind.PRETRAIN}),
    (
        "  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}",
        "  recipe: {epochs: 3, batch_size: 64, lr: 1e-3}",
        {JobKind.PRETRAIN},
    ),
    ("probe, recipe: {epochs: 2", "probe, recipe: {epochs: 5", {JobKind.PROBE}),
]


@pytest.mark.parametrize(("old", "new", "kinds"), IDENTITY)
def test_keys_identity_changed_move_the_job_and_exactly_its_descendants(
    old: str, new: str, kinds: set[JobKind]
) -> None:
    assert changed_by(old, new) == descendants(plan_of(), kinds)


def test_keys_seed_added_adds_only_its_own_leaves() -> None:
    before, after = keys_of(), keys_of(TEXT.replace("seeds: [0, 1]}", "seeds: [0, 1, 2]}"))
    assert before.items() <= after.items()
    assert {name.rpartition("/")[2] for name in after.keys() - before.keys()} == {"seed2"}
    assert all(name.startswith("finetune/") for name in after.keys() - before.keys())


def test_keys_random_seed_does_not_follow_the_pretrain_seed() -> None:
    labels = {job.key for job in plan_of().jobs if job.name == "labels/random/16"}
    other = plan_of(TEXT.replace("seeds: [0, 1]\n", "seeds: [5]\n"))
    assert labels == {job.key for job in other.jobs if job.name == "labels/random/16"}


def test_two_names_of_one_rule_share_the_key() -> None:
    text = TEXT.replace("  random:", "  again: {dataset: tree, hierarchy: [depth1]}\n  random:")
    text = text.replace('"random/16"', '"again/*"')
    keys = keys_of(text)
    assert keys["pretrain/again/depth1/seed0"] == keys["pretrain/levels/depth1/seed0"]


def test_dispositions_follow_what_the_store_holds() -> None:
    plan = plan_of()
    dataset, index = plan.jobs[0], plan.jobs[1]
    labels = plan.jobs[2]
    found = dispositions(plan, {dataset.key, labels.key}, {dataset.key, index.key}, stale={labels.key, index.key})
    assert found[dataset.name] is Disposition.REUSE
    assert found[index.name] is Disposition.RESUME
    assert found[labels.name] is Disposition.STALE
    assert set(found.values()) == set(Disposition)


def test_resources_come_from_the_group_of_the_kind() -> None:
    plan = plan_of(TEXT.replace("report:", "resources: {transfer: {cpus: 3}}\nreport:"))
    assert {job.resources for job in plan.jobs if job.kind in TRANSFER} == {Resources(cpus=3)}
    assert {job.resources for job in plan.jobs if job.kind not in TRANSFER} == {Resources(cpus=1)}
    assert replace(plan.jobs[0].resources, gpus=1) != plan.jobs[0].resources


@pytest.mark.parametrize(
    ("resources", "num_workers", "num_threads"),
    [
        ("{gpus: 4, cpus: 16}", 4, 4),
        ("{workers: 2, cpus: 3}", 2, 1),
        ("{gpus: 0.5}", 1, 1),
        ("{cpus: 2}", 1, 2),
    ],
)
def test_workers_share_the_attempt_and_default_to_one_per_gpu(resources, num_workers, num_threads) -> None:
    plan = plan_of(TEXT.replace("report:", f"resources: {{pretrain: {resources}}}\nreport:"))
    (execution,) = {(j.execution.num_workers, j.execution.num_threads) for j in plan.jobs if j.kind == "pretrain"}
    assert execution == (num_workers, num_threads)
