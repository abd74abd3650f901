"""Folders that somebody else fills: links, pipes and files that are no images pack nothing that was not meant."""

from __future__ import annotations

import json
import logging
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow.parquet import write_table  # type: ignore[import-untyped]

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.datasets import ConversionSpec, source_arguments
from orchestrator.sweepfile.survey import ask_listing
from tests.conversions import convert, fill, photo
from tests.data_jobs import encoded, tar_of
from tests.unit.test_convert import svhn
from workloads.commands.data import CONVERTERS, shard
from workloads.convert.items import ConvertRequest, WriteRequest
from workloads.convert.listing import describe_conversion, list_source, listing_digest
from workloads.convert.write import write_dataset
from workloads.data.images import is_image_form
from workloads.data.reasons import Reason
from workloads.data.scan import ClassRule, scan_shard
from workloads.data.scan_splits import file_chunks

WORM = "00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris"
MAPLE = "00007_Plantae_Tracheophyta_Magnoliopsida_Sapindales_Sapindaceae_Acer_x freemanii"
SECRET = b"root:x:0:0:root:/root:/bin/bash\n" * 8


@pytest.fixture
def source(tmp_path: Path) -> Path:
    fill(tmp_path / "outside", {"passwd": SECRET, "private/1.png": encoded(seed=9)})
    return fill(tmp_path / "in", {"train/cat/0.jpg": photo(0), "train/dog/1.jpg": photo(1)})


def listed(source: Path, converter: str = "imagefolder", *, follow_links: bool = False) -> list[str]:
    conversion = CONVERTERS[converter](ConvertRequest(source=source, follow_links=follow_links))
    table = conversion.splits["train"]
    return [table.name(row) for row in range(len(table))]


@pytest.mark.parametrize("converter", ["imagefolder", "imagenet21k"])
@pytest.mark.parametrize("target", ["passwd", "private/1.png"])
def test_link_out_of_the_source_is_refused_unless_links_may_be_followed(
    source: Path, target: str, converter: str
) -> None:
    folder = source / "train/n00000001"
    folder.mkdir()
    (folder / "x.png").symlink_to(source.parent / "outside" / target)
    with pytest.raises(UserError, match=r"x\.png is a link to .*outside of the source; .*--follow-links"):
        listed(source, converter)
    assert "n00000001/x.png" in listed(source, converter, follow_links=True)


def test_linked_folder_out_of_the_source_is_refused_unless_links_may_be_followed(source: Path) -> None:
    (source / "train/owl").symlink_to(source.parent / "outside/private")
    with pytest.raises(UserError, match=r"train/owl is a link to .*--follow-links"):
        listed(source)
    assert listed(source, follow_links=True) == ["cat/0.jpg", "dog/1.jpg", "owl/1.png"]


@pytest.mark.parametrize("name", ["../outside/private/1.png", "{outside}/private/1.png", "train/owl/1.png"])
def test_json_that_names_images_outside_of_the_source_is_refused_unless_links_may_be_followed(
    source: Path, tmp_path: Path, name: str
) -> None:
    (source / "train/owl").symlink_to(source.parent / "outside/private")
    image = {"id": 0, "file_name": name.format(outside=source.parent / "outside")}
    category = {"id": 0, "name": "Bubo bubo"}
    document = {"images": [image], "annotations": [{"image_id": 0, "category_id": 0}], "categories": [category]}
    fill(source, {"train.json": json.dumps(document).encode()})
    with pytest.raises(UserError, match=r"private, which is outside of the source; .*--follow-links"):
        listed(source, "inat2021")
    _, found = convert("inat2021", source, tmp_path / "out", follow_links=True)
    assert [content for _, content in found["train"].values()] == [encoded(seed=9)]


def test_table_may_name_images_by_absolute_paths(source: Path, tmp_path: Path) -> None:
    fill(source, {"train.csv": f"path,label\n{source.parent}/outside/private/1.png,owl\n".encode()})
    _, found = convert("csv", source, tmp_path / "out")
    assert [content for _, content in found["train"].values()] == [encoded(seed=9)]


@pytest.mark.parametrize("label", [[float("nan")], [[None, 1]]])
def test_table_may_not_name_a_class_by_a_missing_label(source: Path, tmp_path: Path, label: list[Any]) -> None:
    write_table(pa.table({"path": ["train/cat/0.jpg"], "label": label}), source / "train.parquet")
    if label == [[None, 1]]:
        _, found = convert("parquet", source, tmp_path / "out")
        assert [leaves for leaves, _ in found["train"].values()] == [(1,)]
        return
    with pytest.raises(UserError, match="a sample has an empty label"):
        listed(source, "parquet")


def test_table_of_numbers_below_zero_names_no_classes(source: Path) -> None:
    fill(source, {"train.csv": b"path,label\ntrain/cat/0.jpg,10\ntrain/dog/1.jpg,-1\n"})
    with pytest.raises(UserError, match="-1 is no class: numbers count classes from 0; remove its rows if"):
        listed(source, "csv")


def test_json_that_names_other_files_than_images_is_refused(source: Path) -> None:
    image = {"id": 0, "file_name": "train/cat/notes.txt"}
    fill(source, {"train.json": json.dumps({"images": [image], "annotations": [], "categories": []}).encode()})
    with pytest.raises(UserError, match=r"names 'train/cat/notes\.txt', which has no extension of an image"):
        listed(source, "inat2021")


def test_links_within_the_source_and_the_source_itself_are_followed(source: Path, tmp_path: Path) -> None:
    (source / "train/owl").symlink_to(source / "train/cat")
    (source / "train/dog/2.jpg").symlink_to("1.jpg")
    (tmp_path / "link").symlink_to(source)
    assert listed(tmp_path / "link") == ["cat/0.jpg", "dog/1.jpg", "dog/2.jpg", "owl/0.jpg"]


@pytest.mark.parametrize("follow_links", [False, True])
def test_links_without_an_end_are_named(source: Path, *, follow_links: bool) -> None:
    (source / "train/cat/again").symlink_to(source / "train")
    with pytest.raises(UserError, match=r"again is a link to a folder that holds it"):
        listed(source, follow_links=follow_links)
    (source / "train/cat/again").unlink()
    (source / "train/cat/a.png").symlink_to("b.png")
    (source / "train/cat/b.png").symlink_to("a.png")
    with pytest.raises(UserError, match=r"a\.png is a link that leads in a circle"):
        listed(source, follow_links=follow_links)
    (source / "train/cat/b.png").unlink()
    with pytest.raises(UserError, match=r"a\.png is a link that leads to nothing"):
        listed(source, follow_links=follow_links)


def test_pipes_sockets_and_devices_are_refused_without_waiting(source: Path, tmp_path: Path) -> None:
    path = source / "train/cat/x.png"
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"x\.png is a named pipe"):
        listed(source)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        with pytest.raises(UserError, match=r"x\.png is a socket"):
            listed(source)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"x\.png is a device"):
        listed(source, follow_links=True)


def test_file_that_becomes_a_pipe_after_the_listing_does_not_hold_the_writer(source: Path, tmp_path: Path) -> None:
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    (source / "train/cat/0.jpg").unlink()
    os.mkfifo(source / "train/cat/0.jpg")
    with pytest.raises(UserError, match=r"0\.jpg cannot be read: it is a named pipe"):
        write_dataset(conversion, WriteRequest(destination_uri=(tmp_path / "out").as_uri()), lambda _: None)


def test_pipe_in_the_place_of_a_tar_does_not_hold_the_listing(source: Path) -> None:
    os.mkfifo(source / "train/n00000001.tar")
    with pytest.raises(UserError, match="is a named pipe"):
        listed(source, "imagenet21k")


@pytest.mark.parametrize("beside", ["batches.meta.txt", "batches.meta"])
def test_names_of_classes_that_are_a_link_out_of_the_source_are_refused(source: Path, beside: str) -> None:
    fill(source, {f"data_batch_{number}.bin": bytes(3073) for number in range(1, 6)})
    (source / beside).symlink_to(source.parent / "outside/passwd")
    with pytest.raises(UserError, match="--follow-links"):
        listed(source, "cifar10")


def test_table_that_names_a_link_out_of_its_folder_is_refused(source: Path) -> None:
    (source / "x.png").symlink_to(source.parent / "outside/passwd")
    (source / "train.csv").write_text("path,label\nx.png,0\n")
    with pytest.raises(UserError, match="--follow-links"):
        listed(source, "csv")


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("path,label\n0.jpg,a\n1.jpg,crane, bird\n", [], r"line 3 of .*train\.csv has more cells than the header"),
        ("path,label,g\n0.jpg,07,x\n1.jpg,7,y\n", ["g"], "the label '7' has 'x' at level 'g', this one 'y'"),
    ],
    ids=["cells", "numbers"],
)
def test_table_that_would_mix_classes_or_their_levels_is_refused(
    tmp_path: Path, text: str, columns: list[str], message: str
) -> None:
    source = fill(tmp_path, {"0.jpg": photo(0), "1.jpg": photo(0), "train.csv": text.encode()})
    with pytest.raises(UserError, match=message):
        list_source({"format": "csv", "source": str(source), "level_columns": columns})


def test_table_columns_that_are_no_level_of_their_own_are_told(tmp_path: Path) -> None:
    rows = "path,label,name,class,taxonomic_class\n0.jpg,0,x,a,b\n1.jpg,1,x,c,d\n"
    source = fill(tmp_path, {"0.jpg": photo(0), "1.jpg": photo(0), "train.csv": rows.encode()})
    columns = ["name", "class", "taxonomic_class"]
    found = describe_conversion(list_source({"format": "csv", "source": str(source), "level_columns": columns}))
    assert [row["taxonomic_class"] for row in found["classes"]] == ["b", "d"]
    ranks, names = found["notes"]
    assert ranks.startswith("columns 'class' and 'taxonomic_class' are one level, 'taxonomic_class', with the values")
    assert names.startswith(
        "column 'name' is no level, but the names of the classes, and 2 of them are called 'x'; ren"
    )


def test_table_may_end_its_rows_with_commas_and_name_its_classes(tmp_path: Path) -> None:
    text = b"path,label,name\n0.jpg,0,ant,\n1.jpg,2,owl,,\n"
    source = fill(tmp_path, {"0.jpg": photo(0), "1.jpg": photo(0), "train.csv": text})
    found = list_source({"format": "csv", "source": str(source), "level_columns": ["name"]})
    assert [row["name"] for row in found.classes] == ["ant", "1", "owl"]
    assert not found.notes


def test_file_that_is_no_image_is_a_bad_sample_of_which_nothing_is_packed(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hard link, a copy, a followed link: whatever it is that has got the name of an image."""
    (source / "train/dog/passwd.png").write_bytes(SECRET)
    (source / "train/dog/cut.jpg").write_bytes(photo(3)[:-100])
    with caplog.at_level(logging.WARNING):
        conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
        write_dataset(conversion, WriteRequest(destination_uri=(tmp_path / "out").as_uri()), lambda _: None)
    shard = tmp_path / "out/train-000000.tar"
    assert b"root:x:0" not in shard.read_bytes()
    assert [record.getMessage() for record in caplog.records] == [
        f"{source}/train/dog/passwd.png (dog/passwd) is not an image: nothing of it is packed, and its sample is bad"
    ]
    table = scan_shard(file_chunks(shard), shard.name, ClassRule(num_classes=2))
    assert table.num_samples == 2
    assert {(bad.place, bad.reason) for bad in table.bad} == {
        ("train-000000.tar:dog/passwd", Reason.EMPTY),
        ("train-000000.tar:dog/cut", Reason.TRUNCATED),
    }


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "PPM", "GIF"])
def test_images_of_all_forms_are_images_also_when_they_are_cut(form: str) -> None:
    image = encoded(form, size=(40, 30))
    assert is_image_form(image)
    assert is_image_form(image[: len(image) - 20])
    assert not is_image_form(b"x" + image)


def test_sweep_says_that_links_may_be_followed(source: Path) -> None:
    (source / "train/owl").symlink_to(source.parent / "outside/private")
    refused = ConversionSpec(format="imagefolder", source=str(source))
    assert "follow_links" not in source_arguments(refused)
    with pytest.raises(UserError, match=r"outside of the source; .* anywhere: follow_links: true"):
        ask_listing(source_arguments(refused))
    allowed = ConversionSpec(format="imagefolder", source=str(source), follow_links=True)
    assert ask_listing(source_arguments(allowed))["num_samples"] == {"train": 3}


def test_files_that_are_no_images_by_their_names_are_counted_and_told(source: Path, tmp_path: Path) -> None:
    before = listing_digest(CONVERTERS["imagefolder"](ConvertRequest(source=source)))
    others = (
        "cat/a.tif",
        "cat/b.TIF",
        "dog/c.jfif",
        "README",
        "dog/Thumbs.db",
        "dog/.DS_Store",
        "notes/x.txt",
        "d.gif",
    )
    fill(source / "train", dict.fromkeys(others, b"?"))
    (source / "train/empty").mkdir()
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    assert listing_digest(conversion) == before
    left_out = {".tif": 2, ".jfif": 1, "": 1, ".db": 1, ".txt": 1, ".gif": 1}
    assert conversion.notes == {"left_out": left_out, "empty": ["empty"]}
    note, of_empty = describe_conversion(conversion)["notes"]
    assert note.startswith("left out of the source: 7 files (.tif 2, ")
    assert ", no extension 1, " in note
    write = {"destination_uri": str(tmp_path / "out"), "num_processes": 1}
    assert shard({"converter": "imagefolder", "source": {"source": str(source)}, "write": write})["notes"] == [
        note,
        of_empty,
    ]


@pytest.mark.parametrize(
    ("converter", "lost", "files"),
    [
        ("imagefolder", "train/bird", {"train/bird/0.tif": b"?", "train/bird/README.txt": b"?"}),
        ("imagefolder", "train/cat/raw", {"train/cat/raw/0.gif": b"?"}),
        ("imagefolder", "train/bird", {"train/bird/0001": b"?"}),
        ("imagefolder", "val/cat", {"val/cat/0.jfif": b"?"}),
        ("imagefolder", "train/bird", {"train/bird/images.tar.gz": b"?"}),
        ("imagefolder", "train/bird", {"train/bird/0.jpg.part": b"?"}),
        ("imagenet21k", "train/n00000002", {"train/n00000002/raw/0.tif": b"?"}),
        ("imagenet21k", "train/n00000002.tar", {"train/n00000002.tar": tar_of([("0.tif", b"?")])}),
        ("imagenet1k", "val/n00000001", {"val/n00000001/0.gif": b"?"}),
        ("inat2021", f"train/{MAPLE}", {f"train/{MAPLE}/0.heic": b"?"}),
    ],
)
def test_class_of_which_no_file_is_an_image_is_refused_and_not_dropped(
    tmp_path: Path, converter: str, lost: str, files: dict[str, bytes]
) -> None:
    """Its class would vanish, and all later ones would move down by one."""
    kept = {"imagefolder": "cat", "inat2021": WORM}.get(converter, "n00000001")
    source = fill(tmp_path / "in", {f"train/{kept}/0.jpg": photo(0), **files})
    with pytest.raises(UserError, match=rf"in/{lost} holds .*\(.*\) and no image, .*rename them to \.jpg"):
        listed(source, converter)


@pytest.mark.parametrize(
    ("converter", "empty"),
    [
        ("imagefolder", "train/animal/dog"),
        ("imagefolder", "val/dog"),
        ("imagenet21k", "train/n00000002"),
        ("imagenet1k", "val/n00000002"),
    ],
)
def test_empty_folder_is_named_unless_another_split_has_images_of_its_class(
    tmp_path: Path, converter: str, empty: str
) -> None:
    kept = "train/animal/cat" if converter == "imagefolder" else "train/n00000001"
    below = {f"{kept}/sub/.hidden": b""} if converter != "imagefolder" else {}
    source = fill(tmp_path / "in", {f"{kept}/0.jpg": photo(0), **below})
    split, _, name = empty.partition("/")
    (source / empty).mkdir(parents=True)
    before = CONVERTERS[converter](ConvertRequest(source=source))
    (note,) = describe_conversion(before)["notes"]
    assert note.startswith(f"1 empty folder without a class: {name}; ")
    fill(source, {f"{'val' if split == 'train' else 'train'}/{name}/1.jpg": photo(1)})
    assert "notes" not in describe_conversion(CONVERTERS[converter](ConvertRequest(source=source)))


def test_empty_tar_is_named(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"n00000001.tar": tar_of([("0.JPEG", photo(0))]), "n00000002.tar": tar_of([])})
    conversion = CONVERTERS["imagenet21k"](ConvertRequest(source=source))
    assert conversion.notes == {"empty": ["n00000002"]}


def test_class_in_a_tar_of_tars_of_which_no_file_is_an_image_is_refused(tmp_path: Path) -> None:
    tars = [("n00000001.tar", tar_of([("0.JPEG", photo(0))])), ("x/n00000002.tar", tar_of([("0.tif", b"?")]))]
    source = fill(tmp_path / "in", {"winter21_whole.tar": tar_of([*tars, ("words.txt", b"?")])})
    with pytest.raises(UserError, match=r"winter21_whole\.tar/n00000002\.tar holds 1 file \(\.tif 1\) and no image"):
        listed(source, "imagenet21k")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_image_that_is_a_link_in_a_tar_is_refused_by_its_name(tmp_path: Path, kind: bytes) -> None:
    """It was left out without a word: GNU tar stores the second of two names of a file so."""

    def packed(name: str) -> Path:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = kind, "0.JPEG"
        return fill(tmp_path / "in", {"n00000001.tar": tar_of([("0.JPEG", photo(0)), link])})

    with pytest.raises(UserError, match=r"n00000001\.tar has '1\.JPEG' as a link .*--hard-dereference"):
        listed(packed("1.JPEG"), "imagenet21k")
    assert listed(packed("newest"), "imagenet21k") == ["0.JPEG"]


def test_other_files_than_images_make_no_class(source: Path) -> None:
    before = listing_digest(CONVERTERS["imagefolder"](ConvertRequest(source=source)))
    others = ("cat/masks/0.npy", "cache/x.pkl", "video/0.mp4", "tables/a.csv.gz", "about/LICENSE", "about/README.gz")
    fill(source / "train", dict.fromkeys(others, b"?"))
    conversion = CONVERTERS["imagefolder"](ConvertRequest(source=source))
    assert listing_digest(conversion) == before
    assert conversion.notes == {"left_out": {".gz": 2, ".pkl": 1, ".npy": 1, ".mp4": 1, "": 1}}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("other", ["n00000002.tar.gz", "n00000002.tar.part", "n00000002.tar.aria2", "n00000002.zip"])
def test_synset_that_is_there_only_in_a_form_that_is_not_read_is_refused(
    tmp_path: Path, other: str, *, whole: bool
) -> None:
    files = {"n00000001.tar": tar_of([("0.JPEG", photo(0))]), other: b"?", "n00000003.txt": b"?"}

    def packed(files: dict[str, bytes]) -> Path:
        if whole:
            return fill(tmp_path / str(len(files)), {"winter21_whole.tar": tar_of(list(files.items()))})
        fill(tmp_path / str(len(files)) / "winter21_whole", files)
        return tmp_path / str(len(files))

    with pytest.raises(UserError, match=rf"n00000002 has {other} in .*/winter21_whole.* no images in n00000002\.tar"):
        listed(packed(files), "imagenet21k")
    beside = {**files, "n00000002.tar": tar_of([("1.JPEG", photo(1))])}
    assert listed(packed(beside), "imagenet21k") == ["0.JPEG", "1.JPEG"]


def test_two_folders_of_one_split_are_refused_unless_they_are_one(source: Path) -> None:
    fill(source, {"val/cat/2.jpg": photo(2)})
    (source / "validation").symlink_to("val")
    assert len(CONVERTERS["imagefolder"](ConvertRequest(source=source)).splits["val"]) == 1
    (source / "validation").unlink()
    fill(source, {"validation/cat/3.jpg": photo(3)})
    message = "'val' and 'validation', which are both the split 'val'; .* --split train=train --split val=val"
    with pytest.raises(UserError, match=message):
        listed(source)
    with pytest.raises(UserError, match=r"name those to read: splits: \{train: train, val: val\}$"):
        ask_listing(source_arguments(ConversionSpec(format="imagefolder", source=str(source))))
    chosen = ConvertRequest(source=source, splits={"train": "train", "val": "validation"})
    assert CONVERTERS["imagefolder"](chosen).splits["val"].name(0) == "cat/3.jpg"


@pytest.mark.parametrize(
    ("train", "other"), [("Training", "Testing"), ("seg_train", "seg_test"), ("training_set", "test"), ("Train", "val")]
)
def test_folders_that_look_like_splits_are_no_classes(tmp_path: Path, train: str, other: str) -> None:
    source = fill(tmp_path / "in", {f"{train}/cat/0.jpg": photo(0), f"{other}/cat/1.jpg": photo(1)})
    with pytest.raises(
        UserError, match=rf"look like splits and not like classes: .*--split train={train}.*--split train="
    ):
        listed(source)
    chosen = ConvertRequest(source=source, splits={"train": train, "test": other})
    assert [row["name"] for row in CONVERTERS["imagefolder"](chosen).classes] == ["cat"]
    classes = CONVERTERS["imagefolder"](ConvertRequest(source=source, splits={"train": "."})).classes
    assert len(classes) == 2


def test_folder_beside_one_that_looks_like_a_split_is_a_class(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"testing/0.jpg": photo(0), "cat/1.jpg": photo(1)})
    assert len(CONVERTERS["imagefolder"](ConvertRequest(source=source)).classes) == 2


def test_converted_images_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    _, found = convert("imagefolder", source, tmp_path / "out")
    assert found["train"] == {"cat/0": ((0,), photo(0)), "dog/1": ((1,), photo(1))}


def test_snapshot_of_a_hub_cache_holds_links_to_its_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--x--y"
    fill(repository, {"blobs/abc": photo(0), "snapshots/1/train/dog/1.jpg": photo(1)})
    cat = repository / "snapshots/1/train/cat"
    cat.mkdir()
    (cat / "0.jpg").symlink_to("../../../../blobs/abc")
    assert listed(repository / "snapshots/1") == ["cat/0.jpg", "dog/1.jpg"]


CATS = {"cat/0.jpg": photo(0), "val/cat/1.jpg": photo(1), "train/cat/2.jpg": photo(2)}


@pytest.mark.parametrize(
    ("converter", "make", "splits"),
    [
        ("imagefolder", lambda: CATS, {"train": ".", "val": "val"}),
        ("imagefolder", lambda: CATS, {"train": "val", "val": "val"}),
        ("imagefolder", lambda: CATS, {"train": "link/..", "test": "link"}),
        ("csv", lambda: {**CATS, "t.csv": b"path,label\ncat/0.jpg,a\n"}, {"train": "t.csv", "val": "t.csv"}),
        (
            "csv",
            lambda: {
                **CATS,
                "t.csv": b"path,label\ncat/0.jpg,a\nval/cat/1.jpg,a\n",
                "v.csv": b"path,label\nlink/cat/../cat/1.jpg,a\n",
            },
            {"train": "t.csv", "val": "v.csv"},
        ),
        ("imagenet21k", lambda: {"all/n00000001.tar": tar_of([("1.JPEG", photo(0))])}, {"train": "all", "val": "all"}),
        ("imagenet1k", lambda: {"a/n00000001/1.JPEG": photo(0)}, {"train": "a", "val": "a"}),
        (
            "inat2021",
            lambda: {f"train/{WORM}/0.jpg": photo(0)},
            {"train": "train", "val": "train"},
        ),
        ("svhn", svhn, {"train": "train_32x32.mat", "val": "train_32x32.mat"}),
    ],
)  # fmt: skip
def test_image_of_train_in_another_split_is_refused(
    tmp_path: Path, converter: str, make: Callable[[], dict[str, bytes]], splits: dict[str, str]
) -> None:
    source = fill(tmp_path, make())
    (source / "link").symlink_to("val")
    other = next(split for split in splits if split != "train")
    with pytest.raises(UserError, match=rf"is an image of split 'train' and of split '{other}', so that it would be"):
        list_source({"format": converter, "source": str(source), "splits": splits})
