"""Texts as Ray 2.60 gives them, word for word."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError

from orchestrator.backends.ray.deaths import Ended, death_of
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.scheduling.sweep_index import failure_group_of
from orchestrator.state.brief_reasons import MAX_CHARACTERS, brief_message
from orchestrator.state.failure_policy import signature_of
from orchestrator.state.snapshot import Failure
from tests.scripted_sweep import make_job

_FIELDS = "\tclass_name: Runner\n\tactor_id: 0123\n\tpid: 22221\n\tname: runner/x\n\tnamespace: n\n\tip: 10.0.0.7\n"
_BEGINNING = "The actor died unexpectedly before finishing this task.\n" + _FIELDS
_BEFORE = (
    _BEGINNING + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: "
)
_KILLED = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)
_TERMINATED = "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM."
_MONITOR = "Task was killed due to the node running low on memory.\nMemory on the node was 62.1GB / 64.0GB (0.97)"
_NODE = _BEGINNING + "The actor died because its node has died. Node Id: 8ba2c0ffee\n"
_HEARTBEATS = "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
_BY_RAY = "The actor is dead because it was killed by `ray.kill`."
NODE, RUNNER = "gpu-07/8ba2c0ff", "runner/cpus1-gpus0-memory_gib0/abcd1234"


@pytest.mark.parametrize(
    ("text", "kind", "ended", "words"),
    [
        (_BEFORE + _KILLED, FailureKind.NODE_LOST, Ended.PROCESS, "was killed (as by signal 9) or crashed; dmesg"),
        (_BEFORE + _TERMINATED, FailureKind.PREEMPTED, Ended.PROCESS, "SIGTERM); its node is being taken back"),
        (_BEFORE + "Worker exits with an exit code 5.", FailureKind.NODE_LOST, Ended.PROCESS, "code 5)"),
        (_BEFORE + "Worker exits with an exit code 135.", FailureKind.OUT_OF_MEMORY, Ended.PROCESS, "shm"),
        (_MONITOR, FailureKind.OUT_OF_MEMORY, Ended.PROCESS, "memory_gib"),
        (_NODE + _HEARTBEATS, FailureKind.NODE_LOST, Ended.NODE, "missing too many heartbeats"),
        (_NODE, FailureKind.NODE_LOST, Ended.NODE, "no reason"),
        (_BEGINNING + _BY_RAY, FailureKind.NODE_LOST, Ended.UNKNOWN, "killed by `ray.kill`"),
        ("", FailureKind.NODE_LOST, Ended.UNKNOWN, "no reason"),
    ],
)
def test_death_as_ray_tells_it_is_understood(text: str, kind: FailureKind, ended: Ended, words: str) -> None:
    error = RayActorError(error_msg=text)
    error.error_msg = text
    death = death_of(error)
    assert (death.kind, death.ended) == (kind, ended)
    assert words in death.description
    assert "\n" not in death.description


def told(text: str, node: str = NODE, runner: str = RUNNER) -> str:
    return death_of(RayActorError(error_msg=text)).describe(runner, node)


def test_killed_process_is_told_from_a_node_that_died() -> None:
    assert told(_BEFORE + _KILLED) == (
        f"its process was killed (as by signal 9) or crashed, while node '{NODE}' was alive ({RUNNER}); "
        "dmesg there tells if memory ran out"
    )
    assert told(_NODE + _HEARTBEATS) == (
        f"node '{NODE}' died: health check failed due to missing too many heartbeats ({RUNNER})"
    )
    assert told(_BEGINNING + _BY_RAY) == f"{RUNNER} has died: {_BY_RAY}"
    assert told(_BEFORE + _KILLED, node="").startswith("its process was killed (as by signal 9) or crashed, while its ")


def test_shortened_reason_keeps_what_died_and_where() -> None:
    shown = brief_message(told(_BEFORE + _KILLED))
    assert len(shown) <= MAX_CHARACTERS
    assert shown.startswith(f"its process was killed (as by signal 9) or crashed, while node '{NODE}' was alive (")
    assert shown.endswith("; dmesg there tells if memory ran out")


@pytest.mark.parametrize("text", [_BEFORE + _KILLED, _NODE + _HEARTBEATS, _BEFORE + _TERMINATED])
def test_same_death_on_other_nodes_is_the_same_failure(text: str) -> None:
    def likeness(node: str, runner: str) -> object:
        message = told(text, node, runner)
        failure = Failure(attempt_id="k.0", kind=FailureKind.NODE_LOST, message=message, at_s=1.0)
        return failure_group_of(make_job(f"{JobKind.PRETRAIN}/a"), failure)

    assert likeness(NODE, RUNNER) == likeness("cpu-host.example/00112233", "runner/cpus2-gpus1-memory_gib8/0000ffff")


@pytest.mark.parametrize("text", [_BEFORE + _KILLED, _NODE + _HEARTBEATS])
def test_death_blames_no_hardware(text: str) -> None:
    found = signature_of(told(text))
    assert found is None or not found.blames_node
