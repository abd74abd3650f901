"""Texts as Ray 2.60 gives them, word for word."""

import pytest
from ray.exceptions import RayActorError

from orchestrator.backends.ray.deaths import death_of
from orchestrator.errors import FailureKind

_BEFORE = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 22221\nThe actor is dead because "
    "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
)
_KILLED = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)
_TERMINATED = "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM."
_MONITOR = "Task was killed due to the node running low on memory.\nMemory on the node was 62.1GB / 64.0GB (0.97)"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (_BEFORE + _KILLED, FailureKind.NODE_LOST, "killed, or crashed"),
        (_BEFORE + _TERMINATED, FailureKind.PREEMPTED, "SIGTERM. (its node is being taken back"),
        (_BEFORE + "Worker exits unexpectedly. Worker exits with an exit code 5.", FailureKind.NODE_LOST, "code 5"),
        (_BEFORE + "Worker exits unexpectedly. Worker exits with an exit code 135.", FailureKind.OUT_OF_MEMORY, "shm"),
        (_MONITOR, FailureKind.OUT_OF_MEMORY, "memory_gib"),
        ("The actor died because its node has died.\nNode Id: 12", FailureKind.NODE_LOST, "its node has died"),
    ],
)
def test_death_as_ray_tells_it_is_understood(text, kind, words):
    death = death_of(RayActorError(error_msg=text))
    assert death.kind is kind
    assert words in death.told
    assert "\n" not in death.told
