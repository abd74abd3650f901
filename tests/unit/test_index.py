"""The index: columns that find every sample, and the bad data that it refuses."""

import gzip
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from orchestrator.core.errors import BadDataError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import MIB
from orchestrator.storage.artifacts import ArtifactWriter, Record, part_object, read_record
from orchestrator.storage.digests import Digests
from tests.data_jobs import TREE, DataPlane, Member, encoded, tar_of
from workloads.data import synthetic
from workloads.data.index import BadSamples, Column, LeafSets, SampleIndex, Shard, SplitIndex
from workloads.data.index_writer import ColumnFile, SplitColumns
from workloads.data.scan import ClassRule, ShardTable

IMAGE = encoded()


def link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry


def test_index_offsets_find_the_rendered_images(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    split = plane.builtin(TREE).split("train")
    params = synthetic.SyntheticParameters.from_mapping(
        {name: value for name, value in TREE.items() if name not in {"builtin", "version"}}
    )
    assert split.shard_sizes == (512, 88)
    for ordinal, sample in enumerate(synthetic.render_split(params, "train")):
        shard = split.shards[split.shard_of(np.array([ordinal]))[0]]
        content = plane.store.get_range(shard.object_name, int(split.offsets[ordinal]), int(split.lengths[ordinal]))
        assert np.array_equal(np.asarray(Image.open(BytesIO(content))), sample.image_HWC)
        assert (split.key(ordinal), split.leaves[ordinal]) == (sample.key, sample.leaf)
    assert split.first_ordinals.tolist() == [0, 512, 600]
    assert split.place(513) == "train-000001.tar:train-00000513"


def test_index_val_split_names_hard_samples(tmp_path: Path) -> None:
    index = DataPlane(folder=tmp_path).builtin(TREE)
    val = index.split("val")
    assert val.subset_names == ("hard", "normal")
    assert np.bincount(val.subset_ids).tolist() == [36, 36]
    assert set(index.split("train").subset_ids.tolist()) == {1}


def test_index_record_counts_samples_and_classes(tmp_path: Path) -> None:
    index = DataPlane(folder=tmp_path).builtin(TREE)
    record = read_record(DataPlane(folder=tmp_path).store, index.key)
    assert record.metrics == {"num_train": 600, "num_val": 72, "num_classes": 12}


def test_index_foreign_shard_with_scattered_members_is_read(tmp_path: Path) -> None:
    photo = encoded("JPEG", seed=1)
    members = [
        ("./", b""),
        ("a/2.JPG", photo),
        ("README", b"no extension"),
        ("a/1.cls", b"1"),
        ("__meta__.json", b"not a sample"),
        ("a/2.cls", b"0\n"),
        ("a/1.png", IMAGE),
        ("a/1.seg.png", b"another member"),
    ]
    plane = DataPlane(folder=tmp_path)
    split = plane.index(plane.foreign({"train-0.tar": tar_of(members)})).split("train")
    assert [split.key(ordinal) for ordinal in range(2)] == ["a/2", "a/1"]
    assert split.leaves.tolist() == [0, 1]
    assert split.lengths.tolist() == [len(photo), len(IMAGE)]


def test_index_name_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    latin = b"caf\xe9".decode(errors="surrogateescape")
    plane = DataPlane(folder=tmp_path)
    tar = tar_of([(f"{latin}.png", IMAGE), (f"{latin}.cls", b"0")])
    assert plane.index(plane.foreign({"train-0.tar": tar})).split("train").key(0) == latin


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", IMAGE)], "train-0.tar:a has no class"),
        ([("a.png", IMAGE), ("a.cls", b"cat")], "train-0.tar:a has the class 'cat'"),
        ([("a.png", IMAGE), ("a.cls", b"2")], "train-0.tar:a has the class 2; the class table has 0 to 1"),
        ([("a.png", IMAGE), ("a.cls", b"-1")], "train-0.tar:a has the class -1"),
        ([("a.cls", b"0")], "train-0.tar:a has 0 images"),
        ([("a.png", IMAGE), ("a.jpg", IMAGE), ("a.cls", b"0")], "train-0.tar:a has 2 images"),
        ([("a.png", b"not an image"), ("a.cls", b"0")], "train-0.tar:a is not a readable image"),
        ([("a.png", IMAGE[:300] + b"?" + IMAGE[301:]), ("a.cls", b"0")], "train-0.tar:a is not a readable image"),
        ([("a.png", IMAGE), ("a.cls", b"0"), ("a.png", IMAGE)], "train-0.tar:a has the member .png twice"),
        ([link("a.png", "b.png"), ("a.cls", b"0")], "train-0.tar:a has the member 'a.png', which is a link"),
        ([("a.png", IMAGE), ("a.cls", b"0"), ("a.json", b"{")], "train-0.tar:a has metadata that is not JSON"),
    ],
)
def test_index_bad_sample_is_refused_by_name(
    tmp_path: Path, members: Sequence[Member | tarfile.TarInfo], message: str
) -> None:
    plane = DataPlane(folder=tmp_path)
    with pytest.raises(BadDataError, match=message):
        plane.index(plane.foreign({"train-0.tar": tar_of(members)}))


def test_index_key_in_two_shards_of_a_split_is_refused(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    tar = tar_of([("a.png", IMAGE), ("a.cls", b"0")])
    with pytest.raises(BadDataError, match=r"train-1\.tar:a has the key of a sample in train-0\.tar"):
        plane.index(plane.foreign({"train-0.tar": tar, "train-1.tar": tar}))


def test_index_of_shards_whose_keys_begin_anew_is_refused_before_all_are_read(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    tar = tar_of(
        [(f"{number:06d}.{kind}", content) for number in range(3) for kind, content in (("png", IMAGE), ("cls", b"0"))]
    )
    shards = {"train-0.tar": tar, "train-1.tar": tar, "train-2.tar": b"never read"}
    message = (
        r"train-1\.tar:000000 has the key of a sample in train-0\.tar; keys must be unique; 2 more in the same scan"
    )
    with pytest.raises(BadDataError, match=message):
        plane.index(plane.foreign(shards))


def test_index_key_in_two_splits_is_accepted(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    tars = {
        f"{split}-0.tar": tar_of([("a.png", IMAGE), ("a.cls", leaf)])
        for split, leaf in (("train", b"0"), ("val", b"1"))
    }
    assert set(plane.index(plane.foreign(tars)).splits) == {"train", "val"}


def test_index_with_one_shard_in_two_splits_is_bad_data(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    tars = [tar_of([(f"{leaf}.png", IMAGE), (f"{leaf}.cls", b"%d" % leaf)]) for leaf in range(2)]
    empty = {"train-9.tar": tar_of([]), "val-9.tar": tar_of([])}
    same = {"train-0.tar": tars[0], "train-1.tar": tars[1], "val-0.tar": tars[1], **empty}
    with pytest.raises(BadDataError, match=r"val-0\.tar of split 'val' is train-1\.tar of split 'train', too"):
        plane.index(plane.foreign(same))
    assert plane.index(plane.foreign({"train-0.tar": tars[0], "val-0.tar": tars[1], **empty})).split("val").num_samples


@pytest.mark.parametrize("damage", ["cut", "header", "not_a_tar"])
def test_index_damaged_tar_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    tar = tar_of([("a.png", IMAGE), ("a.cls", b"0"), ("b.png", IMAGE), ("b.cls", b"1")])
    second = tar.index(b"b.png")
    damaged = {"cut": tar[: second + 700], "header": tar[:second] + b"X" + tar[second + 1 :], "not_a_tar": b"?" * 2000}
    plane = DataPlane(folder=tmp_path)
    with pytest.raises(BadDataError, match=r"train-0\.tar"):
        plane.index(plane.foreign({"train-0.tar": damaged[damage]}))


def test_index_class_table_with_a_hole_is_refused(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    request = plane.request(JobKind.DATASET, {}, {})
    writer = ArtifactWriter(plane.store, request)
    writer.add("classes.json", json.dumps([{"class": 0, "name": "a"}, {"class": 2, "name": "c"}]).encode())
    writer.commit(now=0.0)
    with pytest.raises(BadDataError, match=r"classes \[0, 2\]"):
        plane.index(request.key)


def test_index_missing_split_is_a_user_error(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.index(plane.foreign({"train-0.tar": tar_of([("a.png", IMAGE), ("a.cls", b"0")])}))
    with pytest.raises(UserError, match=r"no samples in split 'val'; it has \['train'\]"):
        index.split("val")


def test_index_digest_follows_content_and_not_place(tmp_path: Path) -> None:
    tars = {f"train-{number}.tar": tar_of([(f"{number}.png", IMAGE), (f"{number}.cls", b"0")]) for number in range(3)}
    changed = {**tars, "train-2.tar": tar_of([("2.png", IMAGE), ("2.cls", b"1")])}
    digests = []
    for folder, shards in (("a", tars), ("b", dict(reversed(tars.items()))), ("c", changed)):
        plane = DataPlane(folder=tmp_path / folder)
        index = plane.index(plane.foreign(shards))
        digests.append(read_record(plane.store, index.key).summary["dataset_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_index_object_names_are_those_of_the_data_set(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    key = plane.foreign({"train-0.tar": tar_of([("a.png", IMAGE), ("a.cls", b"0")])})
    (shard,) = plane.index(key).split("train").shards
    record = read_record(plane.store, key)
    assert shard.object_name == part_object(record, "train-0.tar")
    assert shard.sha256 == record.parts["train-0.tar"].sha256


def test_index_columns_of_imagenet21k_fit_on_disk(tmp_path: Path) -> None:
    num_samples, num_shards = 3000, 3
    columns = SplitColumns(name="train", folder=tmp_path, rule=ClassRule(num_classes=21_843), policy=BadSamples())
    for shard in range(num_shards):
        columns.add(shard_table(shard, num_samples))
    finished = columns.finish(())
    size_bytes = sum(columns.path(column).stat().st_size for column in finished)
    headers_bytes = 128 * len(finished)
    assert (size_bytes - headers_bytes) / (num_shards * num_samples) * 12_700_000 <= 600 * MIB


def shard_table(shard: int, num_samples: int) -> ShardTable:
    """As a scan of ImageNet-21k's folders gives it: keys of 25 bytes."""
    keys = [f"n{shard:08d}/n{shard:08d}_{row:05d}".encode() for row in range(num_samples)]
    return ShardTable(
        name=f"train-{shard:06d}.tar",
        size_bytes=1,
        digests=Digests(sha256=""),
        offsets=np.arange(num_samples, dtype=np.int64),
        lengths=np.ones(num_samples, dtype=np.int32),
        checks=np.zeros(num_samples, dtype=np.uint32),
        leaves=np.zeros(num_samples, dtype=np.int32),
        num_leaves=np.ones(num_samples, dtype=np.int32),
        subsets=np.full(num_samples, -1, dtype=np.int32),
        subset_names=(),
        keys=np.frombuffer(b"".join(keys), dtype=np.uint8),
        key_lengths=np.full(num_samples, len(keys[0]), dtype=np.int32),
        key_hashes=np.arange(num_samples, dtype=np.uint64) + np.uint64(shard * num_samples),
        bad=(),
    )


@pytest.mark.parametrize(("num_subsets", "dtype"), [(1, "<i2"), (32_767, "<i2"), (32_768, "<i4"), (40_000, "<i4")])
def test_index_subset_ids_have_as_many_bytes_as_their_number_needs(
    tmp_path: Path, num_subsets: int, dtype: str
) -> None:
    """Two bytes up to 32,767 subsets, as in all indexes that there are; more names once ended in an OverflowError."""
    columns = SplitColumns(name="train", folder=tmp_path, rule=ClassRule(num_classes=1), policy=BadSamples())
    names = [f"s{number:05d}" for number in range(num_subsets)]
    for shard, mine in enumerate((names[num_subsets // 2 :], names[: num_subsets // 2])):
        ids = np.arange(-1, len(mine), dtype=np.int32)  # the first sample is in none
        columns.add(replace(shard_table(shard, len(ids)), subsets=ids, subset_names=tuple(mine)))
    columns.finish(names)
    expected = [-1, *range(num_subsets // 2, num_subsets), -1, *range(num_subsets // 2)]
    written = ColumnFile(tmp_path / "expected.npy", np.dtype(dtype).type)
    written.append(np.array(expected))
    written.close()
    assert columns.path(Column.SUBSET).read_bytes() == written.path.read_bytes()


@pytest.mark.slow
def test_index_of_more_subsets_than_two_bytes_count_is_read_and_joined(tmp_path: Path) -> None:
    samples = [
        member
        for row in range(33_000)
        for member in ((f"{row}.png", IMAGE), (f"{row}.json", b'{"cls": 0, "subset": "s%05d"}' % row))
    ]
    plane = DataPlane(folder=tmp_path)
    index = plane.index(plane.foreign({"train-0.tar": tar_of(samples), "train-1.tar": tar_of(samples[:0])}))
    split = index.split("train")
    assert split.subset_ids.tolist() == list(range(33_000))
    summary = read_record(plane.store, index.key).summary
    assert summary["warnings"][0] == "train-1.tar holds no samples"
    assert summary["warnings"][1].startswith("samples name 33000 values of subset, such as 's00000'")
    joined = plane.run(JobKind.INDEX, {"mixture": {"weights": None}}, {"part0": index.key, "part1": index.key})
    ids = SampleIndex.open(plane.store, joined.key, plane.cache).split("train").subset_ids
    assert ids.tolist() == 2 * list(range(33_000))


def _cut(shard: bytes) -> bytes:
    return shard[: len(shard) // 2]


def _emptied(shard: bytes) -> bytes:
    return shard[:0]


def _broken_header(shard: bytes) -> bytes:
    place = shard.index(b"5.cls")
    return shard[:place] + b"?" + shard[place + 1 :]


@pytest.mark.parametrize(("harm", "num_bad"), [(gzip.compress, 30), (_cut, 15), (_broken_header, 15), (_emptied, 30)])
def test_index_broken_shards_count_as_the_samples_that_they_held(
    tmp_path: Path, harm: Callable[[bytes], bytes], num_bad: int
) -> None:
    """A budget is a share of the split: three broken ones of ten shards are not three samples of a hundred."""
    shards = {}
    for shard in range(10):
        rows = [(f"{shard}{row}.{ext}", body) for row in range(10) for ext, body in (("png", IMAGE), ("cls", b"0"))]
        shards[f"train-{shard}.tar"] = harm(tar_of(rows)) if shard in {0, 4, 9} else tar_of(rows)
    plane = DataPlane(folder=tmp_path)
    dataset = plane.foreign(shards)

    def indexed(budget: float) -> Record:
        policy = {"bad_samples": {"policy": "replace", "budget": budget}}
        return plane.run(JobKind.INDEX, policy, {"dataset": dataset})

    with pytest.raises(BadDataError, match=r"train-\d\.tar.* by its size it counts as \d+ bad samples"):
        indexed(0.05)
    metrics = indexed(0.35).metrics
    assert metrics["num_bad_train"] == pytest.approx(num_bad, abs=6)
    assert metrics["num_train"] + metrics["num_bad_train"] == pytest.approx(100, abs=6)


def test_index_of_broken_shards_alone_fails_whatever_they_held(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    dataset = plane.foreign({"train-0.tar": gzip.compress(tar_of([("a.png", IMAGE), ("a.cls", b"0")]))})
    with pytest.raises(BadDataError, match=r"1 samples of split 'train' cannot be used, 100\.00%"):
        plane.run(JobKind.INDEX, {"bad_samples": {"policy": "replace", "budget": 0.9}}, {"dataset": dataset})


def test_index_keys_whose_hashes_clash_are_compared(tmp_path: Path) -> None:
    columns = SplitColumns(name="train", folder=tmp_path, rule=ClassRule(num_classes=1), policy=BadSamples())
    first, second = shard_table(0, 4), shard_table(1, 4)
    columns.add(first)
    columns.add(replace(second, key_hashes=first.key_hashes))  # other keys
    columns.finish(())
    assert columns.num_samples == 8


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    leaves=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=30, max_size=30),
)
def test_index_in_memory_finds_shard_and_key_of_every_ordinal(sizes: list[int], leaves: list[list[int]]) -> None:
    sets = leaves[: sum(sizes)]
    offsets = np.concatenate([[0], np.cumsum([len(found) for found in sets])]).astype(np.int64)
    values = np.array([leaf for found in sets for leaf in found], dtype=np.int32)
    split = SplitIndex.in_memory(
        leaves=np.array([found[0] if found else -1 for found in sets], dtype=np.int32),
        shard_sizes=sizes,
        keys=[f"k{row}" for row in range(len(sets))],
        leaf_sets=LeafSets(offsets=offsets, values=values),
    )
    owners = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    assert split.shard_of(np.arange(len(sets))).tolist() == owners
    assert [split.key(row) for row in range(len(sets))] == [f"k{row}" for row in range(len(sets))]
    assert split.subset_ids.tolist() == [-1] * len(sets)
    assert split.num_samples == len(sets)


def test_index_columns_are_opened_when_they_are_used() -> None:
    opened: list[str] = []

    def open_column(column: str) -> np.ndarray[Any, Any]:
        opened.append(column)
        return np.zeros(3, dtype=np.int32)

    shard = Shard(name="a.tar", object_name="a.tar", size_bytes=0, sha256="", num_samples=3)
    split = SplitIndex(
        index_key="", name="train", shards=(shard,), subset_names=(), columns=("leaf",), open_column=open_column
    )
    assert (split.num_samples, opened) == (3, [])
    assert (split.leaves.tolist(), split.leaves.tolist(), opened) == ([0, 0, 0], [0, 0, 0], ["leaf"])
