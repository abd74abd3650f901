"""Submits to this directory's stack, and keeps the stack running while a command follows the sweep.

This process never connects to the stack's Ray: it reads the store and the stack's description, and ``controller.calls``
makes its calls. So it survives failures of the stack, reports them, and starts the stack again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.controller.calls import ANSWER_TIMEOUT_S, CallsLostError, ServiceCalls, ServiceSettings
from orchestrator.core.errors import ClusterError, OrchestratorError
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import say
from orchestrator.stack.description import (
    BUCKET,
    CLIENT_FILE,
    S3_FOLDER,
    Stack,
    read_description,
    read_stack,
    touch_stack,
)
from orchestrator.stack.start import ensure_stack, why_stack_ended
from orchestrator.stack.supervisor import StartLimit
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

if TYPE_CHECKING:
    from orchestrator.services.submit import SubmitRequest

POLL_EVERY_S: Final = 0.5
ENSURE_EVERY_S: Final = 5.0
_MAX_TRIES: Final = 3
_PUBLISH_WAIT_S: Final = 60.0
_POLL_S: Final = 0.1
_GOES_ON: Final = "is started again, and the sweep resumes from its checkpoints."


class StackTransport:
    """A store and the stack whose controller serves it; a ``Submitter``. ``open`` it first, ``close`` it last."""

    def __init__(self, settings: Settings, store_uri: str, store: ObjectStore | None = None) -> None:
        self.settings = settings
        self._services = ServiceSettings(
            store_uri=store_uri,
            cluster=settings.cluster,
            namespace=settings.namespace,
            tracking_uri=settings.tracking_uri(),
        )
        self._stack: Stack | None = None
        self._store = store
        self._calls: ServiceCalls | None = None
        self._called_at_s: float | None = None
        self._poll_at_s = self._ask_at_s = 0.0
        self._last_said = ""
        self._is_failing = False
        """Whether the controller's rounds failed when it last answered."""
        self._starts = StartLimit()

    @property
    def store(self) -> ObjectStore:
        """URI of the store."""
        if self._store is None:
            self._store = open_store(self._services.store_uri)
        return self._store

    def open(self) -> None:
        """Find or start a stack with a controller and a publisher.

        Raises:
            ClusterError: they do not come up.
            ControllerError: the stack's controller serves another store.
        """
        for num_left in reversed(range(_MAX_TRIES)):
            self._stack = ensure_stack(self.settings.home)
            try:
                self._ensure_now(self._stack)
            except CallsLostError:
                self._drop_calls()
                if not num_left:
                    raise
            else:
                return

    def close(self) -> None:
        """Disconnect; the stack and everything on it continues."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def submit(self, request: SubmitRequest) -> str:
        """Leave the message, and notify the controller, which otherwise finds it a second later."""
        # Planning takes 0.2 s to import; `status` reads this module for the stack's addresses alone.
        from orchestrator.services.submit import deliver

        message = deliver(request, self.store, self.settings.cluster)
        try:
            if self._calls is not None:
                self._calls.wake(request.plan.sweep)
        except CallsLostError:
            self._drop_calls()  # its late answer must not be taken for that of the next call
        except ClusterError:
            pass  # the controller reads its inbox by itself
        return message

    def keep_alive(self) -> None:
        """Call it twice a second: check the stack, have dead parts started again, and print one sentence about it.

        Raises:
            ClusterError: the stack was stopped, or does not come up again.
        """
        now_s = time.monotonic()
        if now_s < self._poll_at_s:
            return
        self._poll_at_s = now_s + POLL_EVERY_S
        stack = read_stack(self.settings.home)
        if stack is None:
            stack = self._start_again()
        if stack.trouble:
            self._drop_calls()
            self._say_once(f"{stack.trouble}. {self._safe()}; it {_GOES_ON}")
            return
        if self._stack is None or _session(stack) != _session(self._stack):
            self._drop_calls()
            self._stack, self._ask_at_s = stack, 0.0
            self._say_once("The local stack runs again.")
        touch_stack(self.settings.home)
        self._tend(now_s)

    def wait_for_publisher(self, sweep: str) -> bool:
        """Wait until MLflow has all of an ended sweep; False after the time limit (the publisher continues)."""
        deadline_s = time.monotonic() + _PUBLISH_WAIT_S
        while time.monotonic() < deadline_s:
            try:
                self.keep_alive()
                if self._calls is not None and self._called_at_s is None and self._calls.has_published(sweep):
                    return True
            except CallsLostError:
                self._drop_calls()
            except ClusterError:
                return False  # the stack was stopped
            time.sleep(_POLL_S)
        return False

    def _ensure_now(self, stack: Stack) -> None:
        """Raises as ``open``; ``CallsLostError`` as soon as the stack reports that its Ray has died."""
        calls = self._calls = ServiceCalls(self.settings.home, self._services)
        calls.send("ensure")
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while (answer := calls.poll()) is None:
            now = read_stack(self.settings.home)
            if now is None or now.trouble or _session(now) != _session(stack):
                raise CallsLostError((now and now.trouble) or f"the local stack has died: {self._why_it_ended()}")
            if time.monotonic() > deadline_s:
                raise CallsLostError(f"Ray has not answered for {ANSWER_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        if answer["notice"]:
            self._say_once(answer["notice"])
        self._is_failing = bool(answer.get("failure"))
        self._ask_at_s = time.monotonic() + ENSURE_EVERY_S

    def _tend(self, now_s: float) -> None:
        """Every few seconds, make sure that a controller answers. Never waits, so that the display continues."""
        try:
            if self._called_at_s is None:
                if now_s >= self._ask_at_s:
                    self._calls = self._calls or ServiceCalls(self.settings.home, self._services)
                    self._calls.send("ensure")
                    self._called_at_s = now_s
            elif (answer := self._calls.poll() if self._calls is not None else {}) is not None:
                self._called_at_s, self._ask_at_s = None, now_s + ENSURE_EVERY_S
                failure = answer.get("failure", "")
                if failure and not self._is_failing:
                    self._say_once(failure)
                self._is_failing = bool(failure)
            elif now_s - self._called_at_s > ANSWER_TIMEOUT_S:
                self._drop_calls()
        except CallsLostError:
            self._drop_calls()  # the description will name what has died
            self._ask_at_s = now_s + 2 * POLL_EVERY_S
        except OrchestratorError as error:
            self._called_at_s, self._ask_at_s = None, now_s + ENSURE_EVERY_S
            self._say_once(f"{error}; the sweep waits in the store, trying again")

    def _start_again(self) -> Stack:
        """Start the stack of a supervisor that was killed. Raises ``ClusterError`` if it was stopped instead."""
        killed = read_description(self.settings.home)
        self._drop_calls()
        if killed is None or not self._starts.allows_start():
            message = (
                f"the local stack of {self.settings.home} has ended: {self._why_it_ended()}. {self._safe()}; "
                "the same submit goes on with the rest"
            )
            raise ClusterError(message)
        self._say_once(
            f"The supervisor of the local stack (pid {killed.pid}) has died. {self._safe()}; the stack {_GOES_ON}"
        )
        return ensure_stack(self.settings.home)

    def _why_it_ended(self) -> str:
        return why_stack_ended(self.settings.home) or (
            "it was stopped (orchestrator down), it ended after a long time without use, or its directory was deleted"
        )

    def _safe(self) -> str:
        return f"All results so far are safe in {self._services.store_uri}"

    def _drop_calls(self) -> None:
        if self._calls is not None:
            self._calls.kill()
        self._calls = self._called_at_s = None

    def _say_once(self, sentence: str) -> None:
        """Print a sentence, unless it was the last one printed."""
        if sentence != self._last_said:
            say(sentence)
        self._last_said = sentence


@contextmanager
def connect_stack(settings: Settings, store_uri: str, store: ObjectStore | None = None) -> Iterator[StackTransport]:
    """The directory's stack, started if it does not run, with a controller; the connection ends with the block.

    Raises:
        ClusterError, ControllerError: as ``StackTransport.open``.
    """
    say("Starting Ray and MLflow, or finding them running ...")
    connection = StackTransport(settings, store_uri, store)
    try:
        connection.open()
        yield connection
    finally:
        connection.close()


def _session(stack: Stack) -> tuple[int, int, int]:
    """Number of the Ray to which the calls are connected."""
    return stack.pid, stack.pid_started_at, stack.num_ray_starts


def addresses_of(stack: Stack) -> dict[str, str]:
    """What people open or connect to, to be printed on stdout."""
    addresses = {
        "Ray dashboard": stack.dashboard_url,
        "Ray dashboard's token": stack.token_path,
        "MLflow": shown_link(stack, stack.mlflow_url),
    }
    if stack.mlflow_token_path and addresses["MLflow"] == stack.mlflow_url:
        addresses["MLflow's token"] = stack.mlflow_token_path
    if stack.s3_url:
        environment = Path(stack.directory, S3_FOLDER, CLIENT_FILE)
        addresses["S3"] = f"{stack.s3_url} (bucket {BUCKET}; first: source {environment})"
    return addresses


def shown_link(stack: Stack, url: str) -> str:
    """The address of one of its MLflow pages as stdout may have it: with the token on a terminal alone.

    Others read files and the logs of CI.
    """
    return stack.browser_link(url) if sys.stdout.isatty() else url
