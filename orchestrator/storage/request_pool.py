"""Independent requests to a store, side by side: what keeps a distant store from being asked one thing at a time.

Invariants:

- What is started together does not depend on each other: the steps of one job or one sweep stay in one call, in order.
- Nothing goes on behind the caller's back: a batch ends only when all of its requests have.
- A store on this machine is asked one thing at a time, when its answer is taken: it answers faster than a thread
  starts, and the order of its writes stays that of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from orchestrator.core.errors import OrchestratorError

NUM_THREADS = 32
"""As many as the S3 client keeps connections."""
_ALIVE_EVERY_S = 1.0
_LOCAL = ("file:", "memory:")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Batch:
    """Requests that were started together. From ``RequestPool.batch``."""

    def __init__(self, executor: ThreadPoolExecutor | None, on_alive: Callable[[], None]) -> None:
        self._executor = executor
        self._on_alive = on_alive
        self._futures: list[Future[object]] = []

    def start(
        self, work: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Callable[[], Result]:
        """Start a request; what is returned waits for its answer, and raises what it raised."""
        if self._executor is None:
            return partial(self._call, partial(work, *arguments, **options))
        future = self._executor.submit(work, *arguments, **options)
        self._futures.append(future)  # type: ignore[arg-type] # a future is read here, never set
        return partial(self._wait, future)

    def end(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        # First all of them: while one is waited for, the threads would begin the others.
        for future in [future for future in self._futures if not future.cancel()]:
            while not wait([future], _ALIVE_EVERY_S).done:
                with suppress(OrchestratorError):  # what it raises is raised by the next batch, too
                    self._on_alive()

    def _call(self, work: Callable[[], Result]) -> Result:
        self._on_alive()
        return work()

    def _wait(self, future: Future[Result]) -> Result:
        self._on_alive()
        while not wait([future], _ALIVE_EVERY_S).done:
            self._on_alive()
        return future.result()


class RequestPool:
    """Threads for the requests of one user of a store. Use from one thread."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, uri: str) -> RequestPool:
        """As many threads as are worth it for a store."""
        return cls(1 if uri.startswith(_LOCAL) else NUM_THREADS)

    @contextmanager
    def batch(self, on_alive: Callable[[], None] = lambda: None) -> Iterator[Batch]:
        """Requests to start together. ``on_alive`` is called again and again while answers are waited for."""
        if self.num_threads > 1 and self._executor is None:
            self._executor = ThreadPoolExecutor(self.num_threads, thread_name_prefix="store")
        batch = Batch(self._executor, on_alive)
        try:
            yield batch
        finally:
            batch.end()

    def ask(
        self,
        on_alive: Callable[[], None],
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """The answer to a single request. ``on_alive`` as for ``batch``; raises what the request raises."""
        with self.batch(on_alive) as batch:
            return batch.start(work, *arguments, **options)()
