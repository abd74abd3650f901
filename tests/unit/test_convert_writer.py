"""The writer behind the converters: the same bytes always, and no work lost."""

import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import DatasetFile
from tests.conversions import convert, fill, photo, read_back
from tests.data_jobs import encoded
from workloads.commands.data import CONVERTERS
from workloads.convert import write
from workloads.convert.items import WHOLE_FILE, Conversion, ConvertRequest, SourceItem, StoredItems, WriteRequest
from workloads.convert.listing import list_source
from workloads.convert.write import SourceFiles, shard_rows, write_dataset

PHOTO = encoded("JPEG", size=(12, 10))


def conversion_of(folder: Path, num_images: int = 30) -> Conversion:
    files = {f"c{n % 3}/i{n}.jpg": photo(n) for n in range(num_images)}
    return CONVERTERS["imagefolder"](ConvertRequest(source=fill(folder, files)))


def request_for(out: Path, **fields: Any) -> WriteRequest:
    return WriteRequest(**{"destination_uri": out.as_uri(), "shard_bytes": 20_000, **fields})


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_writer_same_source_elsewhere_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_dataset(conversion_of(tmp_path / name), request_for(tmp_path / f"out-{name}"), lambda _: None)
    assert contents(tmp_path / "out-a") == contents(tmp_path / "out-b")
    assert len(contents(tmp_path / "out-a")) > 4


@pytest.mark.slow
def test_writer_number_of_processes_changes_no_byte(tmp_path: Path) -> None:
    conversion = conversion_of(tmp_path / "in")
    for name, number in (("a", 1), ("b", 2)):
        write_dataset(conversion, request_for(tmp_path / name, num_processes=number), lambda _: None)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not [path for path in (tmp_path / "a").iterdir() if path.name.startswith(".")]


def test_writer_shards_stay_below_their_size_and_hold_every_image_once(tmp_path: Path) -> None:
    conversion = conversion_of(tmp_path / "in")
    dataset = write_dataset(conversion, request_for(tmp_path / "out"), lambda _: None)
    assert len(read_back(dataset, "train", tmp_path / "out")) == dataset.num_samples("train") == 30
    assert max(entry.size_bytes for entry in dataset.splits["train"]) <= 20_000 + 10_240  # tar pads to 20 blocks


def test_writer_shuffled_order_follows_the_seed_and_mixes_classes(tmp_path: Path) -> None:
    table = conversion_of(tmp_path / "in").splits["train"]
    orders = [
        [row for shard in shard_rows(table, request_for(tmp_path, **options), "train") for row in shard]
        for options in ({"seed": 0}, {"seed": 0}, {"seed": 1}, {"shuffle": False})
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == list(range(30))
    assert len({table.leaves(row) for row in orders[0][:10]}) == 3


class KilledError(Exception):
    pass


def test_writer_killed_at_any_shard_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = conversion_of(tmp_path / "in")
    write_dataset(conversion, request_for(tmp_path / "whole"), lambda _: None)
    num_shards, written = len(list((tmp_path / "whole").glob("*.tar"))), []
    true_write = write.write_one

    def counted(task: write.ShardTask) -> Any:
        written.append(task.name)
        return true_write(task)

    monkeypatch.setattr(write, "write_one", counted)
    for survivors in range(num_shards):

        def dies(_: object, limit: int = survivors + 1) -> None:
            if len(list((tmp_path / "out").glob("*.tar"))) >= limit:
                raise KilledError

        with pytest.raises(KilledError):
            write_dataset(conversion, request_for(tmp_path / "out"), dies)
        assert not (tmp_path / "out" / "dataset.json").exists()
    write_dataset(conversion, request_for(tmp_path / "out"), lambda _: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(written) == sorted(set(written))  # no shard was written twice


def test_writer_shard_lost_after_its_receipt_is_written_again(tmp_path: Path) -> None:
    conversion, out = conversion_of(tmp_path / "in"), tmp_path / "out"

    def dies(_: object) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        write_dataset(conversion, request_for(out), dies)
    (out / "train-000000.tar").write_bytes(b"half")
    write_dataset(conversion, request_for(out), lambda _: None)
    assert len(read_back(DatasetFile.from_bytes((out / "dataset.json").read_bytes(), ""), "train", out)) == 30


def test_writer_takes_no_shard_for_its_own_that_another_seed_wrote_since(tmp_path: Path) -> None:
    conversion, out = conversion_of(tmp_path / "in"), fill(tmp_path / "out", {"conversion/notes.txt": b"mine"})

    def dies(_: object) -> None:
        raise KilledError

    for seed in (0, 1):
        with pytest.raises(KilledError):
            write_dataset(conversion, request_for(out, seed=seed), dies)
    dataset = write_dataset(conversion, request_for(out, seed=0), lambda _: None)
    assert len(read_back(dataset, "train", out)) == 30  # each shard as dataset.json has its sha256
    assert [path.name for path in (out / "conversion").rglob("*") if path.is_file()] == ["notes.txt"]


def test_writer_finished_data_set_is_left_alone_and_another_is_refused(tmp_path: Path) -> None:
    conversion, out = conversion_of(tmp_path / "in"), tmp_path / "out"
    first = write_dataset(conversion, request_for(out), lambda _: None)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert write_dataset(conversion, request_for(out), lambda _: None) == first
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    with pytest.raises(UserError, match="holds another data set"):
        write_dataset(conversion, request_for(out, seed=1), lambda _: None)


def test_writer_source_that_changed_after_listing_is_refused(tmp_path: Path) -> None:
    conversion = conversion_of(tmp_path / "in")
    (tmp_path / "in/c0/i0.jpg").write_bytes(b"shorter")
    with pytest.raises(UserError, match=r"c0/i0\.jpg \(c0/i0\) has 7 bytes"):
        write_dataset(conversion, request_for(tmp_path / "out"), lambda _: None)


@pytest.mark.parametrize("offset_bytes", [WHOLE_FILE, 512])
def test_writer_image_that_is_a_pipe_is_refused_at_once(offset_bytes: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jpg")
    item = SourceItem(
        key="x", path=str(tmp_path / "x.jpg"), offset_bytes=offset_bytes, length_bytes=10, extension="jpg", leaves=(0,)
    )
    with pytest.raises(UserError, match=r"x.jpg cannot be read: it is a named pipe"), SourceFiles() as files:
        files.read(item)


def test_writer_images_that_share_a_key_are_refused(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"c/a.b.jpg": PHOTO, "c/a_b.png": encoded(), "d/x.jpg": PHOTO})
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    with pytest.raises(UserError, match="would both have the key 'c/a_b'"):
        write_dataset(conversion, request_for(tmp_path / "out"), lambda _: None)


def test_images_that_share_a_key_are_refused_as_soon_as_a_source_is_listed(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"c/x.jpg": PHOTO, "c/x.png": encoded(), "d/x.jpg": PHOTO})
    with pytest.raises(UserError, match=r"'c/x\.jpg' and 'c/x\.png' of split 'train' would both have the key 'c/x'"):
        list_source({"format": "imagefolder", "source": str(source)})


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("猫/1.jpg", "犬/1.jpg"), {"猫/1", "犬/1"}),
        (("Bär/1.jpg", "cat/1.jpg"), {"B_r/1", "cat/1"}),  # as earlier releases wrote them
    ],
)
def test_writer_keeps_letters_where_they_are_all_that_tells_keys_apart(
    tmp_path: Path, names: tuple[str, str], keys: set[str]
) -> None:
    source = fill(tmp_path / "in", {name: photo(number) for number, name in enumerate(names)})
    _, found = convert("imagefolder", source, tmp_path / "out")
    assert set(found["train"]) == keys
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    table = conversion.splits["train"]
    table.check_keys("train")
    stored = StoredItems(table.columns(), table.containers)
    assert {stored.item(row).key for row in range(2)} == keys


def test_writer_long_names_are_kept(tmp_path: Path) -> None:
    folders = "/".join(["a_folder_name_of_some_length"] * 9)
    source = fill(tmp_path / "in", {f"{folders}/1.jpg": PHOTO, "b/2.jpg": PHOTO})
    _, found = convert("imagefolder", source, tmp_path / "out")
    assert f"{folders}/1" in found["train"]
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        assert f"{folders}/1.jpg" in tar.getnames()


def test_conversion_fingerprint_sees_options_and_labels(tmp_path: Path) -> None:
    conversion = conversion_of(tmp_path / "in")
    relabelled = replace(conversion, classes=[{**row, "name": "x"} for row in conversion.classes])
    requests = [request_for(tmp_path / "o"), request_for(tmp_path / "o", shard_bytes=30_000)]
    found = {
        write._fingerprint(one, request)["fingerprint"] for one in (conversion, relabelled) for request in requests
    }
    assert len(found) == 4
