"""What status says beside the counts: what is present and what is past, budgets, waits, and stores that are silent."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.commands.live_rows import job_line
from orchestrator.core.contract import Progress
from orchestrator.core.errors import FailureKind
from orchestrator.services import stores
from orchestrator.services.status import MAX_LINES, SweepStatus, describe_progress, status_lines
from orchestrator.services.stores import ANSWER_S
from orchestrator.state.snapshot import Failure, JobTable, JobView, Snapshot
from orchestrator.state.spending import ResourceUse
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import checkpoints_folder, lease_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import load_snapshot
from orchestrator.sweeps.lease import LeaseState
from orchestrator.sweeps.progress import LiveProgress
from tests.commands import Ended, run_command
from tests.live_sweep import CLUSTER, SWEEP, write_live_sweep
from tests.scripted_sweep import World, make_job, make_plan

PATIENCE_S = 40.0
"""A busy machine imports slowly; without a deadline of its own a store is asked for a minute."""
NOW = 1_800_000_000.0


def gpu_sweep(ran_s: float, policy: Policy, *, state: SweepState = SweepState.RUNNING) -> Snapshot:
    """One job with one GPU that ran so long."""
    job = make_job("pretrain/a")
    job = replace(job, resources=replace(job.resources, gpus=1.0))
    plan = replace(make_plan(job), policy=policy)
    view = JobView(
        name=job.name,
        key=job.key,
        ran_s=ran_s,
        used=(ResourceUse(gpu_s=ran_s),) if ran_s else (),
        state=JobState.PENDING,
    )
    return Snapshot(sweep="s", state=state, plan=plan, accepted_at_s=NOW, jobs=JobTable([view]))


def lines(snapshot: Snapshot, progress: dict[str, LiveProgress] | None = None, now: float = NOW) -> str:
    return "\n".join(status_lines(SweepStatus(snapshot=snapshot, progress=progress or {}, now=now)))


@pytest.mark.parametrize(
    ("hours", "told"),
    [
        (2.0, "Used 2.00 of 10.00 GPU-hours, 20 % of the budget"),
        (8.5, "85 % of the budget: nearly spent"),
        (10.0, "100 % of the budget: it is spent, and no job that needs GPUs starts"),
    ],
)
def test_budget_says_how_much_is_used_and_what_follows(hours: float, told: str) -> None:
    assert told in lines(gpu_sweep(hours * 3600, Policy(gpu_hours=10.0)))


def test_deadline_says_how_long_it_is_and_when_it_has_passed() -> None:
    snapshot = gpu_sweep(0.0, Policy(time_limit_s=7200.0))
    assert "1h00m until the deadline" in lines(snapshot, now=NOW + 3600)
    assert "No job starts any more" in lines(snapshot, now=NOW + 7300)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (SweepState.PAUSED, "orchestrator resume s"),
        (SweepState.STOPPING, "running jobs finish"),
        (SweepState.CANCELLING, "end after a checkpoint"),
    ],
)
def test_states_that_somebody_asked_for_are_explained(state: SweepState, told: str) -> None:
    assert told in lines(gpu_sweep(0.0, Policy(), state=state))


def wait(reason: str) -> LiveProgress:
    return LiveProgress(at_s=NOW, attempt_id="", progress=Progress(phase=reason))


def test_waits_for_many_reasons_end_with_the_command_that_lists_all() -> None:
    names = [f"pretrain/{number}" for number in range(MAX_LINES + 1)]
    views = JobTable(JobView(name=name, key=name, state=JobState.PENDING) for name in names)
    snapshot = replace(gpu_sweep(0.0, Policy()), jobs=views)
    status = SweepStatus(snapshot=snapshot, progress={name: wait(name) for name in names}, now=NOW)
    *_, last = status_lines(status, "file:///s")
    assert last == "and 1 more reasons to wait; all of them: orchestrator status s -o json --store file:///s"


def test_waits_name_the_jobs_by_reason_and_forget_those_that_run() -> None:
    snapshot = gpu_sweep(0.0, Policy())
    assert "1 job waits: 8 GPUs are busy (pretrain/a)" in lines(snapshot, {"pretrain/a": wait("8 GPUs are busy")})
    done = replace(snapshot.jobs["pretrain/a"], state=JobState.SUCCEEDED)
    ended = replace(snapshot, jobs=JobTable([done]))
    assert "waits" not in lines(ended, {"pretrain/a": wait("8 GPUs are busy")})


def test_failure_of_an_earlier_attempt_is_told_as_past() -> None:
    failure = Failure(attempt_id="k.1", kind=FailureKind.NODE_LOST, message="its node is gone", at_s=NOW)
    view = JobView(name="pretrain/a", key="k", state=JobState.PENDING, num_attempts=1, last_failure=failure)
    line = job_line(view)
    assert line == "pretrain/a will be tried again after node_lost: its node is gone"


@pytest.fixture
def live(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=400, now=time.time())
    return store


@pytest.fixture
def served(live: LocalStore) -> LocalStore:
    """The same, beside a controller."""
    lease = LeaseState(cluster=CLUSTER, epoch=1, holder="h", expires_at_s=time.time() + 3600)
    live.put(lease_name(CLUSTER), lease.to_bytes(lease_name(CLUSTER)))
    return live


def test_status_without_a_controller_tells_what_was_last_seen_and_no_time_left(
    live: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_command(capsys, "status", SWEEP, "--store", live.uri).out
    assert "No controller serves this sweep" in out
    assert "run `orchestrator serve` on the cluster's head" in " ".join(out.split())
    assert "orchestrator up" not in out
    assert "last seen: train 96/512" in out
    assert "images/s" not in out
    assert " left" not in out
    assert run_command(capsys, "status", SWEEP, "--store", live.uri, "-o", "json").document["time_left_s"] is None


def test_running_line_has_no_metrics() -> None:
    progress = Progress(phase="train", step=1, total_steps=4, metrics={"bad_samples": 0.0, "val_error": 0.5})
    assert describe_progress(progress) == "train 1/4"


def test_status_of_a_live_sweep_tells_pace_use_and_past(served: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "status", SWEEP, "--store", served.uri)
    assert result.code == 101
    assert "No controller serves this sweep" not in result.out
    assert "left, on what it holds now: 800 CPU, 100 GPU" in result.out
    assert "train 96/512  1,234 images/s  3m10s left" in result.out
    assert result.out.count("(attempt 2; the one before ended with node_lost)") == 1
    again = f"orchestrator status {SWEEP} -o json --store {served.uri}"
    assert f"and 80 more running jobs; all of them: {again}" in " ".join(result.out.split())


def test_status_documents_are_the_same_in_json_and_yaml(served: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    found = run_command(capsys, "status", SWEEP, "--store", served.uri, "-o", "json").document
    again = yaml.safe_load(run_command(capsys, "status", SWEEP, "--store", served.uri, "-o", "yaml").out)
    moving = ("time_left_s", "gpu_hours", "core_hours", "cost")
    assert {name: value for name, value in again.items() if name not in moving} == {
        name: value for name, value in found.items() if name not in moving
    }
    first = next(job for job in found["jobs"] if job["previous_failure"])
    assert first["state"] == "running"
    assert first["reason"] == ""
    assert first["previous_failure"]["kind"] == "node_lost"
    assert found["time_left_s"] > 0
    assert found["owner"] == "ann"


def test_unreadable_sweep_does_not_hide_the_others(live: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    segment = live.list_children(f"sweeps/{SWEEP}/journal/")[0]
    live.put(f"sweeps/worse/journal/{segment}", live.get(f"sweeps/{SWEEP}/journal/{segment}"))
    assert load_snapshot(live, SWEEP).state is SweepState.RUNNING
    states = json.loads(run_command(capsys, "status", "--store", live.uri, "-o", "json").out)
    assert states == {SWEEP: "running", "worse": "unreadable"}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def s3_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    assert ANSWER_S <= 5
    monkeypatch.setattr(stores, "ANSWER_S", 1.0)

    def point(port: int) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")

    return point


def ask_silent_store(capsys: pytest.CaptureFixture[str]) -> tuple[Ended, float]:
    began_s = time.monotonic()
    result = run_command(capsys, "status", "any", "--store", "s3://bucket-of-nobody/prefix")
    return result, time.monotonic() - began_s


def test_store_behind_a_closed_port_is_said_to_be_silent_within_seconds(
    s3_at: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    s3_at(port)
    result, took_s = ask_silent_store(capsys)
    assert result.code == 1
    assert "check that the server runs and the endpoint is right (AWS_ENDPOINT_URL_S3)" in result.err
    assert took_s < PATIENCE_S


def test_store_that_takes_connections_and_never_answers_is_said_to_be_silent_within_seconds(
    s3_at: Callable[[int], None], silent_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    s3_at(silent_port)
    result, took_s = ask_silent_store(capsys)
    assert result.code == 1
    assert "ReadTimeoutError; check that the server runs" in result.err
    assert took_s < PATIENCE_S


def test_explain_of_an_unknown_sweep_lists_those_of_the_store(
    live: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "explain", "nosuch", "pretrain/a", "--store", live.uri)
    assert result.code != 0
    assert f"submitted there: {SWEEP}" in result.message


def test_describe_before_any_controller_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "store")
    world.submit(make_job("pretrain/a"))
    result = run_command(capsys, "describe", "sweep", "pretrain/a", "--store", world.store.uri)
    assert result.code == 102
    assert "or run `orchestrator serve` on the cluster's head" in result.message


def test_describe_parts_names_from_places(live: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    job = next(iter(load_snapshot(live, SWEEP).jobs.running))
    view = load_snapshot(live, SWEEP).jobs[job]
    live.put(f"{checkpoints_folder(view.key)}/000000000001-a/manifest.json", b"{}")
    out = run_command(capsys, "describe", SWEEP, job, "--store", live.uri).out
    assert "  checkpoints  file:" in out
    assert "checkpointsfile" not in out
