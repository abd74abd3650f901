"""``orchestrator gc``, ``fsck``, ``ls`` and ``du`` over a store that a finished sweep left."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrator.cli.app import app
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import ControllerError, NotFoundError, StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.retention.fsck import Depth, check_store
from orchestrator.retention.gc import CollectionBusyError, CollectionLock
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import artifact_folder, checkpoints_folder, log_name, parts_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash
from tests.gc_store import GRACE_S, Lab, make_job
from tests.s3_server import s3_server, s3_store
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import SWEEP, sample_plan

__all__ = ["s3_server"]

SPACES = ("levels/depth1", "levels/depth2")
CHECKPOINT = "000000000005-ab"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root) -> LocalStore:
    return LocalStore(root)


@pytest.fixture
def plan(store) -> Plan:
    plan = sample_plan(store.uri, spaces=SPACES, seeds=(0,))
    SampleJournal(store, plan).run_all()
    for job in plan.jobs:
        store.put(log_name(SWEEP, job.name, 1, key=job.key), b"hello")
        write_segment(store, job.key, 1, 0, [0.5])
    return plan


@pytest.fixture
def orchestrator(store):
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--store", store.uri])

    return run


def age(root: Path, age_s: float) -> None:
    """Make everything in the store look that old."""
    for path in root.rglob("*"):
        os.utime(path, (time.time() - age_s,) * 2)


def document(result: Result) -> Any:
    assert result.exit_code == ExitCode.OK, result.output
    return json.loads(result.stdout)


def by_action(result: Result) -> dict[str, int]:
    """Objects by action, over all reasons."""
    found: dict[str, int] = {}
    for line in document(result)["garbage"]:
        found[line["action"]] = found.get(line["action"], 0) + line["num_objects"]
    return found


def num_committed(store: ObjectStore, plan: Plan) -> int:
    return sum(is_committed(store, job.key) for job in plan.jobs)


def test_gc_dry_run_prints_bytes_by_reason_and_changes_nothing(orchestrator, store, plan, root) -> None:
    pretrain = next(job for job in plan.jobs if job.kind is JobKind.PRETRAIN)
    store.put(f"{parts_folder(pretrain.key, 7, 'dead')}/weights", b"x" * 2048)
    age(root, 90_000)
    before = {path for path in root.rglob("*") if path.is_file()}
    result = orchestrator("gc")
    assert result.exit_code == ExitCode.OK
    assert "orphaned parts" in result.stdout
    assert "2.0 KiB in 1" in result.stdout
    assert "--apply" in result.stderr
    assert {path for path in root.rglob("*") if path.is_file()} == before


def test_gc_apply_forgotten_sweep_is_freed_in_two_steps(orchestrator, store, plan, root) -> None:
    age(root, 90_000)
    assert orchestrator("gc").stdout.startswith("No garbage in ")
    assert by_action(orchestrator("gc", "--apply", "-o", "json")) == {}
    hidden = by_action(orchestrator("gc", "--apply", "--forget", SWEEP, "-o", "json"))
    assert hidden == {"hide": 4 * len(plan.jobs)}  # record, part, metrics, log
    assert num_committed(store, plan) == 0
    assert all(line["is_hidden"] and not line["is_committed"] for line in document(orchestrator("ls", "-o", "json")))
    assert "in the trash" in orchestrator("ls").stdout
    assert by_action(orchestrator("gc", "--apply", "-o", "json")) == {"wait_in_trash": 3 * len(plan.jobs)}
    freed = by_action(orchestrator("gc", "--apply", "--trash-grace", "0s", "-o", "json"))
    assert freed == {"destroy": 3 * len(plan.jobs)}
    assert store.list_children("artifacts/") == store.list_children("logs/") == []
    assert load_snapshot(store, SWEEP).state.is_final, "its history stays"


def test_gc_pin_of_a_sweep_keeps_its_artifacts_until_unpinned(orchestrator, store, plan, root) -> None:
    age(root, 90_000)
    orchestrator("gc", "--apply", "--pin", f"paper={SWEEP}", "--forget", SWEEP)
    assert num_committed(store, plan) == len(plan.jobs)
    assert [pin["name"] for pin in document(orchestrator("ls", "pins", "-o", "json"))] == ["paper"]
    orchestrator("gc", "--apply", "--unpin", "paper")
    assert num_committed(store, plan) == 0


def test_gc_pin_keeps_one_artifact_and_what_it_was_made_from(orchestrator, store, plan, root) -> None:
    age(root, 90_000)
    probe = next(job for job in plan.jobs if job.kind is JobKind.PROBE)
    orchestrator("gc", "--apply", "--pin", f"best={probe.key}", "--forget", SWEEP)
    kept = {job.kind for job in plan.jobs if is_committed(store, job.key)}
    assert kept == {JobKind.DATASET, JobKind.INDEX, JobKind.LABELS, JobKind.PRETRAIN, JobKind.PROBE}
    assert orchestrator("fsck", "--deep").exit_code == ExitCode.OK


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("logs", "logs is not committed and has no complete checkpoint in "),
        ("artifacts/pretrain/{key}", "is neither a key nor KEY/checkpoints/STEP-NONCE"),
        ("{key}/", "write KEY alone"),
        ("{key}/parts", "is neither a key nor KEY/checkpoints/STEP-NONCE"),
        ("{key}/checkpoint/{name}", "is neither a key nor KEY/checkpoints/STEP-NONCE"),
        ("{key}/checkpoints/", "or the whole name of a checkpoint"),
        ("{key}/checkpoints/{name}0", "{name}0 is no complete checkpoint in "),
        ("{key}/checkpoints/{name}/manifest.json", "is neither a key nor KEY/checkpoints/STEP-NONCE"),
    ],
)
def test_gc_pin_of_what_is_no_key_and_no_checkpoint_is_refused(orchestrator, store, plan, target, message) -> None:
    key = next(job.key for job in plan.jobs if job.kind is JobKind.PRETRAIN)
    store.put(f"{checkpoints_folder(key)}/{CHECKPOINT}/manifest.json", b"{}")
    result = orchestrator("gc", "--pin", "x=" + target.format(key=key, name=CHECKPOINT))
    assert isinstance(result.exception, NotFoundError)
    assert message.format(name=CHECKPOINT) in str(result.exception)
    assert store.list_children("pins/") == store.list_children("trash/") == []


@pytest.mark.parametrize("key", ["pretrain-unfinished-0123", ""])
def test_gc_pin_of_a_checkpoint_keeps_it_whether_its_job_is_committed_or_not(
    orchestrator, store, plan, root, key
) -> None:
    is_in_plan, key = not key, key or next(job.key for job in plan.jobs if job.kind is JobKind.PRETRAIN)
    kept = f"{checkpoints_folder(key)}/{CHECKPOINT}/manifest.json"
    store.put(kept, b"{}")
    age(root, 90_000)
    orchestrator("gc", "--apply", "--pin", f"best={key}/checkpoints/{CHECKPOINT}")
    assert [pin["keys"] for pin in document(orchestrator("ls", "pins", "-o", "json"))] == [
        [f"{key}/checkpoints/{CHECKPOINT}"]
    ]
    assert len(document(orchestrator("ls", "pins", "--sweep", SWEEP, "-o", "json"))) == is_in_plan
    assert store.exists(kept)


def test_gc_pin_of_an_artifact_in_the_trash_restores_it(orchestrator, store, plan, root) -> None:
    age(root, 90_000)
    orchestrator("gc", "--apply", "--forget", SWEEP)
    probe = next(job for job in plan.jobs if job.kind is JobKind.PROBE)
    assert not is_committed(store, probe.key)
    orchestrator("gc", "--apply", "--pin", f"best={probe.key}")
    assert is_committed(store, probe.key)


def test_gc_pin_of_what_may_be_in_the_trash_waits_for_the_end_of_a_collection(orchestrator, store, plan, root) -> None:
    """It has read the pins already, and may be destroying what the pin names or what that was made from."""
    age(root, 90_000)
    orchestrator("gc", "--apply", "--forget", SWEEP)
    hidden, visible = (
        next(job.key for job in plan.jobs if job.kind is kind) for kind in (JobKind.PROBE, JobKind.INDEX)
    )
    orchestrator("gc", "--apply", "--pin", f"first={visible}")
    assert is_committed(store, visible)
    with CollectionLock(store, "another", time.time):
        for target in (hidden, SWEEP):
            assert isinstance(orchestrator("gc", "--pin", f"best={target}").exception, CollectionBusyError)
        assert orchestrator("gc", "--pin", f"second={visible}").exit_code == ExitCode.OK
    assert store.list_children("pins/") == ["first.json", "second.json"]
    assert orchestrator("gc", "--pin", f"best={hidden}").exit_code == ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--forget", "no-such-sweep"), NotFoundError),
        (("--unpin", "no-such-pin"), NotFoundError),
        (("--pin", "x=pretrain-nothing-0123"), NotFoundError),
        (("--pin", f"paper/final={SWEEP}", "--forget", SWEEP), StorageError),
        (("--forget", "running"), ControllerError),
    ],
)
def test_gc_impossible_request_is_refused_before_anything_is_collected(
    orchestrator, plan, root, arguments, error
) -> None:
    store = LocalStore(root)
    SampleJournal(store, sample_plan(store.uri, sweep="running", spaces=SPACES, seeds=(1,)))
    store.put(f"{artifact_folder('pretrain-old-0123')}/parts/1-dead/weights", b"garbage")
    age(root, 90_000)
    result = orchestrator("gc", "--apply", *arguments)
    assert isinstance(result.exception, error)
    assert store.list_children("trash/") == []


def test_fsck_intact_store_succeeds_and_damaged_one_fails(orchestrator, store, plan, root) -> None:
    assert orchestrator("fsck").exit_code == ExitCode.OK
    part = next(stat.name for stat in store.list_objects("artifacts/pretrain/") if "/parts/" in stat.name)
    content = store.get(part)
    store.put(part, bytes([content[0] ^ 1]) + content[1:])
    assert orchestrator("fsck").exit_code == ExitCode.OK, "the size is right"
    deep = orchestrator("fsck", "--deep", "-o", "json")
    assert deep.exit_code == ExitCode.FAILURE
    assert [(found["name"], found["problem"]) for found in json.loads(deep.stdout)["findings"]] == [(part, "altered")]
    store.delete(part)
    missing = orchestrator("fsck")
    assert missing.exit_code == ExitCode.FAILURE
    assert missing.stdout.startswith(f"missing  {part}")


def test_ls_artifacts_of_a_sweep_are_those_of_its_plan(orchestrator, store, plan) -> None:
    other = sample_plan(store.uri, sweep="other", spaces=SPACES, seeds=(5,))
    journal = SampleJournal(store, other)
    for job in other.jobs:
        (journal.reuse if is_committed(store, job.key) else journal.run)(job)
    lines = document(orchestrator("ls", "artifacts", "--sweep", SWEEP, "-o", "json"))
    assert {line["key"] for line in lines} == {job.key for job in plan.jobs}
    assert all(line["is_committed"] and line["total"]["num_objects"] == 2 for line in lines)
    everything = document(orchestrator("ls", "-o", "json"))
    assert {line["key"] for line in everything} == {job.key for job in (*plan.jobs, *other.jobs)}
    assert plan.jobs[0].key in orchestrator("ls").stdout


@pytest.mark.parametrize("by", ["sweep", "kind", "level"])
def test_du_groups_add_up_to_what_is_stored(orchestrator, store, plan, by) -> None:
    found = document(orchestrator("du", "--by", by, "-o", "json"))
    stored = [s for prefix in ("artifacts/", "metrics/", "logs/") for s in store.list_objects(prefix)]
    parts = ("artifacts", "checkpoints", "metrics", "logs")
    assert sum(found["total"][part]["num_bytes"] for part in parts) == sum(stat.size_bytes for stat in stored)
    grouped = sum(group[part]["num_objects"] for group in found["groups"].values() for part in parts)
    assert grouped == len(stored), "nothing is shared here, so the groups add up"
    expected = {"sweep": {SWEEP}, "kind": {job.kind.value for job in plan.jobs}, "level": {*SPACES, "-"}}[by]
    assert set(found["groups"]) == expected
    assert orchestrator("du", "--by", by).exit_code == ExitCode.OK


def test_du_artifacts_of_two_sweeps_are_shown_as_shared(orchestrator, store, plan) -> None:
    twin = SampleJournal(store, sample_plan(store.uri, sweep="twin", spaces=SPACES, seeds=(0,)))
    for job in twin.plan.jobs:
        twin.reuse(job)
    groups = document(orchestrator("du", "-o", "json"))["groups"]
    assert groups[SWEEP]["artifacts"] == groups["twin"]["artifacts"]
    assert groups["twin"]["shared"]["num_bytes"] > groups["twin"]["artifacts"]["num_bytes"]


@pytest.mark.parametrize("moment", [None, Moment.CRASH_AFTER])
def test_gc_on_a_real_server_frees_what_is_unreachable_and_nothing_else(s3_server, tmp_path, moment) -> None:
    lab = Lab()
    lab.clock.now_s = time.time() + 1.0
    lab.store = s3_store(tmp_path)
    dataset, pretrain = make_job(0), make_job(3, make_job(0))
    for job in (dataset, pretrain):
        lab.commit(job)
        lab.write_metrics(job)
    lab.accept("kept", [dataset])
    kept = lab.names(f"artifacts/{dataset.kind}/") | lab.names(f"metrics/{dataset.key}/")
    lab.write_parts(dataset)
    lab.write_checkpoint(pretrain)
    if moment is not None:
        lab.clock.advance(GRACE_S + 1)
        with pytest.raises(SimulatedCrash):
            lab.collect(FaultyStore(lab.store, [Fault(moment=moment, within="record.json")]))
    lab.collect_until_freed()
    assert lab.payload() == kept
    assert lab.trash() == set()
    assert list(check_store(lab.store, Depth.CONTENT)) == []
