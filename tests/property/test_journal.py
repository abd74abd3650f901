"""The journal: order, atomic segments, and one writer at a time."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import StorageError
from orchestrator.storage.journal import Journal, JournalDamagedError, JournalFencedError, journal_exists
from orchestrator.storage.layout import journal_segment
from orchestrator.storage.local import LocalStore
from orchestrator.testing import Fault, FaultyStore, Moment

SEGMENTS = st.lists(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)), max_size=3), max_size=6
)


@settings(max_examples=25)
@given(segments=SEGMENTS, pause=st.integers(0, 6))
def test_reader_at_any_pace_sees_all_events_in_order(segments: list[list[dict[str, object]]], pause: int) -> None:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        writer, reader = Journal(store, "s", holder="w"), Journal(store, "s")
        seen = []
        for number, events in enumerate(segments):
            writer.append(events)
            if number == pause:
                seen += list(reader.read_new())
        seen += list(reader.read_new())
        assert seen == [event for events in segments for event in events]
        assert reader.next_sequence == writer.next_sequence == len(segments)


@settings(max_examples=25)
@given(turns=st.lists(st.booleans(), max_size=8))
def test_writer_that_is_behind_is_fenced_and_writes_nothing(turns: list[bool]) -> None:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        writers = {turn: Journal(store, "s", holder=str(turn)) for turn in (False, True)}
        written: list[dict[str, int]] = []
        for number, turn in enumerate(turns):
            is_behind = writers[turn].next_sequence < len(written)
            if is_behind:
                with pytest.raises(JournalFencedError, match="another writer"):
                    writers[turn].append([{"n": number}])
                list(writers[turn].read_new())
            else:
                writers[turn].append([{"n": number}])
                written.append({"n": number})
        assert list(Journal(store, "s").read_new()) == written


def test_equal_events_of_two_writers_are_two_segments(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Journal(store, "s", holder="same").append([{"n": 1}])
    with pytest.raises(JournalFencedError):
        Journal(store, "s", holder="same").append([{"n": 1}])


def test_append_whose_answer_is_lost_is_found_by_the_next_reader(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), [Fault(moment=Moment.ERROR_AFTER)])
    assert not journal_exists(store, "s")
    with pytest.raises(StorageError):
        Journal(store, "s", holder="w").append([{"n": 1}])
    assert list(Journal(store, "s").read_new()) == [{"n": 1}]
    assert journal_exists(store, "s")


def test_event_text_with_line_separators_stays_one_line(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    event = {"message": "a\nb\u2028c\x0bd\x85e"}
    Journal(store, "s", holder="w").append([event])
    assert list(Journal(store, "s").read_new()) == [event]


class _FailsOnce(LocalStore):
    """Cannot read the second segment at the first try."""

    has_failed = False

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        if name.endswith("00000001.jsonl") and not self.has_failed:
            self.has_failed = True
            raise StorageError("no answer")
        return super().get(name, max_bytes=max_bytes)


def test_reader_whose_read_fails_between_segments_loses_no_event(tmp_path: Path) -> None:
    store = _FailsOnce(tmp_path)
    writer, reader = Journal(store, "s", holder="w"), Journal(store, "s")
    for number in range(3):
        writer.append([{"number": number}])
    with pytest.raises(StorageError, match="no answer"):
        reader.read_new()
    assert [event["number"] for event in reader.read_new()] == [0, 1, 2]


def test_journal_with_a_lost_segment_is_damaged_until_it_is_restored(tmp_path: Path) -> None:
    """Without the check it seems to end before the loss, and a writer would put its next segment there."""
    store = LocalStore(tmp_path)
    writer, reader = Journal(store, "s", holder="w"), Journal(store, "s", holder="next")
    for number in range(3):
        writer.append([{"number": number}])
    lost = store.get(journal_segment("s", 1))
    store.delete(journal_segment("s", 1))
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"segment 1 of .*it is missing, and later ones exist"):
            reader.read_whole()
    store.put(journal_segment("s", 1), lost)
    assert [event["number"] for event in reader.read_whole()] == [0, 1, 2]


def test_journal_that_ends_before_the_place_to_read_on_is_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer, reader = Journal(store, "s", holder="w"), Journal(store, "s", next_sequence=2)
    for number in range(2):
        writer.append([{"number": number}])
    assert reader.read_whole() == []
    store.delete(journal_segment("s", 1))
    with pytest.raises(JournalDamagedError, match=r"segment 1 of .*it is missing, and it was there before"):
        reader.read_whole()


class _ListsThePast(LocalStore):
    """As a client of NFS may: what it listed a while ago."""

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        return []


def test_journal_that_an_old_listing_lacks_is_not_damaged(tmp_path: Path) -> None:
    writer = Journal(LocalStore(tmp_path), "s", holder="w")
    for number in range(2):
        writer.append([{"number": number}])
    assert Journal(_ListsThePast(tmp_path), "s", next_sequence=2).read_whole() == []


class _Appends(LocalStore):
    """Another writer appends while a listing is on its way."""

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        number = len(super().list_children(prefix))
        found = super().list_children(prefix, start_after=start_after)
        Journal(LocalStore(self.root), "s", holder="w", next_sequence=number).append([{"number": number}])
        return found


def test_segment_that_is_appended_meanwhile_is_no_loss(tmp_path: Path) -> None:
    reader = Journal(_Appends(tmp_path), "s")
    assert [event["number"] for _ in range(3) for event in reader.read_whole()] == [0, 1]
