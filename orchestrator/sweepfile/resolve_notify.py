"""``notify:``, resolved; and the file of the same list that counts for all sweeps of a cluster."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.notify import Channel, Email, Occasion, Security
from orchestrator.sweepfile.parse.tree import parse_tree, parse_value
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.schema_notify import EmailSpec, NotifySpec
from orchestrator.sweepfile.schema_policy import duration_s


def resolve_notify(entries: Iterable[NotifySpec]) -> tuple[Channel, ...]:
    """The channels of a sweep."""
    return tuple(_channel(entry) for entry in entries)


def is_notify_file(text: str, file: str) -> bool:
    """Whether a text holds only who is told (or a list of that, which is refused), and is no sweep.yaml.

    Raises:
        SpecError: it is not YAML.
    """
    found = parse_value(text, file)
    return isinstance(found, list) or (isinstance(found, dict) and set(found) == {"notify"})


def parse_notify_file(text: str, file: str) -> tuple[Channel, ...]:
    """The channels of a file, called ``file`` in errors.

    Raises:
        SpecError: everything that is wrong with it, one line each.
    """
    if isinstance(parse_value(text, file), list):
        raise SpecError((f"{file}:1:1: this is a bare list; write notify: above it",))
    tree = parse_tree(text, file)
    entries = tree.value.get("notify")
    if not isinstance(entries, list) or len(tree.value) != 1:
        raise SpecError((f"{file}:1:1: this is no file of who is told; write notify: [...], and nothing else",))
    return resolve_notify(validate(NotifySpec, entry, tree, ("notify", number)) for number, entry in enumerate(entries))


def _channel(entry: NotifySpec) -> Channel:
    return Channel(
        on=tuple(Occasion(name) for name in dict.fromkeys(entry.on)),
        webhook=entry.webhook,
        secret=entry.secret,
        slack=entry.slack,
        email=_email(entry.email) if entry.email is not None else None,
        stalled_after_s=duration_s(entry.stalled_after) or 0.0,
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
