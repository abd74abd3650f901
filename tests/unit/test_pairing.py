"""What backbones of one seed share, from their identities and the label spaces of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.pairing import Sharing, sharing_between, sharing_of
from tests.sweep_fields import plan_of
from tests.unit.test_report_factors import TEXT


def _identity(**parameters: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"model": {"name": "a", "image_size": 32, "kwargs": {}}, "recipe": {"lr": 0.1}, "seed": 0}
    inputs = {"index": "i", "labels": "l"}
    return {"parameters": {**usual, **parameters}, "inputs": inputs, "spaces": [{"hierarchy": "family"}]}


@pytest.mark.parametrize(
    ("changed", "shared"),
    [
        ({"recipe": {"lr": 0.2, "optimizer": "lamb"}}, Sharing.all_of_it()),
        ({"model": {"name": "b", "image_size": 32, "kwargs": {}}}, Sharing.ORDER | Sharing.CROPS),
        ({"model": {"name": "b", "image_size": 48, "kwargs": {}}}, Sharing.ORDER),
        ({"recipe": {"lr": 0.1, "augment": "flip"}}, Sharing.WEIGHTS | Sharing.ORDER),
        ({"subset": {"fraction": 0.1}}, Sharing.WEIGHTS),
        ({"recipe": {"lr": 0.1, "shuffle_block_shards": 4}}, Sharing.WEIGHTS),
        ({"initial": {"timm": "x"}}, Sharing.ORDER | Sharing.CROPS),
        ({"recipe": {"lr": 0.1, "data_groups": 2}}, Sharing.WEIGHTS),
    ],
)
def test_what_backbones_share_follows_from_their_identities(changed: Mapping[str, Any], shared: Sharing) -> None:
    assert sharing_of(_identity(), _identity(**changed)) == shared


_SOME = {"names": ["a", "b"]}


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ([{"hierarchy": "family"}], [{"random": {"num_classes": 8, "seed": 0}}], True),
        ([{"hierarchy": "family"}], [{"hierarchy": "family", "classes": _SOME}], False),
        ([{"hierarchy": "genus", "classes": _SOME}], [{"hierarchy": "family", "classes": _SOME}], True),
        ([{"hierarchy": "family"}], [{"merge": {"groups": [], "others": "keep"}}], True),
        ([{"hierarchy": "family"}], [{"merge": {"groups": [], "others": "drop"}}], False),
        ([{"hierarchy": "family"}], [{"plugin": {"name": "p", "arguments": {}}}], False),
        ([{"hierarchy": "family"}], [{"modulo": 2, "base": {"hierarchy": "family", "classes": _SOME}}], False),
        ([{"hierarchy": "family"}], [{"random": {"within": {"hierarchy": "family", "classes": _SOME}}}], False),
        ([{"hierarchy": "family"}], [{"hierarchy": "genus"}, {"hierarchy": "genus", "classes": _SOME}], False),
    ],
)
def test_backbones_share_the_order_where_their_label_spaces_leave_out_the_same_classes(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], is_shared: bool
) -> None:
    model = {"name": "b", "image_size": 32, "kwargs": {}}
    first, second = {**_identity(), "spaces": one}, {**_identity(model=model), "spaces": other}
    shared = Sharing.ORDER | Sharing.CROPS if is_shared else Sharing.NOTHING
    assert sharing_of(first, second) == sharing_of(second, first) == shared


def test_backbones_of_a_plan_are_asked_for_the_classes_that_their_label_spaces_leave_out() -> None:
    plan = plan_of(
        "labels.few={dataset: tree, hierarchy: [depth2], classes: {num: 4}}",
        "pretrain.labels=[levels/depth2, few/depth2]",
        "pretrain.factors.optimizer=null",
        "pretrain.factors.mix=null",
        "pretrain.factors.net={small: {}, large: {model: {name: test_vit2, image_size: 32}}}",
        text=TEXT,
    )
    backbones = {
        (job.facets["label_space"], job.facets["factor.net"]): job
        for job in plan.jobs
        if job.kind is JobKind.PRETRAIN and job.facets["pretrain_seed"] == 0
    }
    first = backbones["levels/depth2", "small"]
    assert {cell: sharing_between(first, job, plan.by_name()) for cell, job in backbones.items() if job != first} == {
        ("levels/depth2", "large"): Sharing.ORDER | Sharing.CROPS,
        ("few/depth2", "small"): Sharing.WEIGHTS,
        ("few/depth2", "large"): Sharing.NOTHING,
    }


@pytest.mark.parametrize(
    ("batch_size", "changed", "is_shared"),
    [
        (256, {}, True),
        (256, {"recipe": {"batch_size": 512, "data_groups": 2}}, False),
        (256, {"recipe": {"batch_size": 256, "data_groups": 2, "norm_group": 32}}, False),
        (256, {"model": {"name": "b"}}, True),
        (320, {"model": {"name": "b"}}, False),
    ],
)
def test_backbones_with_data_groups_share_the_order_where_batches_are_cut_alike(
    batch_size: int, changed: Mapping[str, Any], is_shared: bool
) -> None:
    first: dict[str, Any] = {"recipe": {"batch_size": batch_size, "data_groups": 2}}
    assert (Sharing.ORDER in sharing_of(_identity(**first), _identity(**{**first, **changed}))) == is_shared


@pytest.mark.parametrize(
    ("recipe", "mixing", "is_shared"),
    [
        ({"batch_size": 256, "data_groups": 3}, {"mixup": 0.2}, False),  # 85 and 170, mixed 84 and 170
        ({"batch_size": 256, "data_groups": 3}, {"cutmix": 1.0}, False),
        ({"batch_size": 256, "data_groups": 3, "mixup": 0.1}, {"mixup": 0.2, "cutmix": 1.0}, True),
        ({"batch_size": 18, "data_groups": 2, "norm_group": 3}, {"mixup": 0.2}, False),  # 9, mixed 6
        ({"batch_size": 36, "data_groups": 2, "norm_group": 3}, {"mixup": 0.2}, True),
        ({"batch_size": 256, "data_groups": 4}, {"mixup": 0.2}, True),
        ({"batch_size": 256, "data_groups": 1}, {"mixup": 0.2}, True),
    ],
)
def test_backbones_with_data_groups_share_the_order_where_pairs_do_not_move_the_borders(
    recipe: dict[str, Any], mixing: Mapping[str, Any], is_shared: bool
) -> None:
    sides = (_identity(recipe=recipe), _identity(recipe={**recipe, **mixing}))
    assert (Sharing.ORDER in sharing_of(*sides)) == (Sharing.ORDER in sharing_of(*sides[::-1])) == is_shared
