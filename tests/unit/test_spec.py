"""The sweep language: what is accepted, and how everything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.planning.estimate.volumes import builtin_size
from orchestrator.sweepfile import ResolvedSweep, load_sweep, parse_sweep
from orchestrator.sweepfile.datasets import digits_split
from orchestrator.sweepfile.load import shipped_recipes
from orchestrator.sweepfile.model import RESERVED_KWARGS
from orchestrator.sweepfile.parse.tree import parse_tree
from workloads.data.builtin import open_builtin
from workloads.models.spec import _RESERVED

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


def problems_of(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return str(caught.value)


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


def test_shipped_files_all_load() -> None:
    folder = Path("workloads/sweeps")
    names = [path.stem for path in folder.glob("*.yaml")]
    assert {"quickstart", "digits"} <= set(names)
    for name in names:
        assert load_sweep(name)[0].name == name
    assert {"default-finetune", "default-probe"} <= set(shipped_recipes())


# Each case: what is replaced, by what, and what the error must say.
WRONG = [
    ("pretrain:", "pretain:", ["sweep.yaml:10:1", "unknown key 'pretain'", "did you mean 'pretrain'"]),
    ("  seeds: [0, 1]\n", "  sedes: [0, 1]\n", ["sweep.yaml:14:3", "'sedes'", "did you mean 'seeds'"]),
    ("version: 1", "version: 2", ["sweep.yaml:1:1", "2 is not one of", "known: 1"]),
    ("version: 1\n", "", ["'version' is missing", "add 'version: ...'"]),
    ("name: small", "name: a/b", ["sweep.yaml:2:1", "'a/b'", "letters, digits"]),
    ("name: small", "name: 7", ["sweep.yaml:2:1", "7 is not text"]),
    ("num_train: 512", "num_train: many", ["sweep.yaml:4:59", "'many'", "a whole number"]),
    ("num_train: 512", "num_train: 0", ["num_train", "0 is refused", "greater than or equal to 1"]),
    ("builtin: digits", "builtin: digit", ["sweep.yaml:5:11", "'digit'", "did you mean 'digits'"]),
    ("{builtin: digits}", "{val_fraction: 0.2}", ["sweep.yaml:5:3", "'builtin' is missing"]),
    ("[depth1, depth2]", "[depth1, dept2]", ["sweep.yaml:7:47", "'dept2'", "did you mean 'depth2'", "known: depth1"]),
    ("[depth1, depth2]", "[depth1, depth1]", ["sweep.yaml:7:47", "a second time"]),
    ("dataset: scans", "dataset: scan", ["sweep.yaml:9:12", "'scan' is not a data set", "did you mean 'scans'"]),
    ("modulo: 2", "modulo: 11", ["sweep.yaml:9:28", "11 is more than the 10 classes"]),
    ("modulo: 2", "modulo: 2, hierarchy: [digit]", ["exactly one of hierarchy, random, modulo"]),
    ("[16, 32]", "[16, 513]", ["513 classes for 512 training samples"]),
    ('"random/16"', '"rnd/*"', ["sweep.yaml:12:24", "'rnd/*' matches no label space", "did you mean 'random/"]),
    ("seeds: [0, 1]\n", "seeds: [0, 0]\n", ["sweep.yaml:14:14", "'0' stands here a second time"]),
    ("seeds: [0, 1]\n", "seeds: [0, -1]\n", ["seeds[1]", "-1 is refused"]),
    ("seeds: [0, 1]\n", "seeds: []\n", ["seeds", "at least 1 item"]),
    (f"  recipe: {RECIPE}", "  recipe: smal", ["sweep.yaml:13:3", "did you mean 'small'"]),
    (f"  recipe: {RECIPE}", "  recipe: {base: smal}", ["sweep.yaml:13:12", "did you mean 'small'"]),
    (f"  recipe: {RECIPE}", "  recipe: {epochs: 1, lr: 1}", ["sweep.yaml:13:3", "'batch_size' is missing"]),
    (f"  recipe: {RECIPE}", "  recipe: {base: small, lerning: 1}", ["sweep.yaml:13:25", "unknown key 'lerning'"]),
    (f"  recipe: {RECIPE}", "  recipe: {base: small, batch_size: 600}", ["batch_size 600 is more than the 512"]),
    ("target: levels/depth1", "target: levels/dept1", ["sweep.yaml:16:17", "did you mean 'levels/depth1'"]),
    ("target: levels/depth1", "target: random/16", ["random ids", "choose a level"]),
    ("protocol: finetune", "protocol: tune", ["sweep.yaml:16:40", "did you mean 'finetune'"]),
    ("baseline: levels/depth1", "baseline: parity", ["sweep.yaml:17:10", "not pretrained in this sweep"]),
    ("{cpus: 2}", "{cpu: 2}", ["sweep.yaml:18:24", "did you mean 'cpus'"]),
    ("version: 1", "version: 1\nversion: 1", ["sweep.yaml:2:1", "'version' stands here a second time"]),
    ("seeds: [0, 1]\n", "seeds: [0, 1\n", ["sweep.yaml:", "not valid YAML"]),
    ("branching: [2, 4]", "branching: [2, 4], patch_size: 7", ["not a multiple of patch_size 7"]),
    ("branching: [2, 4]", "branching: [2, 4], patch_size: 32", ["an image has 1 patches"]),
    ("branching: [2, 4]", "branching: [1, 4]", ["sweep.yaml:4:40", "a single superclass"]),
    ("branching: [2, 4]", "branching: [8]", ["sweep.yaml:4:40", "at least 2 items"]),
    ("branching: [2, 4]", "branching: [20, 20]", ["the tree has 420 nodes", "at most 192 independent features"]),
    # Values without a canonical form, and of the wrong kind.
    ("lr: 1e-3", "lr: 1e999", ["sweep.yaml:13:39: pretrain.recipe.lr", "inf is refused", "a finite number"]),
    ("lr: 1e-3", "lr: 1e-3, mean: [0.5, 1e999, 0.5]", ["recipe.mean[1]", "inf is refused", "a finite number"]),
    ("lr: 1e-3", "lr: 1e-3, std: [0.5, 0.5, 1e999]", ["recipe.std[2]", "inf is refused", "a finite number"]),
    ("{cpus: 2}", "{cpus: 1e999}", ["sweep.yaml:18:24", "inf is refused", "a finite number"]),
    ("num_train: 512", "num_train: 9007199254740992", ["sweep.yaml:4:59", "less than or equal to 9007199254740991"]),
    (
        "{depth: 2}",
        "{depth: 99999999999999999999}",
        ["sweep.yaml:11:52: pretrain.model.kwargs.depth: 99999999999999999999 "],
    ),
    ("{depth: 2}", "{a: {b: [1, 1e999]}}", ["sweep.yaml:11:63: pretrain.model.kwargs.a.b[1]: inf ", "finite numbers"]),
    (f"  recipe: {RECIPE}", "  recipe: {base: [small], lr: 1}", ["sweep.yaml:13:12", "['small'] is not a recipe"]),
    (f"  recipe: {RECIPE}", "  recipe: {base: {a: b}, lr: 1}", ["sweep.yaml:13:12", "known: small"]),
    ("{cpus: 2}", "{gpus: 4, workers: 2}", ["sweep.yaml:18:33", "4 GPUs need as many workers"]),
    ("{pretrain: {cpus: 2}}", "{data: {workers: 2}}", ["sweep.yaml:18:13: resources.data", "run as one process"]),
    *(
        (
            f"  recipe: {RECIPE}",
            f"  checkpoints: {{every: {value}}}\n  recipe: {RECIPE}",
            ["sweep.yaml:13:17", *expected],
        )
        for value, expected in {
            "10": ["10 has no unit; write {steps: 10}, {epochs: 1} or auto"],
            "daily": ["'daily' has no unit; write {steps: 1000}"],
            "[1]": ["[1] has no unit"],
        }.items()
    ),
    # Places.
    ("name: small", "name: small\nstore: foo/bar", ["sweep.yaml:3:1: store: ", "supported: file:///absolute/path"]),
    ("name: small", "name: small\nstore: gs://x", ["sweep.yaml:3:1: store: ", "'gs'", "s3://bucket/prefix"]),
    ("name: small", "name: small\nstore: file://here/x", ["sweep.yaml:3:1: store: ", "is not absolute"]),
    ("name: small", "name: small\nstore: s3://B_/x", ["sweep.yaml:3:1: store: ", "names no bucket"]),
    ("name: small", "name: small\nstore: s3://bucket/.x", ["sweep.yaml:3:1: store: ", "no leading dot"]),
    ("name: small", "name: small\nstore: 's3://[x'", ["sweep.yaml:3:1: store: ", "not a URI"]),
    ("name: small", 'name: small\nstore: "file:///a\\0b"', ["sweep.yaml:3:1: store: ", "control characters"]),
    ("name: small", "name: small\ntracking: {uri: 'http://[x'}", ["sweep.yaml:3:12: tracking.uri", "not a URI"]),
    # Recipes and models that the data plane would refuse.
    ("lr: 1e-3", "lr: 1e-3, warmup_epochs: 2.5", ["sweep.yaml:13:49", "2.5 is refused", "of 2 epochs; use 0 to 2"]),
    ("lr: 1e-3", "lr: 1e-3, norm_group: 48", ["sweep.yaml:13:49", "48 is refused", "use a divisor of 64"]),
    ("lr: 1e-3", "lr: 1e-3, std: [0.5, 0, 0.5]", ["recipe.std[1]", "0 is refused", "greater than 0"]),
    ("lr: 1e-3", "lr: 1e-3, std: [-0.5, 0.5, 0.5]", ["recipe.std[0]", "-0.5 is refused", "greater than 0"]),
    ("lr: 1e-3", "lr: 1e-3, betas: [0.9, 1]", ["recipe.betas[1]", "1 is refused", "less than 1"]),
    ("lr: 1e-3", "lr: 1e-3, betas: [-0.1, 0.9]", ["recipe.betas[0]", "-0.1 is refused", "equal to 0"]),
    ("lr: 1e-3", "lr: 1e-3, momentum: 0, nesterov: true", ["13:62: pretrain.recipe.nesterov", "set momentum > 0"]),
    ("{depth: 2}", "{pretrained: true}", ["sweep.yaml:11:52: pretrain.model.kwargs.pretrained", "remove it"]),
    ("{depth: 2}", "{in_chans: 1}", ["kwargs.in_chans", "'in_chans' is refused", "the product sets this argument"]),
]


@pytest.mark.parametrize(("old", "new", "expected"), WRONG, ids=[f"{case[1].strip()[:40]}" for case in WRONG])
def test_sweep_with_one_mistake_is_refused_with_place_value_and_remedy(old: str, new: str, expected: list[str]) -> None:
    assert old in GOOD
    text = problems_of(GOOD.replace(old, new, 1))
    for part in expected:
        assert part in text


def test_checkpoint_interval_with_a_mistake_is_one_problem() -> None:
    for interval in ("{steps: 0}", "{step: 3}", "{steps: 3, epochs: 1}"):
        text = problems_of(GOOD.replace("  recipe:", f"  checkpoints: {{every: {interval}}}\n  recipe:", 1))
        assert len(text.splitlines()) == 1, text


def test_sweep_with_several_mistakes_shows_all_of_them() -> None:
    text = problems_of(GOOD.replace("[depth1, depth2]", "[depth1, dept2]").replace('"random/16"', '"rnd/*"'))
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize("field", ["store: %s", "tracking: {uri: '%s'}"])
@pytest.mark.parametrize("uri", ["http://me:hunter2@host/x", "s3://me:hunter2@bucket", "http://[me:hunter2@x"])
def test_uri_with_a_password_is_refused_and_not_shown(field: str, uri: str) -> None:
    text = problems_of(GOOD.replace("name: small", f"name: small\n{field % uri}"))
    assert text.startswith("sweep.yaml:3:")
    assert "hunter2" not in text


def test_tracking_uri_with_a_user_says_where_credentials_belong() -> None:
    text = problems_of(GOOD.replace("name: small", "name: small\ntracking: {uri: 'http://me@host'}"))
    assert "sweep.yaml:3:12: tracking.uri" in text
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in text


@pytest.mark.parametrize("store", ["file:///tmp/a%20b", "s3://bucket", "s3://bucket/a/b/"])
def test_store_uri_that_is_known_is_accepted(store: str) -> None:
    assert parse(GOOD.replace("name: small", f"name: small\nstore: {store}")).store == store


def test_batch_larger_than_the_second_of_two_datasets_is_refused() -> None:
    scans = GOOD.replace("{builtin: digits}", "{builtin: digits, val_fraction: 0.98}")
    text = problems_of(scans.replace('"random/16"', "random/16, parity"))
    assert text.startswith("sweep.yaml:13:23: pretrain.recipe.batch_size: batch_size 64 is more than the 39 training")
    assert text.splitlines() == [text]
    assert "'scans'" in text


def test_digits_are_counted_as_they_are_split() -> None:
    for val_fraction in (0.01, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.75, 0.98):
        made = open_builtin({"builtin": "digits", "version": 1, "val_fraction": val_fraction, "seed": 0}).splits
        found = digits_split(val_fraction)
        assert found == (made["train"].num_samples, made["val"].num_samples)
        assert builtin_size({"builtin": "digits", "val_fraction": val_fraction}).num_train == found[0]
    assert digits_split(0.2) == (1438, 359)


def test_batch_of_all_training_digits_is_accepted_and_one_more_is_not() -> None:
    digits = f"""{GOOD.split("datasets:", maxsplit=1)[0]}datasets: {{scans: {{builtin: digits}}}}
labels: {{digit: {{dataset: scans, hierarchy: [digit]}}}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["digit/*"]
  recipe: {{epochs: 2, batch_size: 1438, lr: 0.1}}
transfer: [{{name: t, target: digit/digit, protocol: finetune, recipe: {{epochs: 1, batch_size: 64, lr: 0.1}}}}]
"""
    assert parse(digits).datasets["scans"].num_train == 1438
    assert "batch_size 1439 is more than the 1438 training samples" in problems_of(digits.replace("1438", "1439"))


def test_recipe_at_the_limits_is_accepted() -> None:
    limits = "lr: 1e-3, warmup_epochs: 2, norm_group: 16, momentum: 0, mean: [0, -1, 1]"
    assert parse(GOOD.replace("lr: 1e-3", limits)).pretrains[0].recipe["norm_group"] == 16


def test_recipe_with_several_mistakes_shows_all_of_them() -> None:
    text = problems_of(GOOD.replace("lr: 1e-3", "lr: 1e-3, warmup_epochs: 3, norm_group: 48, std: [0, 0, 0]", 1))
    assert len(text.splitlines()) == 5


def test_reserved_kwargs_are_those_of_the_data_plane() -> None:
    assert RESERVED_KWARGS == _RESERVED


def test_transfer_named_twice_is_refused() -> None:
    line = next(line for line in GOOD.splitlines() if "name: top" in line)
    assert "'top' stands here a second time" in problems_of(GOOD.replace(line, f"{line}\n{line}"))


def test_yaml_pitfalls_are_taken_out() -> None:
    tree = parse_tree("a: 1e-4\nb: no\nc: 2020-01-01\nd: true\ne: 010\nf: null\ng: 1_000\nh: .5", "f")
    assert tree.value == {
        "a": 1e-4,
        "b": "no",
        "c": "2020-01-01",
        "d": True,
        "e": "010",
        "f": None,
        "g": 1000,
        "h": 0.5,
    }


def test_yaml_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    with pytest.raises(SpecError, match="after expanding aliases"):
        parse_tree("\n".join(lines), "bomb.yaml")


def test_yaml_deep_nesting_is_refused() -> None:
    with pytest.raises(SpecError, match="levels"):
        parse_tree("a: " + "[" * 60 + "]" * 60, "deep.yaml")


@pytest.mark.parametrize("text", ['a: "\\ud800"', '"\\udfff": 1'])
def test_yaml_half_of_a_character_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"half.yaml:1:\d: .* half of a character"):
        parse_tree(text, "half.yaml")


def test_yaml_huge_file_is_refused() -> None:
    with pytest.raises(SpecError, match="more than"):
        parse_tree("a: " + "x" * 1_000_001, "huge.yaml")


def test_yaml_python_tag_is_refused() -> None:
    with pytest.raises(SpecError):
        parse_tree("a: !!python/object/apply:os.system ['true']", "evil.yaml")


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_sweep(str(path))


def test_file_that_is_missing_is_refused_with_the_shipped_names() -> None:
    with pytest.raises(SpecError, match="did you mean 'quickstart'"):
        load_sweep("quikstart")


@pytest.mark.parametrize(
    ("entry", "place", "message"),
    [
        ("from: shards", "5:11: datasets.scans.from", "'shards' has no scheme; supported: file:///absolute/path"),
        ("from: /a/b", "5:11: datasets.scans.from", "'/a/b' has no scheme; write file:///a/b;"),
        (
            "shards: {train: /a/t.tar}, num_train: 3, num_classes: 2",
            "datasets.scans.shards.train",
            "write file:///a/t.tar",
        ),
        ("shards: {train: /a/b/}, num_train: 3, num_classes: 2", "datasets.scans.shards.train", "write file:///a/b/;"),
    ],
)
def test_data_set_at_a_plain_path_is_refused_with_its_uri(tmp_path: Path, entry: str, place: str, message: str) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD.replace("{builtin: digits}", f"{{{entry}}}"))
    with pytest.raises(SpecError) as caught:
        load_sweep(str(tmp_path / "sweep.yaml"))
    assert f"{place}: data set '" in str(caught.value)
    assert message in str(caught.value)
