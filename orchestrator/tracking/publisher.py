"""What publishes the sweeps of a store: one ``Publication`` for each pass over a sweep, and what is kept in between."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage.layout import journal_segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.content import RecordCache
from orchestrator.tracking.facts import FactsCache, TimelineReader
from orchestrator.tracking.memory import MemoryFile
from orchestrator.tracking.publication import Publication, SweepSource
from orchestrator.tracking.server import TrackingServer
from orchestrator.tracking.trials import TrialsReader


class Publisher:
    """Needs the store and the tracking server, no cluster.

    Args:
        store: of the sweeps.
        tracking_uri: see ``TrackingServer``.
        compares: whether the first pass of a sweep asks the server if it has what is remembered as published.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: ObjectStore,
        tracking_uri: str,
        *,
        compares: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._compares, self._clock = store, compares, clock
        self._server = TrackingServer(tracking_uri, artifact_root=store.uri)
        self._records = RecordCache(store)
        self._readers: dict[str, TimelineReader] = {}
        self._sources: dict[str, SweepSource] = {}
        self._resting: dict[str, int] = {}
        """Of ended sweeps all of which was published, the number of the journal's next segment. What is as large as a
        sweep is not kept of them: there may be thousands."""

    def publish_once(self, sweep: str) -> bool:
        """Publish what is new; True if everything known at this moment is published.

        Any number of calls, crashes in between, and other publishers at the same time lead to the same runs.

        Raises:
            TrackingError: the tracking server cannot be reached or refuses; call again later.
            StorageError: the store cannot be read.
        """
        if self._is_resting(sweep):
            return True
        reader = self._reader(sweep)
        timeline = reader.read()
        if timeline.snapshot.plan is None:
            return True  # no controller has accepted the sweep yet: there is nothing to tell
        publication = Publication(self._source(sweep), self._server, timeline, timeline.snapshot.plan)
        try:
            published = publication.run()
        except PreconditionFailedError:
            return False  # another publisher remembered something meanwhile: the next pass starts from that
        if published and timeline.snapshot.state.is_final:
            self._resting[sweep] = reader.next_sequence
            self._source(sweep).rest()
            del self._readers[sweep]
        return published

    @property
    def num_written(self) -> int:
        """Runs that the tracking server took so far, each time it took them."""
        return self._server.num_written

    def has_ended(self, sweep: str) -> bool:
        """Whether nothing will happen to the sweep unless a client asks for it."""
        return self._is_resting(sweep) or self._reader(sweep).read().snapshot.state.is_final

    def _is_resting(self, sweep: str) -> bool:
        """Whether it had ended, all of it was published, and nothing happened since: one look for the next segment."""
        if sweep not in self._resting:
            return False
        if not self._store.exists(journal_segment(sweep, self._resting[sweep])):
            return True
        del self._resting[sweep]
        return False

    def _source(self, sweep: str) -> SweepSource:
        if sweep not in self._sources:
            self._sources[sweep] = SweepSource(
                store=self._store,
                records=self._records,
                facts=FactsCache(),
                trials=TrialsReader(self._store),
                file=MemoryFile(self._store, sweep, self._server.uri),
                clock=self._clock,
                is_to_be_compared=self._compares,
            )
        return self._sources[sweep]

    def _reader(self, sweep: str) -> TimelineReader:
        return self._readers.setdefault(sweep, TimelineReader(self._store, sweep))
