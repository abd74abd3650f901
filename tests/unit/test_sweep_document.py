"""Includes, scales, ``--set`` and substitution: what happens to a document before the schema sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.document import Changes, Document, read_document

TEXT = """\
version: 1
name: small
vars: {rate: 1e-3, where: "${env:DATA:-s3://public}", sizes: [2, 4]}
datasets:
  tree: {builtin: synthetic-hierarchy, branching: "${vars.sizes}"}
  photos: {from: "${vars.where}/photos"}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 2, lr: "${vars.rate}"}
transfer:
  - {name: top, target: levels/depth1, recipe: probe, seeds: [0]}
  - {name: low, target: levels/depth2, recipe: {base: probe, lr: 0.1}}
tiny:
  datasets: {photos: {builtin: digits}}
  pretrain: {recipe: {epochs: 1}, seeds: [0]}
  transfer: {"*": {recipe: {epochs: 1}}, low: {target: levels/depth1}}
"""
FILES = {"sweep.yaml": TEXT}


def read(
    text: str = TEXT,
    *overrides: str,
    scale: str = "",
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Document:
    def read_text(path: str) -> str:
        if path not in (files or {}):
            raise SpecError((f"{path}: no such file",))
        return (files or {})[path]

    changes = Changes(overrides=overrides, scale=scale)
    return read_document(text, "sweep.yaml", changes=changes, environment=env, read_text=read_text)


def value(*overrides: str, **kwargs: Any) -> Any:
    return read(TEXT, *overrides, **kwargs).tree.value


def at(document: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        document = document[step]
    return document


# ------------------------------------------------------------------------------------------------------ substitution


def test_variable_alone_keeps_its_type_and_in_text_is_written_out() -> None:
    found = value()
    assert found["pretrain"]["recipe"]["lr"] == 1e-3
    assert found["datasets"]["tree"]["branching"] == [2, 4]
    assert found["datasets"]["photos"]["from"] == "s3://public/photos"
    assert "vars" not in found


def test_environment_wins_over_the_default_and_stays_out_of_the_portable_form() -> None:
    document = read(env={"DATA": "file:///data"})
    assert document.tree.value["datasets"]["photos"]["from"] == "file:///data/photos"
    assert document.portable["datasets"]["photos"]["from"] == "${env:DATA:-s3://public}/photos"


@pytest.mark.parametrize(("text", "expected"), [("8", 8), ("0.5", 0.5), ("true", True), ("abc: [", "abc: [")])
def test_environment_alone_has_the_type_that_it_is_written_as(text: str, expected: object) -> None:
    document = read(TEXT + 'resources: {pretrain: {cpus: "${env:CPUS}"}}\n', env={"CPUS": text})
    assert document.tree.value["resources"]["pretrain"]["cpus"] == expected


def test_escaped_substitution_is_plain_text() -> None:
    document = read(TEXT.replace("name: small", "name: small\nstore: $${HOME}/x"))
    assert document.tree.value["store"] == "${HOME}/x"


# ------------------------------------------------------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("override", "steps", "expected"),
    [
        ("name=other", ["name"], "other"),
        ("pretrain.recipe.lr=1e-2", ["pretrain", "recipe", "lr"], 1e-2),
        ("pretrain.recipe.norm_group=8", ["pretrain", "recipe"], {"epochs": 2, "lr": 1e-3, "norm_group": 8}),
        ("vars.rate=0.5", ["pretrain", "recipe", "lr"], 0.5),
        ("transfer.1.recipe.lr=0.2", ["transfer", 1, "recipe"], {"base": "probe", "lr": 0.2}),
        ("transfer.low.seeds=[1, 2]", ["transfer", 1, "seeds"], [1, 2]),
        ("transfer.low.seeds=1,2", ["transfer", 1, "seeds"], [1, 2]),
        ("transfer.top.recipe.lr=0.2", ["transfer", 0, "recipe"], {"base": "probe", "lr": 0.2}),
        ("transfer.*.recipe.lr=0.2", ["transfer", 1, "recipe", "lr"], 0.2),
        ("transfer.top.recipe.lr=0.1,0.2", ["transfer", 0, "grid"], {"lr": [0.1, 0.2]}),
        ("policy.failures=7", ["policy"], {"failures": 7}),
        ("datasets.photos.builtin=digits", ["datasets", "photos"], {"builtin": "digits"}),
        ("labels.levels={random: {num_classes: [4]}}", ["labels", "levels", "dataset"], "tree"),
        ("pretrain.model.kwargs={a: '1,2'}", ["pretrain", "model", "kwargs", "a"], "1,2"),
        ("name='1,2'", ["name"], "1,2"),
        ("store=no", ["store"], "no"),
        ("pretrain.labels=levels/depth1", ["pretrain", "labels"], "levels/depth1"),
    ],
)
def test_override_changes_one_value(override: str, steps: list[str | int], expected: object) -> None:
    assert at(value(override), steps) == expected


def test_override_of_several_values_takes_the_field_out_of_the_recipe() -> None:
    for item in ("low", "1", "*"):
        entry = value(f"transfer.{item}.recipe.lr=0.2,0.3")["transfer"][1]
        assert (entry["recipe"], entry["grid"]) == ({"base": "probe"}, {"lr": [0.2, 0.3]})


def test_overrides_apply_in_their_order() -> None:
    assert value("name=a", "name=b")["name"] == "b"


def test_override_of_several_values_goes_with_a_transfer_that_says_it_has_no_grid() -> None:
    text = TEXT.replace("lr: 0.1}}", "lr: 0.1}, grid: null}")
    entries = read(text, "transfer.top.recipe.lr=0.2,0.3").tree.value["transfer"]
    assert [(entry.get("grid"), entry["recipe"]) for entry in entries] == [
        ({"lr": [0.2, 0.3]}, "probe"),
        (None, {"base": "probe", "lr": 0.1}),
    ]


def test_override_null_brings_back_the_default() -> None:
    assert "lr" not in value("transfer.low.recipe.lr=null")["transfer"][1]["recipe"]


def test_override_of_a_key_with_dots_means_the_longest_that_exists() -> None:
    text = TEXT.replace("  tree:", "  tree.v2: {builtin: digits}\n  tree:")
    assert read(text, "datasets.tree.v2.seed=3").tree.value["datasets"]["tree.v2"] == {"builtin": "digits", "seed": 3}


def test_override_of_several_values_makes_named_blocks() -> None:
    blocks = value("pretrain.recipe.lr=0.1,0.2", "pretrain.model.name=test_vit,test_resnet")["pretrain"]
    assert list(blocks) == [f"lr-{lr}_name-{name}" for lr in (0.1, 0.2) for name in ("test_vit", "test_resnet")]
    assert blocks["lr-0.2_name-test_vit"] == {
        "model": {"name": "test_vit", "image_size": 32},
        "labels": ["levels/*"],
        "recipe": {"epochs": 2, "lr": 0.2},
        "factors": {"lr": "0.2", "name": "test_vit"},
    }


def test_override_of_several_values_multiplies_one_named_block() -> None:
    text = (
        TEXT[: TEXT.index("pretrain:")] + "pretrain: {a: {model: {name: x}}, b: {}}\n" + TEXT[TEXT.index("transfer:") :]
    )
    blocks = read(text.replace("rate: 1e-3, ", ""), "pretrain.a.model.name=x,y").tree.value["pretrain"]
    assert blocks == {
        "b": {},
        "a_name-x": {"model": {"name": "x"}, "factors": {"name": "x"}},
        "a_name-y": {"model": {"name": "y"}, "factors": {"name": "y"}},
    }


def test_override_is_the_place_of_what_it_sets() -> None:
    tree = read(TEXT, "pretrain.recipe.lr=fast").tree
    assert str(tree.locate(("pretrain", "recipe", "lr"))) == "--set pretrain.recipe.lr=fast"
    assert str(tree.locate(("pretrain", "recipe", "epochs"))) == "sweep.yaml:12:12"


# ------------------------------------------------------------------------------------------------------------- scale


def test_scale_is_merged_over_the_file_and_under_the_overrides() -> None:
    found = value("pretrain.recipe.epochs=3", scale="tiny")
    assert found["datasets"]["photos"] == {"builtin": "digits"}
    assert found["pretrain"]["recipe"] == {"epochs": 3, "lr": 1e-3}
    assert [item["recipe"] for item in found["transfer"]] == [
        {"base": "probe", "epochs": 1},
        {"base": "probe", "lr": 0.1, "epochs": 1},
    ]
    assert [item["target"] for item in found["transfer"]] == ["levels/depth1", "levels/depth1"]
    assert "tiny" not in found


@pytest.mark.parametrize("source", ["{from: s3://a/b}", "{convert: {format: csv, source: /a}}", "{builtin: digits}"])
def test_scale_that_names_another_source_replaces_the_data_set(source: str) -> None:
    text = f"version: 1\ndatasets: {{tree: {{from: s3://a/b}}}}\ntiny: {{datasets: {{tree: {source}}}}}\n"
    assert read(text, scale="tiny").tree.value["datasets"]["tree"] == yaml.safe_load(source)


def test_scale_that_is_not_asked_for_changes_nothing() -> None:
    assert value() == read(TEXT[: TEXT.index("tiny:")]).tree.value


# ----------------------------------------------------------------------------------------------------------- include

CATALOGUE = "version: 1\ndatasets:\n  tree: {builtin: digits, seed: 4}\n  other: {builtin: digits}\n"


def test_include_lies_below_the_file_and_keeps_its_places() -> None:
    files = {"shared/data.yaml": CATALOGUE, "shared/more.yaml": "datasets: {other: {seed: 1}}\nstore: s3://x\n"}
    document = read(f"include: [shared/data.yaml, shared/more.yaml]\n{TEXT}", files=files)
    datasets = document.tree.value["datasets"]
    assert datasets["other"] == {"builtin": "digits", "seed": 1}
    assert datasets["tree"] == {"builtin": "synthetic-hierarchy", "seed": 4, "branching": [2, 4]}
    assert str(document.tree.locate(("datasets", "other", "builtin"))) == "shared/data.yaml:4:11"
    assert str(document.tree.locate(("datasets", "other", "seed"))) == "shared/more.yaml:1:20"
    assert not document.is_own_text


def test_include_is_relative_to_the_file_that_names_it() -> None:
    files = {"a/b.yaml": "include: c/d.yaml\n", "a/c/d.yaml": "store: s3://deep\n"}
    assert read(f"include: a/b.yaml\n{TEXT}", files=files).tree.value["store"] == "s3://deep"


def test_include_in_a_text_without_a_file_is_refused() -> None:
    with pytest.raises(SpecError, match="files can only be included by a file"):
        read_document(f"include: a.yaml\n{TEXT}", "text")


# ----------------------------------------------------------------------------------------------------------- secrets


def test_ordinary_words_are_no_secrets() -> None:
    text = "resources: {pretrain: {cpus: 1}}\nstore: s3://bucket/task-force/secret-sauce\n" + TEXT
    document = read(text.replace("image_size: 32", "image_size: 32, kwargs: {class_token: true, global_pool: token}"))
    assert document.tree.value["pretrain"]["model"]["kwargs"]["global_pool"] == "token"


def test_places_without_a_scheme_start_from_the_file_that_names_them() -> None:
    text = """version: 1
name: places
store: results
datasets:
  a: {from: shards}
  b: {shards: {train: "b/train-{000..003}.tar", val: [/abs/, ../val/]}, classes: "${env:WHERE}/classes.json"}
  c: {convert: {format: csv, source: photos}}
  d: {from: "s3://bucket/d"}
  e.1k: {convert: {format: csv, source: "${env:WHERE}"}}
  f.1k: {from: shards}
"""
    changes = Changes(overrides=["datasets.a.classes=table.json"])
    found = read_document(
        text, "studies/sweep.yaml", changes=changes, environment={"WHERE": "here"}, folder="/home/ada"
    )
    assert found.tree.value["store"] == "file:///home/ada/studies/results"
    assert found.tree.value["datasets"] == {
        "a": {"from": "file:///home/ada/studies/shards", "classes": "file:///home/ada/table.json"},
        "b": {
            "shards": {
                "train": "file:///home/ada/studies/b/train-{000..003}.tar",
                "val": ["file:///abs/", "file:///home/ada/val/"],
            },
            "classes": "file:///home/ada/here/classes.json",
        },
        "c": {"convert": {"format": "csv", "source": "/home/ada/studies/photos"}},
        "d": {"from": "s3://bucket/d"},
        "e.1k": {"convert": {"format": "csv", "source": "here"}},
        "f.1k": {"from": "file:///home/ada/studies/shards"},
    }
    assert found.portable["datasets"]["b"]["classes"] == "${env:WHERE}/classes.json"
    assert not found.is_own_text  # or the file that is kept would name other places elsewhere


def test_text_that_is_kept_has_absolute_paths_where_messages_show_what_was_written() -> None:
    """It is read elsewhere: a path that starts from the working directory meant another place there."""
    text = """version: 1
name: places
datasets:
  a: {convert: {format: csv, source: lists/a.csv, root: "${env:WHERE}"}}
labels:
  t: {dataset: a, taxonomy: {levels: [x], table: tables/t.csv}}
simulate:
  own: {run: "walks.py:simulate", metric: m}
  shared: {run: "../lib/walks.py:simulate", metric: m}
  shipped: {run: feature-learning, metric: m}
"""
    where = {"WHERE": "here"}
    found = read_document(text, "sweep.yaml", environment=where, folder="/home/ada", home="/real/ada")
    runs = ["/real/ada/walks.py:simulate", "/real/lib/walks.py:simulate", "feature-learning"]
    for document, source, table, simulations in (
        (found.portable, "/home/ada/lists/a.csv", "/home/ada/tables/t.csv", runs),
        (found.tree.value, "lists/a.csv", "tables/t.csv", ["walks.py:simulate", "../lib/walks.py:simulate", runs[2]]),
    ):
        assert document["datasets"]["a"]["convert"]["source"] == source
        assert document["labels"]["t"]["taxonomy"]["table"] == table
        assert [one["run"] for one in document["simulate"].values()] == simulations
    assert found.portable["datasets"]["a"]["convert"]["root"] == "${env:WHERE}"
    assert not found.is_own_text


@pytest.mark.parametrize("name", ["", "big"])
def test_weights_in_a_factor_are_places_as_those_of_a_block(name: str) -> None:
    """A path there was not read as one, and the environment could not name it."""
    values = '{mae: {init: {uri: w/mae.pth}}, own: {init: {uri: "${env:WHERE}/own.pth"}}, none: {}}'
    block = f"{{labels: [a], factors: {{start: {values}}}}}"
    text = f"version: 1\npretrain: {f'{{{name}: {block}}}' if name else block}\n"
    found = read_document(text, "studies/sweep.yaml", environment={"WHERE": "s3://w"}, folder="/home/ada")
    assert [one.get("init", {}).get("uri") for one in found.tree.value["pretrain"].values()] == [
        "file:///home/ada/studies/w/mae.pth",
        "s3://w/own.pth",
        None,
    ]
    with pytest.raises(SpecError, match=r"'\${env:WHERE}' is not allowed here"):
        read_document(
            text.replace("uri: w/mae.pth", "sha256: '${env:WHERE}'"), "sweep.yaml", environment={"WHERE": "a"}
        )
