"""Converters on small copies of the published layouts, and the writer behind them."""

import csv
import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import level_problem
from tests.conversions import convert, fill, photo, table_of
from tests.data_jobs import encoded, tar_of
from workloads.commands.data import CONVERTERS
from workloads.convert.items import ConvertRequest, ItemTable, hold_out, key_of
from workloads.convert.listing import list_source

PHOTO = encoded("JPEG", size=(12, 10))


def test_imagefolder_nested_folders_are_levels_and_images_stay_as_they_are(tmp_path: Path) -> None:
    files = {f"train/{c}/i{n}.JPG": photo(n) for c in ("animal/dog", "animal/cat", "plant/oak") for n in range(2)}
    files |= {"val/animal/cat/v.png": encoded(), "train/animal/cat/.hidden.jpg": b"", "train/animal/notes.txt": b""}
    dataset, found = convert("imagefolder", fill(tmp_path / "in", files), tmp_path / "out")
    assert table_of(tmp_path / "out") == [
        {"class": 0, "name": "cat", "depth1": "animal", "depth2": "animal/cat"},
        {"class": 1, "name": "dog", "depth1": "animal", "depth2": "animal/dog"},
        {"class": 2, "name": "oak", "depth1": "plant", "depth2": "plant/oak"},
    ]
    assert dict(dataset.levels) == {"depth1": 2, "depth2": 3}
    assert len(found["train"]) == 6
    assert found["train"]["animal/dog/i1"] == ((1,), photo(1))
    assert found["val"] == {"animal/cat/v": ((0,), encoded())}


def test_imagefolder_classes_of_different_depth_repeat_their_path(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"a/1.jpg": PHOTO, "b/c/d/2.jpg": PHOTO, "b/e/d/3.jpg": PHOTO})
    convert("imagefolder", source, tmp_path / "out")
    rows = table_of(tmp_path / "out")
    assert rows[0] == {"class": 0, "name": "a", "depth1": "a", "depth2": "a", "depth3": "a"}
    assert [row["name"] for row in rows[1:]] == ["b/c/d", "b/e/d"]


def test_imagenet21k_tars_of_synsets_are_read_in_place(tmp_path: Path) -> None:
    tars = {
        f"{synset}.tar": tar_of([(f"{synset}_{n}.JPEG", photo(seed + n)) for n in range(3)])
        for seed, synset in ((0, "n00000002"), (10, "n00000001"))
    }
    source = fill(tmp_path / "in", {**tars, "readme.tar": b"?", "words.txt": b"n00000001\towl, bird\nn00000002\tcat\n"})
    dataset, found = convert("imagenet21k", source, tmp_path / "out")
    rows = table_of(tmp_path / "out")
    assert [(row["class"], row["name"], row["synset"]) for row in rows] == [
        (0, "owl", "n00000001"),
        (1, "cat", "n00000002"),
    ]
    assert found["train"]["n00000002_1"] == ((1,), photo(1))
    assert found["train"]["n00000001_2"] == ((0,), photo(12))
    assert dict(dataset.class_counts) == {"train": (3, 3)}


@pytest.mark.parametrize("layout", ["winter21_whole", "winter21_whole.tar"])
def test_imagenet21k_winter21_is_read_unpacked_once_or_not(tmp_path: Path, layout: str) -> None:
    tars = {f"{synset}.tar": tar_of([(f"{synset}_1.JPEG", PHOTO)]) for synset in ("n00000001", "n00000002")}
    if layout.endswith(".tar"):
        whole = tar_of([(f"winter21_whole/{name}", content) for name, content in tars.items()])
        source = fill(tmp_path / "in", {layout: whole})
    else:
        source = fill(tmp_path / "in", {f"{layout}/{name}": content for name, content in tars.items()})
    _, found = convert("imagenet21k", source, tmp_path / "out")
    assert found["train"] == {"n00000001_1": ((0,), PHOTO), "n00000002_1": ((1,), PHOTO)}


def test_imagenet21k_compressed_tar_is_refused_with_a_remedy(tmp_path: Path) -> None:
    source = fill(tmp_path / "in", {"n00000001.tar": gzip.compress(tar_of([("a.JPEG", PHOTO)]))})
    with pytest.raises(UserError, match=r"is compressed \(gzip\).*unpack"):
        convert("imagenet21k", source, tmp_path / "out")


def test_imagenet21k_held_out_val_is_the_same_share_of_each_class(tmp_path: Path) -> None:
    files = {f"n0000000{leaf}/{leaf}_{n}.JPEG": photo(n) for leaf in (1, 2) for n in range(10)}
    source = fill(tmp_path / "in", {**files, "n00000003/only.JPEG": PHOTO})
    dataset, found = convert("imagenet21k", source, tmp_path / "out", val_fraction=0.2, seed=3)
    assert dict(dataset.class_counts) == {"train": (8, 8, 1), "val": (2, 2, 0)}
    assert not found["train"].keys() & found["val"].keys()


SYNSETS = ("n00000005", "n00000001")
VAL_IMAGES = {f"ILSVRC2012_val_{n:08d}.JPEG": photo(n) for n in (1, 2, 3)}
VAL_SYNSETS = ("n00000001", "n00000005", "n00000001")


def imagenet1k(folder: Path, *, val_as_tar: bool) -> Path:
    inner = [(f"{synset}.tar", tar_of([(f"{synset}_{n}.JPEG", photo(n)) for n in range(2)])) for synset in SYNSETS]
    val = {"ILSVRC2012_img_val.tar": tar_of(list(VAL_IMAGES.items()))}
    val = val if val_as_tar else {f"val/{name}": content for name, content in VAL_IMAGES.items()}
    return fill(folder, {"ILSVRC2012_img_train.tar": tar_of(inner), **val})


def devkit_bytes() -> bytes:
    from scipy.io import savemat

    synsets = np.zeros(2, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    for row, (number, synset) in enumerate([(1, "n00000005"), (2, "n00000001")]):
        synsets[row] = (number, synset)
    mat = io.BytesIO()
    savemat(mat, {"synsets": synsets})
    truth = b"2\n1\n2\n"
    folder = "ILSVRC2012_devkit_t12/data"
    members = [(f"{folder}/meta.mat", mat.getvalue()), (f"{folder}/ILSVRC2012_validation_ground_truth.txt", truth)]
    return gzip.compress(tar_of(members))


def val_labels(folder: Path, how: str) -> None:
    if how == "kaggle":
        lines = [f"{Path(name).stem},{s} 1 2 3 4 " for name, s in zip(VAL_IMAGES, VAL_SYNSETS, strict=True)]
        fill(folder, {"LOC_val_solution.csv": "\n".join(["ImageId,PredictionString", *reversed(lines)]).encode()})
    elif how == "pairs":
        lines = [f"{name} {synset}" for name, synset in zip(VAL_IMAGES, VAL_SYNSETS, strict=True)]
        fill(folder, {"val_labels.txt": "\n".join(reversed(lines)).encode()})
    elif how == "lines":
        fill(folder, {"val_labels.txt": "\n".join(VAL_SYNSETS).encode()})
    else:
        fill(folder, {"ILSVRC2012_devkit_t12.tar.gz": devkit_bytes()})


@pytest.mark.parametrize("how", ["kaggle", "pairs", "lines", "devkit"])
def test_imagenet1k_tar_of_tars_and_flat_validation_images_get_their_classes(tmp_path: Path, how: str) -> None:
    source = imagenet1k(tmp_path / "in", val_as_tar=how in {"kaggle", "devkit"})
    val_labels(source, how)
    _, found = convert("imagenet1k", source, tmp_path / "out")
    assert found["train"]["n00000005_1"] == ((1,), photo(1))
    assert {key: leaves for key, (leaves, _) in found["val"].items()} == {
        "ILSVRC2012_val_00000001": (0,),
        "ILSVRC2012_val_00000002": (1,),
        "ILSVRC2012_val_00000003": (0,),
    }
    assert found["val"]["ILSVRC2012_val_00000002"][1] == photo(2)


DAMAGE: dict[str, Callable[[bytes, int, int, int], bytes]] = {
    "hole": lambda whole, second, third, _: whole[:second] + bytes(third - second) + whole[third:],
    "flipped_bit": lambda whole, second, *_: whole[:second] + bytes([whole[second] ^ 1]) + whole[second + 1 :],
    "cut_at_a_border": lambda whole, second, *_: whole[:second],
    "cut_in_a_header": lambda whole, second, *_: whole[: second + 100],
    "no_end": lambda whole, _second, _third, end: whole[:end],
}
"""What is left of a tar with members that begin at these bytes and end at the last of them."""


def damaged(whole: bytes, harm: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        _, second, third = tar.getmembers()
    end = third.offset_data + third.size
    return DAMAGE[harm](whole, second.offset, third.offset, end + -end % 512)


@pytest.mark.parametrize("place", ["outer", "inner", "alone"])
@pytest.mark.parametrize("harm", list(DAMAGE))
def test_imagenet_tar_with_lost_members_is_refused_and_not_listed_without_them(
    tmp_path: Path, harm: str, place: str
) -> None:
    """At all of these `tarfile` ends its listing without an error."""
    images = [tar_of([(f"{leaf}_{n}.JPEG", PHOTO) for n in range(3)]) for leaf in range(3)]
    images[1] = images[1] if place == "outer" else damaged(images[1], harm)
    tars = {f"n0000000{leaf}.tar": content for leaf, content in enumerate(images)}
    outer = tar_of(list(tars.items()))
    train = {"ILSVRC2012_img_train.tar": damaged(outer, harm) if place == "outer" else outer}
    source = fill(tmp_path / "in", tars if place == "alone" else train)
    named = {"outer": "img_train.tar", "inner": r"img_train.tar:n00000001.tar", "alone": "n00000001.tar"}[place]
    with pytest.raises(
        UserError, match=rf"{named} is not a whole tar \((it is cut off|it has|its end).*download it again"
    ):
        CONVERTERS["imagenet21k" if place == "alone" else "imagenet1k"](ConvertRequest(source=source))


def test_imagenet_tar_with_more_zeros_at_its_end_is_whole(tmp_path: Path) -> None:
    tars = {f"n0000000{leaf}.tar": tar_of([(f"{leaf}.JPEG", PHOTO)]) + bytes(512 * leaf) for leaf in range(3)}
    conversion = CONVERTERS["imagenet21k"](ConvertRequest(source=fill(tmp_path / "in", tars)))
    assert len(conversion.splits["train"]) == 3


def test_imagenet1k_validation_images_without_classes_are_refused(tmp_path: Path) -> None:
    source = imagenet1k(tmp_path / "in", val_as_tar=False)
    with pytest.raises(UserError, match="--labels"):
        convert("imagenet1k", source, tmp_path / "out")
    fill(source, {"val_labels.txt": b"ILSVRC2012_val_00000001.JPEG n00000001\n"})
    with pytest.raises(UserError, match=r"no synset for 2 validation images, the first is ILSVRC2012_val_00000002"):
        convert("imagenet1k", source, tmp_path / "out")


@pytest.mark.parametrize("text", ["image,label\nx,n00000001\n", "ImageId,PredictionString\nx,\n", "ImageId\nx\n"])
def test_imagenet1k_table_of_labels_with_other_columns_is_refused(tmp_path: Path, text: str) -> None:
    source, labels = imagenet1k(tmp_path / "in", val_as_tar=False), tmp_path / "labels.csv"
    labels.write_text(text)
    with pytest.raises(UserError, match=r"labels\.csv is not a table of ImageId and PredictionString"):
        convert("imagenet1k", source, tmp_path / "out", labels=labels)


ONE = tar_of([("n00000001_1.JPEG", PHOTO)])
FOLDERS = {"n00000001/a.JPEG": PHOTO, "n00000002/b.JPEG": PHOTO}


@pytest.mark.parametrize(
    ("converter", "files", "options", "message"),
    [
        ("imagenet21k", {**FOLDERS, "n00000001.tar": ONE}, {}, "of n00000001 in n00000001 and in n00000001.tar"),
        (
            "imagenet21k",
            {"fall11_whole.tar": tar_of([("x/n00000001.tar", ONE), ("y/n00000001.tar", ONE)])},
            {},
            "in x/n00000001.tar and in y/n00000001.tar: they would be read twice",
        ),
        (
            "imagenet21k",
            {f"{place}/{name}": PHOTO for place in ("winter21_whole", "imagenet21k_val") for name in FOLDERS},
            {},
            "already contains the images of imagenet21k_val, so .* with --split train=winter21_whole",
        ),
        ("imagenet21k", FOLDERS, {"splits": {"train": "fall"}}, "fall: no such file; --split names"),
        (
            "imagenet1k",
            {**{f"train/{name}": PHOTO for name in FOLDERS}, "val/n00000001/a.JPEG": PHOTO, "val/b.JPEG": PHOTO},
            {},
            "val/b.JPEG is in no folder and no tar of a synset",
        ),
        ("cifar10", {"a": b""}, {"splits": {"train": "a"}}, "cifar10 has fixed files for train and val; remove"),
        ("imagefolder", {f"x/{name}": PHOTO for name in FOLDERS}, {"splits": {"test": "x"}}, "--split names only test"),
    ],
)  # fmt: skip
def test_source_that_would_be_read_twice_or_in_part_is_refused(
    tmp_path: Path, converter: str, files: dict[str, bytes], options: dict[str, Any], message: str
) -> None:
    if converter == "imagefolder":
        options = {**options, "val_fraction": 0.5}
    arguments = {"format": converter, "source": str(fill(tmp_path / "in", files)), **options}
    with pytest.raises(UserError, match=message):
        list_source(arguments)


def test_imagenet_splits_are_those_that_are_named(tmp_path: Path) -> None:
    places = ("train", "val", "imagenetv2", "imagenet21k_train", "imagenet21k_val", "winter21_whole")
    files = {f"{place}/{name}".replace(".", f"_{place}."): PHOTO for place in places for name in FOLDERS}
    source = fill(tmp_path / "in", files)
    splits = {"train": "train", "val": "imagenetv2"}
    conversion = CONVERTERS["imagenet1k"](ConvertRequest(source=source, splits=splits))
    assert [Path(split.containers[0]).name for split in conversion.splits.values()] == ["train", "imagenetv2"]
    splits = {"train": "imagenet21k_train", "val": "imagenet21k_val"}
    conversion = CONVERTERS["imagenet21k"](ConvertRequest(source=source, splits=splits))
    assert [Path(split.containers[0]).name for split in conversion.splits.values()] == [
        "imagenet21k_train",
        "imagenet21k_val",
    ]


def inat(folder: Path) -> Path:
    ranks = ("kingdom", "phylum", "class", "order", "family", "genus", "specific_epithet")
    categories = [
        {
            "id": number,
            "name": f"Genus{number % 2} species{number}",
            "supercategory": "Birds",
            "image_dir_name": "x",
            **{rank: f"{rank}{number % 2}" for rank in ranks},
        }
        for number in (3, 0, 7)
    ]
    for split, count in (("train_mini", 3), ("val", 2)):
        images = [{"id": n, "file_name": f"{split}/0000{n}_x/{n}.jpg"} for n in range(count)]
        notes = [{"id": n, "image_id": n, "category_id": (7, 0, 3)[n]} for n in range(count)]
        document = {"images": images, "annotations": notes, "categories": categories}
        fill(folder, {f"{split}.json": json.dumps(document).encode()})
        fill(folder, {f"{split}/0000{n}_x/{n}.jpg": photo(n) for n in range(count)})
    return folder


def test_inat2021_json_gives_classes_with_all_ranks(tmp_path: Path) -> None:
    _, found = convert("inat2021", inat(tmp_path / "in"), tmp_path / "out")
    rows = table_of(tmp_path / "out")
    assert [row["name"] for row in rows] == ["Genus0 species0", "Genus1 species3", "Genus1 species7"]
    ranks = ["supercategory", "kingdom", "phylum", "taxonomic_class", "order", "family", "genus", "specific_epithet"]
    assert list(rows[0]) == ["class", "name", *ranks, "species"]
    assert rows[1]["taxonomic_class"] == "class1"
    assert {key: leaves for key, (leaves, _) in found["train"].items()} == {
        "train_mini/00000_x/0": (2,),
        "train_mini/00001_x/1": (0,),
        "train_mini/00002_x/2": (1,),
    }
    assert len(found["val"]) == 2


def test_inat2021_image_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = inat(tmp_path / "in")
    (source / "val/00001_x/1.jpg").unlink()
    with pytest.raises(UserError, match=r"val/00001_x/1\.jpg is named in the JSON, but does not exist"):
        convert("inat2021", source, tmp_path / "out")


def test_inat2021_files_that_number_their_categories_differently_are_refused(tmp_path: Path) -> None:
    source = inat(tmp_path / "in")
    document = json.loads((source / "val.json").read_text())
    for category in document["categories"]:
        category["id"] += 1
    (source / "val.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="have different categories"):
        convert("inat2021", source, tmp_path / "out")


def test_inat2021_folders_alone_give_all_ranks_but_the_supercategory(tmp_path: Path) -> None:
    worm = "00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris"
    maple = "00007_Plantae_Tracheophyta_Magnoliopsida_Sapindales_Sapindaceae_Acer_x freemanii"
    files = {
        f"train_mini/{maple}/a.jpg": photo(1),
        f"train_mini/{worm}/b.jpg": photo(2),
        f"val/{maple}/c.jpg": photo(3),
    }
    _, found = convert("inat2021", fill(tmp_path / "in", files), tmp_path / "out")
    rows = table_of(tmp_path / "out")
    ranks = ["kingdom", "phylum", "taxonomic_class", "order", "family", "genus", "specific_epithet"]
    assert list(rows[0]) == ["class", "name", *ranks, "species"]
    assert [(row["name"], row["taxonomic_class"]) for row in rows] == [
        ("Lumbricus terrestris", "Clitellata"),
        ("Acer x freemanii", "Magnoliopsida"),
    ]
    assert found == {
        "train": {f"{maple}/a": ((1,), photo(1)), f"{worm}/b": ((0,), photo(2))},
        "val": {f"{maple}/c": ((1,), photo(3))},
    }
    with pytest.raises(UserError, match=r"'dogs' below .* does not hold a number and seven ranks.*imagefolder"):
        convert("inat2021", fill(tmp_path / "in", {"train_mini/dogs/d.jpg": photo(1)}), tmp_path / "again")


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
PLANES = PIXELS.transpose(0, 3, 1, 2).reshape(6, -1)
FINE, COARSE = [0, 1, 2, 1, 0, 2], [1, 0, 1, 0, 1, 1]
NAMES_100 = {"fine_label_names": ["apple", "bee", "pear"], "coarse_label_names": ["insects", "fruit"]}
LEVELS_100 = [
    {"class": 0, "name": "apple", "superclass": "fruit"},
    {"class": 1, "name": "bee", "superclass": "insects"},
    {"class": 2, "name": "pear", "superclass": "fruit"},
]
DIGITS = [{"class": leaf, "name": str(leaf)} for leaf in range(3)]


def cifar100_pickles() -> dict[str, bytes]:
    def batch(rows: slice) -> bytes:
        return pickle.dumps(
            {b"data": PLANES[rows], b"fine_labels": FINE[rows], b"coarse_labels": COARSE[rows]}, protocol=2
        )

    return {"train": batch(slice(4)), "test": batch(slice(4, 6)), "meta": pickle.dumps(NAMES_100, protocol=2)}


def cifar100_binary() -> dict[str, bytes]:
    records = np.concatenate([np.array([COARSE, FINE], dtype=np.uint8).T, PLANES], axis=1)
    texts = {f"{name}.txt": "\n".join(names).encode() for name, names in NAMES_100.items()}
    return {"train.bin": records[:4].tobytes(), "test.bin": records[4:].tobytes(), **texts}


def cifar10_pickles() -> dict[str, bytes]:
    rows = {**{f"data_batch_{row + 1}": slice(row, row + 1) for row in range(5)}, "test_batch": slice(5, 6)}
    batches = {name: pickle.dumps({"data": PLANES[of], "labels": FINE[of]}, protocol=2) for name, of in rows.items()}
    return {**batches, "batches.meta": pickle.dumps({b"label_names": [b"0", b"1", b"2"]}, protocol=2)}


def cifar10_binary() -> dict[str, bytes]:
    records = np.concatenate([np.array([FINE], dtype=np.uint8).T, PLANES], axis=1)
    files = {**{f"data_batch_{row + 1}": records[row : row + 1] for row in range(5)}, "test_batch": records[5:]}
    return {"batches.meta.txt": b"0\n1\n2\n\n", **{f"{name}.bin": rows.tobytes() for name, rows in files.items()}}


def idx(numbers: np.ndarray[Any, Any]) -> bytes:
    return bytes([0, 0, 8, numbers.ndim]) + np.array(numbers.shape, dtype=">u4").tobytes() + numbers.tobytes()


def mnist() -> dict[str, bytes]:
    grey, labels = PIXELS[..., 0], np.array(FINE, dtype=np.uint8)
    return {
        "train-images-idx3-ubyte.gz": gzip.compress(idx(grey[:4])),
        "train-labels-idx1-ubyte.gz": gzip.compress(idx(labels[:4])),
        "t10k-images-idx3-ubyte": idx(grey[4:]),
        "t10k-labels-idx1-ubyte": idx(labels[4:]),
    }


def svhn() -> dict[str, bytes]:
    from scipy.io import savemat

    files = {}
    for name, rows in (("train_32x32.mat", slice(4)), ("test_32x32.mat", slice(4, 6))):
        savemat(
            mat := io.BytesIO(),
            {"X": PIXELS[rows].transpose(1, 2, 3, 0), "y": np.array([[label or 10] for label in FINE[rows]])},
        )
        files[name] = mat.getvalue()
    return files


@pytest.mark.parametrize(
    ("converter", "make", "table"),
    [
        ("cifar100", cifar100_pickles, LEVELS_100),
        ("cifar100", cifar100_binary, LEVELS_100),
        ("cifar10", cifar10_pickles, DIGITS),
        ("cifar10", cifar10_binary, DIGITS),
        ("mnist", mnist, DIGITS),
        ("svhn", svhn, DIGITS),
    ],
)
def test_rows_of_arrays_become_images_with_their_pixels(
    tmp_path: Path, converter: str, make: Callable[[], dict[str, bytes]], table: list[dict[str, Any]]
) -> None:
    dataset, found = convert(converter, fill(tmp_path / "in", make()), tmp_path / "out")
    assert table_of(tmp_path / "out") == table
    sizes = {"train": 5, "val": 1} if converter == "cifar10" else {"train": 4, "val": 2}
    assert {split: sum(counts) for split, counts in dataset.class_counts.items()} == sizes
    read = {}
    for images in found.values():
        for (leaf,), image in images.values():
            pixels = np.asarray(Image.open(io.BytesIO(image)))
            expected = PIXELS[..., 0] if pixels.ndim == 2 else PIXELS
            read[next(row for row in range(6) if np.array_equal(expected[row], pixels))] = leaf
    assert [read[row] for row in range(6)] == FINE


@pytest.mark.parametrize("make", [cifar10_pickles, cifar10_binary])
def test_cifar10_without_one_of_its_batches_is_refused(tmp_path: Path, make: Callable[[], dict[str, bytes]]) -> None:
    files = {name: content for name, content in make().items() if not name.startswith("data_batch_3")}
    with pytest.raises(UserError, match="lacks data_batch_3 of CIFAR-10; unpack the whole archive"):
        list_source({"format": "cifar10", "source": str(fill(tmp_path, files))})


def test_svhn_without_a_named_file_is_refused(tmp_path: Path) -> None:
    arguments = {"format": "svhn", "source": str(fill(tmp_path, svhn()))}
    with pytest.raises(UserError, match=r"tst_32x32\.mat: no such file; --split names files in"):
        list_source({**arguments, "splits": {"train": "train_32x32.mat", "val": "tst_32x32.mat"}})


def test_other_pixels_under_the_same_labels_are_another_source(tmp_path: Path) -> None:
    """Every image of an array has the same size, so that sizes do not tell."""
    first = fill(tmp_path / "first", cifar10_binary())
    files = cifar10_binary()
    changed = bytearray(files["data_batch_1.bin"])
    changed[100] ^= 1
    other = fill(tmp_path / "other", {**files, "data_batch_1.bin": bytes(changed)})
    digests = [
        CONVERTERS["cifar10"](ConvertRequest(source=source)).splits["train"].digest() for source in (first, other)
    ]
    assert digests[0] != digests[1]


def _tower(levels: int) -> bytes:
    """A dictionary whose key is a tuple of twice the same tuple, and so on."""
    tower: tuple[object, ...] = ()
    for _ in range(levels):
        tower = (tower, tower)
    return pickle.dumps([tower], protocol=2)[:-1] + b"0}h\x00K\x01s."


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("converter", "files", "message"),
    [
        ("cifar100", {"train": pickle.dumps(_Evil())}, r"which is not executed"),
        ("cifar100", {"train": _tower(60)}, r"more tuples or sets than an array needs"),
        ("cifar100", {"train": pickle.dumps({b"data": 0, b"labels": [[1], [2]]})}, r"labels are not a list of numbers"),
        ("cifar100", {"train": b"\x80\x02]r\xff\xff\xff\xff."}, r"holds no dictionary"),
        ("cifar100", {"train": cifar100_pickles()["train"][:3000]}, r"train is not the pickle that CIFAR publishes"),
        ("cifar100", {"meta": None}, r"has neither meta nor fine_label_names\.txt"),
        (
            "cifar100",
            {"meta": pickle.dumps({**NAMES_100, "fine_label_names": ["bee"]})},
            r"classes 0 to 2, and 1 names",
        ),
        ("mnist", {"t10k-labels-idx1-ubyte": idx(np.array([1], dtype=np.uint8))}, r"has 2 images and 1 labels"),
        ("mnist", {"t10k-images-idx3-ubyte": idx(PIXELS[..., 0])[:-1]}, r"not of the form that its name promises"),
        ("mnist", {"t10k-labels-idx1-ubyte": None}, r"t10k-labels-idx1-ubyte cannot be read: No such file"),
        ("mnist", {"kuzushiji-train-images-idx3-ubyte": b""}, r"keep one data set in the folder"),
        ("svhn", {"train_32x32.mat": b"MATLAB 7.3 MAT-file"}, r"not of the form that its name promises"),
    ],
)
def test_arrays_that_are_not_as_published_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    converter: str,
    files: dict[str, bytes | None],
    message: str,
) -> None:
    good = {"cifar100": cifar100_pickles, "mnist": mnist, "svhn": svhn}[converter]()
    changed = {name: content for name, content in {**good, **files}.items() if content is not None}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        convert(converter, fill(tmp_path / "in", changed), tmp_path / "out")
    assert not Path("executed").exists()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return
    pd.DataFrame(rows).to_parquet(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_table_names_become_sorted_classes_with_their_levels(tmp_path: Path, suffix: str) -> None:
    source = fill(tmp_path / "in", {f"{n}.jpg": photo(n) for n in range(3)})
    rows = [{"file": f"{n}.jpg", "what": what, "kind": what[0]} for n, what in enumerate(("owl", "ant", "owl"))]
    write_rows(source / f"train.{suffix}", rows)
    columns = {"path_column": "file", "label_column": "what", "level_columns": ("kind",)}
    _, found = convert(suffix, source, tmp_path / "out", **columns)
    assert table_of(tmp_path / "out") == [
        {"class": 0, "name": "ant", "kind": "a"},
        {"class": 1, "name": "owl", "kind": "o"},
    ]
    assert found["train"] == {"0": ((1,), photo(0)), "1": ((0,), photo(1)), "2": ((1,), photo(2))}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_table_missing_level_is_no_value_and_the_rank_class_is_no_number(tmp_path: Path, suffix: str) -> None:
    source = fill(tmp_path / "in", {f"{n}.jpg": photo(n) for n in range(3)})
    families = {"ant": None, "elm": None, "owl": "Strigidae"}
    rows = [{"path": f"{n}.jpg", "label": a, "class": a[0], "family": families[a]} for n, a in enumerate(families)]
    write_rows(source / f"train.{suffix}", rows)
    if suffix == "csv":  # rows that end before their last cell
        (source / "train.csv").write_text((source / "train.csv").read_text().replace(",\n", "\n"))
    convert(suffix, source, tmp_path / "out", level_columns=("class", "family"))
    table = table_of(tmp_path / "out")
    assert [list(row.values()) for row in table] == [[n, a, a[0], families[a]] for n, a in enumerate(families)]
    assert list(table[0]) == ["class", "name", "taxonomic_class", "family"]
    assert "class 0 ('ant'), 1 ('elm') have no value at level 'family'" in level_problem(table, "family")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_table_several_labels_are_kept(tmp_path: Path, suffix: str) -> None:
    source = fill(tmp_path / "in", {f"{n}.jpg": photo(n) for n in range(3)})
    labels: list[Any] = ["2;0", "", "1"] if suffix == "csv" else [["2", "0"], [], ["1"]]
    write_rows(source / f"train.{suffix}", [{"path": f"{n}.jpg", "label": label} for n, label in enumerate(labels)])
    dataset, found = convert(suffix, source, tmp_path / "out", separator=";" if suffix == "csv" else "")
    assert dataset.multi_label
    assert {key: leaves for key, (leaves, _) in found["train"].items()} == {"0": (2, 0), "1": (), "2": (1,)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"path": "0.jpg", "class": "a"}], "no column 'label'; it has path, class"),
        ([{"path": "9.jpg", "label": "a"}], r"names '9\.jpg', but"),
        ([{"path": "0.txt", "label": "a"}], "no extension of an image"),
        ([{"path": "0.jpg", "label": ""}], "empty label"),
    ],
)
def test_table_wrong_row_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    source = fill(tmp_path / "in", {"0.jpg": PHOTO})
    write_rows(source / "train.csv", rows)
    with pytest.raises(UserError, match=message):
        convert("csv", source, tmp_path / "out")


@pytest.mark.parametrize("converter", sorted(CONVERTERS))
def test_converter_empty_source_is_refused(tmp_path: Path, converter: str) -> None:
    with pytest.raises(UserError):
        CONVERTERS[converter](ConvertRequest(source=tmp_path))


def test_key_of_name_has_no_dots_and_stays_relative() -> None:
    assert [key_of(name) for name in ("a/b.c.JPEG", "/x.jpg", "ä b/c.png")] == ["a/b_c", "x", "_ b/c"]


def test_table_images_outside_its_folder_are_samples_too(tmp_path: Path) -> None:
    """Names that begin with two underscores are webdataset's own, and would be skipped by all readers."""
    fill(tmp_path, {"images/0.jpg": PHOTO, "images/1.jpg": PHOTO})
    rows = "path,label\n../images/0.jpg,a\n../images/1.jpg,b\n"
    source = fill(tmp_path / "lists", {"train.csv": rows.encode()})
    _, found = convert("csv", source, tmp_path / "out")
    assert found["train"] == {"_/images/0": ((0,), PHOTO), "_/images/1": ((1,), PHOTO)}


def test_hold_out_leaves_a_sample_of_every_class_in_train() -> None:
    table = ItemTable()
    container = table.container(Path("/x"))
    for row in range(9):
        table.add(f"{row}.jpg", container=container, leaves=(row % 3 if row < 8 else 3,), length_bytes=1)
    parts = hold_out(table, 0.9, seed=0)
    assert {leaf for row in range(len(parts["train"])) for leaf in parts["train"].leaves(row)} == {0, 1, 2, 3}
    assert len(parts["train"]) + len(parts["val"]) == 9
