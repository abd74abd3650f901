"""What WebDataset reads, we read: shards of several writers, read by webdataset and by the scan, sample by sample.

A sample is compared where webdataset has it whole: one image and a class. The differences that are meant are at the
end, and in docs/data.md.
"""

import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from tests.data_jobs import Member, encoded, tar_of
from workloads.data.decode import decoder_of
from workloads.data.reasons import Reason
from workloads.data.scan import IMAGE_EXTENSIONS, SPARE_IMAGE_EXTENSIONS, ClassRule, ShardTable, scan_shard

JPEG, PNG = encoded("JPEG", size=(40, 30)), encoded(size=(20, 10))
RULE = ClassRule(num_classes=100)
Sample = tuple[bytes, int, bytes]
"""The encoded image, its class and its RGB pixels."""


def read_by_webdataset(shard: Path) -> dict[str, Sample]:
    """Samples by key, of those that hold one image and a class."""
    raw = webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False)
    decoded = webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False).decode("rgb8")
    found: dict[str, Sample] = {}
    for sample, values in zip(raw, decoded, strict=True):
        images = [name for name in (*IMAGE_EXTENSIONS, *SPARE_IMAGE_EXTENSIONS) if name in sample]
        if len(images) == 1 and ("cls" in sample or "json" in sample):
            leaf = values["cls"] if "cls" in sample else values["json"]["label"]
            found[sample["__key__"]] = (sample[images[0]], leaf, values[images[0]].tobytes())
    return found


def read_here(shard: Path, *, chunk_bytes: int = 1000) -> dict[str, Sample]:
    """The same by the scan, the places it found, and both decoders."""
    content = shard.read_bytes()
    table = scan(content, chunk_bytes=chunk_bytes)
    assert table.bad == ()
    found: dict[str, Sample] = {}
    ends = np.cumsum(table.key_lengths)
    for row, (offset, length) in enumerate(zip(table.offsets.tolist(), table.lengths.tolist(), strict=True)):
        key = table.keys[ends[row] - table.key_lengths[row] : ends[row]].tobytes().decode(errors="surrogateescape")
        image = content[offset : offset + length]
        pixels = decoder_of("pillow").decode(image).tobytes()
        assert decoder_of("turbo").decode(image).tobytes() == pixels
        found[key] = (image, int(table.leaves[row]), pixels)
    return found


def scan(content: bytes, *, chunk_bytes: int = 1000) -> ShardTable:
    chunks = (content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes))
    return scan_shard(chunks, "s.tar", RULE)


def assert_read_equal(shard: Path, keys: list[str]) -> None:
    theirs, ours = read_by_webdataset(shard), read_here(shard)
    assert list(theirs) == keys, "the corpus does not hold what it is to hold"
    assert ours == theirs
    assert list(ours) == list(theirs), "in another order"


@pytest.mark.parametrize("tar_format", ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"])
@pytest.mark.parametrize("keep_meta", [False, True])
def test_corpus_of_webdatasets_writer_is_read_equal(tmp_path: Path, tar_format: str, keep_meta: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 3), dtype=np.uint8)
    values = {"jpg": pixels, "png": pixels, "ppm": pixels, "pgm": saved("PPM", "L"), "jpeg": pixels / 255.0}
    folder = "" if tar_format == "USTAR_FORMAT" else "a_folder_of_a_name_that_needs_more_than_one_header/" * 5
    shard = tmp_path / "s.tar"
    with webdataset.TarWriter(str(shard), format=tar_format, keep_meta=keep_meta) as writer:
        for number, (extension, image) in enumerate(values.items()):
            sample = {"__key__": f"{folder}{number:06d}", "__source__": "test", extension: image, "txt": "a caption, é"}
            writer.write(sample | {"cls": number, "json": {"label": 99}, "npy": np.zeros(3), "mask.png": pixels})
        writer.write({"__key__": "json_only", "jpg": pixels, "json": {"label": 7, "width": 20}})
    assert_read_equal(shard, [f"{folder}{number:06d}" for number in range(5)] + ["json_only"])


def test_corpus_of_webdatasets_shard_writer_is_read_equal(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "s-%03d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(3):
            writer.write({"__key__": f"train/{number}", "jpg": JPEG, "cls": number})
    assert_read_equal(tmp_path / "s-000.tar", ["train/0", "train/1"])
    assert_read_equal(tmp_path / "s-001.tar", ["train/2"])


FILES: Mapping[str, bytes] = {
    "0001.cls": b"1",
    "0001.jpg": JPEG,
    "0002.JPEG": JPEG,
    "0002.json": b'{"label": 2}',
    "__shard__.cls": b"3",
    "__shard__.png": PNG,
    "deep/er.v1/a b é.cls": b" 4\n",
    "deep/er.v1/a b é.png": PNG,
    "deep/of/.cls": b"5",
    "deep/of/.jpg": JPEG,
    "__meta__/x.cls": b"6",
    "__meta__/x.jpg": JPEG,
    "._0001.jpg": b"of a Mac",
    "no_extension": b"nothing",
}
KEYS = ["0001", "0002", "__shard__", "deep/er.v1/a b é", "deep/of/"]
LONG = "a_name_of_more_than_a_hundred_characters_" * 4


def folder_of(tmp_path: Path, files: Mapping[str, bytes]) -> Path:
    folder = tmp_path / "files"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def gnu_tar(folder: Path, *arguments: str) -> Path:
    subprocess.run(["tar", *arguments], cwd=folder, check=True, capture_output=True)
    return folder / "s.tar" if (folder / "s.tar").exists() else folder.parent / "s.tar"


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_corpus_of_gnu_tar_is_read_equal(tmp_path: Path, form: str) -> None:
    folder = folder_of(tmp_path, FILES)
    owner = () if form in {"v7", "ustar"} else ("--owner=someone:4000000000", "--group=3000000000")
    gnu_tar(folder, f"--format={form}", *owner, "-cf", "../s.tar", *FILES)
    assert_read_equal(tmp_path / "s.tar", KEYS)


@pytest.mark.parametrize("form", ["oldgnu", "gnu", "posix"])
def test_corpus_of_gnu_tar_with_long_names_is_read_equal(tmp_path: Path, form: str) -> None:
    names = [f"{LONG}/{LONG}/{number}.{extension}" for number in range(3) for extension in ("cls", "jpg")]
    folder = folder_of(tmp_path, {name: JPEG if name.endswith("jpg") else b"9" for name in names})
    assert_read_equal(
        gnu_tar(folder, f"--format={form}", "-b1", "-cf", "../s.tar", *names),
        [f"{LONG}/{LONG}/{number}" for number in range(3)],
    )


def test_corpus_of_whole_folders_with_links_and_a_label_is_read_equal(tmp_path: Path) -> None:
    """``tar c .``: names begin with ``./``; folders, a hard link, a soft link and a volume label are members."""
    names = {name: content for name, content in FILES.items() if not name.startswith("_")}
    folder = folder_of(tmp_path, names)
    (folder / "0001.npy").symlink_to("nowhere")
    (folder / "notes.png.md").hardlink_to(folder / "0001.cls")
    shard = gnu_tar(folder, "--sort=name", "--label=train.v1", "-cf", "../s.tar", ".")
    keys = ["./0001", "./0002", "./deep/er.v1/a b é", "./deep/of/"]
    theirs, ours = read_by_webdataset(shard), read_here_but(shard, "./notes")
    assert sorted(theirs) == keys
    assert ours == theirs


def read_here_but(shard: Path, key: str) -> dict[str, Sample]:
    """As ``read_here`` of a shard with one sample that is none for webdataset either."""
    content = shard.read_bytes()
    places = {bad.place for bad in scan(content).bad}
    assert places <= {f"s.tar:{key}"}
    stripped = shard.with_name("stripped.tar")
    with tarfile.open(shard) as members, tarfile.open(stripped, "w") as written:
        for member in members:
            if not member.name.startswith(key):
                written.addfile(member, members.extractfile(member) if member.isreg() else None)
    return read_here(stripped)


def test_corpus_of_gnu_tar_appended_and_joined_is_read_equal(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, {f"{key}.{ext}": JPEG if ext == "jpg" else b"1" for key in "abc" for ext in ("cls", "jpg")}
    )
    gnu_tar(folder, "-cf", "../s.tar", "a.cls", "a.jpg")
    gnu_tar(folder, "-rf", "../s.tar", "b.cls", "b.jpg")
    gnu_tar(folder, "-cf", "../other.tar", "c.cls", "c.jpg")
    assert_read_equal(gnu_tar(folder.parent, "--concatenate", "-f", "s.tar", "other.tar"), ["a", "b", "c"])


def strange(name: str, content: bytes, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_corpus_of_tarfile_is_read_equal(tmp_path: Path, tar_format: int) -> None:
    large = {} if tar_format == tarfile.USTAR_FORMAT else {"uid": 2**40, "gid": 2**33, "mtime": 2**34}
    extra = {"comment": "é", "mtime": "1.25"} if tar_format == tarfile.PAX_FORMAT else {}
    entries = [
        strange("train.v1/", b"", type=tarfile.DIRTYPE),
        strange("a/1.cls", b"1", **large),
        strange("a/1.jpeg", JPEG, mode=0, **large),
        strange("a/pipe", b"", type=tarfile.FIFOTYPE),
        strange("a/2.CLS", b"+2", type=tarfile.CONTTYPE),
        strange("a/2.Png", PNG, type=tarfile.AREGTYPE),
        strange("a/3.json", json.dumps({"label": 3, "caption": "é"}).encode("utf-16")),
        strange("a/3.jpg", JPEG, uname="é" * 10),
        strange("line\nend/4.cls", b"1_0"),
        strange("line\nend/4.jpg", JPEG),
        strange("5.cls", b"5"),
        strange("5.jpg", JPEG, pax_headers=extra),
        strange("5.txt", b"a long caption " * 100_000),
        strange("5.npy", b"", type=tarfile.SYMTYPE, linkname="5.cls"),
    ]
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w", format=tar_format, pax_headers={"comment": "global"}) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    assert_read_equal(shard, ["a/1", "a/2", "a/3", "line\nend/4", "5"])


def saved(form: str, mode: str, **options: object) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (12, 18, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(pixels).convert("RGBA" if mode.endswith("A") else "RGB")
    image.convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def exif_of_a_turned_camera() -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = 6
    return found


IMAGES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "grey": ("jpg", lambda: saved("JPEG", "L")),
    "inks": ("jpg", lambda: saved("JPEG", "CMYK")),
    "progressive": ("jpeg", lambda: saved("JPEG", "RGB", progressive=True, subsampling=0)),
    "turned": ("JPEG", lambda: saved("JPEG", "RGB", exif=exif_of_a_turned_camera())),
    "other_name": ("jpe", lambda: saved("JPEG", "RGB")),
    "file_interchange": ("jfif", lambda: saved("JPEG", "RGB")),
    "palette": ("png", lambda: saved("PNG", "P")),
    "clear_palette": ("png", lambda: saved("PNG", "P", transparency=3)),
    "alpha": ("png", lambda: saved("PNG", "RGBA")),
    "grey_alpha": ("png", lambda: saved("PNG", "LA")),
    "bits": ("png", lambda: saved("PNG", "1")),
    "webp": ("webp", lambda: saved("WEBP", "RGBA")),
    "bmp": ("bmp", lambda: saved("BMP", "P")),
    "gif": ("gif", lambda: saved("GIF", "P")),
    "pnm": ("pnm", lambda: saved("PPM", "RGB")),
    "pbm": ("pbm", lambda: saved("PPM", "1")),
    "wrong_name": ("png", lambda: saved("JPEG", "RGB")),
}


def test_corpus_of_image_forms_is_decoded_equal(tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    members: list[Member] = []
    for key, (extension, make) in IMAGES.items():
        members += [(f"{key}.{extension}", make()), (f"{key}.cls", b"8")]
    shard.write_bytes(tar_of(members))
    assert_read_equal(shard, list(IMAGES))


# ---------------------------------------------------------------------------------------------- meant differences


def test_difference_members_in_any_order_are_one_sample_here(tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    shard.write_bytes(tar_of([("a.jpg", JPEG), ("b.jpg", JPEG), ("a.cls", b"1"), ("b.cls", b"2")]))
    assert read_by_webdataset(shard) == {}
    assert {key: leaf for key, (_, leaf, _) in read_here(shard).items()} == {"a": 1, "b": 2}


def test_difference_16_bit_grey_keeps_its_upper_bits_here(tmp_path: Path) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0x80FF, dtype=np.uint16)).save(deep, "PNG")
    shard = tmp_path / "s.tar"
    shard.write_bytes(tar_of([("a.png", deep.getvalue()), ("a.cls", b"1")]))
    (theirs,), (ours,) = read_by_webdataset(shard).values(), read_here(shard).values()
    assert (set(theirs[2]), set(ours[2])) == ({0xFF}, {0x80})


def test_difference_cut_and_damaged_tars_keep_what_is_whole_here(tmp_path: Path) -> None:
    whole = tar_of([(f"{key}.{ext}", JPEG if ext == "jpg" else b"1") for key in "abc" for ext in ("cls", "jpg")])
    third = whole.index(b"c.cls")
    for content in (whole[: third + 100], whole[:third] + b"\xff" + whole[third + 1 :]):
        table = scan(content)
        assert [bad.reason for bad in table.bad] == [Reason.DAMAGED_ARCHIVE]
        assert table.num_samples >= 1
    cut = tmp_path / "s.tar"
    cut.write_bytes(whole[: third + 100])
    assert list(read_by_webdataset(cut)) == ["a", "b"], "webdataset ends in silence"


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.jpg", JPEG), ("a.png", PNG), ("a.cls", b"1")], Reason.SEVERAL_IMAGES),
        ([("../a.jpg", JPEG), ("../a.cls", b"1")], Reason.UNSAFE_NAME),
        ([("/a.jpg", JPEG), ("/a.cls", b"1")], Reason.UNSAFE_NAME),
        ([("a.tiff", saved("TIFF", "RGB")), ("a.cls", b"1")], Reason.NO_IMAGE),
        ([("a.jpg", JPEG), ("a.json", b'{"label": 1, "x": "' + b"x" * 2**20 + b'"}')], Reason.TOO_LARGE),
        ([("a.jpg", JPEG), ("a.cls", b"1"), ("b.cls", b"1"), ("a.jpg", JPEG), ("a.cls", b"1")], Reason.DUPLICATE_KEY),
    ],
)
def test_difference_refused_here_and_read_by_webdataset(members: list[Member], reason: Reason, tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    shard.write_bytes(tar_of(members))
    raw = list(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))
    assert any({"cls", "json"} & set(sample) and len(sample) > 3 for sample in raw)
    assert reason in [bad.reason for bad in scan(shard.read_bytes()).bad]


def test_difference_sparse_members_are_refused_here(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.cls": b"1"})
    with (folder / "a.jpg").open("wb") as file:
        file.write(JPEG)
        file.truncate(2**20)
    shard = gnu_tar(folder, "--sparse", "-cf", "../s.tar", "a.cls", "a.jpg")
    assert list(read_by_webdataset(shard)) == ["a"]
    assert [bad.reason for bad in scan(shard.read_bytes()).bad] == [Reason.NOT_A_PLAIN_FILE]


def test_preview_beside_a_photograph_stays_ignored() -> None:
    members = [("a.jpg", JPEG), ("a.gif", b"no image"), ("a.jfif", JPEG), ("a.cls", b"1"), ("b.gif", b"no image")]
    table = scan(tar_of([*members, ("b.cls", b"1"), ("c/.txt", b"hidden")]))
    assert table.lengths.tolist() == [len(JPEG)]
    assert [(bad.place, bad.reason) for bad in table.bad] == [("s.tar:b", Reason.NOT_AN_IMAGE)]
