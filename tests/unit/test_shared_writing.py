"""Data sets that several jobs write: the same shards and keys whatever their number, and no shard twice."""

import json
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import PreemptedError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.layout import checkpoints_folder
from tests.data_jobs import DataPlane
from tests.shared_writing import TREE, Written, shard_digests
from workloads.jobs.dataset import Part


def copies(written: Written, key: str) -> Counter[str]:
    """How often each shard was written, by name."""
    names = (stat.name for stat in written.store.list_objects(f"{checkpoints_folder(key)}/"))
    return Counter(name.rpartition("/")[2] for name in names if name.endswith(".tar"))


@given(num=st.integers(1, 40), num_shards=st.integers(0, 100))
def test_parts_cover_all_shards_once_in_equal_runs(num: int, num_shards: int) -> None:
    runs = [Part(of="k", number=number, num=num).numbers(num_shards) for number in range(num)]
    assert [number for run in runs for number in run] == list(range(num_shards))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_shared_writing_changes_no_shard_and_no_key(tmp_path: Path) -> None:
    found = []
    for jobs in (1, 7):
        written = Written(tmp_path / str(jobs))
        plan = written.plan({**TREE, "jobs": jobs})
        records = written.run_all(plan)
        shards = shard_digests(records["dataset/mine"])
        assert set(copies(written, records["dataset/mine"].key).values()) == {1}
        keys = {job.name: job.key for job in plan.jobs if "/part" not in job.name}
        found.append((keys, shards, records["index/mine"].summary["dataset_digest"]))
        assert len(plan.jobs) - len(keys) == (jobs if jobs > 1 else 0)
    assert found[0] == found[1]
    assert sorted(found[0][1]) == [*(f"train-{n:06d}.tar" for n in range(3)), "val-000000.tar", "val-000001.tar"]


def test_shared_writing_has_the_bytes_of_one_process_that_writes_all(tmp_path: Path) -> None:
    written = Written(tmp_path)
    plan = written.plan({**TREE, "jobs": 3})
    records = written.run_all(plan)
    parameters = plan.by_name()["dataset/mine"].identity["parameters"]
    alone = DataPlane(folder=tmp_path / "alone").run(JobKind.DATASET, parameters)
    assert shard_digests(records["dataset/mine"]) == shard_digests(alone)
    assert records["dataset/mine"].parts["classes.json"].sha256 == alone.parts["classes.json"].sha256


def test_shared_writing_job_waits_for_its_parts_and_reads_none_of_their_keys(tmp_path: Path) -> None:
    plan = Written(tmp_path).plan({**TREE, "jobs": 2}).by_name()
    assert plan["dataset/mine"].needs == ("dataset/mine/part0", "dataset/mine/part1")
    assert plan["dataset/mine"].identity["inputs"] == {}
    assert plan["dataset/mine/part1"].identity["parameters"]["part"] == {
        "of": plan["dataset/mine"].key,
        "number": 1,
        "num": 2,
    }


def test_part_that_was_stopped_goes_on_with_the_shards_that_are_missing(tmp_path: Path) -> None:
    written = Written(tmp_path)
    plan = written.plan({**TREE, "jobs": 2}).by_name()
    asked = count(1)
    with pytest.raises(PreemptedError, match="after 2 shards"):
        written.run(plan["dataset/mine/part1"], should_stop=lambda: next(asked) == 2)
    before = copies(written, plan["dataset/mine"].key)
    record = written.run(plan["dataset/mine/part1"])
    assert sum(before.values()) == 2
    assert copies(written, plan["dataset/mine"].key) == before + Counter({"val-000001.tar": 1})
    assert record.metrics == {"num_shards": 3.0, "num_adopted": 2.0}


def test_job_of_the_whole_writes_what_its_parts_lost(tmp_path: Path) -> None:
    written = Written(tmp_path)
    plan = written.plan({**TREE, "jobs": 2}).by_name()
    for number in range(2):
        written.run(plan[f"dataset/mine/part{number}"])
    folders = [
        f"{checkpoints_folder(plan['dataset/mine'].key)}/{name}"
        for name in written.store.list_children(f"{checkpoints_folder(plan['dataset/mine'].key)}/")
    ]
    written.store.delete(f"{folders[0]}/train-000000.tar")
    written.store.put(f"{folders[1]}/train-000001.tar", b"cut")
    written.store.put(f"{folders[2]}/manifest.json", b"{}")
    record = written.run(plan["dataset/mine"])
    assert record.metrics["num_adopted"] == 2
    alone = Written(tmp_path / "alone")
    assert shard_digests(record) == shard_digests(alone.run_all(alone.plan(TREE))["dataset/mine"])
    written.run(plan["index/mine"])


def test_part_of_a_data_set_that_is_there_has_nothing_to_do(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.run_all(written.plan(TREE))
    plan = written.plan({**TREE, "jobs": 3}).by_name()
    before = copies(written, plan["dataset/mine"].key)
    assert written.run(plan["dataset/mine/part2"]).metrics == {"num_shards": 0.0}
    assert copies(written, plan["dataset/mine"].key) == before


def test_part_commits_a_receipt_of_its_shards(tmp_path: Path) -> None:
    written = Written(tmp_path)
    record = written.run(written.plan({**TREE, "jobs": 5}).by_name()["dataset/mine/part3"])
    content = written.store.get(f"artifacts/dataset/{record.key}/{record.parts['shards.json'].path}")
    assert list(json.loads(content)) == ["val-000000.tar"]


def test_part_that_does_not_exist_is_a_user_error(tmp_path: Path) -> None:
    parameters = {**TREE, "version": 1, "part": {"of": "dataset-x", "number": 2, "num": 2}}
    with pytest.raises(UserError, match="part 2 of 2"):
        DataPlane(folder=tmp_path).run(JobKind.DATASET, parameters)
