"""Calls to the services of a directory's stack, made by a separate process.

If a cluster is gone for a minute, Ray's C++ code blocks connected processes and then ends them with its own message. A
command that follows a sweep for hours must outlive its Ray. So it never connects, but starts
``python -m orchestrator.controller.calls DIRECTORY``, which answers each line of JSON with one line, ends with its
input, and can be killed and started again. With ``--revive`` it starts the controllers that the stack lists, and ends.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.core.errors import ClusterError, ControllerError, OrchestratorError
from orchestrator.stack.description import LOG_FOLDER, read_stack, remember_service, remembered_services

REVIVE: Final = "--revive"
ANSWER_TIMEOUT_S: Final = 150.0
"""For an answer to "ensure": a new controller on a busy machine has 60 s, and as much to get its lease."""
_PING_TIMEOUT_S: Final = 5.0
_CLOSE_WITHIN_S: Final = 2.0
_ERRORS: Final[dict[str, type[OrchestratorError]]] = {"ControllerError": ControllerError}


class CallsLostError(ClusterError):
    """The process that makes the calls has ended, or did not answer in time: Ray has died, probably."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """A controller and its publisher."""

    store_uri: str
    cluster: str
    namespace: str
    tracking_uri: str


class ServiceCalls:
    """The caller's side. One call at a time; ``close`` it in the end."""

    def __init__(self, directory: Path, settings: ServiceSettings) -> None:
        self._settings = settings
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        log_path = directory / LOG_FOLDER / "calls.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.controller.calls", str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command
                text=True,
            )
        threading.Thread(target=self._read, name="calls", daemon=True).start()

    def wake(self, sweep: str) -> None:
        """Make the controller read a sweep's inbox now. Raises as ``wait``."""
        self.send("wake", sweep=sweep)
        self.wait(ANSWER_TIMEOUT_S)

    def has_published(self, sweep: str) -> bool:
        """Whether the publisher has all of an ended sweep. Raises as ``wait``."""
        self.send("has_published", sweep=sweep)
        return bool(self.wait(4 * _PING_TIMEOUT_S)["is_caught_up"])

    def send(self, call: str, **arguments: str) -> None:
        """Begin a call, such as "ensure": find or create a controller and a publisher. Raises ``CallsLostError``."""
        line = json.dumps({"call": call, **arguments, "settings": asdict(self._settings)})
        if self._process.stdin is None:  # pragma: no cover - it is a pipe
            raise AssertionError
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise CallsLostError("the connection to Ray has ended") from error

    def poll(self) -> dict[str, Any] | None:
        """The answer to the call that was begun; ``None`` if it is not there yet. Raises as ``wait``."""
        try:
            return self._decoded(self._answers.get_nowait())
        except queue.Empty:
            return None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the call that was begun.

        Raises:
            ControllerError: the namespace's controller serves another store or cluster.
            CallsLostError: Ray has died meanwhile, or does not answer in time.
            ClusterError: the services do not come up.
        """
        try:
            return self._decoded(self._answers.get(timeout=timeout_s))
        except queue.Empty:
            raise CallsLostError(f"Ray has not answered for {timeout_s:g} s") from None

    def close(self) -> None:
        """End the process, which disconnects from Ray if that is quick."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once: disconnecting from a Ray that is gone would block."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put(None)

    @staticmethod
    def _decoded(line: str | None) -> dict[str, Any]:
        if line is None:
            raise CallsLostError("the connection to Ray has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _ERRORS.get(answer["error"], ClusterError)(answer["message"])
        return answer


def main(arguments: list[str]) -> int:
    """Answer calls until the input ends, or start all that the stack remembers; 1 if that fails."""
    directory = Path(arguments[0])
    # Answers use a descriptor of their own: Ray's C++ code also prints to stdout.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if REVIVE in arguments:
        outcomes = [_answer(directory, {"call": "ensure", "settings": one}) for one in remembered_services(directory)]
        for outcome in outcomes:
            sys.stderr.write(f"{json.dumps(outcome)}\n")
        return 1 if any("error" in outcome for outcome in outcomes) else 0
    for line in sys.stdin:
        answers.write(f"{json.dumps(_answer(directory, json.loads(line)))}\n")
        answers.flush()
    return 0


def _answer(directory: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    calls: dict[str, Callable[[Path, ServiceSettings, str], dict[str, Any]]] = {
        "ensure": _ensure,
        "wake": _wake,
        "has_published": _has_published,
    }
    settings = ServiceSettings(**request["settings"])
    try:
        _attach(directory, settings.namespace)
        return calls[request["call"]](directory, settings, request.get("sweep", ""))
    except OrchestratorError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001 - Ray fails in many ways, and the caller must hear of each
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {"error": "ClusterError", "message": f"Ray does not answer as it should ({reason})"}


def _attach(directory: Path, namespace: str) -> None:
    stack = read_stack(directory)
    if stack is None:
        raise ClusterError(f"no stack runs in {directory}; run: orchestrator up")
    import ray

    from orchestrator.stack.attach import attach_stack

    if not ray.is_initialized():
        attach_stack(stack, namespace)


def _ensure(directory: Path, settings: ServiceSettings, _: str) -> dict[str, Any]:
    from orchestrator.controller.connect import ensure_services

    services = ensure_services(settings.store_uri, settings.cluster, settings.namespace, settings.tracking_uri)
    if not services.elsewhere:  # what starts again with Ray publishes where it did
        remember_service(directory, asdict(settings))
    return {"notice": "; ".join(services.notices), "failure": services.link.failure}


def _wake(_directory: Path, settings: ServiceSettings, sweep: str) -> dict[str, Any]:
    from orchestrator.controller.connect import wake_controller

    return {"is_told": wake_controller(settings.namespace, sweep)}


def _has_published(_directory: Path, settings: ServiceSettings, sweep: str) -> dict[str, Any]:
    import ray

    from orchestrator.controller.connect import ensure_publisher

    publisher: Any = ensure_publisher(settings.store_uri, settings.tracking_uri, settings.namespace)
    try:
        pong = ray.get(publisher.ping.remote(), timeout=_PING_TIMEOUT_S)
    except ray.exceptions.RayError:
        return {"is_caught_up": False}
    return {"is_caught_up": sweep in pong["caught_up"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
