"""`notify:`: its schema, the secrets that a channel may use, and the file of the same list for a whole cluster. Pure.

A controller resolves references in its own environment, and a person who may submit a sweep, or write its store,
chooses the mail server that gets a password. So a sweep may only name secrets whose names say that they are for
notifications; the cluster's own file, which its operator writes, may name any secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.errors import SpecError, UserError
from orchestrator.core.security.references import is_reference
from orchestrator.core.security.urls import check_url, forbidden_host
from orchestrator.sweepfile.fields import Strict
from orchestrator.sweepfile.parse.tree import parse_tree, parse_value
from orchestrator.sweepfile.policy import duration_s
from orchestrator.sweepfile.problems import Complaints, validate
from orchestrator.sweepfile.values import Channel, ClusterChannel, Email, Occasion, Security

_ADDRESS = re.compile(r"[^@\s<>,;:\"\\()\[\]]{1,64}@[A-Za-z0-9.-]{1,255}")
_SERVER = re.compile(r"(?P<host>[A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_REFERENCES = "${env:NAME}, ${file:/path} or another reference of docs/security.md, which the controller reads"
_Occasion = Literal["finished", "failed", "stalled", "budget"]
_MEANT_FOR_IT = re.compile(r"(?i)notif|hook|slack|mail|smtp")
_NO_APPRISE = (
    "a sweep may not use apprise, which reaches any address; put it into the cluster's own file "
    "(ORCHESTRATOR_NOTIFY_FILE)"
)
_NAMED = re.compile(r"\$\{(?P<where>[a-z-]+):(?P<name>[^}#]+)(?:#[^}]*)?\}")


def _reference(text: str) -> str:
    if text and not is_reference(text):
        # No message shows the text, which may be the secret itself.
        message = "sweeps are stored and shared, so write a reference to the secret, not the secret: {forms}"
        raise PydanticCustomError("refused", message, {"forms": _REFERENCES})
    return text


def _url(text: str) -> str:
    if text and not is_reference(text):
        try:
            check_url(text, what="the webhook")
        except UserError as error:
            raise PydanticCustomError("refused", "{why}", {"why": str(error)}) from None
    return text


def _mail_address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise PydanticCustomError("refused", "{text} is not a mail address; write name@host", {"text": repr(text)})
    return text


def _server(text: str) -> str:
    found = _SERVER.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        message = "{text} is not a mail server; write host:port, such as smtp.example.org:587"
        raise PydanticCustomError("refused", message, {"text": repr(text)})
    if reason := forbidden_host(found["host"].strip("[]")):
        message = "{text} is refused: it names a host {reason}; name your mail server"
        raise PydanticCustomError("refused", message, {"text": repr(text), "reason": reason})
    return text


def _duration(text: str) -> str:
    if not duration_s(text):
        message = "{text} is not a duration above zero; write 30m, 2h, 1d"
        raise PydanticCustomError("refused", message, {"text": repr(text)})
    return text


Reference = Annotated[str, AfterValidator(_reference)]
MailAddress = Annotated[str, AfterValidator(_mail_address)]


class EmailSpec(Strict):
    """A mail server, and who writes to whom."""

    to: Annotated[list[MailAddress], Field(min_length=1, max_length=50)] = Field(description="Who gets the mail.")
    sender: MailAddress = Field(description="From whom it comes.")
    server: Annotated[str, AfterValidator(_server)] = Field(description="host:port of the mail server (SMTP).")
    user: str = Field("", description="Name to log in with; default: no login.")
    password: Reference = Field("", description="Reference to its password: ${env:NAME}, ${file:/path}, ...")
    security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="How the connection is protected; none is refused beyond this machine."
    )

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        if bool(self.user) != bool(self.password):
            raise PydanticCustomError("refused", "user and password belong together; give both or none")
        if self.security == "none" and self.server.rpartition(":")[0] not in _LOOPBACK:
            message = "without TLS anyone on the network can read mail and password; write security: starttls or tls"
            raise PydanticCustomError("refused", message)
        return self


class NotifySpec(Strict):
    """One way to notify people: a webhook, Slack or mail."""

    HINTS: ClassVar[Mapping[str, str]] = {"apprise": _NO_APPRISE}
    kinds: ClassVar[tuple[str, ...]] = ("webhook", "slack", "email")

    on: Annotated[list[_Occasion], Field(min_length=1)] = Field(
        default_factory=lambda: list(get_args(_Occasion)),
        description="Events to notify about: the sweep finished, failed, stalled, or its budget is nearly or "
        "completely spent.",
    )
    webhook: Annotated[str, AfterValidator(_url)] = Field(
        "", description="URL that gets a POST of JSON, or a reference to it. http only on this machine or network."
    )
    secret: Reference = Field(
        "", description="Reference to the key that signs the messages of the webhook; default: unsigned."
    )
    slack: Reference = Field("", description="Reference to the URL of an incoming Slack webhook: ${env:SLACK_URL}.")
    email: EmailSpec | None = Field(None, description="Mail.")
    stalled_after: Annotated[str, AfterValidator(_duration)] = Field(
        "30m", description="A sweep has stalled when nothing happened for so long: 30m, 2h, 1d."
    )

    @model_validator(mode="after")
    def _is_one_channel(self) -> Self:
        given = [name for name in self.kinds if getattr(self, name)]
        if len(given) != 1:
            found = f"{', '.join(given)}; keep one and write an entry for each" if given else "none; add one"
            message = "this needs exactly one of {kinds}; it has {found}"
            raise PydanticCustomError("refused", message, {"kinds": ", ".join(self.kinds), "found": found})
        if self.secret and not self.webhook:
            raise PydanticCustomError("refused", "secret signs what a webhook gets; without webhook remove it")
        return self


class ClusterNotifySpec(NotifySpec):
    """An entry of the cluster's own file, which its operator writes: also any service that Apprise knows."""

    kinds: ClassVar[tuple[str, ...]] = (*NotifySpec.kinds, "apprise")

    apprise: Reference = Field("", description="Reference to a URL of Apprise: ${file:/run/secrets/teams}.")


# -------------------------------------------------------------------------------------------------- what it resolves to


def resolve_notify(entries: Iterable[NotifySpec]) -> tuple[Channel, ...]:
    """The channels of a sweep."""
    return tuple(_channel(entry) for entry in entries)


def is_notify_file(text: str, file: str) -> bool:
    """Whether a text holds only ``notify:`` (or a bare list, which is refused), and is not a sweep.yaml.

    Raises:
        SpecError: it is not YAML.
    """
    found = parse_value(text, file)
    return isinstance(found, list) or (isinstance(found, dict) and set(found) == {"notify"})


def parse_notify_file(text: str, file: str) -> tuple[Channel, ...]:
    """The channels of a cluster's own file, called ``file`` in errors.

    Raises:
        SpecError: everything that is wrong with it, one line each.
    """
    if isinstance(parse_value(text, file), list):
        raise SpecError((f"{file}:1:1: this is a bare list; write notify: above it",))
    tree = parse_tree(text, file)
    entries = tree.value.get("notify")
    if not isinstance(entries, list) or len(tree.value) != 1:
        raise SpecError((f"{file}:1:1: this is not a notification file; write notify: [...], and nothing else",))
    return resolve_notify(
        validate(ClusterNotifySpec, entry, tree, ("notify", number)) for number, entry in enumerate(entries)
    )


def _channel(entry: NotifySpec) -> Channel:
    occasions = tuple(Occasion(name) for name in dict.fromkeys(entry.on))
    stalled_after_s = duration_s(entry.stalled_after) or 0.0
    if isinstance(entry, ClusterNotifySpec) and entry.apprise:
        return ClusterChannel(on=occasions, apprise=entry.apprise, stalled_after_s=stalled_after_s)
    return Channel(
        on=occasions,
        webhook=entry.webhook,
        secret=entry.secret,
        slack=entry.slack,
        email=_email(entry.email) if entry.email is not None else None,
        stalled_after_s=stalled_after_s,
    )


def _email(entry: EmailSpec) -> Email:
    return Email(
        to=tuple(entry.to),
        sender=entry.sender,
        server=entry.server,
        user=entry.user,
        password=entry.password,
        security=Security(entry.security),
    )


# --------------------------------------------------------------------------- which secrets a channel of a sweep may use


def check_channel_of_sweep(channel: Channel) -> None:
    """Refuse a sweep's channel that would use other secrets of the cluster, or that contains one in clear text.

    Raises:
        UserError: no reference was read.
    """
    if isinstance(channel, ClusterChannel):
        raise UserError(_NO_APPRISE)
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
        raise UserError(
            f"the mail server {email.server} would get mail and password unencrypted; write security: starttls"
        )


def _references(channel: Channel) -> Iterator[str]:
    password = channel.email.password if channel.email is not None else ""
    webhook = channel.webhook if channel.webhook.startswith("${") else ""
    yield from (text for text in (webhook, channel.secret, channel.slack, password) if text)


def check_channels(channels: Sequence[Channel], complaints: Complaints) -> None:
    """Refuse them here already: a controller would refuse them only with the first notification, hours later."""
    for position, channel in enumerate(channels):
        try:
            check_channel_of_sweep(channel)
        except UserError as error:
            complaints.add(("notify", position), str(error))
