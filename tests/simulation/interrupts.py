"""Stops a controller in the middle of a round, at any access to its store or backend: for good, or for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore, Thread
from typing import TypeVar

from orchestrator.backends.protocol import ANYWHERE, AttemptReport, Capacity, Placement
from orchestrator.backends.simulated import SimulatedBackend
from orchestrator.core.contract import JobRequest, Resources
from orchestrator.core.errors import FailureKind, StorageTimeoutError
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.testing import SimulatedCrash
from tests.simulation.audit import require

Written = TypeVar("Written")


class Turn:
    """Runs a function that may be suspended from within: in a thread, but never at the same time as its caller."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._go, self._back = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        self._is_ended = False
        self._is_killed = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Let it run to its next pause or its end; true at the end. Raises what the function raises."""
        self._go.release()
        self._back.acquire()
        if self._is_ended:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self._is_ended

    def kill(self) -> None:
        """Let the function end where it is suspended."""
        if self._is_ended:
            return
        self._is_killed = True
        try:
            self.resume()
        except SimulatedCrash:
            return

    def pause(self) -> None:
        """Called by the function: go on when the caller resumes."""
        self._back.release()
        self._go.acquire()
        if self._is_killed:
            raise SimulatedCrash("killed while it was suspended")

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - raised again by ``resume``
            self._error = error
        self._is_ended = True
        self._back.release()


@dataclass(slots=True, kw_only=True)
class Gate:
    """What all accesses of one controller pass. ``at_access`` counts down to the one where something happens."""

    crashes_in: int = 0
    pauses_in: int = 0
    within: str = ""
    """Accesses that count: those to names that contain this."""
    turn: Turn | None = None
    is_dead: bool = False

    def enter(self, name: str = "") -> None:
        """Pass, die or be suspended here."""
        if self.is_dead:
            raise SimulatedCrash("this controller has died already")
        if self.within not in name:
            return
        if self.crashes_in:
            self.crashes_in -= 1
            if not self.crashes_in:
                self.is_dead = True
                raise SimulatedCrash("here")
        if self.pauses_in and self.turn is not None:
            self.pauses_in -= 1
            if not self.pauses_in:
                self.turn.pause()


class GatedStore:
    """An ``ObjectStore`` behind a gate."""

    def __init__(self, store: ObjectStore, gate: Gate) -> None:
        self._store, self._gate = store, gate
        self._in_doubt: set[str] = set()
        """Folders of journals to which something was appended and nobody knows whether it is there."""

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, name: str, content: bytes) -> ObjectStat:
        return self._both(self._store.put, name, content)

    def put_file(self, name: str, path: Path) -> ObjectStat:
        return self._both(self._store.put_file, name, path)

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        folder, _, _ = name.rpartition("/")
        if not folder.endswith("/journal"):
            return self._both(self._store.put_if_absent, name, content)
        require(folder not in self._in_doubt, f"{name} is appended before anybody looked what became of the last one")
        try:
            return self._both(self._store.put_if_absent, name, content)
        except StorageTimeoutError:
            self._in_doubt.add(folder)
            raise

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        return self._both(self._store.put_if_match, name, content, etag)

    def delete(self, name: str) -> None:
        self._both(self._store.delete, name)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self._gate.enter()
        self._in_doubt.discard(name.rpartition("/")[0])
        return self._store.get(name, max_bytes=max_bytes)

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        self._gate.enter()
        return self._store.get_with_stat(name, max_bytes=max_bytes)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self._gate.enter()
        return self._store.get_range(name, start, length)

    def download(self, name: str, path: Path) -> None:
        self._gate.enter()
        self._store.download(name, path)

    def stat(self, name: str) -> ObjectStat:
        self._gate.enter()
        return self._store.stat(name)

    def exists(self, name: str) -> bool:
        self._gate.enter()
        self._in_doubt.discard(name.rpartition("/")[0])
        return self._store.exists(name)

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        self._gate.enter()
        self._in_doubt.discard(prefix.rstrip("/"))  # of an empty journal a reader sees nothing more
        return self._store.list_children(prefix, start_after=start_after)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self._gate.enter()
        return self._store.list_objects(prefix)

    def _both(self, write: Callable[..., Written], *arguments: object) -> Written:
        """Before and after a write: both sides of every durable change are moments to die at."""
        name = str(arguments[0])
        self._gate.enter(name)
        written = write(*arguments)
        self._gate.enter(name)
        return written


MAX_LOOKS = 500


class GatedBackend:
    """A simulated backend behind a gate."""

    def __init__(self, backend: SimulatedBackend, gate: Gate) -> None:
        self.inner, self._gate = backend, gate
        self.num_looks = 0
        """At the capacity, in this round."""

    def announce(self, epoch: int) -> None:
        self._gate.enter()
        self.inner.announce(epoch)

    def why_not(self, plan: Plan) -> str:
        return self.inner.why_not(plan)

    def capacity(self) -> Capacity:
        self.num_looks += 1
        require(self.num_looks < MAX_LOOKS, "a round of the controller never ends: it decides again and again")
        return self.inner.capacity()

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        self._gate.enter()
        self.inner.launch(request, resources, placement)
        self._gate.enter()

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        self._gate.enter()
        return self.inner.observe(attempt_ids, are_all=are_all)

    def stop(self, attempt_id: str) -> None:
        self._gate.enter()
        self.inner.stop(attempt_id)

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        self._gate.enter()
        self.inner.kill(attempt_id, reason, kind)

    def release(self, attempt_id: str) -> None:
        self._gate.enter()
        self.inner.release(attempt_id)

    def close(self) -> None:
        self.inner.close()
