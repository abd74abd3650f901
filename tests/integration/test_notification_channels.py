"""How a notification arrives: at a webhook that checks its signature, at Slack, and at a mail server."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.core.errors import UserError
from orchestrator.notifications.channels import DeliveryError, deliver, post, signed
from orchestrator.notifications.messages import trial_notice
from orchestrator.sweepfile.values import Channel, ClusterChannel, Email, Security
from tests.commands import run_command
from tests.sinks import Mailbox, Webhook, dripping_sink, mail_sink, webhook_sink

KEY, PASSWORD = "key-of-the-webhook-1", "password-of-the-mail-1"
SIGNED = "${env:TEST_HOOK_KEY}"
NOTICE = trial_notice(1_700_000_000.0)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook_sink() as found:
        yield found


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mailbox]:
    with mail_sink(tmp_path_factory.mktemp("mail"), password=PASSWORD) as found:
        yield found


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HOOK_KEY", KEY)
    monkeypatch.setenv("TEST_MAIL_KEY", PASSWORD)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_webhook_gets_json_whose_signature_its_receiver_can_check(hook: Webhook) -> None:
    notice = trial_notice(1_700_000_000.0)
    deliver(notice, Channel(webhook=hook.url, secret=SIGNED))
    [(headers, body)] = hook.requests
    # What docs/operations.md tells receivers to do.
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY.encode(), content, sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["webhook-id"] == f"trial.{notice.notification_id}"
    document = json.loads(body)
    assert document["type"] == "sweep.finished"
    assert document["timestamp"] == "2023-11-14T22:13:20Z"
    assert KEY not in body.decode() + str(headers)


def test_signature_of_another_time_or_body_is_another() -> None:
    first, later = (signed(trial_notice(0.0), KEY, now).headers for now in (100.0, 101.0))
    assert first["webhook-id"] == later["webhook-id"]
    assert first["webhook-signature"] != later["webhook-signature"]
    other = signed(replace(trial_notice(0.0), title="x"), KEY, 100.0).headers
    assert other["webhook-signature"] != first["webhook-signature"]


def test_key_in_the_form_of_standard_webhooks_signs_as_their_example() -> None:
    # The example of the specification's reference libraries.
    raw = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    request = signed(trial_notice(0.0), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", 1614265330.0)
    content = b".".join([request.headers["webhook-id"].encode(), b"1614265330", request.body])
    assert (
        request.headers["webhook-signature"]
        == "v1," + base64.b64encode(hmac.new(raw, content, sha256).digest()).decode()
    )


def test_slack_gets_a_message_without_markup_of_jobs(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SLACK", hook.url)
    deliver(replace(trial_notice(0.0), text="<!channel> & <b>"), Channel(slack="${env:TEST_SLACK}"))
    [(_, body)] = hook.requests
    document = json.loads(body)
    assert document["text"] == "A trial of orchestrator's notifications"
    assert "<!channel>" not in body.decode()
    assert "&lt;!channel&gt; &amp; &lt;b&gt;" in document["blocks"][1]["text"]["text"]


def test_mail_goes_over_starttls_with_a_login(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(mailbox.certificate))
    mailbox.mails.clear()
    channel = Channel(email=mail(mailbox))
    for _ in range(2):
        deliver(trial_notice(0.0), channel)
    first, second = mailbox.mails
    assert first["Subject"] == "A trial of orchestrator's notifications"
    assert first["To"] == "a@example.org, b@example.org"
    assert first["Message-ID"] == second["Message-ID"]
    assert mailbox.logins[-1] == ("user", PASSWORD)


def test_mail_server_whose_certificate_nobody_trusts_gets_no_password(mailbox: Mailbox, monkeypatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    before = len(mailbox.logins)
    with pytest.raises(DeliveryError, match="SSLCertVerificationError"):
        deliver(trial_notice(0.0), Channel(email=mail(mailbox)))
    assert len(mailbox.logins) == before


def test_mail_server_that_refuses_the_password_is_told_without_it(mailbox: Mailbox, monkeypatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(mailbox.certificate))
    monkeypatch.setenv("TEST_MAIL_KEY", "a-wrong-password-9")
    with pytest.raises(DeliveryError, match="code 535") as caught:
        deliver(trial_notice(0.0), Channel(email=mail(mailbox)))
    assert "a-wrong-password-9" not in str(caught.value)


def test_proxy_gets_its_login_and_is_named_without_it(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    place = hook.url.split("/")[2]
    monkeypatch.setenv("HTTPS_PROXY", f"http://ann:p%40ss-of-the-proxy@{place}")
    monkeypatch.setenv("NO_PROXY", "")
    hook.statuses = [407]
    with pytest.raises(DeliveryError) as refused:
        deliver(trial_notice(0.0), Channel(webhook="https://receiver.example.org/hook"))
    [(headers, _)] = hook.requests
    assert headers["proxy-authorization"] == f"Basic {base64.b64encode(b'ann:p@ss-of-the-proxy').decode()}"
    assert f"through the proxy {place} of HTTPS_PROXY (OSError: the proxy answers with HTTP 407)" in str(refused.value)
    assert "ss-of-the-proxy" not in str(refused.value)


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        ("http", b""),
        ("http", b"HTTP/1.1 20"),
        ("https", b"\x16\x03\x03\x40\x00"),  # the head of a long record of TLS
    ],
)
def test_receiver_that_drips_holds_nobody_beyond_the_deadline(scheme: str, first: bytes) -> None:
    with dripping_sink(first, num_bytes=400, every_s=0.02) as (host, port):
        begun_s = time.monotonic()
        with pytest.raises(OSError, match="it did not end within"):
            post(f"{scheme}://{host}:{port}/", b"x", {}, timeout_s=0.4)
        assert time.monotonic() - begun_s < 4.0


@pytest.mark.parametrize("first", [b"X:", b"Content-Length: 9999\r\n\r\n"])
def test_receiver_that_has_taken_it_and_drips_is_not_told_twice(first: bytes) -> None:
    with dripping_sink(b"HTTP/1.1 200 OK\r\n" + first, num_bytes=400, every_s=0.02) as (host, port):
        begun_s = time.monotonic()
        assert post(f"http://{host}:{port}/", b"x", {}, timeout_s=0.4) == 200
        assert time.monotonic() - begun_s < 4.0


@pytest.mark.parametrize(
    ("security", "first"),
    [
        (Security.NONE, b"220 mail"),
        (Security.TLS, b"\x16\x03\x03\x40\x00"),
        (Security.STARTTLS, b"220 a\r\n250-b\r\n250 STARTTLS\r\n220 go\r\n\x16\x03\x03\x40\x00"),
    ],
)
def test_mail_server_that_drips_holds_nobody_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch, security: Security, first: bytes
) -> None:
    monkeypatch.setattr("orchestrator.notifications.channels.TIMEOUT_S", 0.4)
    with dripping_sink(first, num_bytes=400, every_s=0.02) as (host, port):
        email = Email(to=("a@b.org",), sender="c@d.org", server=f"{host}:{port}", security=security)
        begun_s = time.monotonic()
        with pytest.raises(DeliveryError, match="did not take it"):
            deliver(trial_notice(0.0), Channel(email=email))
        assert time.monotonic() - begun_s < 4.0


@pytest.mark.parametrize("status", [301, 400, 404, 410, 500])
def test_answer_that_is_no_success_is_a_failure_and_is_not_followed(hook: Webhook, status: int) -> None:
    hook.statuses, hook.headers = [status], {"Location": hook.url}
    with pytest.raises(DeliveryError, match=f"HTTP {status}"):
        deliver(trial_notice(0.0), Channel(webhook=hook.url))
    assert len(hook.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://0xa9fea9fe/",
        "http://metadata.google.internal/x",
        "http://[fe80::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://0.0.0.0/",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://user:pass@127.0.0.1/",
        "http://127.0.0.1:99999/",
    ],
)
def test_address_that_must_not_be_asked_is_refused(url: str) -> None:
    with pytest.raises(UserError):
        post(url, b"x", {}, timeout_s=1.0)


def test_name_that_leads_to_a_metadata_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("169.254.169.254", 80))]
    monkeypatch.setattr("orchestrator.notifications.channels.socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UserError, match="leads to"):
        post("https://harmless.example.org/", b"x", {}, timeout_s=1.0)


def test_clear_text_beyond_the_own_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("93.184.216.34", 80))]
    monkeypatch.setattr("orchestrator.notifications.channels.socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UserError, match="use https"):
        post("http://far.example.org/", b"x", {}, timeout_s=1.0)


def by_apprise(monkeypatch: pytest.MonkeyPatch, url: str) -> ClusterChannel:
    monkeypatch.setenv("TEST_APPRISE_URL", url)
    return ClusterChannel(apprise="${env:TEST_APPRISE_URL}")


def test_service_of_apprise_gets_title_and_text(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(NOTICE, by_apprise(monkeypatch, hook.url.replace("http://", "json://")))
    ((_, body),) = hook.requests
    assert {name: json.loads(body)[name] for name in ("title", "message")} == {
        "title": NOTICE.title,
        "message": NOTICE.text,
    }


@pytest.mark.parametrize(
    ("url", "reason"),
    [("nothing://that/is/known", "knows no such URL"), ("json://127.0.0.1:9/secret-token", "did not take")],
)
def test_service_of_apprise_that_takes_nothing_is_an_error_without_its_url(
    monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    with pytest.raises(DeliveryError, match=reason) as caught:
        deliver(NOTICE, by_apprise(monkeypatch, url))
    assert url not in str(caught.value)


def test_service_of_apprise_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.notifications.channels.APPRISE_TIMEOUT_S", 3.0)
    with (
        dripping_sink(b"HTTP/1.0 200 OK\r\nX:", num_bytes=1000, every_s=0.1) as (host, port),
        pytest.raises(DeliveryError, match="did not end within 3 s"),
    ):
        deliver(NOTICE, by_apprise(monkeypatch, f"json://{host}:{port}/"))


def test_command_tries_all_channels_of_a_file(tmp_path: Path, hook: Webhook, capsys) -> None:
    path = tmp_path / "notify.yaml"
    path.write_text(f"notify:\n- webhook: {hook.url}\n  secret: {SIGNED}\n- slack: ${{env:NOT_SET_ANYWHERE}}\n")
    result = run_command(capsys, "notify", "--test", str(path), "-o", "json")
    assert result.code == 1
    assert [one["sent"] for one in result.document["trials"]] == [True, False]
    assert "NOT_SET_ANYWHERE is not set" in result.document["trials"][1]["error"]
    assert len(hook.requests) == 1


def mail(mailbox: Mailbox) -> Email:
    return Email(
        to=("a@example.org", "b@example.org"),
        sender="sweeps@example.org",
        server=mailbox.server,
        user="user",
        password="${env:TEST_MAIL_KEY}",  # noqa: S106 - a reference
        security=Security.STARTTLS,
    )
