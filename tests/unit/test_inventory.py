"""What of a store is artifacts and what checkpoints, as ``ls`` and ``du`` count it."""

from __future__ import annotations

from typing import Final

import pytest

from orchestrator.retention.inventory import (
    ALL_GROUPS,
    NO_GROUP,
    ArtifactLine,
    Grouping,
    artifact_lines,
    measure_usage,
)
from orchestrator.storage.digests import digests_of
from orchestrator.storage.layout import artifact_folder, checkpoints_folder, flight_record_name, record_name
from tests.gc_store import Lab, make_job

JOB: Final = make_job(3)
SHARD: Final = b"many images"


@pytest.fixture
def lab() -> Lab:
    """A committed artifact with a part in a checkpoint's folder, and a checkpoint that it does not name."""
    lab = Lab()
    name = f"{checkpoints_folder(JOB.key)}/{0:012d}-abcdef/train-000000.tar"
    lab.store.put(name, SHARD)
    lab.write_checkpoint(JOB, step=7)
    writer = lab.write_parts(JOB)
    writer.adopt("train-000000.tar", name, size_bytes=len(SHARD), digests=digests_of(SHARD))
    writer.commit(now=lab.clock())
    return lab


def line_of(lab: Lab) -> ArtifactLine:
    return next(line for line in artifact_lines(lab.store) if line.key == JOB.key)


def test_parts_of_a_record_in_a_checkpoint_folder_are_no_checkpoints(lab: Lab) -> None:
    line = line_of(lab)
    inside = list(lab.store.list_objects(f"{artifact_folder(JOB.key)}/"))
    spare = [stat for stat in inside if f"{7:012d}-" in stat.name]
    assert line.is_committed
    assert line.checkpoints.num_objects == len(spare) == 2
    assert line.checkpoints.num_bytes == sum(stat.size_bytes for stat in spare)
    assert line.total.num_bytes == sum(stat.size_bytes for stat in inside)


def test_usage_counts_them_as_artifacts(lab: Lab) -> None:
    usage = measure_usage(lab.store, Grouping(of_key=lambda _: (), of_log=lambda *_: ()))[ALL_GROUPS]
    assert usage.checkpoints == line_of(lab).checkpoints
    assert usage.checkpoints.num_objects == 2
    assert usage.artifacts.num_bytes == line_of(lab).total.num_bytes - usage.checkpoints.num_bytes


def test_what_counts_as_checkpoints_is_what_a_collection_frees(lab: Lab) -> None:
    lab.accept("kept", [JOB])
    expected = line_of(lab).total.num_bytes - line_of(lab).checkpoints.num_bytes
    lab.collect_until_freed()
    after = line_of(lab)
    assert (after.total.num_bytes, after.checkpoints.num_bytes) == (expected, 0)


def test_unfinished_job_has_only_checkpoints(lab: Lab) -> None:
    lab.store.delete(record_name(JOB.key))
    line = line_of(lab)
    assert not line.is_committed
    assert line.checkpoints.num_objects == 3


def test_record_that_cannot_be_read_leaves_nothing_to_free(lab: Lab) -> None:
    lab.store.put(record_name(JOB.key), b"[1, 2")
    assert line_of(lab).checkpoints.num_objects == 0


def test_logs_count_for_their_job_whether_its_attempt_ended_runs_or_hung(lab: Lab) -> None:
    whole = lab.write_log("s", JOB)
    lab.store.put(f"{whole.removesuffix('.log')}/{0:012d}-{5:012d}.log", b"hello")
    lab.store.put(flight_record_name(whole), b"{}")
    lab.store.put("logs/s/notes.txt", b"theirs")
    asked: set[tuple[str, str]] = set()

    def of_log(sweep: str, job: str) -> set[str]:
        asked.add((sweep, job))
        return {"level"}

    usage = measure_usage(lab.store, Grouping(of_key=lambda _: (), of_log=of_log))
    assert asked == {("s", JOB.name)}
    assert (usage["level"].logs.num_objects, usage[NO_GROUP].logs.num_objects) == (3, 1)
