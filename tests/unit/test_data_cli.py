"""``orchestrator data``: the commands, and the seam between the two planes."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.commands import data
from orchestrator.cli.commands.data import bad_table, dataset_tables, samples_table
from orchestrator.core.data_plane import Question, answer
from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import read_dataset_file
from tests.data_jobs import Member, encoded, tar_of
from workloads.commands.data import ShardInputRequest, open_shard_input

CLASSES = [{"class": leaf, "name": name, "kind": name[0]} for leaf, name in enumerate(("ant", "ape", "owl"))]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "classes.json").write_text(json.dumps(CLASSES))
    for split, count in (("train", 3), ("val", 1)):
        for shard in range(count):
            members: list[Member] = []
            for row in range(6):
                members += [
                    (f"{split}{shard}{row}.jpg", encoded("JPEG", seed=row)),
                    (f"{split}{shard}{row}.cls", b"%d" % (row % 2)),
                ]
            (folder / f"{split}-{shard:06d}.tar").write_bytes(tar_of(members))
    return folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the data plane's side without a new interpreter."""

    def run(question: Question[Any, Any], request: object) -> dict[str, Any]:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
        with redirect_stdout(io.StringIO()) as stdout:
            code = answer(question.name)
        reply: dict[str, Any] = json.loads(stdout.getvalue())
        if code:
            typer.echo(f"error: {reply['error']}", err=True)
            raise typer.Exit(code)
        found: dict[str, Any] = reply["answer"]
        return found

    monkeypatch.setattr(data, "_run", run)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", *arguments])
    return result.exit_code, result.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    code, stdout = invoke(*arguments, "-o", "json")
    assert code == 0, stdout
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_data_index_prints_what_a_sweep_needs(shards: Path, in_process: None) -> None:
    pattern = f"{shards}/train-{{000000..000002}}.tar"
    found = as_json("index", pattern, "--classes", str(shards / "classes.json"), "-j", "1")
    assert found["splits"]["train"]["num_samples"] == 18
    assert found["entry"] == {
        "shards": {"train": f"file://{pattern}"},
        "classes": f"{shards.as_uri()}/classes.json",
        "num_train": 18,
        "digest": found["digest"],
    }


def test_data_index_warns_of_empty_shards_and_of_classes_that_lie_together(tmp_path: Path, in_process: None) -> None:
    image = encoded()
    for shard in range(80):
        sample = {"png": image, "cls": b"%d" % shard}
        members = [(f"{shard}r{row}.{end}", body) for row in range(16) for end, body in sample.items()]
        (tmp_path / f"train-{shard:06d}.tar").write_bytes(tar_of(members))
    (tmp_path / "train-000080.tar").write_bytes(tar_of([]))
    result = CliRunner().invoke(app, ["data", "index", str(tmp_path), "--num-classes", "80", "-j", "1"])
    assert result.exit_code == 0
    assert "warning: train-000080.tar holds no samples" in result.stderr
    assert "warning: the shards are sorted by class: with shuffle_block_shards: 16, a batch of 256" in result.stderr
    assert "`shuffle_chunk_samples: " in result.stderr


def test_data_index_of_a_folder_with_splits_prints_what_names_each_of_them(shards: Path, in_process: None) -> None:
    found = as_json("index", str(shards), "--classes", str(shards / "classes.json"), "-j", "1")
    entry = found["entry"]
    assert entry["shards"] == {
        "train": f"{shards.as_uri()}/train-{{000000..000002}}.tar",
        "val": [f"{shards.as_uri()}/val-000000.tar"],
    }
    assert (entry["num_train"], entry["num_val"]) == (18, 6)
    splits = [
        f"--split={split}={place if isinstance(place, str) else place[0]}" for split, place in entry["shards"].items()
    ]
    again = as_json("index", *splits, "--classes", str(shards / "classes.json"), "-j", "1")
    assert {**again["entry"], "shards": entry["shards"]} == entry


def test_data_index_of_shards_whose_names_tell_no_split_are_for_training(shards: Path, in_process: None) -> None:
    for number, path in enumerate(sorted(shards.glob("*.tar"))):
        path.rename(path.with_name(f"photos-{number:06d}.tar"))
    found = as_json("index", str(shards), "--num-classes", "3", "-j", "1")
    assert found["entry"]["shards"] == {"train": f"{shards.as_uri()}/"}
    assert found["entry"]["num_train"] == 24


def splits_of(folder: Path, *names: str) -> dict[str, list[str]]:
    for name in names:
        (folder / name).touch()
    found = open_shard_input(ShardInputRequest(place=str(folder), splits={}, num_classes=2)).splits
    return {split: [shard.name for shard in listed] for split, listed in found.items()}


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("train_0000.tar", "val_0000.tar"),
        ("train-00000-of-00002.tar", "validation-00000-of-00001.tar"),
        ("train-0.tar", "valid-0.tar"),
    ],
)
def test_data_index_finds_the_splits_in_the_names_that_others_give_to_shards(
    tmp_path: Path, train: str, val: str
) -> None:
    assert splits_of(tmp_path, train, val) == {"train": [train], "val": [val]}


@pytest.mark.parametrize("names", [("data.tar", "data2.tar"), ("7f3a2c91.tar", "7f3a2c9e.tar"), ("cifar10.tar",)])
def test_data_index_takes_a_digit_within_a_name_for_no_split(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert splits_of(tmp_path, *names) == {"train": [*names]}


def test_data_index_of_several_names_without_training_data_is_refused_with_the_remedy(tmp_path: Path) -> None:
    names = ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar")
    message = "imagenet1k-train, imagenet1k-validation; say it, as with --split train=PATTERN --split val=PATTERN"
    with pytest.raises(UserError, match=f"do not say which are the training data: {message}"):
        splits_of(tmp_path, *names)


def test_data_index_write_describes_the_folder_for_stats_verify_and_sample(
    shards: Path, in_process: None, tmp_path: Path
) -> None:
    found = as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")
    assert read_dataset_file(shards.as_uri()).digest == found["digest"]
    stats = as_json("stats", str(shards))
    assert stats["digest"] == found["digest"]
    assert stats["samples_per_class"]["train"]["leaf"] == {
        "num_nodes": 3,
        "min": 0,
        "median": 9.0,
        "max": 9,
        "empty": 1,
    }
    assert stats["samples_per_class"]["train"]["kind"] == {
        "num_nodes": 2,
        "min": 0,
        "median": 9.0,
        "max": 18,
        "empty": 1,
    }
    assert as_json("verify", str(shards), "--decode", "-j", "1")["is_same"] is True
    rows = as_json("sample", str(shards), "-n", "2", "--out", str(tmp_path / "out"))["samples"]
    assert [(tmp_path / "out" / row["file"]).is_file() for row in rows] == [True, True]
    (row,) = as_json("sample", str(shards), "--of", "val", "--key", "val03")["samples"]
    assert (row["classes"], row["names"], row["width"]) == ([1], ["ape"], 16)


def test_data_index_of_a_described_folder_refuses_what_the_description_lacks(shards: Path, in_process: None) -> None:
    as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")

    def refused(*flags: str) -> str:
        result = CliRunner().invoke(app, ["data", "index", str(shards), "-j", "1", *flags])
        assert result.exit_code == 1
        return result.stderr

    assert "says that each sample has one class, against --multi-label; remove dataset.json" in refused("--multi-label")
    assert "--num-classes is 77, but file://" in refused("--num-classes", "77")
    (shards.parent / "other.json").write_text(json.dumps(CLASSES[:2]))
    entry = as_json("index", str(shards), "--classes", str(shards.parent / "other.json"), "-j", "1")["entry"]
    assert entry == {"from": shards.as_uri(), "classes": f"{shards.parent.as_uri()}/other.json"}
    (shards / "train-000003.tar").write_bytes((shards / "train-000002.tar").read_bytes())
    assert "dataset.json does not list 1 shards beside it: train-000003.tar; move them away, or" in refused("--write")


def test_data_index_takes_the_class_table_in_the_folder_of_the_shards(shards: Path, in_process: None) -> None:
    assert as_json("index", str(shards), "-j", "1")["entry"]["classes"] == f"{shards.as_uri()}/classes.json"
    result = CliRunner().invoke(app, ["data", "index", str(shards), "-j", "1", "--num-classes", "77"])
    assert "--num-classes is 77, but file://" in result.stderr


def test_data_index_of_a_shard_in_two_splits_is_refused(shards: Path, in_process: None) -> None:
    splits = ("--split", f"train={shards}/", "--split", f"val={shards}/val-000000.tar")
    result = CliRunner().invoke(app, ["data", "index", *splits, "--num-classes", "3", "-j", "1"])
    assert result.exit_code == 1
    assert f"--split val: val-000000.tar in {shards.as_uri()} is a shard of split 'train', too: " in result.stderr


def test_data_index_of_a_copy_of_a_small_shard_in_two_splits_is_refused(shards: Path, in_process: None) -> None:
    """A small shard may be an empty one, of which there are many; what it holds is known when it is read."""
    small = tar_of([("a.png", encoded()), ("a.cls", b"0")])
    for name in ("train-000009.tar", "val-000009.tar"):
        (shards / name).write_bytes(small)
    result = CliRunner().invoke(app, ["data", "index", str(shards), "-j", "1"])
    assert result.exit_code == 1
    assert "val-000009.tar of split 'val' is train-000009.tar of split 'train', too" in result.stderr


def test_data_stats_count_no_class_at_a_level_where_it_has_no_value(shards: Path, in_process: None) -> None:
    rows = [{**CLASSES[0], "note": None}, {**CLASSES[1], "kind": None}, {**CLASSES[2], "kind": "", "note": ""}]
    (shards / "classes.json").write_text(json.dumps(rows))
    as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")
    sizes = as_json("stats", str(shards))["samples_per_class"]["train"]
    assert sizes["kind"] == {"num_nodes": 1, "min": 9, "median": 9.0, "max": 9, "empty": 0}
    assert list(sizes) == ["kind", "leaf"]


@pytest.mark.parametrize("damage", ["byte", "image"])
def test_data_verify_damaged_shard_fails(shards: Path, in_process: None, damage: str) -> None:
    as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")
    path = shards / "train-000001.tar"
    content = bytearray(path.read_bytes())
    content[-1 if damage == "byte" else 600] ^= 1
    path.write_bytes(content)
    code, _ = invoke("verify", str(shards), "-j", "1")
    assert code == 1


def test_data_verify_of_another_class_table_fails(shards: Path, in_process: None) -> None:
    as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")
    (shards / "classes.json").write_text(json.dumps([{**row, "kind": "other"} for row in CLASSES]))
    result = CliRunner().invoke(app, ["data", "verify", str(shards), "-j", "1"])
    assert result.exit_code == 1
    assert "the class table is not the one that the shards were written with" in result.output


def test_data_index_bad_samples_are_listed_and_budgeted(shards: Path, in_process: None) -> None:
    (shards / "train-000000.tar").write_bytes(tar_of([("x.jpg", b""), ("x.cls", b"0")]))
    base = ("index", str(shards), "--classes", str(shards / "classes.json"), "-j", "1")
    assert invoke(*base)[0] == 1
    assert invoke(*base, "--policy", "replace", "--budget", "0.05")[0] == 1
    found = as_json(*base, "--policy", "replace", "--budget", "0.1")
    assert found["bad_samples"]["train"]["empty"]["first"] == ["train-000000.tar:x its image has zero bytes"]
    assert found["entry"]["bad_samples"] == {"policy": "replace", "budget": 0.1}


def test_data_index_prints_yaml_to_paste_and_what_it_lacks(shards: Path, in_process: None) -> None:
    pattern = f"{shards}/train-{{000000..000002}}.tar"
    result = CliRunner().invoke(app, ["data", "index", pattern, "--num-classes", "3", "-j", "1"])
    assert "--split val=..." in result.stderr
    printed = result.stdout[result.stdout.index("datasets:") :]
    entry = as_json("index", pattern, "--num-classes", "3", "-j", "1")["entry"]
    assert yaml.safe_load(printed) == {"datasets": {"my-data": entry}}
    assert len(printed.splitlines()) == 7


def test_data_index_write_leaves_nothing_but_its_file(shards: Path, in_process: None) -> None:
    before = {path.name for path in shards.iterdir()}
    as_json("index", str(shards), "--classes", str(shards / "classes.json"), "--write", "-j", "1")
    assert {path.name for path in shards.iterdir()} - before == {"dataset.json"}


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_data_commands_of_a_folder_without_a_description_say_how_to_make_one(
    tmp_path: Path, in_process: None, command: str
) -> None:
    result = CliRunner().invoke(app, ["data", command, str(tmp_path)])
    assert result.exit_code == 102
    assert f"orchestrator data index {tmp_path} --num-classes N --write" in result.stderr
    (tmp_path / "classes.json").write_text(json.dumps(CLASSES))
    result = CliRunner().invoke(app, ["data", command, str(tmp_path)])
    assert f"orchestrator data index {tmp_path} --write" in result.stderr


@pytest.mark.parametrize("command", ["stats", "verify", "index", "sample"])
def test_data_commands_of_a_mistyped_folder_say_that_it_does_not_exist(
    tmp_path: Path, in_process: None, command: str
) -> None:
    result = CliRunner().invoke(app, ["data", command, f"{tmp_path}/my shards"])
    assert result.exit_code == 102
    assert f"{tmp_path}/my shards does not exist; check the path" in result.stderr


@pytest.mark.parametrize("command", ["stats", "verify"])
@pytest.mark.parametrize("name", ["train-{000000..000002}.tar", "train-000000.tar"])
def test_data_commands_of_a_described_folder_ask_for_it_where_shards_are_named(
    shards: Path, in_process: None, command: str, name: str
) -> None:
    as_json("index", str(shards), "--write", "-j", "1")
    result = CliRunner().invoke(app, ["data", command, f"{shards}/{name}"])
    assert result.exit_code == 1
    assert f"{name} names shards, and this command takes their folder" in result.stderr
    assert f"give {shards.as_uri()};" in result.stderr


def test_data_index_without_classes_says_how_to_name_them(shards: Path, in_process: None) -> None:
    (shards / "classes.json").unlink()
    result = CliRunner().invoke(app, ["data", "index", str(shards)])
    assert result.exit_code == 1
    assert "--num-classes" in result.stderr


def test_data_pipe_is_refused(in_process: None, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    result = CliRunner().invoke(app, ["data", "index", f"pipe:touch {trap}", "--num-classes", "2"])
    assert result.exit_code == 1
    assert "would run a program" in result.stderr
    assert not trap.exists()


def test_data_tables_show_every_number() -> None:
    split = {"num_shards": 2, "num_samples": 1234, "size_bytes": 2048}
    sizes = {"num_nodes": 2, "min": 1, "median": 1.5, "max": 2, "empty": 0}
    found = {"uri": "u", "splits": {"train": split}, "levels": {"kind": 2}, "num_classes": 3, "multi_label": False}
    tables = list(dataset_tables({**found, "samples_per_class": {"train": {"kind": sizes}}}))
    tables.append(bad_table({"train": {"empty": {"count": 7, "first": ["s:x its image"]}}}))
    row = {"shard": "s", "key": "k", "classes": [1], "names": ["ape"], "width": 4, "height": 5, "length_bytes": 9}
    tables.append(samples_table([row]))
    console = Console(width=200, record=True)
    for table in tables:
        console.print(table)
    text = console.export_text()
    for expected in ("1,234", "2.0 KiB", "kind 2", "1.5", "7", "s:x its image", "4x5", "ape"):
        assert expected in text


@pytest.mark.ci
def test_data_shard_runs_the_data_plane_as_a_process_of_its_own(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "b/2.jpg"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded("JPEG"))
    command = [sys.executable, "-m", "orchestrator.cli", "data", "shard", "imagefolder"]
    command += [str(tmp_path / "in"), str(tmp_path / "out"), "-j", "1", "-o", "json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(result.stdout)
    assert found["splits"]["train"]["num_samples"] == 2
    assert (tmp_path / "out" / "train-000000.tar").is_file()
    missing = subprocess.run(
        [*command[:6], "/nowhere", str(tmp_path / "x")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1
    assert missing.stderr == "error: /nowhere does not exist; name the folder or file to convert\n"
