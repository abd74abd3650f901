"""What nodes are: read from the system, told by runners, kept with the sweep, shown when it is reproduced."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.protocol import AttemptReport
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.metrics import machine as machine_module
from orchestrator.metrics.machine import describe_machine, gpu_uuids
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.reproduction import describe_hardware, reproduce
from orchestrator.storage.journal import Journal
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.testing import ScriptedBackend, Succeed
from tests.commands import run_command
from tests.scripted_sweep import World, make_job

H100 = "NVIDIA H100 80GB HBM3"


class DescribedBackend(ScriptedBackend):
    """Runs on ``n-1``, and tells what that is; ``machine`` may change, as after another driver was installed."""

    machine: Mapping[str, Any] = {"gpus": [H100, H100], "driver": "550.54.15", "cpu": "x86_64", "num_cpus": 16}

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        told = {"n-1": self.machine}
        return [replace(report, node="n-1", machines=told) for report in super().observe(attempt_ids)]


def test_machine_of_a_gpu_node_names_its_gpus_and_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
        (tmp_path / f"gpus/0000:0{number}:00.0/information").write_text(
            f"Model: \t\t {H100}\nIRQ:   \t\t 1\nGPU UUID: \t GPU-5e1c-{number}\nVideo BIOS: \t 96.00.89.00.01\n"
        )
    told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: gcc 12\n"
    (tmp_path / "version").write_text(told)
    monkeypatch.setattr(machine_module, "_NVIDIA", tmp_path)
    assert gpu_uuids(["1", "GPU-77", "7"]) == ("GPU-5e1c-1", "GPU-77", "7")
    found = describe_machine()
    assert found["gpus"] == [H100, H100]
    assert found["driver"] == "550.54.15"
    assert describe_hardware(found) == f"2 x {H100}, driver 550.54.15"


def test_hardware_without_gpus_or_without_a_known_driver_says_so() -> None:
    assert describe_hardware({"cpu": "x86_64 EPYC", "num_cpus": 64}) == "64 cores, x86_64 EPYC"
    assert describe_hardware({"gpus": ["T4"]}) == "1 x T4, driver unknown"
    assert describe_hardware({}) == "? cores, processor unknown"


def test_node_is_described_once_in_the_journal_of_each_sweep_that_runs_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    scripts = {"dataset/0": [Succeed(after_observes=3)], "dataset/1": [Succeed(after_observes=3)]}
    world = World(tmp_path, DescribedBackend(store, scripts), store=store)
    world.submit(make_job("dataset/0"), make_job("dataset/1"))
    world.tick_until(lambda: world.snapshot().state.is_final)
    described = [e for e in Journal(store, "sweep", holder="t").read_new() if e["type"] == "node_described"]
    assert [event["node"] for event in described] == ["n-1"]
    assert world.snapshot().nodes["n-1"]["driver"] == "550.54.15"


def test_reproduce_tells_the_hardware_of_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    sweep, text = load_sweep("quickstart", ())
    plan = build_plan(sweep, store_uri=store.uri)
    run_sweep_inprocess(store, plan, text, backend=DescribedBackend(store), provenance={"commit": "abc"})
    assert reproduce(store, plan.sweep, 1).hardware == {f"2 x {H100}, driver 550.54.15": 1}
    folder = tmp_path / "again"
    ended = run_command(capsys, "reproduce", plan.sweep, "--store", store.uri, "--into", str(folder))
    assert f"Its attempts ran on 1 node: 1 with 2 x {H100}, driver 550.54.15." in " ".join(ended.out.split())
    kept = json.loads((folder / "provenance.json").read_text())
    assert kept["nodes"]["n-1"]["gpus"] == [H100, H100]
