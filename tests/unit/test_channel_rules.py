"""Which secrets of a cluster the channels of a sweep may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from orchestrator.core.errors import SpecError, UserError
from orchestrator.notifications.messages import Notice
from orchestrator.notifications.notifier import Notifier, add_entry, read_entries
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import notification_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.notify import check_channel_of_sweep, parse_notify_file
from orchestrator.sweepfile.values import Channel, ClusterChannel, Email, Occasion, Security


def mail(password: str, server: str = "smtp.example.org:587", security: Security = Security.STARTTLS) -> Channel:
    email = Email(to=("a@b.org",), sender="c@d.org", server=server, user="u", password=password, security=security)
    return Channel(email=email)


@pytest.mark.parametrize(
    "channel",
    [
        mail("${env:SMTP_PASSWORD}"),
        mail("${aws-secretsmanager:team/mail#password}"),
        mail("${env:SMTP_PASSWORD}", "127.0.0.1:25", Security.NONE),
        Channel(webhook="https://example.org", secret="${env:SWEEP_HOOK_KEY}"),  # noqa: S106 - a reference
        Channel(webhook="${file:/run/secrets/webhook}"),
        Channel(slack="${file:/run/secrets/slack-webhook}"),
        Channel(webhook="https://example.org/no/reference"),
    ],
)
def test_channel_of_a_sweep_with_what_is_meant_for_it_is_used(channel: Channel) -> None:
    check_channel_of_sweep(channel)


@pytest.mark.parametrize(
    "channel",
    [
        mail("${env:AWS_SECRET_ACCESS_KEY}"),
        mail("${file:/mail/../root/.aws/credentials}"),
        mail("${file:/proc/self/environ}"),
        mail("${aws-secretsmanager:database#mail}"),
        mail("${aws-ssm:/mail/database}"),
        mail("no reference at all"),
        mail("${env:SMTP_PASSWORD}", security=Security.NONE),
        ClusterChannel(apprise="${file:/run/secrets/mail}"),
        Channel(slack="${env:RAY_AUTH_TOKEN}"),
        Channel(webhook="${env:DATABASE_URL}"),
        Channel(webhook="https://example.org", secret="${env:AWS_SECRET_ACCESS_KEY}"),  # noqa: S106 - a reference
    ],
)
def test_channel_of_a_sweep_with_another_secret_is_refused(channel: Channel) -> None:
    with pytest.raises(UserError):
        check_channel_of_sweep(channel)


def test_apprise_is_a_channel_of_the_clusters_own_file_alone(tmp_path: Path) -> None:
    text = "notify:\n- apprise: ${file:/run/secrets/mail}\n  on: [failed]\n"
    (channel,) = parse_notify_file(text, "notify.yaml")
    assert channel == ClusterChannel(on=(Occasion.FAILED,), apprise="${file:/run/secrets/mail}")
    assert Channel.from_json(asdict(channel)) == channel
    assert "apprise" not in asdict(Channel(slack="${env:SLACK_URL}"))
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{load_sweep('quickstart')[1]}\n{text}")
    with pytest.raises(SpecError, match="apprise"):
        load_sweep(str(path))


def test_sweep_with_a_secret_that_it_may_not_use_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Not hours later, when there is something to tell and nobody looks."""
    path = tmp_path / "sweep.yaml"
    text = load_sweep("quickstart")[1]
    path.write_text(text + "\nnotify:\n- slack: ${env:SLACK_URL}\n- webhook: ${env:AWS_SECRET_ACCESS_KEY}\n")
    with pytest.raises(SpecError) as caught:
        load_sweep(str(path))
    (problem,) = caught.value.problems
    line = len(path.read_text().splitlines())
    assert problem.startswith(f"{path}:{line}:")
    assert "notify[1]: a sweep may not use ${env:AWS_SECRET_ACCESS_KEY}: its name must hold notif" in problem


@pytest.mark.parametrize(("general", "num_sent"), [((), 0), ((mail("${env:PRIVATE}"),), 1)])
def test_outbox_that_somebody_wrote_reaches_no_secret_but_those_of_the_clusters_own_file(
    tmp_path: Path, general: Sequence[Channel], num_sent: int
) -> None:
    """Who may write the store may also put an entry there; only what the operator's file says is exempt."""
    store = LocalStore(tmp_path)
    sent: list[Channel] = []
    snapshot = Snapshot(sweep="s", cluster="c")
    notice = Notice(
        notification_id="00000001-0", occasion=Occasion.FAILED, sweep="s", at_s=1000.0, title="It failed", text=""
    )
    add_entry(store, notice, [mail("${env:PRIVATE}")])
    # Some channel must be there for the notifier to look at the sweep at all, and not one that would get this notice.
    channels = general or (Channel(webhook="https://example.org", on=(Occasion.FINISHED,)),)
    notifier = Notifier(
        store,
        "c",
        lambda: [snapshot],
        lambda: channels,
        send=lambda _, channel: sent.append(channel),
        now=lambda: 1001.0,
    )
    notifier.turn()
    assert len(sent) == num_sent
    (entry,) = read_entries(store, "s")
    assert ("a sweep may not use" in entry.deliveries[0].error) is not bool(num_sent)


@pytest.mark.parametrize(
    "content", [b"[]", b"{", b'{"notice": {}, "deliveries": [1]}', b'{"deliveries": [{"channel": "x"}]}']
)
def test_outbox_entry_of_another_form_is_passed_over(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    notice = Notice(notification_id="1-0", occasion=Occasion.FAILED, sweep="s", at_s=1000.0, title="It failed", text="")
    add_entry(store, notice, [Channel(webhook="https://example.org")])
    store.put(notification_name("s", "0-0"), content)
    assert [entry.notice for entry in read_entries(store, "s")] == [notice]
