"""Which secrets a sweep's channels may use. Pure.

A controller reads references in its own environment, and whoever may submit a sweep, or write the store that it lies
in, chooses the mail server that a password is told to. So what a sweep names must be called as what it is for; the
cluster's own file, which its operator writes, may name anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.notify import Channel, Security

_MEANT_FOR_IT = re.compile(r"(?i)notif|hook|slack|mail|smtp")
_NAMED = re.compile(r"\$\{(?P<where>[a-z-]+):(?P<name>[^}#]+)(?:#[^}]*)?\}")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def check_channel_of_sweep(channel: Channel) -> None:
    """Refuse a sweep's channel that would use other secrets of the cluster, or tell one in clear.

    Raises:
        UserError: and nothing was read.
    """
    for reference in _references(channel):
        found = _NAMED.fullmatch(reference)
        name = found["name"].rpartition("/")[2] if found else ""
        if not _MEANT_FOR_IT.search(name):
            raise UserError(
                f"a sweep may not use {reference}: its name must hold notif, hook, slack, mail or smtp, so that no "
                "sweep has other secrets of the cluster sent anywhere; rename it, or put the channel into the "
                "cluster's own file (ORCHESTRATOR_NOTIFY_FILE)"
            )
    email = channel.email
    if email is not None and email.security is Security.NONE and email.server.rpartition(":")[0] not in _LOOPBACK:
        raise UserError(f"the mail server {email.server} would be told everything in clear; write security: starttls")


def _references(channel: Channel) -> Iterator[str]:
    password = channel.email.password if channel.email is not None else ""
    webhook = channel.webhook if channel.webhook.startswith("${") else ""
    yield from (text for text in (webhook, channel.secret, channel.slack, password) if text)
