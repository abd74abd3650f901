"""Why keys differ: field differences, followed through inputs, between plans and to the nearest result."""

from __future__ import annotations

import pytest

from orchestrator.planning.graph.diff import ABSENT, Change, FieldChange, causes, changes, diff_plans, nearest
from orchestrator.planning.graph.plan import Plan
from tests.builders import make_job, make_plan
from tests.planning_cases import TEXT, plan_of


def test_changes_name_paths_with_old_and_new_values() -> None:
    old = {"parameters": {"recipe": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1}, "inputs": {"index": "i"}}
    new = {"parameters": {"recipe": {"lr": 0.2, "betas": (0.9, 0.99), "ema": 1}}, "inputs": {"index": "i"}}
    assert [(change.path, change.old, change.new) for change in changes(old, new)] == [
        ("parameters.recipe.lr", 0.1, 0.2),
        ("parameters.recipe.ema", ABSENT, 1),
        ("parameters.seed", 1, ABSENT),
    ]


def test_causes_lead_through_inputs_to_what_changed() -> None:
    old, new = plan_of(), plan_of(TEXT.replace("branching: [2, 4]", "branching: [2, 8]"))
    name = "probe/linear/levels/depth2/seed0/seed0"
    stores = [{job.key: job.identity for job in plan.jobs} for plan in (old, new)]
    found = causes(old.by_name()[name].identity, new.by_name()[name].identity, stores[0].get, stores[1].get)
    assert [str(change) for change in found] == ["index > dataset > parameters.branching: [2, 4] -> [2, 8]"]


def test_causes_unknown_input_is_shown_as_two_keys() -> None:
    old, new = {"inputs": {"backbone": "a"}}, {"inputs": {"backbone": "b"}}
    assert causes(old, new, lambda _: None, lambda _: None) == [FieldChange(path="inputs.backbone", old="a", new="b")]


def test_nearest_are_those_with_the_fewest_changes() -> None:
    wanted = {"parameters": {"lr": 0.1, "seed": 0, "wd": 1}}
    others = [
        ("far", {"parameters": {"lr": 0.2, "seed": 1, "wd": 1}}),
        ("near", {"parameters": {"lr": 0.1, "seed": 1, "wd": 1}}),
        ("as-near", {"parameters": {"lr": 0.2, "seed": 0, "wd": 1}}),
    ]
    assert nearest(wanted, others) == ["near", "as-near"]
    assert nearest(wanted, []) == []


def test_diff_of_equal_plans_is_unchanged() -> None:
    diff = diff_plans(plan_of(), plan_of())
    assert set(diff.counts) == set(Change)
    assert diff.counts[Change.UNCHANGED] == len(plan_of().jobs)


def test_diff_changed_recipe_rekeys_the_jobs_that_have_it_and_their_descendants_by_one_cause() -> None:
    new = plan_of(TEXT.replace("  recipe: {epochs: 2,", "  recipe: {epochs: 3,"))
    diff = diff_plans(plan_of(), new)
    (cause,) = diff.by_cause()
    assert cause == "parameters.recipe.epochs: 2.0 -> 3.0"
    kinds = {job.kind for job in diff.jobs if job.change is Change.REKEYED}
    assert kinds == {"pretrain", "finetune", "probe"}
    assert diff.counts[Change.REKEYED] == 12
    by_name = {job.name: job for job in diff.jobs}
    assert by_name["probe/linear/levels/depth1/seed0/seed0"].fields[0].via == ("backbone",)


def test_diff_new_seed_adds_and_dropped_seed_removes() -> None:
    new = plan_of(TEXT.replace("seeds: [0, 1]", "seeds: [0, 2]"))
    diff = diff_plans(plan_of(), new)
    assert diff.counts[Change.ADDED] == diff.counts[Change.REMOVED] == 6
    assert diff.counts[Change.REKEYED] == 0


def test_diff_renamed_transfer_keeps_its_results() -> None:
    diff = diff_plans(plan_of(), plan_of(TEXT.replace("name: top", "name: summit")))
    assert diff.counts[Change.RENAMED] == 4
    assert diff.counts[Change.ADDED] == diff.counts[Change.REMOVED] == diff.counts[Change.REKEYED] == 0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a=1", "a=1 b=1", {"b": ("added", "")}),
        ("a=1 b=1", "a=1 c=1", {"c": ("renamed", "b")}),
        ("a=1 b=1", "c=1 d=1", {"c": ("renamed", "a"), "d": ("renamed", "b")}),
        ("a=1 b=1", "a=2 c=1", {"a": ("rekeyed", ""), "c": ("renamed", "b")}),
        ("a=1 b=2", "a=2 b=1", {"a": ("renamed", "b"), "b": ("renamed", "a")}),
        ("a=1 b=2", "a=1 b=1", {"b": ("rekeyed", "")}),
        ("a=1 b=2", "a=2", {"a": ("renamed", "b"), "-a": ("removed", "")}),
        ("a=1 b=2 c=3", "a=2 b=3", {"a": ("renamed", "b"), "b": ("renamed", "c"), "-a": ("removed", "")}),
    ],
)
def test_diff_job_is_renamed_only_if_its_former_name_is_not_its_own_any_more(
    old: str, new: str, expected: dict[str, tuple[str, str]]
) -> None:
    """A job that stayed was called the former one of an equal job that came, and to be stopped; one whose name another
    job took over was not told of.
    """

    def plan(jobs: str) -> Plan:
        pairs = [job.split("=") for job in jobs.split()]
        return make_plan(*(make_job(f"pretrain/{name}", key=key) for name, key in pairs))

    changed = [job for job in diff_plans(plan(old), plan(new)).jobs if job.change is not Change.UNCHANGED]
    assert {
        "-" * (job.change is Change.REMOVED) + job.name.partition("/")[2]: (
            job.change.value,
            job.old_name.partition("/")[2],
        )
        for job in changed
    } == expected


def test_diff_document_is_plain() -> None:
    old = make_plan(make_job("dataset/a"), make_job("dataset/b"))
    document = diff_plans(old, make_plan(make_job("dataset/a", parameters={"x": 1}, key="k"))).to_json()
    assert document["counts"] == {"added": 0, "removed": 1, "rekeyed": 1, "renamed": 0, "unchanged": 0}
    assert document["jobs"][0]["fields"][0] == {"path": "parameters.x", "old": ABSENT, "new": 1, "via": ()}
