"""What counts as waiting for workers that do not come, and which reservations dead gangs have left."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st
from ray import ActorID, JobID
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData  # type: ignore[attr-defined]

from orchestrator.backends.ray import placement_groups
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.gang.mailbox import GangShape
from orchestrator.backends.ray.placement_groups import (
    POLL_EVERY_S,
    OrphanedPlacementGroups,
    StallTimer,
    orphaned_groups,
    watch_placement,
)
from orchestrator.backends.ray.runner.runner import new_runner_name
from orchestrator.backends.ray.search.mailbox import TrialMailbox
from orchestrator.core.contract import Progress, Resources

HELD, ASKED = {"a": True}, {"a": False}


def waited_s(looks, *, counts_without_room: bool = True, every_s: float = POLL_EVERY_S) -> float:
    timer = StallTimer(counts_without_room=counts_without_room)
    return [timer.update(rooms, number * every_s) for number, rooms in enumerate(looks)][-1]


def test_time_counts_from_the_look_at_which_room_was_made():
    assert waited_s([ASKED, ASKED, HELD]) == 0
    assert waited_s([ASKED, ASKED, HELD, HELD, HELD]) == 2 * POLL_EVERY_S


def test_wait_for_room_never_counts():
    assert waited_s([ASKED] * 1000) == 0
    assert waited_s([HELD] * 10 + [{"a": True, "b": False}]) == 0


def test_new_reservation_begins_anew():
    assert waited_s([HELD] * 10 + [{"b": True}]) == 0


def test_time_before_any_reservation_counts_for_a_gang_and_not_for_a_search():
    assert waited_s([{}] * 5) == 4 * POLL_EVERY_S
    assert waited_s([{}] * 5, counts_without_room=False) == 0


@given(st.lists(st.sampled_from([HELD, ASKED, {}, None]), min_size=1, max_size=30), st.booleans())
def test_time_in_which_nobody_can_tell_never_counts(looks, counts_without_room):
    told = [rooms for rooms in looks if rooms is not None]
    timer = StallTimer(counts_without_room=counts_without_room)
    result = 0.0
    for number, rooms in enumerate(looks):
        before, result = result, timer.update(rooms, number * POLL_EVERY_S)
        assert rooms is not None or result == before
    assert result <= len(told) * POLL_EVERY_S


def test_gap_of_a_process_that_slept_counts_as_two_looks_at_most():
    assert waited_s([HELD, HELD], every_s=3600.0) == 2 * POLL_EVERY_S


def test_watch_ends_with_what_is_reserved_or_with_nothing_when_it_is_over(monkeypatch):
    clock = itertools.count(step=POLL_EVERY_S)
    monkeypatch.setattr("orchestrator.backends.ray.placement_groups.time.monotonic", lambda: next(clock))
    assert watch_placement(lambda: HELD, StallTimer(counts_without_room=True), 60.0, lambda _: False) == HELD
    assert watch_placement(dict, StallTimer(counts_without_room=True), 60.0, lambda _: False) == {}
    looks = itertools.count()
    assert watch_placement(lambda: HELD, StallTimer(counts_without_room=True), 60.0, lambda _: next(looks) == 3) is None


LIMIT_S = 60.0


def silent_trial(looks, *, heard: dict[int, int] | None = None, trials: int = 1) -> int | None:
    """What a mailbox says at the last of these looks; ``heard``: trials by the look before which they spoke."""
    mailbox = TrialMailbox(GangShape(num_workers=2))
    for trial in range(trials):
        mailbox.expect(trial)
    found = None
    for number, rooms in enumerate(looks):
        if number in (heard or {}):
            mailbox.on_report((heard or {})[number], {"progress": Progress(phase="train").to_json()})
        found = mailbox.silent_trial(rooms, number * POLL_EVERY_S, LIMIT_S)
    return found


NUM_LOOKS = int(LIMIT_S / POLL_EVERY_S) + 1


def test_trial_that_never_comes_although_its_room_is_reserved_is_lost():
    assert silent_trial([HELD] * NUM_LOOKS) == 0
    assert silent_trial([HELD] * (NUM_LOOKS - 1)) is None


def test_trial_that_waits_for_room_is_not_lost():
    assert silent_trial([ASKED] * 1000) is None
    assert silent_trial([{}] * 1000) is None
    assert silent_trial([{"a": True, "b": False}] * 1000) is None


def test_trial_that_is_heard_of_no_more_is_lost_though_another_waits_for_room():
    rooms = [{"a": True, "b": False}] * (2 * NUM_LOOKS - 2)
    assert silent_trial(rooms, heard={NUM_LOOKS: 1}, trials=2) is None
    assert silent_trial(rooms, heard={NUM_LOOKS - 1: 1}, trials=2) == 1


def test_trial_that_speaks_or_has_ended_is_not_lost():
    assert silent_trial([HELD] * 40, heard=dict.fromkeys(range(0, 40, 5), 0)) is None
    mailbox = TrialMailbox(GangShape(num_workers=1))
    mailbox.expect(0)
    mailbox.forget(0)
    assert [mailbox.silent_trial(HELD, at_s, LIMIT_S) for at_s in (0.0, 10.0, 100.0)] == [None] * 3


def test_work_of_trials_without_steps_shows_in_the_progress_of_the_search():
    mailbox = TrialMailbox(GangShape(num_workers=2))
    for trial, done in ((0, 5), (1, 3), (1, 4)):
        progress = Progress(phase="evaluate", step=7).to_json()
        mailbox.on_report(trial, {"progress": progress, "activity": {"done": done}})
    assert (mailbox.progress.step, mailbox.progress.done) == (14, 9)


def report(mailbox: TrialMailbox, trial: int, images: float, images_per_s: float = 0.0) -> Progress:
    progress = Progress(phase="train", counters={"images": images}, images_per_s=images_per_s)
    mailbox.on_report(trial, {"progress": progress.to_json()})
    return mailbox.progress


def test_sums_of_a_search_never_fall_so_that_each_image_counts_once():
    """The controller takes a smaller sum for one that was restarted, and counts the whole sum anew."""
    mailbox = TrialMailbox(GangShape(num_workers=2))
    mailbox.expect(0)
    mailbox.expect(1)
    report(mailbox, 0, 1000.0)
    assert report(mailbox, 1, 400.0).counters == {"images": 1400.0}
    mailbox.forget(1)
    assert report(mailbox, 1, 450.0).counters == {"images": 1450.0}, "its process has reported until it was gone"
    mailbox.expect(1)
    assert report(mailbox, 1, 500.0).counters == {"images": 1950.0}, "another attempt counts from zero"
    assert report(mailbox, 0, 100.0).counters == {"images": 2050.0}, "a loader that was opened again does, too"
    mailbox.on_report(0, {"progress": Progress(phase="write").to_json()})
    assert mailbox.progress.counters == {"images": 2050.0}


def test_search_warns_of_an_outage_while_a_trial_that_runs_meets_it_and_no_longer():
    mailbox = TrialMailbox(GangShape(num_workers=2))

    def told(trial: int, **states: float) -> dict[str, float]:
        mailbox.on_report(trial, {"progress": Progress(phase="train", counters={"images": 1.0, **states}).to_json()})
        return {name: value for name, value in mailbox.progress.counters.items() if name != "images"}

    for trial in range(2):
        mailbox.expect(trial)
    assert told(0, unsaved_s=120.0, uncompiled=1.0) == {"unsaved_s": 120.0, "uncompiled": 1.0}
    assert told(1, unsaved_s=90.0, uncompiled=1.0) == {"unsaved_s": 120.0, "uncompiled": 1.0}, "they are not added up"
    assert told(0, uncompiled=1.0) == {"unsaved_s": 90.0, "uncompiled": 1.0}
    mailbox.forget(1)
    assert told(0) == {}
    mailbox.expect(1)
    assert told(0) == {}, "the trial's next attempt has not met it"


def test_rate_of_a_search_is_that_of_the_trials_that_run():
    mailbox = TrialMailbox(GangShape(num_workers=2))
    for trial in range(2):
        mailbox.expect(trial)
        report(mailbox, trial, 1.0, images_per_s=100.0)
    assert mailbox.progress.images_per_s == 200.0
    mailbox.forget(0)
    assert mailbox.progress.images_per_s == 100.0
    mailbox.expect(0)  # once more, by another process, which has not reported yet
    assert report(mailbox, 1, 2.0, images_per_s=100.0).images_per_s == 100.0


def test_time_in_which_ray_tells_nothing_loses_no_trial():
    assert silent_trial([None] * 1000) is None


# ----------------------------------------------------------------------------------------------- what dead gangs leave
class Tables:
    """Ray's tables of actors and placement groups: one of each per maker."""

    def __init__(self) -> None:
        self.actors: list[ActorTableData] = []
        self.groups: list[PlacementGroupTableData] = []

    def add(self, number: int, *, owner: int = 0, job: int = 1, **row: Any) -> str:
        """An actor that has made a group and died; returns the group's id."""
        job_id = JobID.from_int(job).binary()
        actor_id = bytes([number]) * 12 + job_id
        actor = ActorTableData(actor_id=actor_id, job_id=job_id, state=ActorTableData.DEAD, **row)
        actor.address.worker_id, actor.owner_address.worker_id = bytes([number]) * 28, bytes([owner]) * 28
        group_id = bytes([number]) * 18
        self.actors.append(actor)
        self.groups.append(PlacementGroupTableData(placement_group_id=group_id, creator_actor_id=actor_id))
        return group_id.hex()

    def get_placement_group_table(self) -> list[bytes]:
        return [group.SerializeToString() for group in self.groups]

    def get_actor_info(self, actor_id: ActorID) -> bytes | None:
        rows = {actor.actor_id: actor.SerializeToString() for actor in self.actors}
        return rows.get(actor_id.binary())

    def get_actor_table(self, job_id: JobID, state: None) -> list[bytes]:
        return [actor.SerializeToString() for actor in self.actors if actor.job_id == job_id.binary()]


def test_reservations_of_other_peoples_actors_are_no_orphans_of_ours(monkeypatch):
    tables = Tables()
    monkeypatch.setattr(cluster_state, "_connect_and_get_accessor", lambda: tables)
    name = new_runner_name(Resources(cpus=2.0))
    ours = {
        tables.add(1, class_name="Runner", name=name, ray_namespace="ours"),
        tables.add(2, class_name="TrainController", owner=1, ray_namespace="whatever"),
    }
    tables.add(3, class_name="Runner", name="runner", ray_namespace="ours")
    tables.add(4, class_name="Runner", name=name, ray_namespace="theirs")
    tables.add(5, class_name="TrainController", owner=4)
    tables.add(6, class_name="TrainController", owner=99)
    tables.add(7, class_name="TrainController", owner=1, job=2)
    tables.add(8, class_name="Trainer", owner=1)
    backend = RayBackend("ours")
    assert set(orphaned_groups(backend._is_runner)) == ours
    tables.actors[0].state = ActorTableData.ALIVE
    assert set(orphaned_groups(backend._is_runner)) == ours - {tables.groups[0].placement_group_id.hex()}


def test_orphans_are_looked_for_every_minute_and_sooner_after_a_failed_answer(monkeypatch):
    tables, now = Tables(), [0.0]
    removed: list[str] = []
    monkeypatch.setattr(cluster_state, "_connect_and_get_accessor", lambda: tables)
    monkeypatch.setattr(placement_groups, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(placement_groups, "remove_reservation", removed.append)
    orphans = OrphanedPlacementGroups(lambda _name, _namespace: True)
    orphans.scan_after_death()

    def pass_time(seconds: float) -> None:
        for _ in range(int(seconds)):
            now[0] += 1.0
            orphans.scan()

    pass_time(100.5)  # all scans after the death are over, and one of the others
    late = tables.add(1, class_name="Runner")
    pass_time(placement_groups.EVERY_S)
    assert removed == [late]
    with monkeypatch.context() as patch:
        patch.setattr(tables, "get_placement_group_table", Mock(side_effect=RuntimeError("the head restarts")))
        pass_time(placement_groups.EVERY_S)
    pass_time(placement_groups.AGAIN_AFTER_S)
    assert removed == [late, late]
