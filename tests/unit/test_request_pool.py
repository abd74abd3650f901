"""Requests side by side: none is left behind, each has its own error, and a store on this machine is asked in order."""

from __future__ import annotations

import threading

import pytest

from orchestrator.core.errors import StorageTimeoutError
from orchestrator.storage import request_pool
from orchestrator.storage.request_pool import NUM_THREADS, RequestPool

DEADLINE_S = 30.0


@pytest.mark.parametrize(
    ("uri", "num_threads"), [("s3://bucket/prefix", NUM_THREADS), ("file:///data/store", 1), ("memory://1", 1)]
)
def test_only_distant_stores_are_asked_side_by_side(uri: str, num_threads: int) -> None:
    assert RequestPool.of(uri).num_threads == num_threads


def test_batch_that_is_left_by_an_error_ends_what_runs_and_begins_nothing_more() -> None:
    has_begun, may_end, done = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        has_begun.set()
        may_end.wait(DEADLINE_S)
        done.append(number)

    def leave() -> None:
        with RequestPool(2).batch() as batch:
            for number in range(5):
                batch.start(work, number)
            assert has_begun.wait(DEADLINE_S)
            threading.Timer(0.05, may_end.set).start()
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert set(done) <= {0, 1}
    assert done, "what ran was waited for"


def test_caller_shows_signs_of_life_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_pool, "_ALIVE_EVERY_S", 0.001)
    may_end, signs = threading.Event(), list[None]()

    def sign() -> None:
        signs.append(None)
        if len(signs) == 5:
            may_end.set()

    assert RequestPool(2).ask(sign, may_end.wait, DEADLINE_S)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_error_is_that_of_its_request_alone(num_threads: int) -> None:
    def work(number: int) -> int:
        if number == 1:
            raise StorageTimeoutError("no answer")
        return number

    with RequestPool(num_threads).batch() as batch:
        answers = [batch.start(work, number) for number in range(3)]
        assert answers[2]() == 2
        with pytest.raises(StorageTimeoutError):
            answers[1]()
        assert answers[0]() == 0


def test_store_on_this_machine_is_asked_in_the_callers_thread_when_the_answer_is_taken() -> None:
    asked: list[tuple[int, int]] = []

    def ask(number: int) -> None:
        asked.append((number, threading.get_ident()))

    with RequestPool(1).batch() as batch:
        first, second, _ = (batch.start(ask, number) for number in range(3))
        second()
        first()
    assert asked == [(1, threading.get_ident()), (0, threading.get_ident())]
