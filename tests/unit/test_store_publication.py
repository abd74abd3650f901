"""The publisher's round over all sweeps, with a publisher that only notes what it is asked."""

import gc
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from orchestrator.controller import actor
from orchestrator.controller.actor import LOOK_AT_ENDED_EVERY_S, StorePublication
from orchestrator.storage.journal import JournalDamagedError
from orchestrator.storage.layout import journal_folder, journal_segment, snapshots_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import SweepLedger, read_trouble
from orchestrator.tracking.facts import TimelineReader
from tests.scripted_sweep import CLUSTER, World, diamond, make_plan

SWEEPS = ("a", "b", "c")


class CountingStore(LocalStore):
    """Counts what is read."""

    num_reads: Counter[str]

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> Any:
        self.num_reads["get"] += 1
        return super().get_with_stat(name, max_bytes=max_bytes)


class NotingPublisher:
    """Publishes nothing."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.failing: set[str] = set()

    def has_ended(self, sweep: str) -> bool:
        return True

    def publish_once(self, sweep: str) -> bool:
        if sweep in self.failing:
            raise KeyError(sweep)
        self.published.append(sweep)
        return True


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    world = World(tmp_path)
    for sweep in SWEEPS:
        world.submit(*diamond(), sweep=sweep)
    world.finish(*SWEEPS)
    store = CountingStore(tmp_path)
    store.num_reads = Counter()
    return store


def test_publication_of_sweeps_without_news_reads_no_object(store: CountingStore) -> None:
    publication = StorePublication(store, "", lambda *_: NotingPublisher())
    publication.run()
    assert publication.caught_up == set(SWEEPS)
    store.num_reads.clear()
    publication.run()
    assert store.num_reads["get"] == 0


def test_publication_looks_at_ended_sweeps_now_and_then_or_for_who_waits(store: CountingStore) -> None:
    publisher, now = NotingPublisher(), 0.0
    publication = StorePublication(store, "", lambda *_: publisher, clock=lambda: now)
    publication.run()
    for _ in range(2):
        now += 0.4 * LOOK_AT_ENDED_EVERY_S
        publication.run()
    assert publisher.published == list(SWEEPS)
    assert publication.ask() == [], "what it knows may be old"
    publication.run()
    assert publisher.published == list(SWEEPS) * 2
    assert publication.ask() == list(SWEEPS)
    publisher.failing = {"b"}
    with pytest.raises(KeyError):
        publication.run()
    assert publication.ask() == ["a", "c"]
    publisher.failing = set()
    publication.run()
    publisher.published.clear()
    now += LOOK_AT_ENDED_EVERY_S
    publication.run()
    assert publisher.published == list(SWEEPS)


def test_publication_keeps_no_journal_of_ended_sweeps_and_sees_what_is_submitted_again(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands, and each of them holds the plan of all its jobs."""
    ledgers: list[ref[SweepLedger]] = []
    publishers: dict[str, NotingPublisher] = {}

    def make(*arguments: Any) -> SweepLedger:
        ledger = SweepLedger(*arguments)
        ledgers.append(ref(ledger))
        return ledger

    monkeypatch.setattr(actor, "SweepLedger", make)
    publication = StorePublication(store, "", lambda _, uri: publishers.setdefault(uri, NotingPublisher()))
    publication.run()
    gc.collect()
    assert [ledger() for ledger in ledgers] == [None] * len(SWEEPS)

    world = World(Path(store.uri.removeprefix("file://")))
    plan = replace(make_plan(*diamond(), sweep="b", store_uri=store.uri), tracking_uri="sqlite:////other.db")
    client.submit(store, plan, "", CLUSTER, now=world.clock())
    world.tick_until(lambda: world.snapshot("b").revision == 2)
    publication.ask()
    publication.run()
    assert {uri: publisher.published for uri, publisher in publishers.items()} == {
        "": ["a", "b", "c", "a", "c"],
        "sqlite:////other.db": ["b"],
    }


def test_publication_of_a_sweep_that_fails_does_not_keep_the_others(store: CountingStore) -> None:
    publisher = NotingPublisher()
    publication = StorePublication(store, "", lambda *_: publisher)
    publisher.failing.add("a")
    with pytest.raises(KeyError, match="a"):
        publication.run()
    assert publisher.published == ["b", "c"]
    publisher.failing.clear()
    publication.run()
    assert publication.caught_up == set(SWEEPS)


@pytest.mark.parametrize(
    ("uri", "order"), [("sqlite:////other.db", ["c", "a", "b"]), ("", ["a", "b", "c"])], ids=["another server", "same"]
)
def test_publication_that_hung_comes_last_in_the_next_process_and_so_do_all_of_its_server(
    store: CountingStore, uri: str, order: list[str]
) -> None:
    publisher = NotingPublisher()
    publication = StorePublication(store, "", lambda *_: publisher)
    publisher.failing = {"b"}
    with pytest.raises(KeyError, match="b"):
        publication.run(on_alive=lambda: publication.note_hang(1800.0) if publication.current == ("a", "") else None)
    assert "made no progress for 30 min" in read_trouble(store, "a")[0]
    publisher.published.clear()
    publisher.failing.clear()
    StorePublication(store, uri, lambda *_: publisher).run()
    assert publisher.published == order, "c has no problem of its own"
    assert [read_trouble(store, sweep) for sweep in SWEEPS] == [(), (), ()]


@pytest.mark.parametrize("accepts", [True, False])
def test_publication_asks_a_server_that_accepts_no_connection_once_in_a_pass(
    store: CountingStore, accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "getproxies", dict)
    asked: list[str] = []

    class FailingPublisher(NotingPublisher):
        def publish_once(self, sweep: str) -> bool:
            asked.append(sweep)
            raise TimeoutError(sweep)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if accepts:
            server.listen()
        publication = StorePublication(
            store, f"http://127.0.0.1:{server.getsockname()[1]}", lambda *_: FailingPublisher()
        )
        for _ in range(2):
            with pytest.raises(TimeoutError, match="a"):
                publication.run()
    assert asked == 2 * (["a", "b", "c"] if accepts else ["a"])
    assert ("accepts no connection" in read_trouble(store, "c")[0]) is not accepts


def test_publication_of_a_damaged_journal_does_not_keep_the_others(store: CountingStore) -> None:
    for folder in (journal_folder("a"), snapshots_folder("a")):
        for name in store.list_children(folder):
            store.put(f"{folder}{name}", b"{}\n[]\n")
    publisher = NotingPublisher()
    with pytest.raises(JournalDamagedError):
        StorePublication(store, "", lambda *_: publisher).run()
    assert publisher.published == ["b", "c"]


def test_publication_of_a_journal_that_lost_a_segment_names_it(store: CountingStore) -> None:
    """Up to there the sweep still runs; a run on the server would say so for ever."""
    reader, lost = TimelineReader(store, "a"), journal_segment("a", 1)
    content = store.get(lost)
    store.delete(lost)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"segment 1 of .*it is missing, and later ones exist"):
            reader.read()
    store.put(lost, content)
    assert reader.read().snapshot.state.is_final


def test_publication_same_failure_is_told_once_and_again_after_it_worked(store: CountingStore, caplog) -> None:
    publisher = NotingPublisher()
    clock = count(0.0, LOOK_AT_ENDED_EVERY_S).__next__
    publication = StorePublication(store, "", lambda *_: publisher, clock=clock)
    for failing in ({"a"}, {"a"}, set(), {"a"}):
        publisher.failing = failing
        with suppress(KeyError):
            publication.run()
    assert [record.message for record in caplog.records] == ["sweep a is not published now: 'a'; it is tried again"] * 2


def test_publication_failure_is_read_from_the_store_until_any_publisher_has_worked(store: CountingStore) -> None:
    publisher = NotingPublisher()
    publisher.failing = {"a"}
    with pytest.raises(KeyError):
        StorePublication(store, "", lambda *_: publisher).run()
    assert read_trouble(store, "a") == ("not published to MLflow: 'a'",)
    assert read_trouble(store, "b") == ()
    publisher.failing = set()
    StorePublication(store, "", lambda *_: publisher).run()  # another process: it remembers nothing
    assert read_trouble(store, "a") == ()
