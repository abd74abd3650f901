"""The publisher: projects sweeps of one store into one tracking server, and never the other way round."""

from __future__ import annotations

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.content import RecordCache
from orchestrator.tracking.facts_cache import FactsCache
from orchestrator.tracking.memory import MemoryFile
from orchestrator.tracking.publication import Publication, Source
from orchestrator.tracking.server import TrackingServer
from orchestrator.tracking.timeline import Timeline, TimelineReader


class Publisher:
    """Needs the store and the tracking server, no cluster. ``tracking_uri``: see ``TrackingServer``."""

    def __init__(self, store: ObjectStore, tracking_uri: str) -> None:
        self._store = store
        self._server = TrackingServer(tracking_uri, artifact_root=store.uri)
        self._records = RecordCache(store)
        self._readers: dict[str, TimelineReader] = {}
        self._sources: dict[str, Source] = {}
        self._published: dict[str, Timeline] = {}
        """Of ended sweeps, as they were when all of them was published."""

    def publish_once(self, sweep: str) -> bool:
        """Publish what is new; True if everything known at this moment is published.

        Any number of calls, crashes in between, and other publishers at the same time lead to the same runs.

        Raises:
            TrackingError: the tracking server cannot be reached or refuses; call again later.
            StorageError: the store cannot be read.
        """
        timeline = self._reader(sweep).read()
        if timeline.snapshot.plan is None:
            return True  # no controller has accepted the sweep yet: there is nothing to tell
        if timeline is self._published.get(sweep):
            return True  # it had ended and nothing happened since: whoever polls many old sweeps pays nothing for them
        publication = Publication(self._source(sweep), self._server, timeline, timeline.snapshot.plan)
        try:
            published = publication.run()
        except PreconditionFailedError:
            return False  # another publisher remembered something meanwhile: the next pass starts from that
        if published and timeline.snapshot.state.is_final:
            self._published[sweep] = timeline
        return published

    @property
    def num_written(self) -> int:
        """Runs that the tracking server took so far, each time it took them."""
        return self._server.num_written

    def has_ended(self, sweep: str) -> bool:
        """Whether nothing will happen to the sweep unless a client asks for it."""
        return self._reader(sweep).read().snapshot.state.is_final

    def _source(self, sweep: str) -> Source:
        if sweep not in self._sources:
            self._sources[sweep] = Source(
                store=self._store,
                records=self._records,
                facts=FactsCache(),
                file=MemoryFile(self._store, sweep, self._server.uri),
            )
        return self._sources[sweep]

    def _reader(self, sweep: str) -> TimelineReader:
        return self._readers.setdefault(sweep, TimelineReader(self._store, sweep))
