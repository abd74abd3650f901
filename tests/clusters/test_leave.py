"""A node that leaves its Ray cluster, with a stand-in for Ray's control store."""

from __future__ import annotations

import socket

import pytest

from orchestrator.backends.ray.draining import DrainError, RayNode, UnreachableError
from orchestrator.cluster import leave as leaving
from orchestrator.cluster.leave import Leave, Waiting, leave

HERE = socket.gethostname()
HEAD = RayNode(node_id="aa11", address="10.0.0.1", host="head", is_head=True)
MINE = RayNode(node_id="bb22", address="10.0.0.2", host=HERE)
OTHER = RayNode(node_id="cc33", address="10.0.0.3", host="other")


class Store:
    """Drained nodes are gone after some looks."""

    def __init__(self, *nodes: RayNode, looks: float = 2) -> None:
        self.all, self.looks = list(nodes), looks
        self.drained: list[tuple[str, str, float]] = []

    def nodes(self) -> list[RayNode]:
        if self.drained:
            self.looks -= 1
        gone = {node_id for node_id, *_ in self.drained} if self.looks <= 0 else set()
        return [node for node in self.all if node.node_id not in gone]

    def drain(self, node_id, reason, seconds_left):
        self.drained.append((node_id, reason, seconds_left))


@pytest.fixture
def use(monkeypatch):
    def put(store, trouble=lambda: None):
        """``trouble``: the error of a connection to the head's address."""

        def connect(address, timeout_s):
            if error := trouble():
                raise error

        monkeypatch.setattr(leaving, "ControlStore", lambda _address: store)
        monkeypatch.setattr(leaving, "check_answers", connect)
        return store

    return put


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(time=None, **wish):
    time = time or Time()
    asked = Leave(**{"reason": "spot", "seconds_left": 30.0, "address": "head:6379", **wish})
    return leave(asked, clock=time, sleep=time.sleep), time.now


def test_node_of_this_machine_is_drained_and_waited_for(use):
    store = use(Store(HEAD, MINE, OTHER))
    is_free, waited_s = run()
    assert store.drained == [("bb22", "spot", 30.0)]
    assert is_free
    assert waited_s < 5.0


def test_node_that_stays_busy_is_waited_for_no_longer_than_it_has(use):
    use(Store(HEAD, MINE, looks=float("inf")))
    assert run(seconds_left=10.0) == (False, 10.0)


def test_leave_without_waiting_comes_back_at_once(use):
    use(Store(HEAD, MINE, looks=float("inf")))
    assert run(waiting=Waiting.NOT) == (True, 0.0)


def test_notice_that_is_overdue_still_drains(use):
    store = use(Store(HEAD, MINE, looks=0))
    run(seconds_left=0.0)
    assert store.drained == [("bb22", "spot", 1.0)]


def test_node_is_chosen_by_the_beginning_of_its_id(use):
    store = use(Store(HEAD, MINE, OTHER))
    run(node="cc")
    assert [node_id for node_id, *_ in store.drained] == ["cc33"]


@pytest.mark.parametrize("node", ["dd", ""])
def test_node_that_is_not_one_is_refused_with_those_that_there_are(use, node):
    store = use(Store(HEAD, OTHER))
    with pytest.raises(DrainError, match=r"0 nodes are .*There are: aa11 on head, cc33 on other"):
        run(node=node)
    assert store.drained == []


def test_head_is_never_drained(use):
    store = use(Store(HEAD, MINE))
    with pytest.raises(DrainError, match="this is the head"):
        run(node="aa")
    assert store.drained == []


def test_head_that_does_not_answer_while_waiting_is_asked_again(use):
    class Busy(Store):
        def nodes(self):
            found = super().nodes()
            if self.drained and self.looks == 2:
                raise UnreachableError("busy")
            return found

    use(Busy(HEAD, MINE, looks=3))
    assert run()[0]


@pytest.mark.parametrize("busy", ["nodes", "drain"])
def test_notice_is_given_again_to_a_head_that_does_not_answer(use, busy):
    class Busy(Store):
        num_calls = 0

        def miss(self, call):
            self.num_calls += call == busy
            if call == busy and self.num_calls <= 2:
                raise UnreachableError("timed out")

        def nodes(self):
            self.miss("nodes")
            return super().nodes()

        def drain(self, node_id, reason, seconds_left):
            self.miss("drain")
            super().drain(node_id, reason, seconds_left)

    store = use(Busy(HEAD, MINE))
    assert run()[0]
    assert store.drained == [("bb22", "spot", 29.0)]  # two waits of half a second


REFUSED = ConnectionRefusedError("refused")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "not known")


class Absent(Store):
    def nodes(self):
        raise UnreachableError("timed out")


@pytest.mark.parametrize("error", [None, TimeoutError("late"), socket.gaierror(socket.EAI_AGAIN, "no name server")])
def test_head_that_never_answers_ends_the_notice_with_the_node(use, error):
    use(Absent(HEAD, MINE), lambda: error)
    time = Time()
    with pytest.raises(UnreachableError, match="timed out"):
        run(time, seconds_left=120.0)
    assert time.now == 120.0


@pytest.mark.parametrize("error", [REFUSED, UNKNOWN])
def test_head_that_is_gone_for_good_is_waited_for_a_short_time(use, error):
    use(Absent(HEAD, MINE), lambda: error)
    time = Time()
    with pytest.raises(UnreachableError, match="nothing listens at head:6379, the head's address"):
        run(time, seconds_left=120.0)
    assert time.now == 20.0
    troubles = iter([None])  # it ends after it has drained the node
    use(Store(HEAD, MINE, looks=float("inf")), lambda: next(troubles, error))
    assert run(seconds_left=120.0) == (False, 20.0)


def test_head_that_comes_back_is_told_once_it_lists_the_node(use):
    class Restarted(Store):
        num_listed = 0

        def nodes(self):
            self.num_listed += 1
            return super().nodes() if self.num_listed > 4 else [HEAD]

    troubles = iter([REFUSED] * 39)  # twice a second, for almost as long as a head is waited for
    store = use(Restarted(HEAD, MINE), lambda: next(troubles, None))
    assert run(seconds_left=120.0)[0]
    assert store.drained == [("bb22", "spot", 120.0 - (39 + 4) * 0.5)]
    again, time = iter([REFUSED]), Time()
    use(Store(HEAD), lambda: next(again, None))  # another cluster at the same address never does
    with pytest.raises(DrainError, match="0 nodes are on this machine"):
        run(time, seconds_left=120.0)
    assert time.now == 120.0


def test_node_of_a_machine_with_several_is_told_by_its_label(use):
    twin = RayNode(node_id="bb33", address="10.0.0.2", host=HERE, labels={"orchestrator/node": "7-1"})
    store = use(Store(HEAD, MINE, twin))
    assert run(label="orchestrator/node=7-1")[0]
    assert [node_id for node_id, *_ in store.drained] == ["bb33"]
    use(Store(HEAD, MINE, twin))
    with pytest.raises(DrainError, match="2 nodes are on this machine"):
        run()
