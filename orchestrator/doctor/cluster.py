"""``python -m orchestrator.doctor.cluster``: checks all nodes, in a process that can be ended.

If Ray's control store does not answer, a driver tries for minutes and cannot be interrupted. So this program reads the
question from stdin (``ClusterQuestion`` as JSON) and prints a line of JSON for each result at once.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.errors import NotFoundError, OrchestratorError
from orchestrator.stack.attach import attach_cluster, attach_stack
from orchestrator.stack.description import read_stack
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore

CONTROLLER, PUBLISHER, WATCHDOG = "controller", "publisher", "watchdog"
_NUM_CLOCK_QUESTIONS = 5
_QUICK_S, _STORE_S, _REDUCE_S, _DEVICES_S = 12.0, 15.0, 40.0, 45.0
"""Limits for an answer of a node: its facts, the store, the all-reduce or MLflow, its GPUs."""
Report = Callable[[str, Mapping[str, Any]], None]
"""Takes the name of a stage and its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuestion:
    """Which cluster is checked, and what is checked."""

    address: str
    """Address of Ray; empty = the stack of ``home``."""
    home: str
    namespace: str
    store_uri: str
    """Empty = the store is not checked: its checks have failed on this machine already."""
    tracking_uri: str
    """Empty = it is not checked, too."""
    tracking_is_of_sweep: bool = False
    """Whether a sweep names it, and not the settings."""
    token: str = ""
    shards: tuple[tuple[str, str], ...] = ()
    """Store and name of some shards that nodes should be able to read."""

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ClusterQuestion:
        """Inverse of ``to_json``."""
        document = json.loads(text)
        return cls(**{**document, "shards": tuple(map(tuple, document["shards"]))})


def ask(question: ClusterQuestion, report: Report) -> None:
    """Run all checks; each stage is printed as soon as it is known.

    Raises:
        ClusterError: the cluster cannot be joined.
    """
    _join(question)
    import ray

    from orchestrator.backends.ray.capacity import HEAD_RESOURCE

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    report("nodes", {"nodes": [_node_row(node) for node in nodes]})
    doctors = {node["NodeID"]: _doctor_on(node["NodeID"]) for node in nodes}
    facts = _gather({name: doctor.facts.remote() for name, doctor in doctors.items()}, _QUICK_S)
    report("facts", facts)
    there = {name: doctors[name] for name, found in facts.items() if "error" not in found}
    report("clocks", {name: _clock(doctor) for name, doctor in there.items()})
    report("services", _services(question.namespace))
    free = _with_free_gpus(nodes, _available())
    reduces = _start_reduces(there, facts, free)  # takes longest: the others run at the same time
    with_gpus = {name: doctor for name, doctor in there.items() if facts[name]["gpus"]["devices"]}
    devices = {
        name: doctor.devices.remote(facts[name]["gpus"]["devices"], _DEVICES_S)
        for name, doctor in with_gpus.items()
        if name in free
    }
    if question.store_uri:
        report("store", _store(question.store_uri, there))
    heads = [node["NodeID"] for node in nodes if HEAD_RESOURCE in node["Resources"]]
    trackers = {name: there[name] for name in (heads or list(there)[:1]) if name in there}
    if question.tracking_uri:
        uri, of_sweep = question.tracking_uri, question.tracking_is_of_sweep
        calls = {name: doctor.tracking.remote(uri, of_sweep=of_sweep) for name, doctor in trackers.items()}
        report("tracking", _gather(calls, _REDUCE_S))  # MLflow is imported there first
    if question.shards:
        shards = [list(shard) for shard in question.shards]
        report("shards", _gather({name: one.shards.remote(shards) for name, one in there.items()}, _STORE_S))
    for backend, calls in reduces.items():
        report(backend, _gather(calls, _REDUCE_S + 2.0))
    if with_gpus:
        held = {name: {"devices": [], "not_checked": "all"} for name in with_gpus if name not in free}
        report("devices", _gather(devices, _DEVICES_S + 2.0) | held)


def _join(question: ClusterQuestion) -> None:
    if question.address:
        attach_cluster(question.address, question.namespace, token=question.token)
        return
    stack = read_stack(Path(question.home))
    if stack is None:
        raise NotFoundError(f"no stack runs in {question.home} any more; start it with: orchestrator up")
    attach_stack(stack, question.namespace)


def _doctor_on(node_id: str) -> Any:  # noqa: ANN401 - Ray's handles are untyped
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from orchestrator.doctor import node

    with suppress(ValueError):  # it is registered already
        cloudpickle.register_pickle_by_value(node)  # type: ignore[no-untyped-call]
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor: Any = ray.remote(node.NodeDoctor).options(
        num_cpus=0, max_concurrency=8, max_restarts=0, scheduling_strategy=strategy
    )
    return actor.remote()


def _node_row(node: Mapping[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    return {
        "node_id": node["NodeID"],
        "host": node["NodeManagerHostname"],
        "address": node["NodeManagerAddress"],
        "gpus": resources.get("GPU", 0.0),
        "cpus": resources.get("CPU", 0.0),
    }


def _gather(calls: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Answers by node; for a node that does not answer in time, or fails, the reason."""
    import ray

    ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s) if calls else None
    found = {}
    for name, call in calls.items():
        try:
            found[name] = ray.get(call, timeout=0)
        except ray.exceptions.GetTimeoutError:
            found[name] = {"error": f"no answer within {limit_s:g} s"}
        except ray.exceptions.RayError as error:
            found[name] = {"error": f"its process failed ({type(error).__name__}): {str(error).splitlines()[-1][:200]}"}
    return found


def _clock(doctor: Any) -> dict[str, float]:  # noqa: ANN401 - see _doctor_on
    """How far a node's clock is ahead of this one, and how well that is known, in seconds (as NTP, RFC 5905)."""
    import ray

    best = {"ahead_s": 0.0, "within_s": float("inf")}
    for _ in range(_NUM_CLOCK_QUESTIONS):
        before_s, started_s = time.time(), time.monotonic()
        try:
            there_s = float(ray.get(doctor.now.remote(), timeout=_QUICK_S))
        except ray.exceptions.RayError:
            break
        took_s = time.monotonic() - started_s
        if took_s / 2 < best["within_s"]:
            best = {"ahead_s": there_s - (before_s + took_s / 2), "within_s": took_s / 2}
    return best


def _services(namespace: str) -> dict[str, Any]:
    """State of the controller, its watchdog and the publisher; missing ones are left out."""
    import ray

    calls = {}
    for name in (CONTROLLER, PUBLISHER, WATCHDOG):
        with suppress(ValueError):
            handle: Any = ray.get_actor(name, namespace=namespace)
            calls[name] = handle.ping.remote()
    return _gather(calls, _QUICK_S)


def _store(uri: str, doctors: Mapping[str, Any]) -> dict[str, Any]:
    """Results of the nodes' checks of the store, and whether this process finds the objects that they wrote."""
    was_there, store = is_initialised(uri), open_store(uri)
    folder, content = f"probes/doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        store.put(f"{folder}/driver", content.encode())
        found = _gather({name: one.store.remote(uri, folder, content) for name, one in doctors.items()}, _STORE_S)
        written = sum(stat.name != f"{folder}/driver" for stat in store.list_objects(f"{folder}/"))
    finally:
        _clean(store, folder)
    num_wrote = sum("error" not in one for one in found.values())
    return {"nodes": found, "num_written": num_wrote, "num_seen": written, "was_there": was_there}


def _clean(store: ObjectStore, folder: str) -> None:
    with suppress(OrchestratorError):
        for stat in list(store.list_objects(f"{folder}/")):
            store.delete(stat.name)


def _available() -> dict[str, dict[str, float]]:
    """Resources that are free now, by Ray's id of the node."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found


def _with_free_gpus(nodes: Sequence[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Ids of nodes all of whose GPUs are free; other nodes are not tested."""
    return {
        node["NodeID"]
        for node in nodes
        if available.get(node["NodeID"], {}).get("GPU", 0.0) >= node["Resources"].get("GPU", 0.0)
    }


def _start_reduces(
    doctors: Mapping[str, Any], facts: Mapping[str, Any], free: Collection[str]
) -> dict[str, dict[str, Any]]:
    """One rank on each node; two on a cluster's only one. With GPUs on all of them, and none held, over NCCL, too."""
    names = list(doctors) if len(doctors) > 1 else list(doctors) * 2
    if not names:
        return {}
    started: dict[str, dict[str, Any]] = {}
    for offset, backend in enumerate(_reduce_backends(doctors, facts, free)):
        first = facts[names[0]]
        place = {
            "world_size": len(names),
            "host": first["address"],
            "port": first["free_port"] + offset,
            "backend": backend,
            "limit_s": _REDUCE_S,
        }
        started[backend] = {
            f"{name}#{rank}": doctors[name].rank.remote(
                {**place, "rank": rank, "device": rank if len(doctors) == 1 else 0}, _REDUCE_S
            )
            for rank, name in enumerate(names)
        }
    return started


def _reduce_backends(doctors: Mapping[str, Any], facts: Mapping[str, Any], free: Collection[str]) -> list[str]:
    from orchestrator.doctor.node import is_in_use

    gpus = {name: facts[name]["gpus"]["devices"] for name in doctors}
    num_gpus = [0 if name not in free or any(map(is_in_use, gpus[name])) else len(gpus[name]) for name in doctors]
    return ["gloo", *(["nccl"] if all(num_gpus) and (len(doctors) > 1 or num_gpus[0] > 1) else [])]


def _print_line(stage: str, found: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps({"stage": stage, "found": found}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """The program."""
    question = ClusterQuestion.from_json(sys.stdin.read())
    try:
        ask(question, _print_line)
    except OrchestratorError as error:
        _print_line("error", {"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
