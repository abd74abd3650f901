"""Checks a cluster from outside, and evaluates the answers of its nodes.

``orchestrator.doctor.cluster`` asks the nodes, in a separate process with a deadline. The evaluation is pure.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.core.checks import CheckResult, Verdict
from orchestrator.core.code import version_or_empty
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import GIB, format_bytes, format_duration
from orchestrator.doctor.cluster import ClusterQuestion
from orchestrator.stack.environment import python_path
from orchestrator.stack.ports import check_answers

FEW_FILES = 4096
"""Open files: a loader with some hundred shards and a Ray worker with its sockets come close to 1024."""
FEW_CACHE_BYTES, SCARCE_CACHE_BYTES = 1 * GIB, 10 * GIB
FEW_SHARED_BYTES, SCARCE_SHARED_BYTES = 64 * 1024**2, 1 * GIB
"""Containers have 64 MiB of shared memory by default; Ray's object store and NCCL need more."""
SLOW_DISK_BYTES_PER_S = 100 * 1024**2
SKEW_WARNED_S, SKEW_REFUSED_S = 1.0, 60.0
"""Claims tolerate six minutes, signatures of S3 fifteen; people compare times of events."""
SLOW_REDUCE_BYTES_PER_S = 50 * 1024**2
LINE_GBITS = {
    "p4d.24xlarge": 400,
    "p4de.24xlarge": 400,
    "p5.48xlarge": 3200,
    "p5e.48xlarge": 3200,
    "a3-highgpu-8g": 800,
}
"""Network bandwidth of a machine with eight GPUs, Gbit/s. P5: Amazon EC2 User Guide, "Maximize network
bandwidth on instances with multiple network cards"; A3 high: four data NICs of 200, GKE "Maximize GPU network bandwidth
with GPUDirect-TCPX" (both looked up in November 2026); P4: AWS' page of the type, as known in 2025."""
_GPUS_PER_MACHINE = 8
LEAST_SHARE = 0.05
"""Expected share of it in an all-reduce of 16 MiB; TCP stays below. An estimate, never measured."""
_STALE_S = 60.0
"""A controller's loop without a round for so long hangs."""
_SHARE = "a file:// store must be one directory that all nodes mount at the same path; else use s3://"
_PACKAGES = ("ray", "torch", "torchvision", "timm", "numpy", "pretraining-orchestrator")
_END = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Versions and digest on this machine, which runs the checks."""

    python: str
    packages: Mapping[str, str]
    digest: str


def judge(stage: str, found: Mapping[str, Any], known: Mapping[str, Any], here: Here) -> Iterator[CheckResult]:
    """The verdicts on one stage of ``cluster.ask``; ``known`` is what earlier stages found."""
    hosts = {node["node_id"]: _called(node) for node in known.get("nodes", {}).get("nodes", ())}
    if stage == "nodes":
        yield from _nodes(found)
    elif stage == "facts":
        yield from _facts(found, known["nodes"]["nodes"], hosts, here)
    elif stage == "clocks":
        yield from (_clock(hosts[node], answer) for node, answer in found.items())
    elif stage == "services":
        yield from _services(found, here)
    elif stage == "store":
        yield from _store(found, hosts)
    elif stage in {"tracking", "shards"}:
        name = "tracking from the head" if stage == "tracking" else "shards from nodes"
        remedy = "check its network and credentials"
        yield from (_answer(name, hosts[node], answer, remedy) for node, answer in found.items())
    elif stage in {"gloo", "nccl"}:
        yield _reduce(stage, found, hosts, _line_rate(known))
    elif stage == "devices":
        for node, answer in found.items():
            yield from _devices(hosts[node], answer)


def _called(node: Mapping[str, Any]) -> str:
    return f"{node['host']}/{node['node_id'][:8]}"


def _ok(name: str, detail: str, node: str = "") -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.OK, detail=detail, node=node)


def _bad(name: str, detail: str, remedy: str, node: str = "", verdict: Verdict = Verdict.FAILED) -> CheckResult:
    return CheckResult(name=name, verdict=verdict, detail=detail, remedy=remedy, node=node)


def _answer(name: str, node: str, answer: Mapping[str, Any], remedy: str) -> CheckResult:
    if "error" in answer:
        detail, _, advice = str(answer["error"]).partition("; ")
        return _bad(name, detail, advice or remedy, node)
    return _ok(name, str(answer["found"]), node)


def _nodes(found: Mapping[str, Any]) -> Iterator[CheckResult]:
    nodes = found["nodes"]
    gpus, cpus = sum(node["gpus"] for node in nodes), sum(node["cpus"] for node in nodes)
    if not nodes:
        yield _bad("cluster", "it answers and has no nodes", "start nodes with ray start, or see its autoscaler's log")
        return
    yield _ok("cluster", f"{len(nodes)} node{'s' * (len(nodes) > 1)}, {cpus:g} CPUs, {gpus:g} GPUs")


def _facts(
    found: Mapping[str, Any], nodes: list[Mapping[str, Any]], hosts: Mapping[str, str], here: Here
) -> Iterator[CheckResult]:
    usual = _usual_digest(found)
    for node in nodes:
        answer, name = found[node["node_id"]], hosts[node["node_id"]]
        if "error" in answer:
            yield _bad(
                "node",
                answer["error"],
                "see session_latest/logs in the --temp-dir of the node's Ray; restart the node",
                name,
            )
            continue
        yield _versions(answer, here, name)
        yield _code(answer, here, usual, name)
        yield _gpus(answer["gpus"], node, name)
        yield _cache(answer["cache"], name, has_gpus=bool(answer["gpus"]["devices"]))
        yield _shared_memory(answer["shared_memory"], name)
        if answer["open_files"] < FEW_FILES and answer["open_files"] >= 0:
            detail = f"a process may have {answer['open_files']} files open"
            yield _bad("open files", detail, f"ulimit -n {16 * FEW_FILES} before ray start", name, Verdict.WARNING)
        yield _token(answer, name)
    yield from _drivers(found)


def _usual_digest(found: Mapping[str, Any]) -> str:
    digests = Counter(answer["digest"] for answer in found.values() if answer.get("digest"))
    return digests.most_common(1)[0][0] if digests else ""


def _versions(answer: Mapping[str, Any], here: Here, node: str) -> CheckResult:
    theirs = {"Python": answer["python"], **{name: version or "none" for name, version in answer["packages"].items()}}
    ours = {"Python": here.python, **{name: version or "none" for name, version in here.packages.items()}}
    differing = [f"{name} {version} (here {ours[name]})" for name, version in theirs.items() if version != ours[name]]
    if not differing:
        shown = ", ".join(f"{name} {theirs[name]}" for name in ("Python", "ray", "torch"))
        return _ok("versions", shown, node)
    # Ray refuses drivers of another version of itself or Python; other libraries change results, not whether it works.
    is_fatal = answer["packages"]["ray"] != here.packages["ray"] or _minor(answer["python"]) != _minor(here.python)
    verdict = Verdict.FAILED if is_fatal else Verdict.WARNING
    return _bad("versions", ", ".join(differing), "install the same environment on all nodes", node, verdict)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _code(answer: Mapping[str, Any], here: Here, usual: str, node: str) -> CheckResult:
    digest = answer["digest"]
    if not digest:
        remedy = "install pretraining-orchestrator there, or use the image that has it"
        return _bad("code", "orchestrator cannot be imported", remedy, node)
    if digest != usual:
        remedy = "install the same release on all nodes: results must not depend on where a job runs"
        return _bad("code", f"its code {digest} is not that of the other nodes ({usual})", remedy, node)
    if digest != here.digest:
        remedy = "install the same release here and there; plans are made here and run there"
        return _bad("code", f"code {digest} (here {here.digest})", remedy, node, Verdict.WARNING)
    return _ok("code", digest, node)


def _gpus(answer: Mapping[str, Any], node: Mapping[str, Any], name: str) -> CheckResult:
    devices = answer["devices"]
    if "error" in answer:
        return _bad("GPUs", answer["error"], "see dmesg on the node; reload the driver, or take the node out", name)
    if len(devices) != int(node["gpus"]):
        detail = f"the driver has {len(devices)} GPUs, Ray {node['gpus']:g}"
        fallen = len(devices) < int(node["gpus"])
        remedy = "a GPU has fallen off the bus: take the node out" if fallen else "set --num-gpus, or see why not all"
        return _bad("GPUs", detail, remedy, name, Verdict.FAILED if fallen else Verdict.WARNING)
    if not devices:
        return _ok("GPUs", "none", name)
    broken = [device["index"] for device in devices if device.get("ecc_errors", "0") not in {"0", "[N/A]", "N/A"}]
    if broken:
        remedy = "take the node out and reset these GPUs, or have them replaced"
        return _bad("GPUs", f"uncorrected memory errors on GPU {', '.join(broken)}", remedy, name)
    kinds = Counter(device["name"] for device in devices)
    shown = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    return _ok("GPUs", f"{shown}, driver {devices[0]['driver']}", name)


def _drivers(found: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Gangs over nodes of several drivers work until NCCL meets what only one of them can do."""
    drivers = Counter(
        device["driver"] for answer in found.values() for device in answer.get("gpus", {}).get("devices", [])[:1]
    )
    if len(drivers) > 1:
        shown = ", ".join(f"{version} on {number} nodes" for version, number in drivers.most_common())
        yield _bad("GPU drivers", shown, "install one driver on all nodes", verdict=Verdict.WARNING)


def _cache(answer: Mapping[str, Any], node: str, *, has_gpus: bool) -> CheckResult:
    remedy = "set ORCHESTRATOR_CACHE_DIR on the node to a folder of its fast local disk before ray start"
    if answer.get("is_on_root") and has_gpus:
        detail = f"{answer.get('folder', '')} is on the root device, which it fills and shares"
        return _bad("cache disk", detail, remedy, node, Verdict.WARNING)
    if "error" in answer:
        return _bad("cache disk", answer["error"], remedy, node)
    speed = answer["written_per_s"]
    detail = f"{format_bytes(answer['free'])} free in {answer['folder']}, written at {format_bytes(int(speed))}/s"
    if answer["free"] < FEW_CACHE_BYTES:
        return _bad("cache disk", f"only {detail}", "free some space, or " + remedy, node)
    if answer["free"] < SCARCE_CACHE_BYTES or speed < SLOW_DISK_BYTES_PER_S:
        return _bad("cache disk", f"only {detail}", remedy, node, Verdict.WARNING)
    return _ok("cache disk", detail, node)


def _shared_memory(answer: Mapping[str, Any], node: str) -> CheckResult:
    remedy = "start the container with --shm-size=8g or more (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    detail = f"{format_bytes(answer['free'])} of {format_bytes(answer['total'])} free"
    if answer["total"] <= FEW_SHARED_BYTES:
        return _bad("shared memory", detail, remedy, node)
    if answer["free"] < SCARCE_SHARED_BYTES:
        return _bad("shared memory", f"only {detail}", remedy, node, Verdict.WARNING)
    return _ok("shared memory", detail, node)


def _token(answer: Mapping[str, Any], node: str) -> CheckResult:
    address = ipaddress.ip_address(answer["address"])
    if answer["asks_for_token"]:
        return _ok("token", f"Ray at {address} asks for one", node)
    if address.is_loopback:
        return _bad(
            "token",
            "Ray requires no token, and listens on this machine only",
            "start it by `orchestrator up`, or with RAY_AUTH_MODE=token",
            node,
            Verdict.WARNING,
        )
    remedy = "start all of its nodes with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH; see docs/security.md"
    return _bad("token", f"Ray at {address} requires no token: anyone who can reach it can run any code", remedy, node)


def _clock(node: str, answer: Mapping[str, Any]) -> CheckResult:
    ahead_s, within_s = float(answer["ahead_s"]), float(answer["within_s"])
    if within_s == float("inf"):
        return _bad("clocks", "it did not answer", "see whether the node is overloaded", node, Verdict.WARNING)
    way = "ahead of" if ahead_s > 0 else "behind"
    off_s = max(0.0, abs(ahead_s) - within_s)
    shown = f"{format_duration(abs(ahead_s))} {way} this machine's" if off_s > 0.05 else "as this machine's"
    if off_s > SKEW_WARNED_S:
        verdict = Verdict.FAILED if off_s > SKEW_REFUSED_S else Verdict.WARNING
        return _bad("clocks", shown, "let chrony or systemd-timesyncd set the clocks", node, verdict)
    return _ok("clocks", f"{shown}, within {1000 * within_s:.0f} ms", node)


def _services(found: Mapping[str, Any], here: Here) -> Iterator[CheckResult]:
    if "controller" not in found:
        yield _ok("controller", "none runs yet; the next submit starts one")
        return
    for name, pong in found.items():
        if "error" in pong:
            remedy = "the next submit replaces it; until then sweeps wait" if name == "controller" else "see its log"
            yield _bad(name, pong["error"], remedy)
        elif pong["turn_age_s"] > _STALE_S or pong["last_error"]:
            detail = pong["last_error"] or f"its loop has not turned for {pong['turn_age_s']:.0f} s"
            yield _bad(name, detail[:300], "see its log in the Ray dashboard", verdict=Verdict.WARNING)
        elif pong["digest"] != here.digest:
            remedy = "the first command after all sweeps have ended replaces it"
            yield _bad(name, f"pid {pong['pid']} runs other code than this command", remedy, verdict=Verdict.WARNING)
        else:
            yield _ok(name, f"pid {pong['pid']} answers")


def _store(found: Mapping[str, Any], hosts: Mapping[str, str]) -> Iterator[CheckResult]:
    remedy = "check its network, its credentials (they come with the node, not with the submit) and its clock"
    for node, answer in found["nodes"].items():
        if "error" in answer:
            detail, _, advice = str(answer["error"]).partition("; ")
            yield _bad("store from nodes", detail, advice or remedy, hosts[node])
        elif not answer["sees_driver"]:
            yield _bad(
                "store from nodes", "what was written here is not there: it is another place", _SHARE, hosts[node]
            )
        else:
            detail = f"read, written and conditional writes obeyed in {answer['took_s']:.2f} s"
            yield _ok("store from nodes", detail, hosts[node])
    if found["num_seen"] < found["num_written"]:
        detail = f"of {found['num_written']} objects that nodes wrote, {found['num_seen']} are seen here"
        yield _bad("store from nodes", detail, _SHARE)


def _devices(node: str, answer: Mapping[str, Any]) -> Iterator[CheckResult]:
    """What ``workloads.node_check`` found on the GPUs of a node."""
    if "error" in answer:
        yield _bad("devices", answer["error"], "see whether something else uses the GPUs; else take the node out", node)
        return
    errors = [f"{one['device']}: {error}" for one in answer["devices"] for error in one["errors"]]
    held = str(answer.get("not_checked", ""))
    if held:
        which = "" if held == "all" else f"{held} "
        yield CheckResult(name="devices", verdict=Verdict.SKIPPED, detail=f"{which}not checked: in use", node=node)
    if not answer["devices"]:
        return
    if errors:
        yield _bad("devices", "; ".join(errors), "take the node out: these GPUs compute or remember wrongly", node)
    else:
        slowest = min(one["tflops"] for one in answer["devices"])
        memory_gib = min(one["memory_gib"] for one in answer["devices"])
        detail = (
            f"products are right at {slowest:.0f} TFLOP/s and more, {memory_gib:.0f} GiB of each keep what is written"
        )
        yield _ok("devices", detail, node)
    if answer["compile"]:
        remedy = "install gcc and Python's headers there, or use the image's target cuda; else `compile:` has no effect"
        yield _bad("compile", answer["compile"], remedy, node, Verdict.WARNING)
    else:
        yield _ok("compile", "a kernel was compiled and computes what it should", node)


def _line_rate(known: Mapping[str, Any]) -> tuple[str, float]:
    """The slowest kind of machine whose network is known, and its bytes/s for each GPU; 0 if none is."""
    types = {str(answer.get("machine_type", "")) for answer in known.get("facts", {}).values()}
    rates = {name: LINE_GBITS[name] * 1e9 / 8 / _GPUS_PER_MACHINE for name in types & LINE_GBITS.keys()}
    name = min(rates, key=rates.__getitem__, default="")
    return name, rates.get(name, 0.0)


def _reduce(
    backend: str, found: Mapping[str, Any], hosts: Mapping[str, str], line: tuple[str, float] = ("", 0.0)
) -> CheckResult:
    name = f"all-reduce {backend}"
    failed = {rank.partition("#")[0]: answer["error"] for rank, answer in found.items() if "error" in answer}
    if failed:
        node, why = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} more nodes)" if len(failed) > 1 else ""
        remedy = (
            "nodes must reach each other on all ports; with several network cards set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the right one; NCCL_DEBUG=INFO prints more"
        )
        return _bad(name, f"{why}{others}", remedy, hosts[node])
    slowest = max(found.values(), key=lambda answer: float(answer["took_s"]))
    speed = slowest["num_bytes"] / max(1e-9, float(slowest["took_s"]))
    num_nodes = len({rank.partition("#")[0] for rank in found})
    size = format_bytes(slowest["num_bytes"])
    detail = f"{size} over {slowest['world_size']} ranks on {num_nodes} node{'s' * (num_nodes > 1)} in "
    detail += f"{1000 * float(slowest['took_s']):.0f} ms"
    if speed < SLOW_REDUCE_BYTES_PER_S:
        return _bad(name, detail, "gangs over these nodes will wait for the network", verdict=Verdict.WARNING)
    machine, rate = line
    if backend == "nccl" and num_nodes > 1 and speed < LEAST_SHARE * rate:
        detail += f": {format_bytes(int(speed))}/s, of {format_bytes(int(rate))}/s that a GPU of {machine} has"
        remedy = "NCCL may use plain TCP: look with NCCL_DEBUG=INFO for NET/OFI (EFA) or GPUDirect; see docs/deploy.md"
        return _bad(name, detail, remedy, verdict=Verdict.WARNING)
    return _ok(name, detail)


def examine_cluster(question: ClusterQuestion, address: str, limit_s: float) -> Iterator[CheckResult]:
    """All verdicts on a cluster, one by one; missing ones count as failed after the limit.

    ``address`` is that of Ray's control store, which is first checked without Ray.
    """
    try:
        check_answers(address)
    except OSError as error:
        remedy = "check the address, that the cluster is up, and firewalls between"
        detail = f"nobody answers at {address} ({type(error).__name__})"
        yield CheckResult(name="cluster", verdict=Verdict.FAILED, detail=detail, remedy=remedy)
        return
    started_s = time.monotonic()
    known: dict[str, Mapping[str, Any]] = {}
    here = this_machine()
    for line in _lines(question, limit_s):
        document = json.loads(line)
        stage, found = document["stage"], document["found"]
        took_s = time.monotonic() - started_s
        if stage == "error":
            yield _result(str(found["error"]), took_s)
            return
        known[stage] = found
        for result in judge(stage, found, known, here):
            yield _timed(result, took_s)
    missing = [stage for stage in _stages(question, known) if stage not in known]
    if missing and time.monotonic() - started_s >= limit_s:
        message = f"no answer within {limit_s:g} s about: {', '.join(missing)}; see whether its head is overloaded"
        yield _result(message, time.monotonic() - started_s)


def this_machine() -> Here:
    """Versions and digest of this process."""
    return Here(
        python=platform.python_version(),
        packages={name: version_or_empty(name) for name in _PACKAGES},
        digest=code_digest(),
    )


def _stages(question: ClusterQuestion, known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Stages that every examination answers; of GPUs if any node has some."""
    stages = ["nodes", "facts", "clocks", "services", "gloo"]
    stages += ["store"] * bool(question.store_uri) + ["tracking"] * bool(question.tracking_uri)
    has_gpus = any(found["gpus"]["devices"] for found in known.get("facts", {}).values() if "error" not in found)
    return stages + ["shards"] * bool(question.shards) + ["devices"] * has_gpus


def _lines(question: ClusterQuestion, limit_s: float) -> Iterator[str]:
    """The output of the process until it ends, or until the time is over: then it is killed."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, "-m", "orchestrator.doctor.cluster"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    error_lines: list[str] = []
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    threading.Thread(target=error_lines.extend, args=(process.stderr,), daemon=True).start()
    try:
        process.stdin.write(question.to_json())
        process.stdin.close()
        deadline_s = time.monotonic() + limit_s
        while (line := _next(lines, deadline_s)) != _END:
            yield line
        if time.monotonic() < deadline_s and process.wait(max(0.1, deadline_s - time.monotonic())) not in {0, 1}:
            last = redacted("".join(error_lines[-1:]).strip())[-300:]
            raise OrchestratorError(f"the examination ended with code {process.returncode}: {last}")
    except (BrokenPipeError, subprocess.TimeoutExpired):
        return
    finally:
        process.kill()
        process.wait()


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        if line.startswith('{"stage"'):  # Ray prints, too
            lines.put(line)
    lines.put(_END)


def _next(lines: queue.SimpleQueue[str], deadline_s: float) -> str:
    try:
        return lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        return _END


def _result(text: str, took_s: float) -> CheckResult:
    detail, _, remedy = redacted(text).partition("; ")
    return CheckResult(name="cluster", verdict=Verdict.FAILED, detail=detail, remedy=remedy, duration_s=took_s)


def _timed(result: CheckResult, took_s: float) -> CheckResult:
    return replace(result, detail=redacted(result.detail), duration_s=took_s)
