"""The scan of one shard: what it finds, and every kind of sample that it leaves out."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data_jobs import Member, encoded, tar_of
from workloads.data.images import ImageCheck
from workloads.data.reasons import Reason
from workloads.data.scan import (
    ClassRule,
    DamagedArchiveError,
    ShardStream,
    ShardTable,
    class_names,
    scan_shard,
    walk,
)

IMAGE, PHOTO, WEBP = encoded(), encoded("JPEG", size=(64, 48)), encoded("WEBP", size=(64, 48))
RULE = ClassRule(num_classes=3, names={"cat": 1, "great grey owl, Strix nebulosa": 2})


def scan(
    content: bytes, *, chunk_bytes: int = 700, rule: ClassRule = RULE, check: ImageCheck = ImageCheck.HEADER
) -> ShardTable:
    """Chunks are small, so that headers and images cross their borders."""
    chunks = (content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes))
    return scan_shard(chunks, "s.tar", rule, check)


def keys_of(table: ShardTable) -> list[str]:
    ends = np.cumsum(table.key_lengths)
    return [
        table.keys[end - length : end].tobytes().decode() for end, length in zip(ends, table.key_lengths, strict=True)
    ]


def entry(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def bomb() -> bytes:
    """A PNG header that claims 60,000 x 60,000 pixels."""
    image = bytearray(IMAGE)
    image[16:24] = (60_000).to_bytes(4, "big") * 2
    image[29:33] = zlib.crc32(bytes(image[12:29])).to_bytes(4, "big")
    return bytes(image)


BAD: list[tuple[Reason, Sequence[Member | tarfile.TarInfo]]] = [
    (Reason.EMPTY, [("a.png", b""), ("a.cls", b"0")]),
    (Reason.NOT_AN_IMAGE, [("a.jpg", b"GIF? no"), ("a.cls", b"0")]),
    (Reason.NOT_AN_IMAGE, [("a.jpg", pickle.dumps({"x": 1})), ("a.cls", b"0")]),
    (Reason.NOT_AN_IMAGE, [("a.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n"), ("a.cls", b"0")]),
    (Reason.TRUNCATED, [("a.jpg", PHOTO[: len(PHOTO) // 2]), ("a.cls", b"0")]),
    (Reason.TRUNCATED, [("a.jpg", PHOTO[:-2]), ("a.cls", b"0")]),
    (Reason.TRUNCATED, [("a.png", IMAGE[: len(IMAGE) - 30]), ("a.cls", b"0")]),
    (Reason.TRUNCATED, [("a.webp", WEBP[: len(WEBP) // 2]), ("a.cls", b"0")]),
    (Reason.TOO_MANY_PIXELS, [("a.png", bomb()), ("a.cls", b"0")]),
    (Reason.NO_IMAGE, [("a.cls", b"0")]),
    (Reason.SEVERAL_IMAGES, [("a.png", IMAGE), ("a.jpg", PHOTO), ("a.cls", b"0")]),
    (Reason.NO_CLASS, [("a.png", IMAGE)]),
    (Reason.NO_CLASS, [("a.png", IMAGE), ("a.cls", b" \n")]),
    (Reason.NO_CLASS, [("a.png", IMAGE), ("a.txt", b"a photo of 3 dogs")]),
    (Reason.NO_CLASS, [("a.png", IMAGE), ("a.json", b'{"labels": []}')]),
    (Reason.BAD_CLASS, [("a.png", IMAGE), ("a.cls", b"dog")]),
    (Reason.BAD_CLASS, [("a.png", IMAGE), ("a.json", b'{"label": 1.5}')]),
    (Reason.BAD_CLASS, [("a.png", IMAGE), ("a.json", b'{"label": true}')]),
    (Reason.SEVERAL_CLASSES, [("a.png", IMAGE), ("a.cls", b"0 1")]),
    (Reason.CLASS_OUT_OF_RANGE, [("a.png", IMAGE), ("a.cls", b"3")]),
    (Reason.CLASS_OUT_OF_RANGE, [("a.png", IMAGE), ("a.json", b'{"class": -1}')]),
    (Reason.BAD_METADATA, [("a.png", IMAGE), ("a.cls", b"0"), ("a.json", b"{")]),
    (Reason.BAD_METADATA, [("a.png", IMAGE), ("a.json", b"[" * 200_000)]),
    (Reason.DUPLICATE_KEY, [("a.png", IMAGE), ("a.cls", b"0"), ("a.png", IMAGE)]),
    (Reason.NOT_A_PLAIN_FILE, [entry("a.png", tarfile.SYMTYPE, linkname="/etc/passwd"), ("a.cls", b"0")]),
    (Reason.NOT_A_PLAIN_FILE, [entry("a.png", tarfile.LNKTYPE, linkname="b.png"), ("a.cls", b"0")]),
    (Reason.NOT_A_PLAIN_FILE, [entry("a.png", tarfile.CHRTYPE), ("a.cls", b"0")]),
    (Reason.NOT_A_PLAIN_FILE, [entry("a.png", tarfile.FIFOTYPE), ("a.cls", b"0")]),
    (
        Reason.NOT_A_PLAIN_FILE,
        [entry("a.png", tarfile.REGTYPE, pax_headers={"GNU.sparse.map": "0,1"}), ("a.cls", b"0")],
    ),
    (Reason.UNSAFE_NAME, [("../a.png", IMAGE), ("../a.cls", b"0")]),
    (Reason.UNSAFE_NAME, [("/a.png", IMAGE), ("/a.cls", b"0")]),
]


@pytest.mark.parametrize(("reason", "members"), BAD, ids=[f"{reason}-{n}" for n, (reason, _) in enumerate(BAD)])
def test_scan_bad_sample_is_left_out_with_its_reason(
    reason: Reason, members: Sequence[Member | tarfile.TarInfo]
) -> None:
    table = scan(tar_of([("good.png", IMAGE), ("good.cls", b"1"), *members, ("z.jpg", PHOTO), ("z.cls", b"2")]))
    assert [bad.reason for bad in table.bad] == [reason]
    assert table.bad[0].place.startswith("s.tar:")
    assert keys_of(table) == ["good", "z"]
    assert table.leaves.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("label", "leaves"),
    [
        (("a.cls", b"2\n"), [2]),
        (("a.cls", b"cat"), [1]),
        (("a.CLS", b"great grey owl, Strix nebulosa"), [2]),
        (("a.txt", b"1"), [1]),
        (("a.json", b'{"label": 2, "caption": "x"}'), [2]),
        (("a.json", b'{"cls": "cat"}'), [1]),
        (("a.json", b'{"labels": [2]}'), [2]),
        (("a.json", b"0"), [0]),
    ],
)
def test_scan_class_of_a_sample_is_read_from_any_member(label: Member, leaves: list[int]) -> None:
    table = scan(tar_of([label, ("a.jpg", PHOTO)]))
    assert (table.leaves.tolist(), table.bad) == (leaves, ())


def test_scan_multi_label_samples_keep_all_classes() -> None:
    members = [("a.png", IMAGE), ("a.cls", b"2, 0"), ("b.png", IMAGE), ("b.json", b'{"labels": []}')]
    members += [("c.png", IMAGE), ("c.json", b'{"labels": ["cat", 1, 0]}')]
    table = scan(tar_of(members), rule=ClassRule(num_classes=3, multi_label=True, names=RULE.names))
    assert table.num_leaves.tolist() == [2, 0, 2]
    assert table.leaves.tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("chunk_bytes", [512, 1000, 1 << 20])
def test_scan_offsets_find_the_images_in_any_tar_format(tar_format: int, chunk_bytes: int) -> None:
    long = "a_rather_long_folder_name/" * 5
    names = [f"{long}{number}" for number in range(4)] if tar_format != tarfile.USTAR_FORMAT else list("abcd")
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for extension, content in (("JPEG", PHOTO), ("cls", b"1")):  # all images first, then all classes
            for name in names:
                info = tarfile.TarInfo(f"{name}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    shard = buffer.getvalue()
    table = scan(shard, chunk_bytes=chunk_bytes)
    assert keys_of(table) == names
    for offset, length in zip(table.offsets.tolist(), table.lengths.tolist(), strict=True):
        assert shard[offset : offset + length] == PHOTO


def test_scan_jpeg_with_a_thumbnail_is_told_from_a_truncated_one() -> None:
    thumbnail = encoded("JPEG", size=(8, 8))
    application = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    whole = PHOTO[:2] + application + PHOTO[2:]
    members = [("a.jpg", whole), ("a.cls", b"0"), ("b.jpg", whole[:-100]), ("b.cls", b"0")]
    table = scan(tar_of(members))
    assert keys_of(table) == ["a"]
    assert [bad.reason for bad in table.bad] == [Reason.TRUNCATED]


def test_scan_jpeg_with_bytes_after_its_end_is_kept() -> None:
    table = scan(tar_of([("a.jpg", PHOTO + b"\xff\xda trailing"), ("a.cls", b"0")]))
    assert keys_of(table) == ["a"]


def test_scan_pixels_check_finds_what_headers_hide() -> None:
    body = b"IDAT" + b"no zlib stream"
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    first, last = IMAGE.index(b"IDAT") - 4, IMAGE.index(b"IEND") - 4
    shard = tar_of([("a.png", IMAGE[:first] + chunk + IMAGE[last:]), ("a.cls", b"0")])  # every checksum is right
    assert scan(shard).bad == ()
    assert len(scan(shard, check=ImageCheck.PIXELS).bad) == 1


@pytest.mark.parametrize("cut", ["in_image", "in_header", "between_members", "at_end_mark"])
def test_scan_cut_archive_keeps_what_came_before(cut: str) -> None:
    shard = tar_of([(f"{key}.{ext}", body) for key in "abc" for ext, body in (("cls", b"1"), ("jpg", PHOTO))])
    third = shard.index(b"c.cls")
    length = {"in_image": third + 1800, "in_header": third + 100, "between_members": third}
    end = length.get(cut, shard.rindex(b"\xff\xd9") + 2)
    end += -end % 512 if cut == "at_end_mark" else 0
    table = scan(shard[:end])
    assert [bad.reason for bad in table.bad] == [Reason.DAMAGED_ARCHIVE]
    assert keys_of(table) == (["a", "b"] if cut in {"in_image", "at_end_mark"} else ["a"])
    assert table.is_shortened
    last = b"c.jpg" if cut in {"in_image", "at_end_mark"} else b"b.jpg"  # whose sample may be incomplete
    assert table.num_unread_bytes == end - shard.index(last)


def test_scan_broken_header_leaves_what_follows_unread() -> None:
    shard = tar_of([(f"{key}.{ext}", body) for key in "abc" for ext, body in (("cls", b"1"), ("jpg", PHOTO))])
    broken = shard.replace(b"c.cls", b"d.cls", 1)  # its checksum is that of another name
    table = scan(broken)
    assert keys_of(table) == ["a"]
    assert (table.num_unread_bytes, table.is_shortened) == (len(shard) - shard.index(b"b.jpg"), False)


def test_scan_bytes_behind_the_end_mark_are_damage_that_names_the_remedy() -> None:
    """`cat a.tar b.tar`: every reader of tars stops at the first end, so the second half would be gone in silence."""
    first = tar_of([("a.cls", b"1"), ("a.jpg", PHOTO)])
    second = tar_of([("b.cls", b"1"), ("b.jpg", PHOTO)])
    table = scan(first + second)
    (bad,) = table.bad
    assert (keys_of(table), bad.reason) == (["a"], Reason.DAMAGED_ARCHIVE)
    assert f"more follows at byte {len(first)}," in str(bad)
    assert "`tar --concatenate`" in str(bad)
    assert table.size_bytes == len(first + second)
    assert not table.is_shortened
    assert len(second) <= table.num_unread_bytes <= len(second) + 10_240


@pytest.mark.parametrize("num_bytes", [0, 512, 10_240, 3 * 1024**2])
def test_scan_padding_with_zeros_is_no_damage(num_bytes: int) -> None:
    table = scan(tar_of([("a.cls", b"1"), ("a.jpg", PHOTO)]) + bytes(num_bytes), chunk_bytes=1 << 16)
    assert (keys_of(table), table.bad) == (["a"], ())
    assert (table.num_unread_bytes, table.is_shortened) == (0, False)


@pytest.mark.parametrize(
    ("compress", "form", "program"),
    [
        (gzip.compress, "gzip", "gunzip"),
        (bz2.compress, "bzip2", "bunzip2"),
        (lzma.compress, "xz", "unxz"),
        (lambda content: b"\x28\xb5\x2f\xfd" + content, "zstd", "unzstd"),
    ],
)
def test_scan_compressed_shard_is_told_from_a_damaged_one(
    compress: Callable[[bytes], bytes], form: str, program: str
) -> None:
    table = scan(compress(tar_of([("a.cls", b"1"), ("a.jpg", PHOTO)])))
    (bad,) = table.bad
    assert (table.num_unread_bytes, table.is_shortened) == (table.size_bytes, True)
    assert bad.reason is Reason.COMPRESSED_ARCHIVE
    assert str(bad).startswith(f"s.tar is compressed with {form}")
    assert f"`{program}`" in str(bad)


@pytest.mark.parametrize("check", list(ImageCheck))
@pytest.mark.parametrize("content", [b"\x89PNG no", b"GIF? no", b"%!PS-Adobe", PHOTO[:20], IMAGE[:40], b"RIFF", b"P6 "])
def test_scan_reason_holds_no_address_in_memory(content: bytes, check: ImageCheck) -> None:
    (bad,) = scan(tar_of([("a.png", content), ("a.cls", b"0")]), check=check).bad
    assert "0x" not in str(bad)
    assert "object" not in str(bad)


def test_scan_shard_without_samples_is_told_by_name() -> None:
    assert scan(tar_of([])).warnings == ("s.tar holds no samples",)
    assert scan(tar_of([("a.cls", b"1"), ("a.jpg", PHOTO)])).warnings == ()


def test_scan_numbered_images_of_one_key_are_named_with_the_remedy() -> None:
    members = [("x/img.0.png", IMAGE), ("x/img.1.png", IMAGE), ("x/img.cls", b"0")]
    (bad,) = scan(tar_of(members)).bad
    assert bad.reason is Reason.NO_IMAGE
    assert "x/img.0.png, x/img.1.png are members of this one sample: rename them (img_0.png, ...)" in str(bad)
    table = scan(tar_of([*members, ("x/img.png", IMAGE)]))
    assert keys_of(table) == ["x/img"]
    (warning,) = table.warnings
    assert warning.startswith("s.tar:x/img takes one image and leaves others out (1 such samples in s.tar)")
    assert "rename them (img_0.png, ...)" in warning
    assert scan(tar_of([("a.seg.png", IMAGE), ("a.png", IMAGE), ("a.cls", b"0")])).warnings == ()


def test_scan_header_that_claims_a_huge_size_takes_no_memory() -> None:
    shard = bytearray(tar_of([("a.cls", b"1"), ("a.jpg", PHOTO), ("b.jpg", PHOTO)]))
    start = shard.index(b"b.jpg")
    info = tarfile.TarInfo("b.jpg")
    info.size = 1 << 40
    shard[start : start + 512] = info.tobuf(tarfile.GNU_FORMAT)
    table = scan(bytes(shard))
    assert Reason.DAMAGED_ARCHIVE in [bad.reason for bad in table.bad]


def test_scan_sha256_and_size_are_of_all_bytes() -> None:
    shard = tar_of([("a.png", IMAGE), ("a.cls", b"0")])
    table = scan(shard)
    assert (table.digests.sha256, table.size_bytes) == (sha256(shard).hexdigest(), len(shard))


def test_scan_members_are_never_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (trap,))

    members = [("a.png", IMAGE), ("a.cls", b"0"), ("a.pyd", pickle.dumps(Trap())), ("a.pickle", pickle.dumps(Trap()))]
    assert keys_of(scan(tar_of(members))) == ["a"]
    assert not trap.exists()


def test_class_names_texts_of_two_classes_name_none() -> None:
    rows = [
        {"class": 0, "name": "crane", "synset": "n01", "level": "bird"},
        {"class": 1, "name": "crane", "synset": "n02", "level": "thing"},
        {"class": 2, "name": "owl", "synset": "n03", "level": "bird"},
    ]
    assert class_names(rows) == {"n01": 0, "n02": 1, "thing": 1, "owl": 2, "n03": 2}


def test_class_names_number_of_a_class_is_never_a_name() -> None:
    """Groups that a column numbers are no classes: member ``0`` is class 0, not the only class of group 0."""
    rows = [{"class": 0, "name": "cat", "group": "1"}, {"class": 1, "name": "dog", "group": "0", "taxon": 4711}]
    names = class_names(rows)
    assert names == {"cat": 0, "dog": 1, "4711": 1}
    table = scan(tar_of([("a.cls", b"0"), ("a.jpg", PHOTO)]), rule=ClassRule(num_classes=2, names=names))
    assert table.leaves.tolist() == [0]


def test_class_names_name_of_a_class_is_also_the_group_of_another() -> None:
    rows = [{"class": 0, "name": "bird", "kind": "animal"}, {"class": 1, "name": "robin", "kind": "bird"}]
    assert class_names(rows) == {"animal": 0, "bird": 0, "robin": 1}


def test_scan_cut_image_of_a_sample_that_began_earlier_is_left_out() -> None:
    members = [("a.cls", b"0"), ("b.cls", b"1"), ("b.jpg", PHOTO), ("a.jpg", PHOTO)]
    shard = tar_of(members)
    table = scan(shard[: shard.index(b"a.jpg") + 512 + 100])
    assert table.num_samples == 0
    assert {bad.place for bad in table.bad} == {"s.tar:a", "s.tar:b"}


def test_scan_name_of_any_bytes_is_told_as_text() -> None:
    (bad,) = scan(tar_of([("k\udce9.jpg", PHOTO), ("a.jpg", PHOTO), ("a.cls", b"0")])).bad
    assert str(bad).encode().startswith(rb"s.tar:k\udce9 has no class")
    damaged = scan(tar_of([("k\udce9.jpg", PHOTO)])[:600]).bad
    assert all(str(bad).encode() for bad in damaged)


def test_scan_endless_long_names_are_damage() -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 5
    names = (header.tobuf() + b"abcd\0".ljust(512, b"\0")) * 3000
    (bad,) = scan(names + tar_of([("a.jpg", PHOTO)])).bad
    assert bad.reason is Reason.DAMAGED_ARCHIVE


def test_walk_ends_at_a_member_with_a_negative_size_also_if_nobody_reads_it() -> None:
    """Minus a block leads from the end of its header back to its beginning."""
    members = entry("folder", tarfile.DIRTYPE), entry("a.dat", tarfile.REGTYPE, size=-512)
    shard = b"".join(member.tobuf(tarfile.GNU_FORMAT) for member in members) + bytes(1024)
    with pytest.raises(DamagedArchiveError):
        list(islice(walk(ShardStream(iter([shard]))), 9))


def test_scan_cmyk_and_16_bit_images_are_whole() -> None:
    cmyk, deep = BytesIO(), BytesIO()
    Image.new("CMYK", (20, 10)).save(cmyk, "JPEG")
    Image.fromarray(np.zeros((10, 20), dtype=np.uint16)).save(deep, "PNG")
    members = [("a.jpg", cmyk.getvalue()), ("a.cls", b"0"), ("b.png", deep.getvalue()), ("b.cls", b"0")]
    assert keys_of(scan(tar_of(members))) == ["a", "b"]
    assert json.dumps([bad.place for bad in scan(tar_of(members)).bad]) == "[]"
