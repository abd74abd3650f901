"""Ray tasks that check nodes: for a minute, a node's arithmetic, memory and transfers are tested.

``workloads.node_check`` has the tests; the task starts it as a separate process. The task holds all GPUs of its node,
so it never runs together with an attempt, and a gang that is placed on the node meanwhile waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.ray.attempt_process import VISIBLE_GPUS, assigned_gpus
from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.backends.ray.settings import cache_directory
from orchestrator.core.data_plane import NODE, LateAnswerError, NoAnswerError, NodeRequest, ask

LIMIT_S = 60.0
_DEVICES_S = 15.0
"""Of it, for repetitions on the devices."""
_REDUCE_SHARE = 0.5
_STORE_UNTIL = 0.9
"""Part of the limit; a later answer of the store does not count against the node."""
_GIVEN_UP_AFTER = 3.0
"""So many limits after the start, a check that has not begun is dropped: something else holds the GPUs."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Check:
    answer: ray.ObjectRef[Any]
    began_at_s: float
    limit_s: float
    start: Callable[[float], ray.ObjectRef[Any]]
    """Starts another check with the given limit in seconds."""


class NodeChecks:
    """The checks under way, by name of the node; use from one thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._running: dict[str, _Check] = {}

    def start(self, name: str, node_id: str, num_gpus: float, store_uri: str, accepted: Sequence[str]) -> None:
        """Begin to check a node, unless it is being checked; ``accepted``: digests of code that it may run."""
        if name in self._running:
            return
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": strategy}
        task: Any = ray.remote(_check).options(**options)
        self._begin(name, partial(task.remote, store_uri, list(accepted)), self._limit_s)

    def _begin(self, name: str, start: Callable[[float], ray.ObjectRef[Any]], limit_s: float) -> None:
        self._running[name] = _Check(start(limit_s), time.monotonic(), limit_s, start)

    def finished(self) -> dict[str, str]:
        """Checks that have ended since the last call: what is wrong with the node, empty = nothing.

        Checks that could not be made are left out: they do not count against the node.
        """
        found: dict[str, str] = {}
        for name, check in list(self._running.items()):
            ready, _ = ray.wait([check.answer], timeout=0)
            if not ready and time.monotonic() - check.began_at_s < _GIVEN_UP_AFTER * check.limit_s:
                continue
            del self._running[name]
            if not ready:
                ray.cancel(check.answer, force=True)
                continue
            try:
                answer = ray.get(check.answer)
            except RayError:  # the node is gone, or the task could not start there
                continue
            if answer is None:
                continue
            if not_made(answer):
                _LOG.warning("the check of node %s could not be made: %s", name, not_made(answer))
                continue
            if not faults(answer) and timed_out(answer) and check.limit_s == self._limit_s:
                # Cold disks and busy processors are no faults: check once more, with twice the time.
                self._begin(name, check.start, 2 * self._limit_s)
                continue
            found[name] = "; ".join(faults(answer)) or timed_out(answer)
        return found


def faults(answer: Mapping[str, Any]) -> list[str]:
    """What ``workloads.node_check`` found wrong; a compiler that is missing is no fault of the hardware."""
    if "error" in answer:
        return [str(answer["error"])]
    if "devices" not in answer:
        return []
    wrong = [f"{one['device']}: {error}" for one in answer["devices"] for error in one["errors"]]
    return wrong + list(answer.get("node", {}).get("errors", ()))


def timed_out(answer: Mapping[str, Any]) -> str:
    """The parts of the check that did not end in time; empty = all did."""
    return str(answer.get("timed_out") or answer.get("node", {}).get("timed_out", ""))


def not_made(answer: Mapping[str, Any]) -> str:
    """Why a check without faults was not made; empty = it was made."""
    return "" if faults(answer) or timed_out(answer) else "; ".join(answer.get("node", {}).get("not_made", ()))


def _usable_gpus() -> int:
    """How many of the GPUs that Ray has assigned to this process CUDA must show to it."""
    visible = os.environ.get(VISIBLE_GPUS, "")
    if not visible:  # those of other makers have other variables
        return 0
    # CUDA shows one slice of a GPU to a process at most.
    return min(int(assigned_gpus()), 1) if visible.startswith("MIG") else int(assigned_gpus())


def _check(store_uri: str, accepted: Sequence[str], limit_s: float) -> dict[str, Any] | None:
    """On the node; None if there is no such program (another version of the code)."""
    if code_digest() not in accepted:
        return {"node": {"not_made": ["it runs other code than the controller"]}}
    request: NodeRequest = {
        "limit_s": _DEVICES_S,
        "gpus": _usable_gpus(),
        "reduce_s": _REDUCE_SHARE * limit_s,
        "cache": str(cache_directory()),
        "store_uri": store_uri,
        "until_s": time.monotonic() + _STORE_UNTIL * limit_s,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        return ask(NODE, request, limit_s=limit_s, environment=environment)
    except LateAnswerError:
        return {"timed_out": f"its check has not ended within {limit_s:g} s"}
    except NoAnswerError as error:
        return None if "No module named" in str(error) else {"error": f"its check fails: {error}"}
    except OSError:
        return None
