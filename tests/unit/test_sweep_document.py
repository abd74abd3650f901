"""Includes, scales, ``--set`` and substitution: what happens to a document before the schema sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

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


def problem(text: str = TEXT, *overrides: str, **kwargs: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read(text, *overrides, **kwargs)
    return str(caught.value)


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


VARS = [
    (
        "rate: 1e-3",
        "ratio: 1e-3",
        "12:23: pretrain.recipe.lr: there is no variable 'rate' in vars: did you mean 'ratio'",
    ),
    ("rate: 1e-3", "rate: 1e-3, more: 1", "3:20: vars.more: nothing asks for this variable"),
    ("rate: 1e-3", 'rate: "${vars.rate}"', "the variable 'rate' needs itself (rate -> rate)"),
    (
        "from: ",
        'digest: "a${vars.sizes}", from: ',
        "'${vars.sizes}' is a list or mapping, which cannot stand within text",
    ),
    ('"${vars.rate}"', '"${rate}"', "'${rate}' is no substitution; write ${vars.NAME}, ${env:NAME} or"),
    ('"${vars.rate}"', '"${vars.rate"', "'${vars.rate' is no substitution"),
    (
        '"${vars.rate}"',
        '"${env:RATE}"',
        "12:23: pretrain.recipe.lr: '${env:RATE}' may not stand here: results must not",
    ),
    ("rate: 1e-3", 'rate: "${env:RATE}"', "'${env:RATE}' may not stand here"),
    (":-s3://public}", "}", "6:12: datasets.photos.from: the environment variable DATA is not set, or empty; set it"),
    ("env:DATA", "env:API_TOKEN", "API_TOKEN is called as secrets are"),
    ("vars: {", "vars: [], x: {", "not valid YAML"),
]


@pytest.mark.parametrize(("old", "new", "said"), VARS)
def test_wrong_substitution_is_refused_at_its_place(old: str, new: str, said: str) -> None:
    assert said in problem(TEXT.replace(old, new, 1))


def test_environment_that_holds_a_secret_is_refused_and_not_shown() -> None:
    text = problem(env={"DATA": "s3://me:hunter2@bucket"})
    assert "holds what looks like a URI with a user or password" in text
    assert "hunter2" not in text


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
        ("datasets.tree.branching=2,8", ["datasets", "tree", "branching"], "2,8"),
        ("name='1,2'", ["name"], "1,2"),
        ("store=no", ["store"], "no"),
        ("pretrain.labels=levels/depth1", ["pretrain", "labels"], "levels/depth1"),
    ],
)
def test_override_changes_one_value(override: str, steps: list[str | int], expected: object) -> None:
    if "branching" in override:
        with pytest.raises(SpecError, match="write a list in brackets"):
            value(override)
        return
    assert at(value(override), steps) == expected


def test_override_of_several_values_takes_the_field_out_of_the_recipe() -> None:
    for item in ("low", "1", "*"):
        entry = value(f"transfer.{item}.recipe.lr=0.2,0.3")["transfer"][1]
        assert (entry["recipe"], entry["grid"]) == ({"base": "probe"}, {"lr": [0.2, 0.3]})


def test_overrides_apply_in_their_order() -> None:
    assert value("name=a", "name=b")["name"] == "b"


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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name", "--set name: this is not path=value"),
        ("=3", "--set =3: this is not path=value"),
        ("name=", "--set name=: there is no value after '='"),
        ("a..b=1", "--set a..b=1: the path has an empty step"),
        ("name=[1", "--set name=[1: '[1' cannot be read"),
        (
            "transfer.2.seeds=[0]",
            "--set transfer.2.seeds=[0]: transfer.2: '2' is no item of the list; address items by",
        ),
        ("transfer.tip.seeds=[0]", "did you mean 'top'"),
        ("policy.failures=1,2", "several values are a grid"),
        ("transfer.top.target=a,b", "a grid of a transfer is over fields of its recipe"),
        ("pretrain.*.recipe.lr=1,2", "--set pretrain.*.recipe.lr=1,2: pretrain.*: '*' stands for items of a list"),
        ("vars.rat=2", "--set vars.rat=2: vars.rat: nothing asks for this variable"),
        ("pretrain.recipe.lr=1,1", "two blocks would be called 'lr-1'"),
        ("store=s3://me:hunter2@bucket", "--set store=...:"),
    ],
)
def test_wrong_override_is_refused_and_named(override: str, said: str) -> None:
    text = problem(TEXT, override)
    assert said in text
    assert "hunter2" not in text


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


def test_scale_that_is_not_asked_for_changes_nothing() -> None:
    assert value() == read(TEXT[: TEXT.index("tiny:")]).tree.value


@pytest.mark.parametrize(
    ("text", "scale", "said"),
    [
        (TEXT, "small", "'small' is not a scale"),
        (TEXT[: TEXT.index("tiny:")], "tiny", "the file has no block 'tiny:'"),
        (TEXT[: TEXT.index("tiny:")] + "tiny: yes\n", "tiny", "sweep.yaml:16:1: tiny: this is not a mapping"),
        (TEXT.replace("low: {target", "lo: {target"), "tiny", "sweep.yaml:19:42: transfer.lo: 'lo' is no item"),
    ],
)
def test_wrong_scale_is_refused(text: str, scale: str, said: str) -> None:
    assert said in problem(text, scale=scale)


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


def deep(number: int) -> dict[str, str]:
    files = {f"{n}.yaml": f"include: {n + 1}.yaml\n" for n in range(number)}
    return {**files, f"{number}.yaml": "store: s3://x\n"}


@pytest.mark.parametrize(
    ("include", "files", "said"),
    [
        ("a.yaml", {}, "sweep.yaml:1:1: include: a.yaml: no such file"),
        ("[a.yaml, 3]", {}, "sweep.yaml:1:1: include: this is not a list of files"),
        ("a.yaml", {"a.yaml": "include: a.yaml"}, "a.yaml:1:1: include: this file includes itself (a.yaml -> a.yaml)"),
        ("a.yaml", {"a.yaml": "include: [sweep.yaml]"}, "a.yaml:1:11: include[0]: this file includes itself"),
        ("a.yaml", {"a.yaml": "name: part"}, "a.yaml:1:1: name: an included file is no sweep of its own"),
        ("a.yaml", {"a.yaml": "version: 2"}, "a.yaml:1:1: version: 2 is not a known version"),
        ("a.yaml", {"a.yaml": "- x"}, "a.yaml:1:1: the file is not a mapping"),
        ("a.yaml", {"a.yaml": "store: [a\n"}, "a.yaml:2:1: not valid YAML"),
        ("0.yaml", deep(12), "includes are more than 8 deep"),
        (f"[{', '.join(['a.yaml'] * 101)}]", {"a.yaml": "store: s3://x"}, "more than 100 files are included"),
        ("a.yaml", {"a.yaml": "x: ghp_" + "a1" * 20}, "a.yaml:1:4: this looks like a GitHub token"),
    ],
)
def test_wrong_include_is_refused_at_its_place(include: str, files: Mapping[str, str], said: str) -> None:
    assert said in problem(f"include: {include}\n{TEXT}", files=files)


def test_include_in_a_text_without_a_file_is_refused() -> None:
    with pytest.raises(SpecError, match="files can only be included by a file"):
        read_document(f"include: a.yaml\n{TEXT}", "text")


# ----------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("# key: AKIAABCDEFGHIJKLMNOP", "1:8"),
        ("store: s3://me:hunter2@bucket", "1:8"),
        ("store: hf_abcdefghijklmnopqrstuvwxyz0123456789", "1:8"),
        ("x: '-----BEGIN RSA PRIVATE KEY-----'", "1:5"),
        ("tracking: {password: hunter2}", "1:12"),
        ("x: {aws-secret-access-key: hunter2}", "1:5"),
        ("x: {token: hunter2}", "1:5"),
    ],
)
def test_secret_is_refused_and_not_shown(line: str, place: str) -> None:
    text = problem(f"{line}\n{TEXT}")
    assert f"sweep.yaml:{place}:" in text
    assert "looks like" in text
    assert "by the environment" in text
    assert not any(secret in text for secret in ("hunter2", "AKIAABC", "hf_abc"))


def test_ordinary_words_are_no_secrets() -> None:
    text = "resources: {pretrain: {cpus: 1}}\nstore: s3://bucket/task-force/secret-sauce\n" + TEXT
    document = read(text.replace("image_size: 32", "image_size: 32, kwargs: {class_token: true, global_pool: token}"))
    assert document.tree.value["pretrain"]["model"]["kwargs"]["global_pool"] == "token"


@pytest.mark.parametrize("argument", ["tracking.password=hunter2", "vars.api-key=hunter2", "token = hunter2"])
def test_override_called_as_secrets_are_is_refused_without_showing_it(argument: str) -> None:
    with pytest.raises(SpecError, match="looks like a password") as caught:
        read_document(TEXT, "sweep.yaml", changes=Changes(overrides=[argument]))
    assert "hunter2" not in str(caught.value)
    assert str(caught.value).startswith(f"--set {argument.partition('=')[0]}=...")
