"""Processes race for the same names; every round has exactly one winner."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage import ObjectStat, ObjectStore
from orchestrator.storage.local import LocalStore
from tests.s3_server import s3_store

MAKE: dict[str, Callable[[Path], ObjectStore]] = {"local": LocalStore, "s3": s3_store}
Try = Callable[[ObjectStore, int, bytes], ObjectStat]


def put_if_absent(store: ObjectStore, turn: int, content: bytes) -> ObjectStat:
    return store.put_if_absent(f"commits/{turn:04d}", content)


def put_if_match(store: ObjectStore, turn: int, content: bytes) -> ObjectStat:
    found, stat = store.get_with_stat("lease")
    if found.split()[0] != b"%d" % (turn - 1):  # another has won this round already
        raise PreconditionFailedError("lease")
    return store.put_if_match("lease", content, stat.etag)


TRIES: dict[str, Try] = {"put_if_absent": put_if_absent, "put_if_match": put_if_match}


@dataclass(frozen=True, kw_only=True)
class Race:
    kind: str
    operation: str
    root: Path
    num_writers: int
    num_rounds: int


def compete(race: Race, number: int, barrier, results) -> None:
    store, won = MAKE[race.kind](race.root), []
    for turn in range(race.num_rounds):
        barrier.wait(timeout=100)
        try:
            TRIES[race.operation](store, turn, b"%d %d" % (turn, number))
        except PreconditionFailedError:
            continue
        won.append(turn)
    results.put((number, won))


def check_one_winner_per_round(race: Race) -> None:
    store = MAKE[race.kind](race.root)
    store.put("lease", b"-1 start")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(race.num_writers), context.Queue()
    writers = [
        context.Process(target=compete, args=(race, number, barrier, results)) for number in range(race.num_writers)
    ]
    for writer in writers:
        writer.start()
    won = dict(results.get(timeout=300) for _ in writers)
    for writer in writers:
        writer.join()
    assert sorted(turn for turns in won.values() for turn in turns) == list(range(race.num_rounds))
    if race.operation == "put_if_absent":
        for number, turns in won.items():
            for turn in turns:
                assert store.get(f"commits/{turn:04d}") == b"%d %d" % (turn, number)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return str(request.param)


@pytest.mark.parametrize("kind", ["s3"], indirect=True)
def test_processes_that_race_a_few_rounds_have_one_winner_each(kind: str, tmp_path: Path) -> None:
    check_one_winner_per_round(Race(kind=kind, operation="put_if_match", root=tmp_path, num_writers=2, num_rounds=5))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", TRIES)
@pytest.mark.parametrize(("kind", "num_writers", "num_rounds"), [("local", 16, 200), ("s3", 4, 50)], indirect=["kind"])
def test_processes_that_race_many_rounds_have_one_winner_each(
    kind: str, num_writers: int, num_rounds: int, operation: str, tmp_path: Path
) -> None:
    race = Race(kind=kind, operation=operation, root=tmp_path, num_writers=num_writers, num_rounds=num_rounds)
    check_one_winner_per_round(race)
