"""Who is told what: from the journal to a webhook, Slack and a mail server, over outages and restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.notifying import GeneralChannels
from orchestrator.core.errors import StorageTimeoutError
from orchestrator.notifications import notifier as notifier_module
from orchestrator.notifications.channels import DeliveryError
from orchestrator.notifications.messages import Notice, budget_notices, stall_notice
from orchestrator.notifications.notifier import DeliveryState, Notifier, read_entries
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.layout import progress_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.values import Channel, ClusterChannel, Email, Occasion, Policy
from orchestrator.sweeps import client
from orchestrator.sweeps.progress import WRITE_EVERY_S
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Fail, Hang, Succeed
from tests.builders import SweepJournal, launched
from tests.commands import run_command
from tests.scripted_sweep import CLUSTER, World, diamond, make_plan
from tests.sinks import mail_sink, webhook_sink


class Sent:
    """In place of a channel: what was sent, and how many tries fail first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.notices: list[Notice] = []
        self.down: list[Channel] = []

    def __call__(self, notice: Notice, channel: Channel) -> None:
        if channel in self.down:
            raise DeliveryError("down")
        if self.failures:
            raise self.failures.pop(0)
        self.notices.append(notice)

    @property
    def occasions(self) -> list[str]:
        return [notice.occasion.value for notice in self.notices]


class Told(World):
    """A sweep that somebody wants to hear of, with the notifier beside its controller."""

    def __init__(self, root: Path, *channels: Channel, backend: ScriptedBackend | None = None) -> None:
        super().__init__(root, backend)
        self.channels = channels
        self.sent = Sent()
        self.notifier = self.new_notifier()
        self.notifier.turn()

    def new_notifier(self, **options: Any) -> Notifier:
        return Notifier(
            self.store, CLUSTER, lambda: self.controller.snapshots, send=self.sent, now=self.clock, **options
        )

    def send(self, policy: Policy | None = None) -> None:
        self.clock.advance(0.001)
        plan = make_plan(*diamond(), store_uri=self.store.uri, max_failures=1)
        plan = replace(plan, notify=self.channels, policy=policy or plan.policy)
        self.last_message["sweep"] = client.submit(self.store, plan, "name: sweep\n", CLUSTER, now=self.clock())

    def with_general(self, general: list[Channel]) -> None:
        """Run the sweep to its end; ``general`` are the channels of the cluster's file."""
        self.send()
        self.notifier = self.new_notifier(read_channels=lambda: general)
        self.finish()

    def states(self) -> list[tuple[Channel, DeliveryState]]:
        """After one more turn, of the first notification."""
        self.clock.advance(10.0)
        self.notifier.turn()
        entry, *_ = read_entries(self.store, "sweep")
        return [(delivery.channel, delivery.state) for delivery in entry.deliveries]


WEBHOOK = Channel(webhook="https://hooks.example.org/x")
PAGER, TEAMS, DISCORD = (ClusterChannel(apprise=f"${{file:/run/secrets/{name}}}") for name in ("p", "t", "d"))
WAITING, SENT, GIVEN_UP = DeliveryState.WAITING, DeliveryState.SENT, DeliveryState.GIVEN_UP


# ------------------------------------------------------------------------------------------------------- what is told
def test_end_of_a_sweep_is_told_once_whoever_looks(tmp_path: Path) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()
    for notifier in (world.notifier, world.notifier, world.new_notifier()):
        notifier.turn()
    [notice] = world.sent.notices
    assert notice.occasion is Occasion.FINISHED
    assert notice.title.startswith("Sweep sweep succeeded after")
    assert notice.jobs == {"succeeded": 5}


def test_ended_sweep_costs_no_request_until_it_is_opened_again(tmp_path: Path, monkeypatch) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()
    world.notifier.turn()
    asked: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("exists", "get", "list_children"):
            patched.setattr(world.store, name, asked.append)
        world.notifier.turn()
    assert asked == []
    world.clock.advance(1.0)
    plan = replace(make_plan(*diamond(), store_uri=world.store.uri, max_failures=2), notify=world.channels)
    world.last_message["sweep"] = client.submit(world.store, plan, "name: sweep\n", CLUSTER, now=world.clock())
    world.tick_until(lambda: world.last_message["sweep"] in world.snapshot().handled)
    world.finish()
    world.notifier.turn()
    assert world.sent.occasions == ["finished", "finished"]


def test_each_end_of_a_sweep_that_is_opened_again_is_told(tmp_path: Path) -> None:
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Fail(), Succeed()]})
    world = Told(tmp_path, WEBHOOK, backend=backend)
    world.send()
    world.finish()
    world.clock.advance(1.0)
    world.last_message["sweep"] = client.retry(world.store, "sweep", now=world.clock())
    world.tick_until(lambda: world.last_message["sweep"] in world.snapshot().handled)
    world.finish()
    world.notifier.turn()
    assert world.sent.occasions == ["failed", "finished"], "though nobody looked in between"


@pytest.mark.parametrize("late_s", [0.0, 2 * 3600.0])
def test_failed_sweep_is_told_with_its_reasons_also_long_after_its_end(tmp_path: Path, late_s: float) -> None:
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Fail()]})
    world = Told(tmp_path, Channel(webhook="https://a/b", on=(Occasion.FAILED,)), backend=backend)
    world.send()
    world.finish()
    world.clock.advance(late_s)
    world.tick()
    world.notifier.turn()
    assert world.sent.occasions == ["failed"]
    assert "pretrain/a" in world.sent.notices[0].text
    assert "1 failed" in world.sent.notices[0].text
    assert world.sent.notices[0].jobs == {"succeeded": 3, "failed": 1, "skipped": 1}


def test_occasion_that_nobody_asked_for_is_not_sent(tmp_path: Path) -> None:
    world = Told(tmp_path, Channel(webhook="https://a/b", on=(Occasion.FAILED,)))
    world.send()
    world.finish()
    world.notifier.turn()
    assert world.sent.notices == []


def test_sweep_in_which_nothing_happens_is_told_as_stalled_once(tmp_path: Path) -> None:
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Hang()], "pretrain/b": [Hang()]})
    world = Told(tmp_path, Channel(webhook="https://a/b", stalled_after_s=600.0), backend=backend)
    world.send()
    world.tick_until(lambda: world.is_running("pretrain/a") and world.is_running("pretrain/b"))
    world.notifier.turn()
    for _ in range(5):
        world.clock.advance(200.0)
        world.notifier.turn()
    assert world.sent.occasions == ["stalled"]
    assert "pretrain/" in world.sent.notices[0].text
    again = world.new_notifier()
    again.turn()
    world.clock.advance(3600.0)
    again.turn()
    assert world.sent.occasions == ["stalled"], "the same stall, after a restart"


def test_stalled_sweep_tells_jobs_that_run_from_those_that_wait_for_nodes(tmp_path: Path) -> None:
    store, plan = LocalStore(tmp_path), make_plan(*diamond())
    journal = SweepJournal(store, plan.sweep)
    journal.accept(replace(plan, revision=1))
    texts = []
    for job, awaits_room in zip(plan.jobs, (True, False), strict=False):
        journal.tell(launched(job, awaits_room=awaits_room))
        texts.append(stall_notice(client.load_snapshot(store, plan.sweep), 1.0, "mark", 2.0).text.splitlines()[0])
    wait = f"1 jobs wait for nodes ({plan.jobs[0].name}, ...)."
    assert texts == [
        f"No job runs. {wait}",
        f"1 jobs run ({plan.jobs[1].name}, ...) and report no step. {wait}",
    ]


def test_sweep_whose_attempt_works_without_steps_has_not_stalled(tmp_path: Path) -> None:
    """As in a long evaluation."""
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Hang()], "pretrain/b": [Hang()]})
    world = Told(tmp_path, Channel(webhook="https://a/b", stalled_after_s=600.0), backend=backend)
    world.send()
    world.tick_until(lambda: world.is_running("pretrain/a") and world.is_running("pretrain/b"))
    world.clock.advance(WRITE_EVERY_S)
    world.tick()
    for _ in range(5):
        world.notifier.turn()
        world.clock.advance(400.0)
        document = json.loads(world.store.get(progress_name("sweep")))
        document["jobs"]["pretrain/a"]["done"] += 1
        world.store.put(progress_name("sweep"), json.dumps(document).encode())
    assert world.sent.notices == []


def test_paused_sweep_has_not_stalled(tmp_path: Path) -> None:
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Hang()], "pretrain/b": [Hang()]})
    world = Told(tmp_path, Channel(webhook="https://a/b", stalled_after_s=600.0), backend=backend)
    world.send()
    world.tick_until(lambda: world.is_running("pretrain/a"))
    world.clock.advance(0.01)
    client.pause(world.store, "sweep", now=world.clock())
    world.tick_until(lambda: world.snapshot().state is SweepState.PAUSED)
    for _ in range(5):
        world.notifier.turn()
        world.clock.advance(600.0)
    assert world.sent.notices == []


@pytest.mark.parametrize(("used", "ids"), [(7.9, []), (8.0, ["budget-3-nearly"]), (10.0, ["budget-3-spent"])])
def test_budget_is_told_when_it_is_nearly_and_when_it_is_wholly_spent(used: float, ids: list[str]) -> None:
    plan = replace(make_plan(*diamond()), policy=Policy(gpu_hours=10.0))
    snapshot = Snapshot(sweep="sweep", state=SweepState.RUNNING, plan=plan, revision=3)
    assert [notice.notification_id for notice in budget_notices(snapshot, used, 5.0)] == ids


def test_deadline_that_has_passed_is_told(tmp_path: Path) -> None:
    backend = ScriptedBackend(LocalStore(tmp_path), {"pretrain/a": [Hang()]})
    world = Told(tmp_path, WEBHOOK, backend=backend)
    world.send(Policy(time_limit_s=60.0))
    world.tick_until(lambda: world.is_running("pretrain/a"))
    world.clock.advance(100.0)
    world.notifier.turn()
    world.notifier.turn()
    assert world.sent.occasions == ["budget"]
    assert "deadline" in world.sent.notices[0].title


# --------------------------------------------------------------------------------------- at least once, always the same
def test_notification_that_is_not_taken_is_tried_again_later_and_over_a_restart(tmp_path: Path) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.sent.failures = [DeliveryError("HTTP 503"), DeliveryError("HTTP 503"), RuntimeError("a library's own")]
    world.send()
    world.finish()
    world.notifier.turn()
    [entry] = read_entries(world.store, "sweep")
    assert [(one.state, one.num_tries, one.error) for one in entry.deliveries] == [
        (DeliveryState.WAITING, 1, "HTTP 503")
    ]
    world.notifier.turn()
    assert len(world.sent.failures) == 2, "not before it is time"
    notifier = world.new_notifier()
    for _ in range(6):
        world.clock.advance(30.0)
        notifier.turn()
    [notice] = world.sent.notices
    assert notice == entry.notice
    [entry] = read_entries(world.store, "sweep")
    assert [(one.state, one.num_tries) for one in entry.deliveries] == [(DeliveryState.SENT, 4)]


def test_death_between_sending_and_noting_sends_again_under_the_same_id(tmp_path: Path, monkeypatch) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(notifier_module, "save_entry", die)
        with pytest.raises(KeyboardInterrupt):
            world.notifier.turn()
    world.new_notifier().turn()
    assert len(world.sent.notices) == 2
    assert len({notice.notification_id for notice in world.sent.notices}) == 1


def test_delivery_that_the_store_did_not_take_is_noted_in_a_later_turn_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()

    def time_out(*_: object) -> None:
        raise StorageTimeoutError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(notifier_module, "save_entry", time_out)
        with pytest.raises(StorageTimeoutError):
            world.notifier.turn()
    world.notifier.turn()
    [entry] = read_entries(world.store, "sweep")
    assert [(one.state, one.num_tries) for one in entry.deliveries] == [(DeliveryState.SENT, 1)]
    world.new_notifier().turn()
    assert len(world.sent.notices) == 1


def test_corrected_channel_of_the_cluster_gets_what_waits_for_the_former_one(tmp_path: Path) -> None:
    wrong, right, sound = PAGER, TEAMS, DISCORD
    general: list[Channel] = [wrong, sound]
    world = Told(tmp_path)
    world.sent.down = [wrong, right]
    world.with_general(general)
    assert world.states() == [(wrong, WAITING), (sound, SENT)]
    general[:] = [sound]  # as while the file is written
    assert world.states() == [(wrong, WAITING), (sound, SENT)]
    [entry] = read_entries(world.store, "sweep")
    assert "does not have this channel now" in entry.deliveries[0].error
    general[:] = [right, sound]
    assert world.states() == [(wrong, GIVEN_UP), (sound, SENT), (right, WAITING)]
    world.sent.down = []
    general[:] = [wrong, sound]
    moved = [(wrong, GIVEN_UP), (sound, SENT), (right, GIVEN_UP), (wrong, SENT)]
    assert world.states() == world.states() == moved
    assert len(world.sent.notices) == 2


def test_other_occasions_of_a_channel_of_the_cluster_make_no_other_receiver(tmp_path: Path) -> None:
    general: list[Channel] = [PAGER, TEAMS]
    world = Told(tmp_path)
    world.sent.down = [PAGER]
    world.with_general(general)
    before = [(PAGER, WAITING), (TEAMS, SENT)]
    assert world.states() == before
    teams = replace(TEAMS, on=(Occasion.FINISHED,), stalled_after_s=60.0)
    general[:] = [teams]
    assert world.states() == before
    world.sent.down = []
    general[:] = [teams, replace(PAGER, on=(Occasion.FAILED,))]
    assert world.states() == [(PAGER, SENT), (TEAMS, SENT)]
    assert len(world.sent.notices) == 2


@pytest.mark.parametrize("is_of_cluster", [False, True])
def test_channel_that_nobody_has_any_more_is_given_up_only_if_it_was_the_clusters(
    tmp_path: Path, is_of_cluster: bool
) -> None:
    general: list[Channel] = [WEBHOOK] if is_of_cluster else []
    world = Told(tmp_path) if is_of_cluster else Told(tmp_path, WEBHOOK)
    world.sent.down = [WEBHOOK]
    world.with_general(general)
    assert world.states() == [(WEBHOOK, WAITING)]
    world.channels = ()
    world.send()  # without the channel
    world.tick_until(lambda: world.last_message["sweep"] in world.snapshot().handled)
    general[:] = [TEAMS]
    expected = [(WEBHOOK, GIVEN_UP), (TEAMS, SENT)] if is_of_cluster else [(WEBHOOK, WAITING)]
    assert world.states() == expected


def test_channel_that_never_answers_is_given_up_after_days(tmp_path: Path) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.sent.failures = [DeliveryError("away")] * 500
    world.send()
    world.finish()
    for _ in range(90):
        world.notifier.turn()
        world.clock.advance(3600.0)
    [entry] = read_entries(world.store, "sweep")
    assert entry.deliveries[0].state is DeliveryState.GIVEN_UP
    assert 30 < entry.deliveries[0].num_tries < 90


def test_what_happened_before_a_cluster_notified_is_history(tmp_path: Path) -> None:
    world = Told(tmp_path)
    world.channels = ()
    world.send()
    world.finish()
    world.clock.advance(10.0)
    world.store.delete(f"controllers/{CLUSTER}/notifications.json")
    notifier = world.new_notifier(read_channels=lambda: (WEBHOOK,))
    notifier.turn()
    assert world.sent.notices == []


def test_end_of_a_sweep_without_a_channel_is_not_told_to_one_that_comes_later(tmp_path: Path) -> None:
    world = Told(tmp_path)
    world.send()
    world.finish()
    world.clock.advance(3700.0)
    world.notifier.turn()
    for notifier in (world.new_notifier(read_channels=lambda: (WEBHOOK,)), world.notifier):
        notifier.turn()
    assert world.sent.notices == []
    world.channels = (WEBHOOK,)
    world.clock.advance(10.0)
    world.send()
    world.finish()
    world.notifier.turn()
    assert world.sent.occasions == ["finished"]  # the end of today


def test_sweep_of_another_cluster_is_told_by_that_one(tmp_path: Path) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()
    other = Notifier(world.store, "cluster-b", lambda: world.controller.snapshots, send=world.sent, now=world.clock)
    other.turn()
    assert world.sent.notices == []


def test_damaged_journal_of_one_sweep_does_not_keep_the_others(tmp_path: Path) -> None:
    world = Told(tmp_path, WEBHOOK)
    world.send()
    world.finish()
    broken = world.snapshot()
    world.store.put("sweeps/sweep/journal/00000001.jsonl", b"{}\nnot json\n")
    plan = replace(make_plan(*diamond()), notify=(WEBHOOK,), sweep="fine")
    fine = Snapshot(
        sweep="fine",
        cluster=CLUSTER,
        state=SweepState.RUNNING,
        plan=replace(plan, policy=Policy(deadline_s=1.0)),
        revision=1,
        accepted_at_s=world.clock(),
    )
    notifier = Notifier(world.store, CLUSTER, lambda: [broken, fine], send=world.sent, now=world.clock)
    notifier.turn()
    assert world.sent.occasions == ["budget"]


def test_file_for_all_sweeps_that_could_not_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notify.yaml"
    path.write_text("notify: [{webhook: 'https://a.example.org/b'}]")
    channels = GeneralChannels(str(path))

    def fail(_: str) -> tuple[Channel, ...]:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.controller.notifying.read_notify_file", fail)
        assert [list(channels()) for _ in range(3)] == [[], [], []]
    assert caplog.text.count("Permission denied") == 1
    assert [one.webhook for one in channels()] == ["https://a.example.org/b"]


def test_file_for_all_sweeps_is_read_anew_and_a_wrong_one_keeps_the_channels_of_before(tmp_path: Path) -> None:
    path = tmp_path / "notify.yaml"
    channels = GeneralChannels(str(path))
    assert list(channels()) == []
    path.write_text("notify: [{webhook: 'https://a.example.org/b'}]")
    assert [one.webhook for one in channels()] == ["https://a.example.org/b"]
    path.write_text("notify: [{webhook: 'https://a.example.org/b', oops: 1}]")
    assert [one.webhook for one in channels()] == ["https://a.example.org/b"]


# ------------------------------------------------------------------------------------------------------------- commands
def test_command_shows_what_was_told_without_urls(tmp_path: Path, capsys) -> None:
    world = Told(tmp_path, Channel(webhook="https://hooks.example.org/key-in-the-path"))
    world.send()
    world.finish()
    world.notifier.turn()
    result = run_command(capsys, "notify", "sweep", "--store", world.store.uri, "-o", "json")
    [told] = result.document["notifications"]
    assert (told["occasion"], told["deliveries"][0]["state"]) == ("finished", "sent")
    assert "key-in-the-path" not in result.out
    assert "sent" in run_command(capsys, "notify", "sweep", "--store", world.store.uri).out


def test_end_of_a_sweep_arrives_at_a_webhook_and_a_mail_server(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TEST_HOOK_KEY", "key-of-the-webhook-1")
    monkeypatch.setenv("TEST_MAIL_KEY", "password-of-the-mail-1")
    with webhook_sink() as hook, mail_sink(tmp_path, password="password-of-the-mail-1") as mailbox:  # noqa: S106 - ours
        monkeypatch.setenv("SSL_CERT_FILE", str(mailbox.certificate))
        hook.statuses = [503]
        email = Email(
            to=("a@example.org",),
            sender="b@example.org",
            server=mailbox.server,
            user="u",
            password="${env:TEST_MAIL_KEY}",  # noqa: S106 - a reference
        )
        hooked = Channel(webhook=hook.url, secret="${env:TEST_HOOK_KEY}")  # noqa: S106 - a reference
        world = Told(tmp_path / "store", hooked, Channel(email=email))
        notifier = Notifier(world.store, CLUSTER, lambda: world.controller.snapshots, now=world.clock)
        world.send()
        world.finish()
        notifier.turn()
        world.clock.advance(10.0)
        notifier.turn()
        assert [json.loads(body)["type"] for _, body in hook.requests] == ["sweep.finished"] * 2
        assert len({headers["webhook-id"] for headers, _ in hook.requests}) == 1
        assert [mail["Subject"].partition(" after ")[0] for mail in mailbox.mails] == ["Sweep sweep succeeded"]
    content = b"".join(world.store.get(stat.name) for stat in world.store.list_objects("sweeps/"))
    assert b"key-of-the-webhook-1" not in content
    assert b"password-of-the-mail-1" not in content


def test_plan_without_notify_is_stored_as_before_and_one_with_it_comes_back() -> None:
    plan = make_plan(*diamond())
    assert "notify" not in plan.to_json()
    told = replace(plan, notify=(WEBHOOK, Channel(email=Email(to=("a@b",), sender="c@d", server="e:25"))))
    assert Plan.from_json(json.loads(json.dumps(told.to_json()))) == told
