"""The channels of notifications: one entry per kind, the message of each, and the connections to receivers.

Receivers come from files of users: metadata services, redirects and unencrypted remote connections are refused. A
receiver that slowly sends single bytes could keep every read alive, so the whole delivery has a deadline, too.

A new service needs no code: the cluster's own file reaches every service that Apprise knows (``apprise_process``), and
a sweep those that accept Slack's format, or JSON through a relay. A new kind is an entry of ``_KINDS`` here, a field of
``sweepfile.values.Channel``, and the same field of ``sweepfile.notify.NotifySpec``, which says how it is written in a
file. The three are apart because a plan stores channels: reading a plan imports no schema (pydantic), and reading a
sweep imports nothing that sends (mail, TLS).
"""

from __future__ import annotations

import base64
import errno
import hmac
import http.client
import ipaddress
import json
import os
import re
import signal
import smtplib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from hashlib import sha256
from typing import Any, Self
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from orchestrator.core.errors import OrchestratorError, UserError
from orchestrator.core.security.references import is_reference, resolve_secret
from orchestrator.core.security.urls import check_url, forbidden_host
from orchestrator.notifications import apprise_process
from orchestrator.notifications.messages import Notice
from orchestrator.sweepfile.values import Channel, ClusterChannel, Email, Security

_MAX_ANSWER_BYTES = 64 * 1024
_HTTPS_PORT, _HTTP_PORT = 443, 80
TIMEOUT_S = 10.0
_GONE = 410
APPRISE_TIMEOUT_S = 30.0
"""Time limit of a delivery: start of the process, import of Apprise, and up to two requests of a service."""
_APPRISE_MODULE = "orchestrator.notifications.apprise_process"
_APPRISE_FAILURES = {
    apprise_process.IS_MISSING: "it is not installed; pip install 'pretraining-orchestrator[apprise]' where the "
    "controller runs",
    apprise_process.KNOWS_NO_SUCH_URL: "it knows no such URL; see its list of services",
    apprise_process.NOT_DELIVERED: "the service did not take the notification; check the URL and its token",
}
_SLACK_SECTION_CHARS = 2900
"""Slack refuses a section of more than 3,000 characters."""
_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3})")
"""What ``http.client`` raises if a proxy does not connect."""
_PREFIX = "whsec_"
"""Of keys as the Standard Webhooks specification writes them: what follows is base64."""


def post(url: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> int:
    """Send a POST; returns the status of the answer; redirects are not followed.

    ``timeout_s`` is the limit without the name resolution, which has its own limits.

    The name is resolved once, and what it is resolved to is checked and connected to: an answer of a name server that
    changes in between changes nothing.

    Raises:
        UserError: the URL is refused.
        OSError: no answer in time, or none in HTTP.
    """
    check_url(url, what="the webhook")
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with Deadline(timeout_s) as deadline, closing(_connection(parts, deadline)) as connection:
            connection.request("POST", target, body=body, headers={**headers, "User-Agent": "pretraining-orchestrator"})
            answer = connection.getresponse()
            answer.read(_MAX_ANSWER_BYTES)
            return answer.status
    except http.client.HTTPException as error:
        raise ConnectionError(type(error).__name__) from None


class Deadline:
    """Closes its connections when the time is over, even if bytes still arrive.

    Leaving it then raises ``TimeoutError`` in the place of what a library makes of the end of its connection.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._is_over = threading.Event()
        self._held: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for held in self._held:
            held.close()
        if isinstance(error, Exception) and self._is_over.is_set():
            raise TimeoutError(errno.ETIMEDOUT, f"it did not end within {self.timeout_s:g} s") from error

    def connect(self, address: tuple[str, int], *_: object) -> socket.socket:
        """As ``socket.create_connection``. Raises ``OSError``."""
        if self._is_over.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "no time is left to connect")
        found = socket.create_connection(address, self.timeout_s)
        # TLS takes a socket over; a second descriptor of the same connection cuts it in the midst of a handshake, too.
        self._held.append(found.dup())
        return found

    def _cut(self) -> None:
        self._is_over.set()
        for held in self._held:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


def checked_address(host: str, port: int) -> str:
    """The address of a host. Raises ``UserError`` if it leads to a metadata service, ``OSError`` if to nothing."""
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if reason := forbidden_host(address):
        raise UserError(f"the host {host} leads to {address}, {reason}; name your own server")
    return address


class _To(http.client.HTTPConnection):
    """A connection to an address that was checked, even if the name now resolves to another one."""

    def __init__(self, host: str, port: int, address: str, deadline: Deadline) -> None:
        super().__init__(host, port, timeout=deadline.timeout_s)
        self._address, self._deadline = address, deadline

    def connect(self) -> None:
        self.sock = self._deadline.connect((self._address, self.port))


class _SecurelyTo(_To):
    """The same with TLS; the certificate must be the host's."""

    def connect(self) -> None:
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _connection(parts: SplitResult, deadline: Deadline) -> http.client.HTTPConnection:
    host = str(parts.hostname)
    is_secure = parts.scheme == "https"
    port = parts.port or (_HTTPS_PORT if is_secure else _HTTP_PORT)
    if proxy := _proxy_to(parts):
        # The proxy resolves the name, and so has to refuse metadata services itself.
        tunnel = http.client.HTTPSConnection(
            proxy.host, proxy.port, timeout=deadline.timeout_s, context=ssl.create_default_context()
        )
        setattr(tunnel, "_create_connection", deadline.connect)  # noqa: B010 - the seam of http.client for this
        tunnel.set_tunnel(host, port, headers=proxy.headers)
        return tunnel
    address = checked_address(host, port)
    if is_secure:
        return _SecurelyTo(host, port, address, deadline)
    if not ipaddress.ip_address(address.partition("%")[0]).is_private:
        message = f"the webhook of {host} is asked over http, which everybody on the way reads; use https"
        raise UserError(message)
    return _To(host, port, address, deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proxy:
    """A proxy of the environment."""

    host: str
    port: int
    headers: dict[str, str]
    """Its login; empty if its URL has none."""


def _proxy_to(parts: SplitResult) -> _Proxy | None:
    """The proxy through which a receiver is reached; None = there is none, or it is not for this one."""
    url = getproxies().get("https")
    if parts.scheme != "https" or not url or proxy_bypass(str(parts.hostname)):
        return None
    way = urlsplit(url if "://" in url else f"http://{url}")
    headers = {}
    if way.username is not None:
        login = f"{unquote(way.username)}:{unquote(way.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return _Proxy(host=str(way.hostname), port=way.port or _HTTP_PORT, headers=headers)


class DeliveryError(OrchestratorError):
    """A notification was not taken; a later try may succeed."""


class RefusedForeverError(DeliveryError):
    """The receiver says that it is gone for good (HTTP 410)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """Body and headers of a webhook's request."""

    body: bytes
    headers: dict[str, str]


def deliver(notice: Notice, channel: Channel) -> None:
    """Send a notice.

    Raises:
        DeliveryError: no receiver accepted it; the message shows no secret.
        UserError: a reference leads to no secret, or a URL is refused.
    """
    _KINDS[channel.kind].send(notice, channel)


def describe_channel(channel: Channel) -> str:
    """Kind and receiver of a channel, without its secrets."""
    return _KINDS[channel.kind].describe(channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How one kind of channel sends, and its description for people."""

    send: Callable[[Notice, Channel], None]
    describe: Callable[[Channel], str]


def _send_mail(notice: Notice, channel: Channel) -> None:
    if channel.email is not None:
        _mail(notice, channel.email)


def _describe_mail(channel: Channel) -> str:
    return f"email to {', '.join(channel.email.to)} by {channel.email.server}" if channel.email is not None else ""


def _send_to_slack(notice: Notice, channel: Channel) -> None:
    url = resolve_secret(channel.slack, what="the URL of Slack's webhook")
    body = json.dumps(slack_document(notice)).encode()
    _post(url, Signed(body=body, headers={"Content-Type": "application/json"}))


def _send_to_webhook(notice: Notice, channel: Channel) -> None:
    url = resolve_secret(channel.webhook, what="the webhook") if is_reference(channel.webhook) else channel.webhook
    key = resolve_secret(channel.secret, what="the webhook's key") if channel.secret else ""
    _post(url, signed(notice, key, time.time()))


def _send_by_apprise(notice: Notice, channel: Channel) -> None:
    """Send in a separate process, which is killed after ``APPRISE_TIMEOUT_S``: the code of a service may hang."""
    if not isinstance(channel, ClusterChannel):
        raise DeliveryError("apprise works only in the cluster's own file (ORCHESTRATOR_NOTIFY_FILE)")
    url = resolve_secret(channel.apprise, what="the URL of Apprise")
    request = json.dumps({"url": url, "title": notice.title, "body": notice.text})
    # The URL is a secret: it travels over stdin, and nothing that Apprise prints about it is kept.
    with subprocess.Popen(
        [sys.executable, "-m", _APPRISE_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            process.communicate(request, timeout=APPRISE_TIMEOUT_S)
        except BaseException as error:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise DeliveryError(f"Apprise did not end within {APPRISE_TIMEOUT_S:g} s") from None
    if process.returncode != 0:
        reason = _APPRISE_FAILURES.get(process.returncode, f"its process ended with code {process.returncode}")
        raise DeliveryError(f"Apprise: {reason}")


def _describe_url(channel: Channel) -> str:
    where = channel.slack or channel.webhook
    return f"{channel.kind} {where if where.startswith('${') else where.split('/')[2]}"


_KINDS = {
    "apprise": _Kind(
        send=_send_by_apprise,
        describe=lambda channel: f"apprise {channel.apprise}" if isinstance(channel, ClusterChannel) else "",
    ),
    "email": _Kind(send=_send_mail, describe=_describe_mail),
    "slack": _Kind(send=_send_to_slack, describe=_describe_url),
    "webhook": _Kind(send=_send_to_webhook, describe=_describe_url),
}
"""By ``Channel.kind``."""


def signed(notice: Notice, key: str, now: float) -> Signed:
    """The request of a webhook, signed as the Standard Webhooks specification says (version 1.0.0, "Signature scheme").

    The signature covers the id, the time of this try and the body, so that a recorded request cannot be sent again
    later.
    """
    body = json.dumps(webhook_document(notice), ensure_ascii=False, separators=(",", ":")).encode()
    webhook_id, timestamp = _webhook_id(notice), str(int(now))
    headers = {"Content-Type": "application/json", "webhook-id": webhook_id, "webhook-timestamp": timestamp}
    if key:
        content = b".".join((webhook_id.encode(), timestamp.encode(), body))
        digest = hmac.new(_key_bytes(key), content, sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return Signed(body=body, headers=headers)


def webhook_document(notice: Notice) -> dict[str, Any]:
    """The JSON body of a webhook."""
    return {
        "type": f"sweep.{notice.occasion.value}",
        "id": _webhook_id(notice),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(notice.at_s)),
        "sweep": notice.sweep,
        "state": notice.state,
        "jobs": dict(notice.jobs),
        "title": notice.title,
        "text": notice.text,
    }


def slack_document(notice: Notice) -> dict[str, Any]:
    """A message of Slack; names of jobs cannot become markup or mentions."""
    escaped = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    title = notice.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    sections = [f"*{title}*", f"```{escaped}```" if escaped else ""]
    return {
        "text": title,
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": section[:_SLACK_SECTION_CHARS]}}
            for section in sections
            if section
        ],
    }


def mail_of(notice: Notice, email: Email) -> EmailMessage:
    """A mail; its id is the same at every try, so that mail programs show it once."""
    message = EmailMessage()
    message["Subject"] = notice.title
    message["From"], message["To"] = email.sender, ", ".join(email.to)
    message["Date"] = formatdate(notice.at_s)
    message["Message-ID"] = f"<{_webhook_id(notice)}@{email.sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no automatic answers to this
    message.set_content(notice.text + "\n")
    return message


def _webhook_id(notice: Notice) -> str:
    """The same id for every channel and every try."""
    return f"{notice.sweep}.{notice.notification_id}"


def _key_bytes(key: str) -> bytes:
    if not key.startswith(_PREFIX):
        return key.encode()
    try:
        return base64.b64decode(key.removeprefix(_PREFIX), validate=True)
    except ValueError:
        message = f"the webhook's key begins with {_PREFIX} and is not base64; give it as its receiver shows it"
        raise DeliveryError(message) from None


def _post(url: str, request: Signed) -> None:
    try:
        status = post(url, request.body, request.headers, timeout_s=TIMEOUT_S)
    except OSError as error:
        # Not the error itself, which may quote the URL.
        refused = _TUNNEL_REFUSED.match(str(error))
        reason = error.strerror or (f"the proxy answers with HTTP {refused[1]}" if refused else "no connection")
        proxy = _proxy_to(urlsplit(url))
        through = f" through the proxy {proxy.host}:{proxy.port} of HTTPS_PROXY" if proxy else ""
        raise DeliveryError(f"the receiver does not answer{through} ({type(error).__name__}: {reason})") from None
    if status == _GONE:
        raise RefusedForeverError("the receiver answers with HTTP 410: it wants no more")
    if not 200 <= status < 300:
        raise DeliveryError(f"the receiver answers with HTTP {status}; check the URL and what it wants")


def _mail(notice: Notice, email: Email) -> None:
    host, _, port = email.server.rpartition(":")
    host = host.strip("[]")
    try:
        with Deadline(TIMEOUT_S) as deadline, _Mail(host, email.security, deadline) as server:
            server.connect(host, int(port))
            if email.security is Security.STARTTLS:
                server.starttls(context=ssl.create_default_context())
            if email.user:
                server.login(email.user, resolve_secret(email.password, what="the password of the mail server"))
            server.send_message(mail_of(notice, email))
    except smtplib.SMTPResponseException as error:
        raise DeliveryError(f"the mail server {email.server} refuses with code {error.smtp_code}") from None
    except (smtplib.SMTPException, OSError) as error:
        raise DeliveryError(f"the mail server {email.server} did not take it ({type(error).__name__})") from None


class _Mail(smtplib.SMTP):
    """SMTP to an address that was checked, even if the name now resolves to another one; optionally with TLS."""

    def __init__(self, host: str, security: Security, deadline: Deadline) -> None:
        super().__init__(timeout=deadline.timeout_s)
        self._host = host  # what starttls() compares the certificate with
        self._has_tls, self._deadline = security is Security.TLS, deadline

    def _get_socket(self, host: str, port: int, _: float) -> socket.socket:
        found = self._deadline.connect((checked_address(host, port), port))
        return ssl.create_default_context().wrap_socket(found, server_hostname=host) if self._has_tls else found
