"""Logs in the store: segments while a process runs, one object afterwards."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.ray.attempt_log import AttemptLog, PrintedRecords
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import (
    LEVELS,
    LineReader,
    LogContext,
    LogQuery,
    LogRecord,
    append_log,
    encode,
    find_logs,
    finish_log,
    format_time,
    plain_text,
    put_segment,
    read_log,
    search_logs,
)
from orchestrator.testing.memory_store import MemoryStore

NAME = "logs/sweep/pretrain/a/000001/rank0.log"
CONTEXT = LogContext(sweep="sweep", job="pretrain/a", attempt=1)
FOLDER = NAME.removesuffix(".log") + "/"


@given(parts=st.lists(st.binary(min_size=1, max_size=5), max_size=6), start=st.integers(0, 30))
def test_log_of_any_segments_is_read_from_any_byte(parts: list[bytes], start: int) -> None:
    store, whole = MemoryStore(), b""
    for part in parts:
        put_segment(store, NAME, len(whole), part)
        whole += part
    assert read_log(store, NAME, start) == whole[start:]
    finish_log(store, NAME, whole)
    assert read_log(store, NAME, start) == whole[start:]
    assert store.list_children(FOLDER) == []


def test_log_with_a_gap_is_read_up_to_it() -> None:
    store = MemoryStore()
    put_segment(store, NAME, 0, b"first")
    put_segment(store, NAME, 9, b"third")
    assert read_log(store, NAME) == b"first"


def test_log_that_two_write_is_read_once() -> None:
    store = MemoryStore()
    put_segment(store, NAME, 0, b"first")
    assert append_log(store, NAME, b"first, then stacks") == len(b", then stacks")
    put_segment(store, NAME, 5, b", then")
    assert read_log(store, NAME) == b"first, then stacks"
    assert append_log(store, NAME, b"first") == 0


def test_attempt_log_stores_only_what_is_new_and_the_whole_at_its_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0) as log:
        sys.stdout.write("one\n")
        log._upload_news()
        sys.stderr.write("two\n")
        log._upload_news()
        log._upload_news()
        assert len(store.list_children(FOLDER)) == 2
        assert messages(read_log(store, NAME)) == ["one", "two"]
        sys.stdout.write("three\n")
    assert store.list_children(FOLDER) == []
    assert messages(store.get(NAME)) == ["one", "two", "three"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0, "others may not read it"


def test_attempt_log_that_is_long_is_not_sent_again_at_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("orchestrator.backends.ray.attempt_log._MERGED_BYTES", 100)
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0) as log:
        sys.stdout.write("one\n")
        log._upload_news()
        sys.stdout.write("two\n")
    assert not store.exists(NAME)
    assert messages(read_log(store, NAME)) == ["one", "two"]


def test_attempt_log_has_records_that_are_complete_in_themselves(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0):
        sys.stdout.write("to stdout\n")
        sys.stderr.write("a.py:3: UserWarning: careful\n")
        logging.getLogger("some.module").error("logged %d", 3)
    records = [json.loads(line) for line in store.get(NAME).splitlines()]
    assert [(one["level"], one["source"], one["message"]) for one in records] == [
        ("info", "stdout", "to stdout"),
        ("warning", "stderr", "a.py:3: UserWarning: careful"),
        ("error", "some.module", "logged 3"),
    ]
    told = {(one["sweep"], one["job"], one["attempt"], one["rank"]) for one in records}
    assert told == {("sweep", "pretrain/a", 1, 0)}
    assert all(len(one["time"]) == len("2026-11-21T10:24:10.123456Z") for one in records)


def test_traceback_is_one_record_of_level_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0):
        try:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise ValueError("outer\nof two lines") from error
        except ValueError:
            traceback.print_exc(file=sys.stderr)
        sys.stderr.write("afterwards\n")
    records = list(LineReader(CONTEXT).take(store.get(NAME), is_whole=True))
    whole = "\n".join(record.message for record in records if record.level == "error")
    assert "KeyError: 'inner'" in whole
    assert "ValueError: outer\nof two lines" in whole
    assert len([record for record in records if record.level == "error"]) <= 3, "not one for each line"
    assert (records[-1].level, records[-1].message) == ("info", "afterwards")


def test_secrets_of_the_process_are_hidden_in_the_log_and_in_the_worker_s_own_file(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    hidden = "c4n4ry-value-of-a-secret"
    monkeypatch.setenv("SOME_API_TOKEN", hidden)
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0):
        sys.stdout.write(f"token is {hidden}\n")
        logging.getLogger("x").warning("and %s", hidden)
        sys.stderr.write(hidden[:7])
        sys.stderr.write(hidden[7:] + "\n")
    assert hidden.encode() not in store.get(NAME)
    captured = capsys.readouterr()
    assert hidden not in captured.out + captured.err


def test_progress_bar_that_draws_itself_for_long_is_one_record() -> None:
    told: list[str] = []
    printed = PrintedRecords(lambda _at, _level, _source, message: told.append(message), "stderr")
    for percent in range(1000):
        printed.write(f"\r{percent / 10:5.1f} %|####")
    assert len(printed._line) < 100
    printed.write("\n")
    printed.write("no end")
    printed.close()
    assert told == [" 99.9 %|####", "no end"]


# --------------------------------------------------------------------------------------------------------- reading
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(texts=st.lists(TEXTS, max_size=8), cuts=st.lists(st.integers(0, 2000), max_size=5))
def test_records_come_back_from_any_pieces(texts: list[str], cuts: list[int]) -> None:
    written = [record(text, at_s=float(number)) for number, text in enumerate(texts)]
    content = "".join(map(encode, written)).encode()
    places = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    reader = LineReader(CONTEXT)
    pieces = [content[start:end] for start, end in pairwise(places)]
    read = [one for piece in pieces for one in reader.take(piece)]
    assert [*read, *reader.take(b"", is_whole=True)] == written


def test_plain_log_of_an_earlier_version_is_read_with_times_and_levels() -> None:
    text = (
        "epoch 1\n2026-11-21 10:00:00,250 WARNING some.module: careful: a colon\n"
        "Traceback (most recent call last):\n  File 'x'\nValueError: y\nafter\n"
    )
    records = list(LineReader(CONTEXT).take(text.encode(), is_whole=True))
    assert [one.level for one in records] == ["info", "warning", "error", "error", "error", "info"]
    assert records[1].source == "some.module"
    assert records[1].message == "careful: a colon"
    assert plain_text(replace(records[1], time="2026-11-21T10:00:59.250000Z")) == (
        "2026-11-21 10:00:59,250 WARNING some.module: careful: a colon"
    )
    assert records[5].time == records[1].time.replace("Z", "Z"), "a line without a time has that of the one before"
    assert records[1].time.endswith(":00.250000Z")


@pytest.mark.parametrize(
    "content", [b'{"time":"x', b'{"time":"2026","level":3}', b'{"time":', b"\xff\xfe", b'{"time":"[[[']
)
def test_line_that_is_no_record_is_text(content: bytes) -> None:
    [one] = LineReader(CONTEXT).take(content + b"\n", is_whole=True)
    assert one.source == "text"
    assert one.message == content.decode(errors="replace")


@given(
    texts=st.lists(st.text('ab: "\\é\n', max_size=6), max_size=6),
    pattern=st.sampled_from(["", "a", "b:", "a b", "[ab]+", "^b", "é", '"', "a.b"]),
    level=st.sampled_from(list(LEVELS)),
    since=st.integers(0, 6),
)
def test_search_finds_what_looking_at_every_record_finds(texts, pattern, level, since) -> None:
    levels = list(LEVELS)
    written = [
        record(text, at_s=float(number), level=levels[number % len(levels)]) for number, text in enumerate(texts)
    ]
    query = LogQuery(pattern=re.compile(pattern), level=level, since=format_time(float(since)))
    content = "".join(map(encode, written)).encode()
    found = list(LineReader(CONTEXT).take(content, query, is_whole=True))
    assert found == [one for one in written if query.admits(one)]


def test_text_after_records_that_are_not_wanted_has_their_time() -> None:
    lines = [encode(record(str(at), at_s=float(at))) + f"stack {at}\n" for at in (1, 2, 3)]
    query = LogQuery(since=format_time(2.0))
    found = list(LineReader(CONTEXT).take("".join(lines).encode(), query, is_whole=True))
    assert [one.message for one in found] == ["2", "stack 2", "3", "stack 3"]


def test_literal_is_only_what_stands_for_itself_in_json() -> None:
    texts = {"ValueError: no": b"ValueError: no", 'a"b': b"", "a\\d": b"", "a.b": b"", "é": b"", "(?i)x": b""}
    assert {text: LogQuery(pattern=re.compile(text)).literal for text in texts} == texts
    assert LogQuery(pattern=re.compile("x", re.IGNORECASE)).literal == b""


def test_logs_of_a_sweep_are_found_with_jobs_within_jobs() -> None:
    store = MemoryStore()
    for job in ("probe/a/seed0", "probe/a/seed0/epoch5/seed1"):
        finish_log(store, log_name("s", job, 1, key="probe-a-0123456789abcdef"), b"x")
    put_segment(store, log_name("s", "probe/a/seed0", 2, 3, key="probe-a-0123456789abcdef"), 0, b"12345")
    store.put("logs/s/probe/a/seed0/000003/notes.txt", b"of somebody")
    found = [(log.context.job, log.context.attempt, log.context.rank, log.size_bytes) for log in find_logs(store, "s")]
    assert found == [("probe/a/seed0", 1, 0, 1), ("probe/a/seed0", 2, 3, 5), ("probe/a/seed0/epoch5/seed1", 1, 0, 1)]
    assert {log.context.job for log in find_logs(store, "s", "probe/a/seed0")} == {"probe/a/seed0"}


def test_log_that_was_last_written_before_is_not_read() -> None:
    store = MemoryStore()
    finish_log(store, NAME, encode(record("x", at_s=5.0)).encode())
    [log] = find_logs(store, "sweep")
    old = replace(log, modified_at_s=1000.0)
    assert list(search_logs(MemoryStore(), [old], LogQuery(since=format_time(10_000.0)))) == []
    assert [one.message for one in search_logs(store, [old])] == ["x"]


def record(message: str, *, at_s: float, level: str = "info") -> LogRecord:
    return LogRecord(context=CONTEXT, time=format_time(at_s), level=level, source="stdout", message=message)


def messages(content: bytes) -> list[str]:
    return [one.message for one in LineReader(CONTEXT).take(content, is_whole=True)]
