"""Hierarchies for classes that have none: from tables, folders and WordNet; and how a sweep gets them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.commands import labels
from orchestrator.core.errors import SpecError, UserError
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.first_sweep import with_label_entry
from orchestrator.storage.dataset_files import DatasetFile
from orchestrator.sweepfile.datasets import Survey
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.load import shipped_recipes
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep
from tests.commands import run_command
from tests.golden_refusals import count_here
from tests.unit.test_labels_spec import SHARDS, TAIL
from tests.unit.test_wordnet import NET
from workloads.labels.hierarchy import make_hierarchy

CLASSES = [{"class": leaf, "name": name} for leaf, name in enumerate(("cat", "dog", "elm"))]
KINDS = ["animal", "animal", "plant"]


def made(source: object, classes: list[dict[str, Any]] = CLASSES, wordnet: object = "") -> dict[str, Any]:
    return make_hierarchy({"source": str(source), "wordnet": str(wordnet)}, classes)


def csv(folder: Path, text: str) -> Path:
    (folder / "parents.csv").write_text(text)
    return folder / "parents.csv"


def test_columns_of_a_table_are_levels_from_coarse_to_fine(tmp_path: Path) -> None:
    text = "class,family,kind,same,own\nelm,ulmaceae,plant,x,1\ncat,felidae,animal,x,2\ndog,canidae,animal,x,3\n"
    found = made(csv(tmp_path, text))
    assert found["levels"] == ["kind"]  # the others join nothing, or everything
    assert [row["kind"] for row in found["rows"]] == KINDS
    assert [row["name"] for row in found["rows"]] == ["cat", "dog", "elm"]


def test_classes_of_a_table_may_have_numbers_and_words_as_their_names(tmp_path: Path) -> None:
    classes = [{"class": leaf, "name": name} for leaf, name in enumerate("01AB")]
    found = made(csv(tmp_path, "class,kind\n0,digit\n1,digit\nA,letter\nB,letter\n"), classes)
    assert found["levels"] == ["kind"]
    assert [row["kind"] for row in found["rows"]] == ["digit", "digit", "letter", "letter"]


def test_pairs_of_a_class_and_its_parent_are_walked_to_the_root(tmp_path: Path) -> None:
    classes = [*CLASSES, {"class": 3, "name": "oak"}]
    text = "class,parent\ncat,pet\ndog,pet\npet,animal\nelm,plant\noak,tree\ntree,plant\n"
    found = made(csv(tmp_path, text), classes)
    assert found["levels"] == ["level1", "level2"]
    assert [row["level2"] for row in found["rows"]] == ["pet", "pet", "plant", "tree"]
    with pytest.raises(UserError, match="'pet' is above itself"):
        made(csv(tmp_path, "class,parent\ncat,pet\ndog,pet\npet,pet\nelm,plant\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "class,parent\ncat,pet\ndog,pet\npet,animal\nelm,plant\npet,thing\n",
            "'pet' in column 'parent': 'animal', 'th",
        ),
        (
            "class,kind,size\ncat,animal,s\ndog,animal,l\nelm,plant,l\ncat,plant,s\n",
            "'cat' in column 'kind': 'animal', 'p",
        ),
    ],
)
def test_class_or_group_at_two_places_of_a_table_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has different values for {said}"):
        made(csv(tmp_path, text))
    repeated = "class,kind\ncat,animal\ndog,animal\nelm,plant\ncat,animal\n"
    assert [row["kind"] for row in made(csv(tmp_path, repeated))["rows"]] == KINDS


def test_class_that_is_a_group_of_others_is_in_this_group(tmp_path: Path) -> None:
    classes = [{"class": leaf, "name": name} for leaf, name in enumerate(("cat", "dog", "elm", "poodle", "pug"))]
    text = "class,parent\ncat,animal\ndog,animal\nelm,plant\npoodle,dog\npug,dog\n"
    rows = made(csv(tmp_path, text), classes)["rows"]
    assert [row["level2"] for row in rows] == ["animal", "dog", "plant", "dog", "dog"]
    for path in ("animal/cat", "animal/dog/poodle", "animal/dog/pug", "plant/elm"):
        (tmp_path / "nested" / path).mkdir(parents=True)
    rows = made(tmp_path / "nested", classes)["rows"]
    assert [row["level2"] for row in rows] == ["animal", "animal/dog", "plant", "animal/dog", "animal/dog"]


def test_nested_folder_gives_the_levels_of_its_classes(tmp_path: Path) -> None:
    for path in ("animal/pet/cat", "animal/pet/dog", "plant/elm"):
        (tmp_path / "nested" / path).mkdir(parents=True)
    found = made(tmp_path / "nested")
    assert [row["level1"] for row in found["rows"]] == KINDS
    (tmp_path / "nested" / "plant" / "cat").mkdir()
    with pytest.raises(UserError, match="has two folders 'cat'"):
        made(tmp_path / "nested")


def test_wordnet_takes_the_senses_that_are_nearest_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(NET)
    # the first sense of "bush" is an entity, the second lies beside the oak, below the plant
    (tmp_path / "index.noun").write_text("oak n 1 1 @ 1 0 00000006  \nbush n 2 1 @ 2 0 00000001 00000005  \n")
    classes = [{"class": leaf, "name": name} for leaf, name in enumerate(("oak", "Bushes", "n00000004"))]
    (tmp_path / "index.noun").open("a").write("n00000004 n 1 1 @ 1 0 00000004  \n")
    found = made("wordnet", classes, tmp_path)
    assert [row["synset"] for row in found["rows"]] == ["n00000006", "n00000005", "n00000004"]
    assert found["notes"] == ["'Bushes' has 2 senses in WordNet; taken: n00000005, a kind of plant"]
    assert found["levels"] == ["level3"]  # entity, thing, and what they do not share
    assert [row["level3"] for row in found["rows"]] == ["n00000003 plant", "n00000003 plant", "n00000002 thing"]
    with pytest.raises(UserError, match=r"WordNet lacks 1 classes of the data set: 'gnu'"):
        made("wordnet", [*classes, {"class": 3, "name": "gnu"}], tmp_path)


def test_classes_that_share_a_name_are_told_apart_by_their_synsets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.noun").write_text(NET)
    named = (("crane", "n00000006"), ("crane", "n00000005"), ("owl", "n00000004"))
    rows = [{"class": leaf, "name": name, "synset": synset} for leaf, (name, synset) in enumerate(named)]
    (tmp_path / "classes.json").write_text(json.dumps(rows))
    arguments = ("wordnet", "--wordnet", str(tmp_path), "--out", str(tmp_path / "h.csv"), "-o", "json")
    made_of_folder = run_command(capsys, "labels", "hierarchy", tmp_path.as_uri(), *arguments)
    entry = made_of_folder.document["entry"]
    assert "level3], key: synset, class_key: synset}}" in entry
    assert (tmp_path / "h.csv").read_text().splitlines()[1:3] == [
        "crane,n00000006,n00000003 plant",
        "crane,n00000005,n00000003 plant",
    ]
    survey = Survey(
        described=DatasetFile(splits=SHARDS, num_classes=3, levels={}, classes_sha256="c" * 64, digest="d" * 64),
        class_table=rows,
        classes_uri=(tmp_path / "classes.json").as_uri(),
        classes_sha256="c" * 64,
    )
    text = f"version: 1\nname: birds\ndatasets: {{my-data: {{from: file:///birds}}}}\nlabels:\n  {entry}\n{TAIL}"
    tree = parse_tree(text, "sweep.yaml")
    spec, sources = validate(SweepSpec, tree.value, tree), LabelSources(count=count_here)
    sweep = resolve_sweep(spec, tree, shipped_recipes(), {"my-data": survey}, labels=sources)
    assert sweep.labels["hierarchy/level3"].num_classes == 2
    assert "labels/hierarchy/level3" in build_plan(sweep, store_uri="file:///s").by_name()
    for synset in ("n00000006", "oak"):  # as the other crane, or none
        alike = [rows[0], rows[1] | {"synset": synset}, rows[2]]
        with pytest.raises(UserError, match="some classes of the data set share a name"):
            made("wordnet", alike, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class,kind\ncat,animal\n", "lacks 2 classes of the data set: 'dog', 'elm'"),
        ("class,kind\ncat,animal\ndog,\nelm,plant\n", "has no value for 1 classes"),
        ("class\ncat\ndog\nelm\n", "has one column"),
        ("class,kind\ncat,a\ndog,b\nelm,c\n", "gives the classes no level"),
        ("class,a,b\ncat,x,p\ndog,y,p\nelm,x,q\n", "is not a function of"),
    ],
)
def test_what_gives_no_hierarchy_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        made(csv(tmp_path, text))


SWEEP = """version: 1 # a study
labels:
  # the classes
  levels: {dataset: photos, hierarchy: [leaf]}
pretrain:
  labels: ["levels/*"] # all
"""
ENTRY = "hierarchy: {dataset: photos, taxonomy: {table: h.csv, levels: [kind]}}"


def test_entry_is_added_to_a_sweep_whose_comments_stay() -> None:
    text = with_label_entry(SWEEP, "sweep.yaml", ENTRY)
    assert yaml.safe_load(text)["pretrain"]["labels"] == ["hierarchy/*", "levels/*"]
    assert list(yaml.safe_load(text)["labels"]) == ["hierarchy", "levels"]
    assert text.replace(f"  {ENTRY}\n", "").replace('"hierarchy/*", ', "") == SWEEP


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["levels/*"]', '\n    - "levels/*"'),
        ("levels: {", "hierarchy: {"),
        ("pretrain:", "train:"),
        (" [leaf]}", " [leaf"),
    ],
)
def test_sweep_of_another_layout_is_left_alone(old: str, new: str) -> None:
    with pytest.raises((UserError, SpecError), match=r"by hand|not valid YAML"):
        with_label_entry(SWEEP.replace(old, new, 1), "sweep.yaml", ENTRY)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data plane gives every class one level."""
    rows = [{"class": str(leaf), "name": str(leaf), "kind": "digit"} for leaf in range(10)]
    monkeypatch.setattr(labels, "ask_labels", lambda *_: {"key": "name", "levels": ["kind"], "rows": rows, "notes": []})


@pytest.mark.usefixtures("answered")
def test_table_that_is_there_already_is_replaced_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = csv(tmp_path, "class,kind\ncat,animal\n")
    before = table.read_bytes()
    arguments = ("labels", "hierarchy", "quickstart", "wordnet", "--out", str(table))
    refused = run_command(capsys, *arguments)
    assert (refused.code, table.read_bytes()) == (1, before)
    assert f"{table} is there already and would be lost" in refused.message
    assert run_command(capsys, *arguments, "--force").code == 0
    assert table.read_text().startswith("class,name,kind\n0,0,digit\n")


@pytest.mark.parametrize("level", ["Super class", "genus, latin"])
def test_level_that_no_job_can_be_named_after_is_refused_before_anything_is_written(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"key": "name", "levels": ["kind", level], "rows": [{"name": "0", "kind": "a", level: "b"}], "notes": []}
    monkeypatch.setattr(labels, "ask_labels", lambda *_: found)
    out = tmp_path / "h.csv"
    refused = run_command(capsys, "labels", "hierarchy", "quickstart", "table.csv", "--out", str(out))
    assert refused.code == 1
    assert f"table.csv: no job can have the name of the level {level!r}; rename the column" in refused.message
    assert not out.exists()


def test_entry_names_a_table_and_levels_that_yaml_would_read_as_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = ["1", "null", "#x", "kind"]
    rows = [{"name": "0", **dict.fromkeys(levels, "a")}]
    found = {"key": "name", "levels": levels, "rows": rows, "notes": []}
    monkeypatch.setattr(labels, "ask_labels", lambda *_: found)
    (tmp_path / "sweep.yaml").write_text("version: 1\nname: s\n" + SWEEP.partition("\n")[2])
    monkeypatch.setattr(labels, "_dataset_of", lambda *_: ("photos", {}))
    out = tmp_path / "a, b: {c}.csv"
    run_command(capsys, "labels", "hierarchy", str(tmp_path / "sweep.yaml"), "x", "--add", "--out", str(out))
    entry = yaml.safe_load((tmp_path / "sweep.yaml").read_text())["labels"]["hierarchy"]
    assert entry == {"dataset": "photos", "taxonomy": {"table": out.name, "levels": levels}}


@pytest.mark.usefixtures("answered")
def test_levels_are_added_to_a_sweep_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, sweep, out = tmp_path / "real.yaml", tmp_path / "sweep.yaml", tmp_path / "table.csv"
    text = "version: 1\nname: s\n" + SWEEP.partition("\n")[2]
    real.write_text(text)
    real.chmod(0o664)
    sweep.symlink_to(real)
    monkeypatch.setattr(labels, "_dataset_of", lambda *_: ("photos", {}))
    arguments = ("labels", "hierarchy", str(sweep), "wordnet", "--add", "--out", str(out))

    def full_at_the_sweep(descriptor: int, mode: int) -> None:  # only a file that is there has a mode to keep
        os.write(descriptor, b"version: 1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", full_at_the_sweep)
        refused = run_command(capsys, *arguments)
    assert (refused.code, real.read_text()) == (1, text)
    assert f"{sweep} cannot be written: No space left on device" in refused.message
    assert run_command(capsys, *arguments).code == 0
    assert sweep.is_symlink()
    assert yaml.safe_load(real.read_text())["labels"]["hierarchy"]["dataset"] == "photos"
    assert real.stat().st_mode & 0o777 == 0o664
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real.yaml", "sweep.yaml", "table.csv"]
