"""Sending one notification over one channel. Whatever fails raises ``DeliveryError``; nothing here tries again."""

from __future__ import annotations

import base64
import hmac
import json
import smtplib
import socket
import ssl
import time
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from hashlib import sha256
from typing import Any

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.references import is_reference, resolve_secret
from orchestrator.notifications.connections import Deadline, checked_address, post
from orchestrator.notifications.notifications import Notice
from orchestrator.sweepfile.values import Channel, Email, Security

TIMEOUT_S = 10.0
_GONE = 410
_PREFIX = "whsec_"
"""Of keys as the Standard Webhooks specification writes them: what follows is base64."""


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
        DeliveryError: nobody took it; the message shows no secret.
        UserError: a reference leads to no secret, or a URL is refused.
    """
    if channel.email is not None:
        _mail(notice, channel.email)
    elif channel.slack:
        url = resolve_secret(channel.slack, what="the URL of Slack's webhook")
        body = json.dumps(slack_document(notice)).encode()
        _post(url, Signed(body=body, headers={"Content-Type": "application/json"}))
    else:
        url = resolve_secret(channel.webhook, what="the webhook") if is_reference(channel.webhook) else channel.webhook
        key = resolve_secret(channel.secret, what="the webhook's key") if channel.secret else ""
        _post(url, signed(notice, key, time.time()))


def signed(notice: Notice, key: str, now: float) -> Signed:
    """The request of a webhook, signed as the Standard Webhooks specification says (version 1.0.0, "Signature scheme").

    The signature covers the id, the time of this very try and the body: who keeps a request cannot send it later.
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
    """What a webhook gets."""
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
            {"type": "section", "text": {"type": "mrkdwn", "text": section[:2900]}} for section in sections if section
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
    """Of one thing told about one sweep, everywhere."""
    return f"{notice.sweep}.{notice.notification_id}"


def _key_bytes(key: str) -> bytes:
    if not key.startswith(_PREFIX):
        return key.encode()
    try:
        return base64.b64decode(key.removeprefix(_PREFIX), validate=True)
    except ValueError:
        message = f"the webhook's key begins with {_PREFIX} and is no base64; give it as its receiver shows it"
        raise DeliveryError(message) from None


def _post(url: str, request: Signed) -> None:
    try:
        status = post(url, request.body, request.headers, timeout_s=TIMEOUT_S)
    except OSError as error:
        # Not the error itself, which may quote the URL.
        message = f"the receiver does not answer ({type(error).__name__}: {error.strerror or 'no connection'})"
        raise DeliveryError(message) from None
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
    """SMTP to an address that was checked, whatever the name leads to by now; with TLS from the beginning, if asked."""

    def __init__(self, host: str, security: Security, deadline: Deadline) -> None:
        super().__init__(timeout=deadline.timeout_s)
        self._host = host  # what starttls() compares the certificate with
        self._has_tls, self._deadline = security is Security.TLS, deadline

    def _get_socket(self, host: str, port: int, _: float) -> socket.socket:
        found = self._deadline.connect((checked_address(host, port), port))
        return ssl.create_default_context().wrap_socket(found, server_hostname=host) if self._has_tls else found
