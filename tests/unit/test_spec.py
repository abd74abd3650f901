"""The sweep language: what is accepted, and how everything else is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning.estimate.volumes import builtin_size
from orchestrator.sweepfile import ResolvedSweep, load_sweep, parse_sweep
from orchestrator.sweepfile.datasets import digits_split
from orchestrator.sweepfile.load import shipped_recipes
from orchestrator.sweepfile.model import RESERVED_KWARGS
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.survey import check_models
from tests.golden_plans import check_simulations_here
from workloads.data.builtin import open_builtin
from workloads.models.spec import RESERVED

RECIPE = "{epochs: 2, batch_size: 64, lr: 1e-3}"
GOOD = f"""\
version: 1
name: small
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
  scans: {{builtin: digits}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
  random: {{dataset: tree, random: {{num_classes: [16, 32]}}}}
  parity: {{dataset: scans, modulo: 2}}
pretrain:
  model: {{name: test_vit, image_size: 32, kwargs: {{depth: 2}}}}
  labels: ["levels/*", "random/16"]
  recipe: {RECIPE}
  seeds: [0, 1]
transfer:
  - {{name: top, target: levels/depth1, protocol: finetune, recipe: {RECIPE}, seeds: [0, 1, 2]}}
report: {{baseline: levels/depth1}}
resources: {{pretrain: {{cpus: 2}}}}
"""


def parse(text: str) -> ResolvedSweep:
    return parse_sweep(text, "sweep.yaml", {"small": {"epochs": 1, "batch_size": 32, "lr": 0.1}})


def test_sweep_small_example_is_resolved() -> None:
    sweep = parse(GOOD)
    assert list(sweep.labels) == ["levels/depth1", "levels/depth2", "random/16", "random/32", "parity"]
    assert [space.num_classes for space in sweep.labels.values()] == [2, 8, 16, 32, 2]
    assert sweep.pretrains[0].labels == ("levels/depth1", "levels/depth2", "random/16")
    assert sweep.pretrains[0].recipe["lr"] == 1e-3
    assert sweep.pretrains[0].recipe["momentum"] == 0.9
    assert sweep.transfer[0].seeds == (0, 1, 2)
    assert sweep.baseline == "levels/depth1"


def test_recipe_name_and_base_take_the_shipped_fields() -> None:
    named = parse(GOOD.replace(f"  recipe: {RECIPE}", "  recipe: small"))
    based = parse(GOOD.replace(f"  recipe: {RECIPE}", "  recipe: {base: small, lr: 0.2}"))
    assert (named.pretrains[0].recipe["batch_size"], named.pretrains[0].recipe["lr"]) == (32, 0.1)
    assert (based.pretrains[0].recipe["batch_size"], based.pretrains[0].recipe["lr"]) == (32, 0.2)


def test_shipped_files_all_load(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("workloads/sweeps")
    names = [path.stem for path in folder.glob("*.yaml")]
    assert {"quickstart", "digits"} <= set(names)
    models: list[Mapping[str, Any]] = []  # those of all files, to be built in one process instead of one for each file

    def note(found: Sequence[Mapping[str, Any]]) -> tuple[()]:
        models.extend(found)
        return ()

    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.sweepfile.load.check_models", note)
        patch.setattr("orchestrator.sweepfile.load.check_simulations", check_simulations_here)
        for name in names:
            assert load_sweep(name)[0].name == name
    assert models
    assert not check_models(models)
    assert {"default-finetune", "default-probe"} <= set(shipped_recipes())


def test_argument_that_timm_does_not_take_is_found() -> None:
    (problem,) = check_models([{"name": "test_vit", "image_size": 32, "kwargs": {"no_such_argument": 1}}])
    assert problem["path"][-1] == "no_such_argument"


# Each case: what is replaced, by what, and what the error must say.


@pytest.mark.parametrize("store", ["file:///tmp/a%20b", "s3://bucket", "s3://bucket/a/b/"])
def test_store_uri_that_is_known_is_accepted(store: str) -> None:
    assert parse(GOOD.replace("name: small", f"name: small\nstore: {store}")).store == store


def test_digits_are_counted_as_they_are_split() -> None:
    for val_fraction in (0.01, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.75, 0.98):
        made = open_builtin({"builtin": "digits", "version": 1, "val_fraction": val_fraction, "seed": 0}).splits
        found = digits_split(val_fraction)
        assert found == (made["train"].num_samples, made["val"].num_samples)
        assert builtin_size({"builtin": "digits", "val_fraction": val_fraction}).num_train == found[0]
    assert digits_split(0.2) == (1438, 359)


def test_batch_of_all_training_digits_is_accepted() -> None:
    digits = f"""{GOOD.split("datasets:", maxsplit=1)[0]}datasets: {{scans: {{builtin: digits}}}}
labels: {{digit: {{dataset: scans, hierarchy: [digit]}}}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["digit/*"]
  recipe: {{epochs: 2, batch_size: 1438, lr: 0.1}}
transfer: [{{name: t, target: digit/digit, protocol: finetune, recipe: {{epochs: 1, batch_size: 64, lr: 0.1}}}}]
"""
    assert parse(digits).datasets["scans"].num_train == 1438


def test_recipe_at_the_limits_is_accepted() -> None:
    limits = "lr: 1e-3, warmup_epochs: 2, norm_group: 16, momentum: 0, mean: [0, -1, 1]"
    assert parse(GOOD.replace("lr: 1e-3", limits)).pretrains[0].recipe["norm_group"] == 16
    # A recipe without a batch size is checked with one that fits it.
    shared = "recipes: {large: {norm_group: 64, data_groups: 8, lr: 0.3, epochs: 2}}\npretrain:\n"
    text = GOOD.replace(f"  recipe: {RECIPE}", "  recipe: {base: large, batch_size: 512}").replace(
        "pretrain:\n", shared, 1
    )
    assert parse(text).pretrains[0].recipe["data_groups"] == 8


def test_reserved_kwargs_are_those_of_the_data_plane() -> None:
    assert RESERVED_KWARGS == RESERVED


def test_yaml_pitfalls_are_taken_out() -> None:
    tree = parse_tree("a: 1e-4\nb: no\nc: 2020-01-01\nd: true\ne: 010\nf: null\ng: 1_000\nh: .5\ni: 1_2\nj: 10_00", "f")
    assert tree.value == {
        "a": 1e-4,
        "b": "no",
        "c": "2020-01-01",
        "d": True,
        "e": "010",
        "f": None,
        "g": 1000,
        "h": 0.5,
        "i": "1_2",  # a class may be called so
        "j": "10_00",
    }
