"""Data sets that a file declares: planned where they are not, checked where they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.sweepfile import ResolvedSweep, load_sweep
from tests.unit.test_external_shards import Outside, describe

ABSENT = {"num_train": 12, "num_val": 4, "num_classes": 4, "levels": {"group": 2}}
LABELS: dict[str, Any] = {"levels": {"dataset": "photos", "hierarchy": ["group", "leaf"]}}


class Declared:
    """A sweep of one external data set."""

    def __init__(self, folder: Path) -> None:
        self.path, self.place = folder / "sweep.yaml", (folder / "absent").as_uri()

    def sweep(
        self,
        entry: Mapping[str, Any],
        labels: Mapping[str, Any] = LABELS,
        pretrain: str = "levels/*",
        loss: str = "softmax",
    ) -> ResolvedSweep:
        recipe = {"epochs": 1, "batch_size": 2, "lr": 0.1, "loss": loss}
        document = {
            "version": 1,
            "name": "declared",
            "datasets": {"photos": entry},
            "labels": labels,
            "pretrain": {"model": {"name": "test_vit", "image_size": 16}, "labels": [pretrain], "recipe": recipe},
        }
        self.path.write_text(json.dumps(document))
        return load_sweep(str(self.path))[0]

    def plan(self, entry: Mapping[str, Any], labels: Mapping[str, Any] = LABELS, pretrain: str = "levels/*") -> Plan:
        return build_plan(self.sweep(entry, labels, pretrain), store_uri="file:///store")


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


@pytest.fixture
def declared(tmp_path: Path) -> Declared:
    return Declared(tmp_path)


def test_declared_data_set_is_planned_with_its_levels_and_sizes_where_it_is_not(declared: Declared) -> None:
    entry = {"from": declared.place, **ABSENT}
    jobs = declared.plan(entry).by_name()
    assert jobs["labels/levels/group"].facets["granularity"] == 2
    assert jobs["labels/levels/leaf"].facets["granularity"] == 4
    dataset = declared.sweep(entry).datasets["photos"]
    assert (dataset.num_train, dataset.has_val) == (12, True)
    assert "no object dataset.json" in dataset.missing


@pytest.mark.parametrize("field", ABSENT)
def test_data_set_that_is_declared_in_part_must_be_there(declared: Declared, field: str) -> None:
    entry = {"from": declared.place, **{name: value for name, value in ABSENT.items() if name != field}}
    with pytest.raises(SpecError, match=r"no object dataset.json"):
        declared.sweep(entry)


def test_declared_shards_that_are_not_there_are_planned_too(declared: Declared) -> None:
    splits = {"train": f"{declared.place}/train-000.tar", "val": f"{declared.place}/val-000.tar"}
    assert declared.sweep({"shards": splits, **ABSENT}).datasets["photos"].missing


def test_declaration_changes_no_key_of_a_data_set_that_is_there(declared: Declared, outside: Outside) -> None:
    describe(outside)
    plain = declared.plan({"from": outside.shards.as_uri()})
    assert declared.plan({"from": outside.shards.as_uri(), **ABSENT}).jobs == plain.jobs
    assert declared.plan({"from": declared.place, **ABSENT}).jobs != plain.jobs


def test_data_set_that_is_there_must_have_the_declared_levels(declared: Declared, outside: Outside) -> None:
    describe(outside)
    entry = {"from": outside.shards.as_uri(), **ABSENT}
    with pytest.raises(SpecError, match=r"levels.group: 3 is declared, but the class table has 2; is it the right"):
        declared.sweep({**entry, "levels": {"group": 3}})
    with pytest.raises(SpecError, match=r"levels.grop: 'grop' is not a level of the class table: did you mean 'group'"):
        declared.sweep({**entry, "levels": {"grop": 2}})


def test_damaged_data_set_is_no_absent_one(declared: Declared, outside: Outside) -> None:
    describe(outside)
    (outside.shards / "dataset.json").write_text("{}")
    with pytest.raises(SpecError, match="does not describe a data set"):
        declared.sweep({"from": outside.shards.as_uri(), **ABSENT})


def test_label_space_that_cannot_be_counted_needs_a_declared_number(declared: Declared) -> None:
    entry, rule = {"from": declared.place, **ABSENT}, {"dataset": "photos", "wordnet": {"levels": [0, 1]}}
    with pytest.raises(SpecError, match=r"labels.nouns: data set 'photos' is not there.*declare num_classes here"):
        declared.sweep(entry, {"nouns": rule}, "nouns/*")
    found = declared.sweep(entry, {"nouns": {**rule, "num_classes": [4, 3]}}, "nouns/*", "sigmoid").labels
    assert [space.num_classes for space in found.values()] == [4, 3]
    with pytest.raises(SpecError, match="nouns/1"):  # one image has several labels there
        declared.sweep(entry, {"nouns": {**rule, "num_classes": [4, 3]}}, "nouns/*")


def test_label_spaces_within_others_need_no_declared_number(declared: Declared) -> None:
    rule = {"dataset": "photos", "random": {"num_classes": [2], "within": "levels/leaf"}}
    found = declared.sweep({"from": declared.place, **ABSENT}, {**LABELS, "split": rule}, "split/*")
    assert found.labels["split/2"].num_classes == 8


def test_label_spaces_within_random_ones_are_refused_before_any_data_is_there(declared: Declared) -> None:
    """As where the classes are read. Otherwise the sweep would be planned, and its labels job would refuse it."""
    outer = {"dataset": "photos", "random": {"num_classes": [2]}}
    inner = {"dataset": "photos", "random": {"num_classes": [2], "within": "outer/2"}}
    with pytest.raises(
        SpecError, match=r"inner.random.num_classes.* random needs a base in which each class has one target"
    ):
        declared.plan({"from": declared.place, **ABSENT}, {**LABELS, "outer": outer, "inner": inner})


def test_declared_numbers_of_classes_are_checked(declared: Declared) -> None:
    def labels(numbers: list[int], **rule: object) -> dict[str, Any]:
        return {"levels": {"dataset": "tree", "hierarchy": ["depth1", "depth2"], "num_classes": numbers, **rule}}

    tree = {"builtin": "synthetic-hierarchy", "branching": [2, 4]}

    def sweep(labels: Mapping[str, Any]) -> ResolvedSweep:
        return declared.sweep(tree, {name: {**entry, "dataset": "photos"} for name, entry in labels.items()})

    assert sweep(labels([2, 8])).labels["levels/depth2"].num_classes == 8
    with pytest.raises(SpecError, match=r"num_classes\[1\]: 9 is declared, but 'levels/depth2' has 8 classes"):
        sweep(labels([2, 9]))
    with pytest.raises(SpecError, match="1 numbers for 2 label spaces; give one for each"):
        sweep(labels([2]))


def test_transfer_of_some_label_spaces_measures_their_backbones_and_its_baselines() -> None:
    def measured(*overrides: str) -> set[object]:
        plan = build_plan(load_sweep("quickstart", overrides)[0], store_uri="file:///store")
        return {job.facets["label_space"] for job in plan.jobs if job.facets.get("transfer") == "superclass"}

    assert measured() == {"levels/depth1", "levels/depth2", "levels/depth3", "levels/depth4", "random/128"}
    assert measured("transfer.superclass.labels=[levels/depth2, 'random/*']") == {"levels/depth2", "random/128"}
    some = ("transfer.superclass.labels=[levels/depth2]", "transfer.superclass.baselines=[retrain]")
    assert measured(*some) == {"levels/depth1", "levels/depth2"}
