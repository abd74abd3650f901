"""When a gang hangs, and who is waited for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.backends.ray.gang.hangs import RANK_SILENT_S, HangWatch, behind_on_device, describe_hang, judge_hang
from orchestrator.backends.ray.gang.mailbox import RankStatus
from orchestrator.core.activity import Activity, RankActivity

WORLD = 4
EVERY_S = 5.0


def rank(number: int, doing: str, *, entered: int = 7, stage: str = "train") -> RankStatus:
    return RankStatus(
        rank=number,
        node=f"node{number}",
        reported_at_s=0.0,
        doing=doing,
        stage=stage,
        num_entered=entered,
        operation="sum",
    )


def gang(*, odd: str, entered: int = 6, stage: str = "train") -> dict[int, RankStatus]:
    """Three ranks that wait for others, and rank 3."""
    ranks = {number: rank(number, "peers", stage=stage) for number in range(WORLD - 1)}
    return ranks | {3: rank(3, odd, entered=entered, stage=stage)}


def seconds_to_hang(ranks: dict[int, RankStatus], *, silent: tuple[int, ...] = (), limit_s: float = 2000.0) -> float:
    """When the watch says so; infinite if it does not before ``limit_s``."""
    watch, now_s = HangWatch(world_size=WORLD), 0.0
    while now_s < limit_s:
        heard = {n: one if n in silent else replace(one, reported_at_s=now_s) for n, one in ranks.items()}
        if watch.update(heard, now_s):
            return now_s
        now_s += EVERY_S
    return float("inf")


@pytest.mark.parametrize(("stage", "expected_s"), [("setup", 300.0), ("train", 100.0)])
def test_gang_with_a_rank_that_works_on_for_ever_hangs_at_the_limit_of_its_stage(stage: str, expected_s: float) -> None:
    assert seconds_to_hang(gang(odd="work", stage=stage)) == expected_s


@pytest.mark.parametrize("excuse", ["data", "store", "checkpoint", "compile"])
def test_rank_that_says_what_it_waits_for_is_waited_for(excuse: str) -> None:
    assert seconds_to_hang(gang(odd=excuse)) == float("inf")


def test_rank_that_counts_its_work_is_waited_for_until_it_stands_still() -> None:
    """As in an evaluation: no rank begins an operation before it is through."""
    watch, ended_s = HangWatch(world_size=WORLD), 1000.0
    hangs_s = [
        now_s
        for now_s in np.arange(0.0, 2 * ended_s, EVERY_S).tolist()
        if watch.update(
            {
                n: replace(one, reported_at_s=now_s, num_done=int(min(now_s, ended_s)) if n == 3 else 0)
                for n, one in gang(odd="work").items()
            },
            now_s,
        )
    ]
    assert hangs_s[0] == ended_s + 100.0


def test_excuse_of_a_rank_that_speaks_no_more_ends() -> None:
    assert seconds_to_hang(gang(odd="data"), silent=(3,)) == pytest.approx(100.0 + RANK_SILENT_S, abs=2 * EVERY_S)


def test_gang_whose_ranks_all_work_is_no_hang_of_this_kind() -> None:
    assert seconds_to_hang({n: rank(n, "work") for n in range(WORLD)}) == float("inf")


def test_gang_of_jobs_that_tell_no_stage_is_not_judged() -> None:
    assert seconds_to_hang(gang(odd="work", stage="")) == float("inf")


def test_gang_of_slow_steps_gets_five_of_its_longest() -> None:
    watch, now_s = HangWatch(world_size=WORLD), 0.0
    for step in range(3):
        for _ in range(12):  # a minute of work per step
            heard = {n: replace(rank(n, "peers", entered=step), reported_at_s=now_s) for n in range(WORLD)}
            assert not watch.update(heard, now_s)
            now_s += EVERY_S
    assert watch._longest_s == pytest.approx(60.0, abs=EVERY_S)
    stuck = {n: rank(n, "peers" if n else "work", entered=9) for n in range(WORLD)}
    waited = 0.0
    while not watch.update({n: replace(one, reported_at_s=now_s) for n, one in stuck.items()}, now_s):
        now_s, waited = now_s + EVERY_S, waited + EVERY_S
    assert waited == pytest.approx(300.0, abs=5 * EVERY_S)


def test_time_in_which_nobody_looked_counts_ten_seconds() -> None:
    watch = HangWatch(world_size=WORLD)
    for now_s in (0.0, 1000.0):
        assert not watch.update({n: replace(one, reported_at_s=now_s) for n, one in gang(odd="work").items()}, now_s)
    assert watch.waited_s == pytest.approx(10.0)


def described(ranks: dict[int, RankStatus], records: dict[int, dict[str, object]] | None = None) -> str:
    watch = HangWatch(world_size=WORLD, waited_s=100.0, limit_s=100.0)
    return describe_hang(judge_hang(watch, ranks, requested_at_s=50.0), records or {}, {"node3": "host-c/12345678"})


def answered(ranks: dict[int, RankStatus], *, silent: tuple[int, ...] = ()) -> dict[int, RankStatus]:
    return {n: one if n in silent else replace(one, reported_at_s=60.0) for n, one in ranks.items()}


def test_rank_that_says_nothing_any_more_is_named_with_its_node() -> None:
    message = described(answered(gang(odd="peers", entered=7), silent=(3,)))
    assert "3 rank(s) have waited 100 s (100 s are allowed) for others in collective operation 7 (sum)" in message
    assert "rank 3 on node host-c/12345678 does not report any more" in message


def test_rank_that_did_not_enter_is_named_with_what_it_does() -> None:
    message = described(answered(gang(odd="work")))
    assert "rank 3 on node host-c/12345678 did not enter it: it is at operation 6 (sum), doing: work" in message


def test_ranks_that_have_ended_wait_for_the_one_that_has_not() -> None:
    ranks = {n: rank(n, "ended") for n in range(WORLD - 1)} | {3: rank(3, "peers", entered=6)}
    assert seconds_to_hang(ranks, silent=(0, 1, 2, 3)) == 100.0
    message = described(answered(ranks, silent=(0, 1, 2, 3)))
    assert "rank 3 on node host-c/12345678 does not report any more" in message
    assert "rank 0" not in message


def test_rank_that_waits_in_an_earlier_operation_is_named() -> None:
    assert "rank 3 on node host-c/12345678 did not enter it" in described(answered(gang(odd="peers", entered=5)))


def record(begun: int) -> dict[str, object]:
    return {"pg_status": {"0": {"last_started_collective": str(begun), "last_enqueued_collective": "9"}}}


def test_gang_whose_hosts_all_wait_is_told_by_what_their_devices_have_begun() -> None:
    records = {0: record(9), 1: record(9), 2: record(8), 3: record(9)}
    assert behind_on_device(records) == (2,)
    message = described(answered(gang(odd="peers", entered=7)), records)
    assert "the device of rank 2 did not begin it" in message
    assert "flight records of ranks 0, 1, 2, 3 are beside their logs" in message


def test_gang_where_nobody_is_behind_points_at_the_network() -> None:
    records = {n: record(9) for n in range(WORLD)}
    assert behind_on_device(records) == ()
    assert "all of them have entered it, and no device is behind: look at the network" in described(
        answered(gang(odd="peers", entered=7)), records
    )


def test_device_that_has_begun_nothing_is_behind_others() -> None:
    assert behind_on_device({0: record(0), 1: record(-1)}) == (1,)


@pytest.mark.parametrize("records", [{n: record(-1) for n in range(WORLD)}, {}])
def test_gang_whose_records_tell_no_begin_is_not_said_to_have_begun(records: dict[int, dict[str, object]]) -> None:
    """NCCL tells it only with timing, gloo never."""
    assert behind_on_device(records) is None
    message = described(answered(gang(odd="peers", entered=7)), records)
    assert "which devices began it is not recorded (of NCCL it is with TORCH_NCCL_ENABLE_TIMING=1" in message
    assert "all of them have entered it: look at the network and the devices" in message


def test_activity_tells_what_is_done_now_and_goes_back_to_what_was_before() -> None:
    activity = RankActivity()
    with activity.during(Activity.STORE):
        with activity.during(Activity.PEERS):
            assert activity.to_json()["doing"] == "peers"
        assert activity.to_json()["doing"] == "store"
        assert [activity.to_json()["doing"] for _ in activity.each(range(2))] == ["store", "store"]
    assert activity.to_json()["doing"] == "work"
    assert activity.to_json()["done"] == 2, "of the items"


def test_gang_of_slow_steps_is_given_its_first_update_as_a_measure() -> None:
    """On a GPU the host waits for the others for nearly the whole step, and the first one is in the setup."""
    watch, now_s = HangWatch(world_size=WORLD), 0.0
    for entered, stage, step_s in ((7, "setup", 120.0), (8, "train", 120.0), (9, "train", 120.0)):
        ends_s = now_s + step_s
        while now_s < ends_s:
            ranks = {n: rank(n, "peers", entered=entered, stage=stage) for n in range(WORLD)}
            heard = {n: replace(one, reported_at_s=now_s) for n, one in ranks.items()}
            assert not watch.update(heard, now_s), f"operation {entered} of {stage}"
            now_s += EVERY_S


def test_rank_that_never_spoke_is_named() -> None:
    ranks = {n: rank(n, "peers") for n in range(WORLD - 1)}
    assert "rank 3 does not report any more" in described(answered(ranks))
