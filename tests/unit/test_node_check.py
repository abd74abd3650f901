"""Devices that compute or remember wrongly are found."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchestrator.backends.ray import node_check_tasks
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.capacity import ClusterCapacity
from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.backends.ray.node_check_tasks import faults, not_made, timed_out
from orchestrator.core.errors import NoSpaceError, StorageError, StorageTimeoutError
from orchestrator.doctor.cluster import _reduce_backends, _with_free_gpus
from orchestrator.doctor.node import NodeDoctor
from orchestrator.storage.local import LocalStore
from workloads import node_check

CPU = torch.device("cpu")


def test_device_that_is_well_says_how_fast_it_is() -> None:
    found = node_check.check_device(CPU, 0.0)
    assert found["errors"] == []
    assert found["tflops"] > 0
    assert found["memory_gib"] == pytest.approx(1 / 16)


def test_one_wrong_entry_of_a_product_is_found() -> None:
    def flipped(left: Tensor, right: Tensor) -> Tensor:
        found = torch.mm(left, right)
        found[5, 7] += 1
        return found

    with pytest.raises(ArithmeticError, match="1 of 262144 entries of a matrix product are wrong"):
        node_check.multiply(CPU, 0.0, flipped)


def test_one_byte_that_does_not_keep_its_pattern_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        """A chunk of memory whose first bit of one byte stays set."""

        nbytes = 64

        def __init__(self) -> None:
            self._memory = torch.zeros(64, dtype=torch.uint8)

        def fill_(self, value: int) -> None:
            self._memory.fill_(value)
            self._memory[3] |= 1

        def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
            return self._memory.ne(other)  # type: ignore[call-overload, no-any-return]

        def __hash__(self) -> int:
            return 0

    monkeypatch.setattr(node_check, "_memory", lambda _: iter([Stuck()]))
    found = node_check.check_device(CPU, 1.0)
    assert found["errors"] == ["memory_gib: 1 bytes of chunk 0 of memory did not keep the pattern 0xaa"]


def test_kernel_is_compiled_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        def call(*_: object) -> object:
            raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("Failed to find C compiler"), None)

        return call

    monkeypatch.setattr(torch, "compile", fails)
    assert "Failed to find C compiler" in node_check.compile_kernel("cpu")


def test_kernel_that_is_compiled_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda inputs: inputs + 1)
    assert node_check.compile_kernel("cpu") == "the compiled kernel computes another result"


def test_disk_that_is_slow_and_a_store_that_alters_bytes_are_found(tmp_path: Path) -> None:
    assert node_check.write_disk(tmp_path, num_bytes=1024, least_per_s=0.0) > 0
    with pytest.raises(ArithmeticError, match=r"is written at .* MiB/s; at least"):
        node_check.write_disk(tmp_path, num_bytes=1024, least_per_s=1e15)
    assert list(tmp_path.iterdir()) == []

    class Altering(LocalStore):
        def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
            return super().get(name)[:-1] + b"?"

    assert node_check.use_store(LocalStore(tmp_path / "store"), num_bytes=1024, least_per_s=0.0) > 0
    with pytest.raises(ArithmeticError, match="other bytes than were written"):
        node_check.use_store(Altering(tmp_path / "altering"), num_bytes=1024, least_per_s=0.0)
    assert list(LocalStore(tmp_path / "store").list_objects("probes/")) == []


def test_fewer_gpus_than_the_node_was_given_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver does not fit any more, the processor would pass in place of the GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert faults(node_check.main({"limit_s": 0.0})) == []
    assert faults(node_check.main({"limit_s": 0.0, "gpus": 0})) == []
    told = faults(node_check.main({"limit_s": 0.0, "gpus": 8}))
    assert [one.partition(" (")[0] for one in told] == ["GPUs: torch can use 0 of 8"]


@pytest.mark.parametrize(("visible", "gpus"), [("0,1,2,3", 4), ("", 0), ("MIG-1,MIG-2,MIG-3,MIG-4", 1)])
def test_check_of_a_node_asks_for_the_gpus_that_cuda_must_show(
    visible: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(node_check_tasks, "assigned_gpus", lambda: 4.0)
    monkeypatch.setattr(node_check_tasks, "ask", lambda _, request, **__: asked.append(request))
    node_check_tasks._check("file:///nowhere", [code_digest()], 1.0)
    assert [request["gpus"] for request in asked] == [gpus]


def test_faults_are_those_of_the_hardware() -> None:
    well = {"device": "cuda:0", "errors": []}
    found = {"devices": [well], "compile": "no C compiler", "node": {"errors": []}}
    assert faults(found) == []
    assert faults({**found, "node": {"errors": ["all_reduce_s: rank 3 of 8"]}}) == ["all_reduce_s: rank 3 of 8"]
    assert faults({"error": "its check fails: code 1"}) == ["its check fails: code 1"]
    late = {"timed_out": "its check has not ended within 60 s"}
    assert (faults(late), timed_out(late)) == ([], late["timed_out"])
    assert timed_out({**found, "node": {"errors": [], "timed_out": "all_reduce_s: no answer"}})
    assert timed_out(found) == ""


def test_store_that_fails_and_a_full_disk_say_nothing_of_the_node(tmp_path: Path) -> None:
    def raising(error: Exception) -> float:
        raise error

    told = node_check._told(
        {
            "store_bytes_per_s": lambda: raising(StorageError("s3://b does not answer")),
            "disk_bytes_per_s": lambda: raising(OSError(errno.ENOSPC, "No space left on device")),
            "room": lambda: raising(NoSpaceError("the store is full")),
        }
    )
    assert told["errors"] == []
    found = {"devices": [{"device": "cuda:0", "errors": []}], "node": told}
    assert faults(found) == []
    assert not_made(found).startswith("store_bytes_per_s: s3://b does not answer; disk_bytes_per_s: ")
    broken = {**found, "devices": [{"device": "cuda:0", "errors": ["tflops: wrong"]}]}
    assert (faults(broken), not_made(broken)) == (["cuda:0: tflops: wrong"], "")
    assert node_check._told({"disk": lambda: raising(OSError(errno.EIO, "I/O error"))})["errors"]
    with pytest.raises(StorageTimeoutError, match="at least"):
        node_check.use_store(LocalStore(tmp_path), num_bytes=1024, least_per_s=1e15)


def test_store_that_hangs_is_given_up_without_a_fault_of_the_node() -> None:
    never = threading.Event()
    with pytest.raises(StorageTimeoutError, match="no answer within 0 s"):
        node_check.within(0.05, lambda: float(never.wait()))
    never.set()
    assert node_check.within(10.0, lambda: 3.0) == 3.0
    with pytest.raises(ZeroDivisionError):
        node_check.within(10.0, lambda: 1 / 0)


def test_node_with_other_code_than_the_controller_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check_tasks, "ask", lambda *_, **__: pytest.fail("nothing is to be started"))
    told = node_check_tasks._check("file:///nowhere", ["another"], 1.0)
    assert told is not None
    assert (faults(told), timed_out(told)) == ([], "")
    assert not_made(told) == "it runs other code than the controller"


PARENT = """
import os, sys
child = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
with open(sys.argv[1], "w") as told:
    told.write(str(child))
os.waitpid(child, 0)
"""


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_end(pid: int) -> None:
    until_s = time.monotonic() + 10.0
    while runs(pid) and time.monotonic() < until_s:
        os.sched_yield()
    assert not runs(pid)


def test_doctor_that_gives_up_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestrator.core.data_plane._MODULE", "parent")
    told = NodeDoctor()._ask("node.check", {"limit_s": 1.0}, 2.0, sees_gpus=False)
    assert told == {"error": "no answer within 2 s"}
    wait_for_end(int((tmp_path / "node.check").read_text(encoding="utf-8")))


def test_idle_runners_of_a_node_end_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        def __init__(self, node: str, *, is_idle: bool) -> None:
            self.node, self.is_idle, self.ended = node, is_idle, ""

        def kill(self, reason: str) -> None:
            self.ended = reason

    links = [Link("a", is_idle=True), Link("a", is_idle=False), Link("b", is_idle=True)]
    backend = RayBackend("x")
    monkeypatch.setattr(backend, "_alive", lambda: links)
    monkeypatch.setattr(ClusterCapacity, "ids_of", lambda *_: ())
    backend.check_node("a", "file:///nowhere")
    assert [link.ended for link in links] == ["node a is checked", "", ""]


def test_ranks_that_hang_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(["sleep", "60"], stdout=pipe, stderr=pipe, text=True)

    monkeypatch.setattr(node_check, "_start_rank", start)
    with pytest.raises(subprocess.TimeoutExpired):
        node_check.reduce_here(3, 0.2)


def test_doctor_keeps_off_gpus_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answered(
        _: object, question: str, request: dict[str, float], limit_s: float, *, sees_gpus: bool, only: str = ""
    ) -> dict[str, object]:
        assert (question, sees_gpus) == ("node.check", True)
        assert request["limit_s"] < limit_s
        asked.append(only)
        return {"devices": [{"device": f"cuda:{number}", "errors": []} for number in range(2)], "compile": ""}

    monkeypatch.setattr(NodeDoctor, "_ask", answered)
    used = {"0": "3", "1": "70000", "2": "[N/A]"}
    gpus = [{"index": index, "used_mib": mib} for index, mib in used.items()]
    told = NodeDoctor().devices(gpus, 45.0)
    assert asked == ["0,2"]
    assert [one["device"] for one in told["devices"]] == ["cuda:0", "cuda:2"]
    assert told["not_checked"] == "cuda:1"
    assert NodeDoctor().devices(gpus[1:2], 45.0) == {"devices": [], "not_checked": "all"}
    assert "not_checked" not in NodeDoctor().devices(gpus[:1], 45.0)
    assert asked == ["0,2", ""]


def test_doctor_keeps_off_nodes_whose_gpus_are_held() -> None:
    nodes = [{"NodeID": name, "Resources": {"CPU": 8.0, "GPU": 8.0}} for name in ("idle", "part", "full")]
    nodes.append({"NodeID": "cpu", "Resources": {"CPU": 8.0}})
    available = {"idle": {"GPU": 8.0}, "part": {"GPU": 7.0}, "full": {"CPU": 1.0}}
    assert _with_free_gpus(nodes, available) == {"idle", "cpu"}
    doctors = dict.fromkeys(("idle", "part"))
    facts = {name: {"gpus": {"devices": [{"used_mib": "3"}]}, "address": "", "free_port": 1} for name in doctors}
    assert _reduce_backends(doctors, facts, {"idle"}) == ["gloo"]
    assert _reduce_backends(doctors, facts, {"idle", "part"}) == ["gloo", "nccl"]
