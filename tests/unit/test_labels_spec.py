"""Label spaces in a sweep.yaml: definitions, numbers of classes, and what is refused with its place."""

import json
import re
from contextlib import nullcontext
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.commands import labels
from orchestrator.core.errors import SpecError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.plugins import LABEL_SPACES
from orchestrator.planning.graph.build import build_plan
from orchestrator.storage.dataset_files import DatasetFile, ShardEntry, dataset_digest, level_counts
from orchestrator.sweepfile import ResolvedSweep
from orchestrator.sweepfile.datasets import Survey
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.load import shipped_recipes
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.plugin_uses import PluginSources
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep
from tests.golden_refusals import count_here
from tests.sweep_fields import plan_of

HEAD = """\
version: 1
name: spaces
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2, 3], num_train: 600, num_val: 72, image_size: 16, patch_size: 4}
  other: {builtin: digits}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2, depth3]}
"""
TAIL = """
pretrain:
  model: {name: fasternet_t0, image_size: 16, kwargs: {patch_size: 4, embed_dim: 32, depths: [1], feature_dim: 64}}
  labels: ["*"]
  recipe: {epochs: 1, batch_size: 32, lr: 0.1}
"""
DEPTH1, DEPTH2 = {"hierarchy": "depth1"}, {"hierarchy": "depth2"}


def parse(entries: str, tail: str = TAIL) -> ResolvedSweep:
    tree = parse_tree(HEAD + entries + tail, "sweep.yaml")
    sources = LabelSources(count=count_here)
    plugins = PluginSources(installed={LABEL_SPACES: {"letters": "letters==1.2:letters"}})
    spec = validate(SweepSpec, tree.value, tree)
    return resolve_sweep(spec, tree, shipped_recipes(), plugins=plugins, labels=sources)


@pytest.mark.parametrize(
    ("entry", "definitions", "counts"),
    [
        (
            "random: {num_classes: [4, 8], within: levels/depth1}",
            [
                {"random": {"num_classes": 4, "seed": 0, "within": DEPTH1}},
                {"random": {"num_classes": 8, "seed": 0, "within": DEPTH1}},
            ],
            [8, 16],
        ),
        (
            "random: {num_classes: [9], independent: true}",
            [{"random": {"num_classes": 9, "seed": 0, "draw": "independent"}}],
            [9],
        ),
        ("modulo: 3, base: levels/depth2", [{"modulo": 3, "base": DEPTH2}], [3]),
        (
            "split: 2, base: levels/depth1",
            [{"split": {"num": 2, "seed": 0, "draw": "independent"}, "base": DEPTH1}],
            [4],
        ),
        ("split: {num: 3, balanced: true}", [{"split": {"num": 3, "seed": 0, "draw": "balanced"}}], [36]),
        (
            "merge: {groups: {a: [0, 1], b: [2]}}",
            [
                {
                    "merge": {
                        "groups": [{"name": "a", "classes": [0, 1]}, {"name": "b", "classes": [2]}],
                        "others": "keep",
                    }
                }
            ],
            [11],
        ),
        (
            "merge: {num_classes: [3, 4], seed: 1}",
            [{"merge": {"num_classes": 3, "seed": 1}}, {"merge": {"num_classes": 4, "seed": 1}}],
            [3, 4],
        ),
        ("binary: [0, 1]", [{"binary": [0, 1]}], [2]),
        ("hierarchy: [leaf]", [{"hierarchy": "leaf"}], [12]),
        ("hierarchy: [leaf], classes: {num: 5}", [{"hierarchy": "leaf", "classes": {"num": 5, "seed": 0}}], [5]),
        ("hierarchy: [depth3], classes: {num: 5}", [{"hierarchy": "depth3", "classes": {"num": 5, "seed": 0}}], [5]),
    ],
)
def test_labels_entry_becomes_definitions_without_names(
    entry: str, definitions: list[dict[str, Any]], counts: list[int]
) -> None:
    sweep = parse(f"  mine: {{dataset: tree, {entry}}}")
    spaces = [space for space in sweep.labels.values() if space.entry == "mine"]
    assert [space.space for space in spaces] == definitions
    assert [space.num_classes for space in spaces] == counts


def test_labels_base_may_stand_anywhere_and_be_a_chain() -> None:
    sweep = parse("  c: {dataset: tree, modulo: 2, base: b}\n  b: {dataset: tree, modulo: 3, base: levels/depth2}")
    assert sweep.labels["c"].space == {"modulo": 2, "base": {"modulo": 3, "base": DEPTH2}}


def test_labels_taxonomy_holds_the_digest_of_its_table_and_no_place(tmp_path: Path) -> None:
    rows = ["name,order,family"] + [f"{n // 6}.{n // 3 % 2}.{n % 3},order{n // 6},family{n // 3}" for n in range(12)]
    file = tmp_path / "table.csv"
    file.write_text("\n".join(rows))
    sweep = parse(f"  tax: {{dataset: tree, taxonomy: {{table: {file}, levels: [order, family]}}}}")
    digest = sha256(file.read_bytes()).hexdigest()
    order, family = (sweep.labels[f"tax/{level}"] for level in ("order", "family"))
    assert family.space == {"taxonomy": {"level": "family", "digest": digest, "key": "name", "class_key": "name"}}
    assert (order.num_classes, family.num_classes) == (2, 4)
    job = next(job for job in build_plan(sweep, store_uri="file:///s").jobs if job.name == "pretrain/tax/order/seed0")
    (labels_job,) = (one for one in build_plan(sweep, store_uri="file:///s").jobs if one.name == "labels/tax/order")
    assert labels_job.execution.label_files == {"table": str(file)}
    assert job.execution.label_files == {}


@pytest.mark.parametrize(("levels", "classes"), [(", file: /a", ", file: /b"), (", file: /a", ""), ("", ", file: /b")])
def test_labels_with_two_files_of_wordnet_are_refused(levels: str, classes: str) -> None:
    """The second one was ignored."""
    with pytest.raises(SpecError) as error:
        parse(f"  net: {{dataset: tree, wordnet: {{levels: [2]{levels}}}, classes: {{under: n00004258{classes}}}}}")
    (problem,) = error.value.problems
    assert re.search(r": labels\.net\.classes\.file: .* write the same file at both$", problem)


def test_clusters_within_classes_of_which_a_sample_has_several_are_refused() -> None:
    within = ("labels.kept.dataset=counted", "labels.kept.clusters.within=plain/leaf")
    assert plan_of(*within).jobs  # each sample has one class
    with pytest.raises(SpecError, match=r"labels\.kept\.clusters\.within: 'plain/leaf' gives a class no single target"):
        plan_of(*within, "datasets.counted.multi_label=true", "pretrain.first.recipe.loss=sigmoid")


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("split.split", "split.split=2"),
        ("rnd.random.within", "rnd.random.within=plain/leaf"),
        ("rnd.classes", "rnd.classes={num: 3}"),
        ("", "rnd.random.seed=1"),
    ],
)
def test_ids_within_classes_of_which_a_sample_has_several_are_refused(place: str, change: str) -> None:
    """They were planned, and their `labels` job failed."""
    changes = (f"labels.{change.partition('.')[0]}.dataset=counted", f"labels.{change}")
    assert plan_of(*changes).jobs  # each sample has one class
    match = rf"labels\.{re.escape(place)}: samples of 'counted' have several classes each, .* whole set, by random"
    with pytest.raises(SpecError, match=match) if place else nullcontext():
        plan_of(*changes, "datasets.counted.multi_label=true", "pretrain.first.recipe.loss=sigmoid")


def test_labels_that_nobody_can_count_are_refused() -> None:
    tree = parse_tree(HEAD + "  a: {dataset: tree, binary: [0]}" + TAIL, "sweep.yaml")
    with pytest.raises(SpecError, match="can only be counted where the data set can be read"):
        resolve_sweep(validate(SweepSpec, tree.value, tree), tree, {})


# ------------------------------------------------------------------------------- conversions whose listing is declared

PHOTOS = """\
version: 1
name: photos
datasets: {photos: {convert: CONVERT, num_train: 800, num_val: 72, num_classes: 4, levels: {}}}
labels: {mine: {dataset: photos, taxonomy: {table: TABLE, levels: [family, genus]}, num_classes: [2, 3]CLASSES}}
"""
SHARD = ShardEntry(name="0.tar", size_bytes=1, sha256="0" * 64, num_samples=800)
SHARDS, LISTING = {"train": (SHARD,), "val": (SHARD,)}, "a" * 64
CELLS = {"name": "c0 c1 c2 c3", "family": "cats cats dogs dogs", "genus": "lynx lynx fox wolf"}


def table_in(folder: Path, **columns: str) -> Path:
    cells = {name: column.split() for name, column in (CELLS | columns).items()}
    table = folder / "table.csv"
    table.write_text("\n".join(map(",".join, [cells.keys(), *zip(*cells.values(), strict=True)])))
    return table


def photos(table: Path, chosen: str = "", *, is_listed: bool = False, text: str = PHOTOS) -> ResolvedSweep:
    classes = [{"class": number, "name": f"c{number}"} for number in range(4)]
    counts = {"num_samples": {"train": 800, "val": 72}, "num_classes": 4, "levels": {}, "multi_label": False}
    survey = Survey(listed={"listing": LISTING, **counts, "classes": classes} if is_listed else {})
    convert = "{format: imagefolder, source: /photos" + ("}" if is_listed else f", listing: {LISTING}}}")
    text = text.replace("CONVERT", convert).replace("TABLE", str(table)).replace("CLASSES", chosen)
    tree = parse_tree(text + TAIL, "sweep.yaml")
    spec = validate(SweepSpec, tree.value, tree)
    return resolve_sweep(spec, tree, shipped_recipes(), {"photos": survey}, labels=LabelSources(count=count_here))


def keys_of(sweep: ResolvedSweep) -> dict[str, str]:
    return {job.name: job.key for job in build_plan(sweep, store_uri="file:///s").jobs}


def test_number_of_classes_that_nobody_declared_is_not_compared_in_the_job(tmp_path: Path) -> None:
    """How many classes two of four leave is written nowhere, and not known before the listing is."""
    ids = "ids: {dataset: photos, random: {num_classes: [3], within: mine/leaf}}"
    text = re.sub(r"(?<=dataset: photos, ).*", f"hierarchy: [leaf], classes: {{num: 2}}}}, {ids}}}", PHOTOS)
    found = photos(tmp_path / "none", text=text).labels
    assert {name: space.is_declared for name, space in found.items()} == {"mine/leaf": False, "ids/3": False}
    text = text.replace("{num: 2}", "{num: 2}, num_classes: [2]")
    assert photos(tmp_path / "none", text=text).labels["mine/leaf"].is_declared


def test_labels_of_a_declared_listing_have_the_keys_of_the_listed_source(tmp_path: Path) -> None:
    declared = keys_of(photos(table_in(tmp_path)))
    assert declared == keys_of(photos(table_in(tmp_path), is_listed=True))
    corrected = keys_of(photos(table_in(tmp_path, family="cats cats cats dogs", genus="lynx lynx lion wolf")))
    unchanged = {name for name in declared if declared[name] == corrected[name]}
    assert unchanged == {"dataset/photos/listing", "dataset/photos", "index/photos"}


def test_labels_that_leave_out_classes_say_how_many_samples_they_have(tmp_path: Path) -> None:
    table, some = table_in(tmp_path), ", classes: {names: [c1, c2, c3]}"
    assert {space.num_labelled for space in photos(table, is_listed=True).labels.values()} == {None}
    assert {space.num_labelled for space in photos(table, some, is_listed=True).labels.values()} == {600}
    assert {space.num_labelled for space in photos(table, some).labels.values()} == {0}


@pytest.mark.parametrize(("names", "num_labelled"), [("[c0, c1]", 794), ("[c1, c2]", 7)])
def test_labels_that_leave_out_counted_classes_need_a_batch_of_samples(names: str, num_labelled: int) -> None:
    counts = {"train": (790, 4, 3, 3)}
    described = DatasetFile(
        splits=SHARDS, num_classes=4, levels={}, classes_sha256="c" * 64, digest="d" * 64, class_counts=counts
    )
    rows = [{"class": number, "name": f"c{number}"} for number in range(4)]
    survey = Survey(described=described, class_table=rows, classes_uri="file:///c.json", classes_sha256="c" * 64)
    text = f"""\
version: 1
name: photos
datasets: {{photos: {{from: file:///photos}}}}
labels: {{few: {{dataset: photos, hierarchy: [leaf], classes: {{names: {names}}}}}}}
"""
    tree = parse_tree(text + TAIL, "sweep.yaml")
    spec = validate(SweepSpec, tree.value, tree)
    with (
        nullcontext()
        if num_labelled > 32
        else pytest.raises(SpecError, match="batch_size 32 is more than the 7 training samples of 'few/leaf'")
    ):
        sources = LabelSources(count=count_here)
        sweep = resolve_sweep(spec, tree, shipped_recipes(), {"photos": survey}, labels=sources)
        assert sweep.labels["few/leaf"].num_labelled == num_labelled


def test_labels_of_a_declared_listing_need_a_nested_table(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="level 'family' is not a function of 'genus': 1 of its nodes"):
        photos(table_in(tmp_path, family="cats dogs dogs dogs"))
    with pytest.raises(SpecError, match=r"mine\.taxonomy\.levels.*the class table .*nowhere.* cannot be read"):
        photos(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [{}, {"group": "a"}, {"group": "b"}],
            r"class 0 \('c0'\) has no value at level 'group'.*count from 0, without",
        ),
        ([{"group": " "}, {"group": "a"}, {"group": "b"}], "class 0 .* has no value at level 'group'; complete"),
        ([{"group": ""}] * 3, "'group' is not a level of data set 'photos'"),
        ([{"a group": "a"}, {"a group": "a"}, {"a group": "b"}], "'a group' cannot be in the name of a job: .*column"),
    ],
)
def test_labels_level_without_a_value_for_each_class_or_a_name_is_refused_when_the_sweep_is_loaded(
    cells: list[dict[str, str]], message: str
) -> None:
    level = next(iter(cells[-1]))
    classes = [{"class": number, "name": f"c{number}", **cell} for number, cell in enumerate(cells)]
    listed = {"num_samples": {"train": 800, "val": 72}, "num_classes": 3, "levels": level_counts(classes)}
    survey = Survey(listed={"listing": LISTING, "multi_label": False, **listed, "classes": classes})
    text = f"""\
version: 1
name: photos
datasets: {{photos: {{convert: {{format: csv, source: /photos, level_columns: [{level}]}}}}}}
labels: {{mine: {{dataset: photos, hierarchy: [{level}]}}}}
"""
    tree = parse_tree(text + TAIL, "sweep.yaml")
    with pytest.raises(SpecError, match=rf"sweep.yaml:4:\d+: labels\.mine\.hierarchy\[0\]: .*{message}"):
        resolve_sweep(validate(SweepSpec, tree.value, tree), tree, shipped_recipes(), {"photos": survey})


def test_labels_level_that_no_job_can_be_named_after_is_not_suggested() -> None:
    rows = [{"class": leaf, "name": f"c{leaf}", "Super class": f"s{leaf // 2}"} for leaf in range(4)]
    listed = {"num_samples": {"train": 800, "val": 72}, "num_classes": 4, "levels": level_counts(rows)}
    survey = Survey(listed={"listing": LISTING, "multi_label": False, **listed, "classes": rows})
    text = (
        "version: 1\nname: x\ndatasets: {photos: {convert: {format: csv, source: /x, level_columns: [Super class]}}}\n"
    )
    tree = parse_tree(f"{text}labels: {{a: {{dataset: photos, hierarchy: [Superclass]}}}}\n{TAIL}", "sweep.yaml")
    with pytest.raises(SpecError) as refused:
        resolve_sweep(validate(SweepSpec, tree.value, tree), tree, shipped_recipes(), {"photos": survey})
    hint = "known: leaf ('leaf': its classes themselves); columns to rename before they can be levels: 'Super class'"
    assert f"'Superclass' is not a level of data set 'photos': {hint}" in str(refused.value)


# -------------------------------------------------------------------------------------------------- training subsets

SUBSETS = (
    TAIL
    + """\
  subset: {fraction: 0.5}
transfer:
  - {name: few, target: levels/depth1, protocol: probe, recipe: {base: default-probe, batch_size: 32},
     subset: {num_samples: 100, seed: 3}}
  - {name: all, target: levels/depth1, protocol: probe, recipe: {base: default-probe, batch_size: 32},
     subset: {fraction: 1.0}}
"""
)


def test_subset_is_identity_where_it_is_given() -> None:
    plan = build_plan(parse("", SUBSETS), store_uri="file:///store")
    subsets = {
        job.name.split("/")[1]: job.identity["parameters"].get("subset")
        for job in plan.jobs
        if job.kind is JobKind.PROBE
    }
    assert subsets == {"few": {"num_samples": 100, "seed": 3}, "all": None}
    whole = build_plan(parse("", TAIL), store_uri="file:///store")
    keys = [{job.name: job.key for job in one.jobs if job.kind is JobKind.PRETRAIN} for one in (plan, whole)]
    assert keys[0].keys() == keys[1].keys()
    assert not set(keys[0].values()) & set(keys[1].values())
    assert all("subset" not in job.identity["parameters"] for job in whole.jobs)


# ------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def sweep_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    file = tmp_path / "sweep.yaml"
    entries = "  two: {dataset: tree, binary: [0, 6]}\n  random: {dataset: tree, random: {num_classes: [5]}}"
    file.write_text(HEAD + entries + TAIL + "transfer:\n  - {name: t, target: levels/depth1, protocol: probe}\n")
    return file


def test_labels_show_prints_each_space_and_its_nesting(sweep_file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "sizes.png"
    command = ["labels", "show", str(sweep_file), "-o", "json", "--tree", "levels", "--plot", str(plot)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (looked,) = json.loads(result.stdout)
    spaces = {space["name"]: space for space in looked["spaces"]}
    assert looked["counted"] == "leaf classes"
    assert spaces["levels/depth2"]["nesting"] == {"levels/depth1": {"refines": True, "mixing": 0.0}}
    assert spaces["two"]["nesting"] == {"levels/depth1": {"refines": False, "mixing": 1.0}}
    assert (spaces["two"]["min"], spaces["two"]["max"], spaces["two"]["num_empty"]) == (2, 10, 0)
    assert spaces["levels/depth2"]["entropy_bits"] == 2.0
    assert "min" not in spaces["random/5"]
    assert [level["level"] for level in spaces["levels/depth3"]["parents"]] == ["depth1", "depth2"]
    assert spaces["levels/depth2"]["parents"][0]["parents"] == [0, 0, 1, 1]
    assert len(looked["tree"]) == 12
    assert plot.stat().st_size > 1000


def test_labels_show_reads_each_entry_by_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    names = [f"{top}.{middle}.{leaf}" for top in "01" for middle in "01" for leaf in "012"]
    entries = ""
    for table, position in (("a", 0), ("b", 4)):
        rows = "".join(f"{name},{name[position]}\n" for name in names)
        (tmp_path / f"{table}.csv").write_text(f"name,level\n{rows}")
        entries += f"  {table}: {{dataset: tree, taxonomy: {{table: {table}.csv, levels: [level]}}}}\n"
    (tmp_path / "sweep.yaml").write_text(HEAD + entries + TAIL)
    command = ["labels", "show", str(tmp_path / "sweep.yaml"), "--space", "[ab]/*", "-o", "json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (looked,) = json.loads(result.stdout)
    assert {space["name"]: space["num_classes"] for space in looked["spaces"]} == {"a/level": 2, "b/level": 3}


def _described_folder(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "classes.json").write_text(json.dumps(rows))
    described = DatasetFile(
        splits={}, num_classes=len(rows), levels=level_counts(rows), classes_sha256="", digest=dataset_digest({})
    )
    (folder / "dataset.json").write_bytes(described.to_bytes())


def test_labels_show_of_a_folder_leaves_incomplete_levels_out(tmp_path: Path) -> None:
    rows = [
        {"class": leaf, "name": f"c{leaf}", "kind": f"k{leaf // 2}", "note": f"{leaf}" if leaf else ""}
        for leaf in range(4)
    ]
    _described_folder(tmp_path, rows)
    result = CliRunner().invoke(app, ["labels", "show", str(tmp_path), "-o", "json"])
    (looked,) = json.loads(result.stdout)
    assert [space["name"] for space in looked["spaces"]] == ["kind"]
    assert "note: a level is left out: class 0 ('c0') has no value at level 'note'" in result.stderr
    assert "there is no label space" not in result.stderr


def test_labels_show_of_a_folder_without_a_complete_level_says_why_nothing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "ask_labels", lambda _, request: {"spaces": request["spaces"]})
    _described_folder(tmp_path, [{"class": leaf, "name": f"c{leaf}", "kind": "k" * leaf} for leaf in range(4)])
    result = CliRunner().invoke(app, ["labels", "show", str(tmp_path), "-o", "json"])
    assert json.loads(result.stdout)[0]["spaces"] == []
    assert "note: there is no label space to show: classes.json has no level at which every class" in result.stderr
    assert f"orchestrator labels hierarchy {tmp_path.as_uri()} wordnet" in result.stderr


def test_labels_show_of_a_folder_compares_with_what_it_has_and_takes_nothing_of_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "ask_labels", lambda _, request: {"spaces": [], "asked": request["targets"]})
    rows = [{"class": leaf, "name": f"c{leaf}", "kind": f"k{leaf // 2}", "two": leaf % 2} for leaf in range(4)]
    _described_folder(tmp_path, rows)
    command = ["labels", "show", str(tmp_path), "-o", "json"]
    for options, targets in (([], ["kind"]), (["--target", "two"], ["two"])):
        assert json.loads(CliRunner().invoke(app, [*command, *options]).stdout)[0]["asked"] == targets
    for option, why in (
        (["--target", "kin"], "has the name of --target 'kin'"),
        (["--dataset", "tree"], "--dataset and --scale are for sweeps"),
        (["--scale", "tiny"], "--dataset and --scale are for sweeps"),
    ):
        result = CliRunner().invoke(app, [*command, *option])
        assert (result.exit_code, result.stdout) == (2, "")
        assert why in " ".join(result.stderr.split())


def test_labels_show_draws_tables_and_trees() -> None:
    paths = [{"path": [f"node{number // 20}", f"leaf{number}"], "num": 2} for number in range(40)]
    space = {"name": "a", "num_classes": 40, "min": 2, "median": 2.0, "max": 2, "num_empty": 0, "entropy_bits": 5.3219}
    nesting = {"coarse": {"refines": False, "mixing": 0.125}}
    spaces = [{**space, "nesting": nesting}, {"name": "random/5", "num_classes": 5}]
    console = Console(width=120, record=True, file=StringIO())
    console.print(labels._table({"dataset": "tree", "counted": "samples", "spaces": spaces}))
    console.print(labels._drawn("levels", paths, {"node0": "animal"}))
    text = console.export_text()
    for shown in (
        "5.32",
        "12.5 %",
        "mixes coarse",
        "levels (80)",
        "node1 (40)",
        "node0 animal (40)",
        "leaf3 (2)",
        "... 8 more",
    ):
        assert shown in text
    assert "leaf15" not in text


def test_labels_show_of_chosen_spaces_shows_and_plots_these_alone(tmp_path: Path) -> None:
    picture = tmp_path / "sizes.svg"
    chosen = ["--space", "levels/depth[12]", "--plot", str(picture)]
    found = json.loads(CliRunner().invoke(app, ["labels", "show", "quickstart", *chosen, "-o", "json"]).output)
    assert [space["name"] for looked in found for space in looked["spaces"]] == ["levels/depth1", "levels/depth2"]
    assert picture.is_file()


def test_labels_show_plots_each_data_set_to_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(_: object, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["plot"])
        return {"spaces": []}

    names = ["tree", "other"]
    monkeypatch.setattr(labels, "_of_sweep", lambda *_: {name: {} for name in names})
    monkeypatch.setattr(labels, "ask_labels", answer)
    command = ["labels", "show", "sweep.yaml", "-o", "json", "--plot", str(tmp_path / "sizes.png")]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert asked == [str(tmp_path / f"sizes-{name}.png") for name in names]
    names.pop()
    CliRunner().invoke(app, command)
    assert asked[2:] == [str(tmp_path / "sizes.png")]
