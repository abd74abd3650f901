"""From what nodes tell to verdicts and remedies."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.commands.doctor import _grouped
from orchestrator.core.checks import CheckResult, Verdict
from orchestrator.core.units import GIB
from orchestrator.doctor.cluster import ClusterQuestion
from orchestrator.doctor.verdicts import Here, examine_cluster, judge
from tests.commands import run_command

PACKAGES = {"ray": "2.60.0", "torch": "2.15.0"}
HERE = Here(python="3.11.7", packages=PACKAGES, digest="aaaa")
FACTS: dict[str, Any] = {
    "host": "a",
    "address": "10.0.0.1",
    "free_port": 1,
    "python": "3.11.7",
    "packages": PACKAGES,
    "digest": "aaaa",
    "open_files": 65536,
    "shared_memory": {"total": 8 * GIB, "free": 8 * GIB},
    "cache": {"folder": "/cache", "total": 100 * GIB, "free": 50 * GIB, "written_per_s": 1e9},
    "gpus": {"devices": []},
    "asks_for_token": True,
}
GPU = {"index": "0", "name": "H100", "driver": "580.1", "memory_mib": "81559", "used_mib": "3", "ecc_errors": "0"}


def node(name: str = "a", gpus: float = 0.0) -> dict[str, Any]:
    return {"node_id": f"{name * 10}", "host": name, "address": "10.0.0.1", "gpus": gpus, "cpus": 4.0}


def verdicts(change: dict[str, Any], gpus: float = 0.0) -> dict[str, CheckResult]:
    """Of one node whose facts are as usual but for a change (keys are paths)."""
    facts = copy.deepcopy(FACTS)
    for path, value in change.items():
        *steps, last = path.split(".")
        place = facts
        for step in steps:
            place = place[step]
        place[last] = value
    known = {"nodes": {"nodes": [node(gpus=gpus)]}}
    return {result.name: result for result in judge("facts", {"a" * 10: facts}, known, HERE)}


def test_node_as_it_should_be_has_nothing_but_ok() -> None:
    found = verdicts({})
    assert {result.verdict for result in found.values()} == {Verdict.OK}
    assert set(found) == {"versions", "code", "GPUs", "cache disk", "shared memory", "token"}
    assert all(result.node == "a/aaaaaaaa" for result in found.values())


@pytest.mark.parametrize(
    ("change", "gpus", "check", "verdict", "told"),
    [
        ({"python": "3.12.1"}, 0, "versions", "failed", "3.12.1 (here 3.11.7)"),
        ({"python": "3.11.9"}, 0, "versions", "warning", "3.11.9"),
        ({"packages.ray": "2.61.0"}, 0, "versions", "failed", "ray 2.61.0 (here 2.60.0)"),
        ({"packages.torch": ""}, 0, "versions", "warning", "torch none"),
        ({"digest": ""}, 0, "code", "failed", "cannot be imported"),
        ({"digest": "bbbb"}, 0, "code", "warning", "bbbb (here aaaa)"),
        ({"gpus.devices": [GPU]}, 1, "GPUs", "ok", "1 x H100, driver 580.1"),
        ({"gpus.devices": [GPU]}, 2, "GPUs", "failed", "the driver has 1 GPUs, Ray 2"),
        ({"gpus.devices": [GPU]}, 0, "GPUs", "warning", "Ray 0"),
        ({"gpus.devices": [{**GPU, "ecc_errors": "7"}]}, 1, "GPUs", "failed", "uncorrected memory errors on GPU 0"),
        ({"gpus.devices": [{**GPU, "ecc_errors": "[N/A]"}]}, 1, "GPUs", "ok", "H100"),
        ({"gpus": {"devices": [], "error": "nvidia-smi fails"}}, 1, "GPUs", "failed", "nvidia-smi fails"),
        ({"cache.free": GIB // 2}, 0, "cache disk", "failed", "only 512.0 MiB free"),
        ({"cache.free": 5 * GIB}, 0, "cache disk", "warning", "only 5.0 GiB"),
        ({"cache.written_per_s": 1e7}, 0, "cache disk", "warning", "9.5 MiB/s"),
        ({"cache.error": "/cache cannot be written to"}, 0, "cache disk", "failed", "cannot be written"),
        ({"shared_memory": {"total": 64 * 1024**2, "free": 64 * 1024**2}}, 0, "shared memory", "failed", "64.0 MiB"),
        ({"shared_memory": {"total": 8 * GIB, "free": GIB // 4}}, 0, "shared memory", "warning", "only 256.0 MiB"),
        ({"open_files": 1024}, 0, "open files", "warning", "1024"),
        ({"asks_for_token": False}, 0, "token", "failed", "anyone who can reach it can run any code"),
        ({"asks_for_token": False, "address": "127.0.0.1"}, 0, "token", "warning", "on this machine only"),
    ],
)
def test_fact_that_is_off_is_judged_with_a_remedy(change, gpus, check, verdict, told) -> None:
    found = verdicts(change, gpus)
    assert found[check].verdict.value == verdict
    assert told in found[check].detail
    assert bool(found[check].remedy) == (verdict != "ok")
    assert {name for name, one in found.items() if one.verdict is not Verdict.OK} <= {check}


def test_node_of_other_code_than_the_rest_fails_though_it_is_ours() -> None:
    nodes = [node("a"), node("b"), node("c")]
    found = {one["node_id"]: {**FACTS, "digest": "bbbb"} for one in nodes[:2]} | {nodes[2]["node_id"]: FACTS}
    results = [one for one in judge("facts", found, {"nodes": {"nodes": nodes}}, HERE) if one.name == "code"]
    assert [one.verdict.value for one in results] == ["warning", "warning", "failed"]


def test_drivers_that_differ_between_nodes_are_told() -> None:
    nodes = [node("a", 1.0), node("b", 1.0)]
    devices = [{"devices": [{**GPU, "driver": version}]} for version in ("570.1", "580.1")]
    found = {one["node_id"]: {**FACTS, "gpus": gpus} for one, gpus in zip(nodes, devices, strict=True)}
    [result] = [one for one in judge("facts", found, {"nodes": {"nodes": nodes}}, HERE) if one.name == "GPU drivers"]
    assert result.verdict is Verdict.WARNING
    assert "570.1 on 1 nodes" in result.detail


def test_node_that_does_not_answer_fails_and_the_others_are_judged() -> None:
    nodes = [node("a"), node("b")]
    found = {nodes[0]["node_id"]: {"error": "no answer within 12 s"}, nodes[1]["node_id"]: FACTS}
    results = list(judge("facts", found, {"nodes": {"nodes": nodes}}, HERE))
    assert [(one.name, one.node) for one in results if one.verdict is Verdict.FAILED] == [("node", "a/aaaaaaaa")]
    assert {one.node for one in results if one.verdict is Verdict.OK} == {"b/bbbbbbbb"}


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "verdict", "told"),
    [
        (0.001, 0.01, "ok", "as this machine's"),
        (0.9, 0.01, "ok", "ahead of"),
        (2.0, 0.01, "warning", "2.0s ahead of"),
        (-2.0, 0.01, "warning", "2.0s behind"),
        (2.0, 1.5, "ok", ""),
        (-90.0, 0.1, "failed", "1m30s behind"),
        (0.0, float("inf"), "warning", "did not answer"),
    ],
)
def test_clock_is_judged_by_what_is_surely_off(ahead_s, within_s, verdict, told) -> None:
    known = {"nodes": {"nodes": [node()]}}
    [result] = judge("clocks", {"a" * 10: {"ahead_s": ahead_s, "within_s": within_s}}, known, HERE)
    assert (result.verdict.value, result.node) == (verdict, "a/aaaaaaaa")
    assert told in result.detail


def store_of(**told: Any) -> dict[str, Any]:
    return {"nodes": {"a" * 10: {"sees_driver": True, "took_s": 0.1, **told}}, "num_written": 1, "num_seen": 1}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (store_of(sees_driver=False), "is another place"),
        (store_of(error="the clock is off; set the clock"), "the clock is off"),
        ({**store_of(), "num_seen": 0}, "0 are seen here"),
    ],
)
def test_store_that_is_not_one_for_all_fails(found: dict[str, Any], told: str) -> None:
    known = {"nodes": {"nodes": [node()]}}
    failed = [one for one in judge("store", found, known, HERE) if one.verdict is Verdict.FAILED]
    assert told in failed[0].detail
    assert failed[0].remedy


def test_all_reduce_that_fails_names_the_node_and_a_slow_one_is_told() -> None:
    known = {"nodes": {"nodes": [node("a"), node("b")]}}
    fast = {"took_s": 0.05, "num_bytes": 16 * 1024**2, "world_size": 2}
    ranks = {"a" * 10 + "#0": fast, "b" * 10 + "#1": fast}
    [result] = judge("gloo", ranks, known, HERE)
    assert (result.verdict, result.name) == (Verdict.OK, "all-reduce gloo")
    assert "2 ranks on 2 nodes" in result.detail
    [result] = judge("nccl", {**ranks, "b" * 10 + "#1": {"error": "Connection refused"}}, known, HERE)
    assert (result.verdict, result.node) == (Verdict.FAILED, "b/bbbbbbbb")
    assert "NCCL_SOCKET_IFNAME" in result.remedy
    [result] = judge("gloo", {**ranks, "b" * 10 + "#1": {**fast, "took_s": 3.0}}, known, HERE)
    assert result.verdict is Verdict.WARNING


def test_controller_that_hangs_or_runs_other_code_is_told() -> None:
    pong = {"pid": 7, "digest": "aaaa", "turn_age_s": 0.1, "last_error": ""}
    cases = {
        "ok": pong,
        "warning": {**pong, "turn_age_s": 90.0},
        "failed": {"error": "no answer within 12 s"},
    }
    for verdict, told in cases.items():
        [result] = judge("services", {"controller": told}, {}, HERE)
        assert result.verdict.value == verdict
    [result] = judge("services", {"controller": {**pong, "digest": "bbbb"}}, {}, HERE)
    assert "other code" in result.detail
    [result] = judge("services", {}, {}, HERE)
    assert (result.verdict, result.name) == (Verdict.OK, "controller")


def test_what_is_fine_on_many_nodes_takes_one_line_and_what_is_not_one_each() -> None:
    fine = [CheckResult(name="code", verdict=Verdict.OK, detail="x", node=str(number)) for number in range(3)]
    bad = [CheckResult(name="code", verdict=Verdict.FAILED, detail="x", node=name) for name in ("8", "9")]
    assert [where for where, _ in _grouped([*fine, *bad])] == ["3 nodes", "8", "9"]


# ------------------------------------------------------------------------------------------------ what does not answer
@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Takes connections, says ``answer`` and then nothing more, as a control store that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                connection.sendall(answer) if answer else None

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def question(address: str) -> ClusterQuestion:
    return ClusterQuestion(address=address, home="/nowhere", namespace="x", store_uri="", tracking_uri="")


def test_cluster_that_takes_connections_and_stays_silent_is_given_up_soon(monkeypatch) -> None:
    monkeypatch.setattr("orchestrator.stack.ports.TIMEOUT_S", 0.3)
    monkeypatch.setattr("orchestrator.stack.ports.check_answers.__defaults__", (0.3,))
    with listener(b"") as address:
        [result] = examine_cluster(question(address), address, 10.0)
    assert result.verdict is Verdict.FAILED
    assert "nobody answers" in result.detail


def test_driver_that_hangs_is_ended_at_the_deadline() -> None:
    began_s = time.monotonic()
    with listener(b"\0\0\0\x04\0\0\0\0\0") as address:
        results = list(examine_cluster(question(address), address, 3.0))
    assert time.monotonic() - began_s < 20.0
    assert results[-1].verdict is Verdict.FAILED
    assert "no answer within 3 s" in results[-1].detail


def test_gpus_that_were_not_examined_before_the_limit_are_told(monkeypatch) -> None:
    fast = {"took_s": 0.05, "num_bytes": 16 * 1024**2, "world_size": 1}
    found: dict[str, Any] = {
        "nodes": {"nodes": [node(gpus=1.0)]},
        "facts": {"a" * 10: {**FACTS, "gpus": {"devices": [GPU]}}},
        "clocks": {},
        "services": {},
        "gloo": {"a" * 10 + "#0": fast},
    }
    lines = [json.dumps({"stage": stage, "found": answer}) for stage, answer in found.items()]
    monkeypatch.setattr("orchestrator.doctor.verdicts.check_answers", lambda _: None)
    monkeypatch.setattr("orchestrator.doctor.verdicts.this_machine", lambda: HERE)
    monkeypatch.setattr("orchestrator.doctor.verdicts._lines", lambda *_: iter(lines))
    *others, last = examine_cluster(question("head:6379"), "head:6379", 0.0)
    assert {result.verdict for result in others} == {Verdict.OK}
    assert last.verdict is Verdict.FAILED
    assert last.detail.endswith("about: devices")


def test_token_that_cannot_be_read_fails_the_cluster_and_the_other_checks_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("ORCHESTRATOR_RAY_TOKEN", f"file:{tmp_path}/nothing")
    ended = run_command(capsys, "doctor", "-o", "json")
    assert ended.code == 1
    checks = {check["name"]: check for check in ended.document["checks"]}
    assert len(checks) > 1
    assert checks["cluster"]["verdict"] == "failed"
    assert "nothing does not exist" in checks["cluster"]["detail"]


def test_question_comes_back() -> None:
    asked = ClusterQuestion(
        address="a:1", home="/h", namespace="n", store_uri="s3://b", tracking_uri="", token="", shards=(("u", "n"),)
    )
    assert ClusterQuestion.from_json(asked.to_json()) == asked
    assert json.loads(asked.to_json())["shards"] == [["u", "n"]]


def _judged(stage: str, found: dict[str, Any], facts: dict[str, Any] | None = None) -> list[CheckResult]:
    known = {"nodes": {"nodes": [node(), node("b")]}, "facts": facts or {}}
    return list(judge(stage, found, known, HERE))


def test_gpu_that_computes_wrongly_and_a_missing_compiler_are_told() -> None:
    well = {"device": "cuda:0", "errors": [], "tflops": 60.0, "memory_gib": 60.0}
    wrong = {**well, "device": "cuda:1", "errors": ["tflops: 3 of 64 entries of a matrix product are wrong (try 2)"]}
    devices, compiler = _judged("devices", {"a" * 10: {"devices": [well], "compile": ""}})
    assert (devices.verdict, compiler.verdict) == (Verdict.OK, Verdict.OK)
    note = "torch.compile failed, running uncompiled: Failed to find C compiler"
    devices, compiler = _judged("devices", {"a" * 10: {"devices": [well, wrong], "compile": note}})
    assert (devices.verdict, compiler.verdict) == (Verdict.FAILED, Verdict.WARNING)
    assert "cuda:1: tflops: 3 of 64 entries" in devices.detail
    assert "target cuda" in compiler.remedy
    (failed,) = _judged("devices", {"a" * 10: {"error": "no answer within 45 s"}})
    assert failed.verdict is Verdict.FAILED


def test_gpus_in_use_are_told_as_not_checked() -> None:
    (held,) = _judged("devices", {"a" * 10: {"devices": [], "not_checked": "all"}})
    assert (held.verdict, held.detail) == (Verdict.SKIPPED, "not checked: in use")
    well = {"device": "cuda:0", "errors": [], "tflops": 60.0, "memory_gib": 60.0}
    found = {"devices": [well], "compile": "", "not_checked": "cuda:1"}
    held, devices, _ = _judged("devices", {"a" * 10: found})
    assert (held.detail, devices.verdict) == ("cuda:1 not checked: in use", Verdict.OK)


@pytest.mark.parametrize(("took_s", "verdict"), [(0.001, Verdict.OK), (0.02, Verdict.WARNING)])
def test_nccl_over_tcp_where_the_machine_has_more_is_told(took_s: float, verdict: Verdict) -> None:
    fast = {"took_s": took_s, "num_bytes": 16 * 1024**2, "world_size": 2, "torch": "2.15.0"}
    ranks = {f"{'a' * 10}#0": fast, f"{'b' * 10}#1": fast}
    types = {"a" * 10: {"machine_type": "p5.48xlarge"}, "b" * 10: {"machine_type": "p5.48xlarge"}}
    (result,) = _judged("nccl", ranks, types)
    assert result.verdict is verdict
    (elsewhere,) = _judged("nccl", ranks)
    assert elsewhere.verdict is Verdict.OK
    (over_tcp,) = _judged("gloo", ranks, types)
    assert over_tcp.verdict is Verdict.OK


def test_cache_of_a_gpu_node_on_its_root_device_is_a_warning() -> None:
    devices = {"gpus.devices": [GPU], "cache.is_on_root": True}
    found = verdicts(devices, gpus=1.0)["cache disk"]
    assert found.verdict is Verdict.WARNING
    assert "/cache is on the root device" in found.detail
    assert verdicts({"cache.is_on_root": True})["cache disk"].verdict is Verdict.OK
