"""What is changed in ``ray start``: it waits longer for its raylet, not for one that has died, and ends with it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator.stack import ray_hook

NOT_YET = "node is not there yet"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.up_at_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ray_hook, "time", clock)
    monkeypatch.setattr(ray_hook, "_has_dead_children", lambda: False)
    return clock


@pytest.fixture
def services(monkeypatch, clock):
    from ray._private import services

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        if clock.now_s < clock.up_at_s:
            raise RuntimeError(NOT_YET)
        return {"node": node_id, "at": gcs_address}

    monkeypatch.setattr(services, "get_node", get_node)
    return services


def test_raylet_that_takes_two_minutes_is_waited_for(services, clock):
    clock.up_at_s = 120.0
    ray_hook.wait_longer_for_node()
    assert services.get_node("here", "n") == {"node": "n", "at": "here"}
    assert clock.now_s >= 120.0


def test_raylet_that_never_comes_is_given_up_after_the_limit(services, clock):
    clock.up_at_s = 1e9
    ray_hook.wait_longer_for_node()
    with pytest.raises(RuntimeError, match=NOT_YET):
        services.get_node("here", "n")
    assert ray_hook.NODE_WAIT_S <= clock.now_s < ray_hook.NODE_WAIT_S + 2


def test_raylet_that_died_is_not_waited_for(services, clock, monkeypatch):
    clock.up_at_s = 1e9
    monkeypatch.undo()
    monkeypatch.setattr(services, "get_node", lambda *_: (_ for _ in ()).throw(RuntimeError(NOT_YET)))
    ray_hook.wait_longer_for_node()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; nobody has collected it
        with pytest.raises(ChildProcessError, match="died"):
            services.get_node("here", "n")


@pytest.mark.parametrize(
    ("kind", "reason", "has_failed"),
    [
        ("raylet", "UNEXPECTED_TERMINATION", True),
        ("raylet", "AUTOSCALER_DRAIN_IDLE", False),
        ("raylet", "the head is gone", True),
        ("log_monitor", "UNEXPECTED_TERMINATION", False),
    ],
)
def test_raylet_that_ended_by_itself_has_failed(kind, reason, has_failed, monkeypatch):
    from ray._private import node
    from ray.core.generated import common_pb2

    def get_all_node_info(**_: object) -> dict[str, Any]:
        death = SimpleNamespace(reason=getattr(vars(common_pb2)["NodeDeathInfo"], reason))
        return {"a": SimpleNamespace(node_id=b"\xab", death_info=death)}

    monkeypatch.setattr(node.Node, "dead_processes", node.Node.dead_processes)  # put back at the end
    ray_hook.end_with_raylet()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        started: Any = SimpleNamespace(
            all_processes={kind: [SimpleNamespace(process=child)]},
            node_id="ab",
            get_gcs_client=lambda: SimpleNamespace(get_all_node_info=get_all_node_info),
        )
        assert node.Node.dead_processes(started) == [(kind, child)]
    assert (child.poll() != 0) is has_failed


def test_hook_changes_the_functions_that_ray_uses():
    from ray._private import node

    assert "services.get_node(" in inspect.getsource(node.Node.__init__)
    command = Path(ray.__file__).with_name("scripts").joinpath("scripts.py").read_text()  # which takes long to import
    assert "node.dead_processes()" in command
    assert "process.returncode not in expected_return_codes" in command


def test_hooks_that_files_of_clusters_name_are_there() -> None:
    root = Path(__file__).parents[2]
    files = [root / "infra/compose/compose.yaml", *(path for path in root.glob("clusters/**/*") if path.is_file())]
    found = [re.findall(r"RAY_START_HOOK(?:=|: )([\w.]+)", path.read_text()) for path in files]
    assert found[0]
    named = {name for names in found for name in names}
    # The second stands in copies on machines of users.
    for name in named | {"orchestrator.stack.ray_hook.leave_out_ray_client"}:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
