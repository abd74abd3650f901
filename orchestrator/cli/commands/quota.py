"""``orchestrator quota``: limits on what each user's sweeps use at once on a cluster, and what they use now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.arguments import StoreOption
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import NotFoundError, OrchestratorError, StorageError, UsageError
from orchestrator.core.suggest import did_you_mean
from orchestrator.services.settings import Settings
from orchestrator.services.stores import open_existing_store
from orchestrator.services.terminal import stderr_console
from orchestrator.storage.layout import quotas_name
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.sweeps.client import Cap, Quotas, change_quotas, list_sweeps, load_snapshot, read_quotas, write_quotas
from orchestrator.sweeps.lease import is_served, read_lease
from orchestrator.sweeps.quotas import ANYBODY

quota = typer.Typer(
    help="Limit how many GPUs and attempts each user's sweeps use at once on a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_User = Annotated[str, typer.Argument(metavar="USER", help="Name of a user, as `status` shows owners of sweeps.")]
_Others = Annotated[bool, typer.Option("--others", help="All users without their own limits.")]
_Cluster = Annotated[str, typer.Option(help="Name of the cluster in the store; default: that of the settings.")]
_ANY = "none"
_WHOLE = "a whole number"
_OTHERS = "(all others)"
_COLUMNS = ("user", "max_gpus", "max_concurrent", "GPUs now", "attempts now")


@quota.command()
def show(*, cluster: _Cluster = "", output: DocumentOption = DocumentForm.TABLE, store: StoreOption = "") -> None:
    """Show the limits of all users, and what their sweeps use now."""
    objects, name = _open(cluster, store)
    _show(objects, name, read_quotas(objects, name), output)


@quota.command(name="set")
def set_bounds(
    user: _User = "",
    *,
    others: _Others = False,
    max_gpus: Annotated[
        str, typer.Option(metavar="NUMBER|none", help="Largest number of GPUs of all running attempts; none: no limit.")
    ] = "",
    max_concurrent: Annotated[
        str, typer.Option(metavar="NUMBER|none", help="Largest number of attempts that run at once; none: no limit.")
    ] = "",
    cluster: _Cluster = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Set the limits of a user; a limit that is not given stays as it is. Running jobs are not ended."""
    name_or_others = user_or_others(user, is_others=others)
    bounds = parse_bounds(max_gpus, max_concurrent)
    objects, name = _open(cluster, store)
    quotas = change_quotas(objects, name, lambda now: _with(now, name_or_others, bounds))
    shown = "all users without their own limits" if name_or_others == ANYBODY else name_or_others
    message = f"On cluster {name}, what {shown} may hold is set{_unknown_user_note(objects, name, name_or_others)}"
    _changed(message, objects, name, quotas, output)


@quota.command()
def clear(
    user: _User = "",
    *,
    others: _Others = False,
    everyone: Annotated[bool, typer.Option("--all", help="Remove all limits of the cluster.")] = False,
    cluster: _Cluster = "",
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Remove a user's own limits, so that the limits of --others apply again; or remove all limits."""
    if everyone and (user or others):
        raise typer.BadParameter("--all means all users: do not name a user as well")
    name_or_others = "" if everyone else user_or_others(user, is_others=others, beside=", or --all for everybody")
    objects, name = _open(cluster, store)
    if everyone:  # also damaged ones
        write_quotas(objects, name, {})
        _changed(f"Cluster {name} limits no user", objects, name, {}, output)
        return
    quotas = change_quotas(objects, name, _without(name_or_others, name))
    shown = "The limits of all others are" if name_or_others == ANYBODY else f"{name_or_others}'s own limits are"
    _changed(f"{shown} removed on cluster {name}", objects, name, quotas, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The fields that ``set`` changes; other fields stay."""

    max_gpus: float | None = None
    max_concurrent: int | None = None
    given: frozenset[str] = frozenset()

    def over(self, cap: Cap) -> Cap:
        """A user's bounds, changed."""
        return replace(cap, **{name: getattr(self, name) for name in self.given})


@dataclass(slots=True, kw_only=True)
class _HeldByUser:
    gpus: float = 0.0
    num_live: int = 0


@dataclass(slots=True, kw_only=True)
class _ClusterUse:
    """What runs on the cluster, by owner, according to the journals."""

    by_owner: dict[str, _HeldByUser] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    """Sweeps whose journal is damaged: what they hold is not known."""


def _open(cluster: str, store: str) -> tuple[ObjectStore, str]:
    """The store, and the cluster's name. Raises ``UsageError`` if it can be none, ``SpecError`` if it is not known."""
    cluster = Settings().known_cluster(cluster)
    try:
        check_name(quotas_name(cluster))
    except StorageError as error:
        raise UsageError(f"cluster {cluster!r} cannot name a cluster: {error}") from error
    return open_existing_store(store), cluster


def user_or_others(user: str, *, is_others: bool, beside: str = "") -> str:
    """The user, or ``ANYBODY``; ``beside``: other options to name in an error. Raises ``typer.BadParameter``."""
    if bool(user) == is_others:
        message = "name one user, or use --others for all users without their own limits" + beside
        raise typer.BadParameter(message)
    if is_others:
        return ANYBODY
    if user == ANYBODY:
        raise typer.BadParameter(f"{user!r} is not a user: use --others for all users without their own limits")
    if user != user.strip() or not user.isprintable():
        message = f"{user!r} is not a user's name: it has blanks at its ends, or characters that cannot be printed"
        raise typer.BadParameter(message)
    return user


def parse_bounds(max_gpus: str, max_concurrent: str) -> Bounds:
    """``64``, ``0.5`` or ``none``. Raises ``typer.BadParameter``."""
    given = {"max_gpus": max_gpus, "max_concurrent": max_concurrent}
    chosen = frozenset(name for name, text in given.items() if text)
    if not chosen:
        message = "give --max-gpus, --max-concurrent or both; none removes a limit"
        raise typer.BadParameter(message)
    concurrent = _number("--max-concurrent", max_concurrent, _WHOLE)
    return Bounds(
        max_gpus=_number("--max-gpus", max_gpus, "a number"),
        max_concurrent=None if concurrent is None else int(concurrent),
        given=chosen,
    )


def _with(now: Quotas, user: str, bounds: Bounds) -> Quotas:
    """The limits with a user's changed ones; an entry without limits exempts a user from those of all others."""
    changed = bounds.over(now.get(user, Cap()))
    others = {name: cap for name, cap in now.items() if name != user}
    return others if user == ANYBODY and changed == Cap() else {**now, user: changed}


def _without(user: str, cluster: str) -> Callable[[Quotas], Quotas]:
    def change(now: Quotas) -> Quotas:
        if user not in now:
            subject = "all others have" if user == ANYBODY else f"{user} has"
            names = [_OTHERS if name == ANYBODY else name for name in now]
            bounded = did_you_mean(user, names, they_are="users with limits")
            message = f"{subject} no limits on cluster {cluster}, and nothing was changed; {bounded}"
            raise NotFoundError(message)
        return {name: cap for name, cap in now.items() if name != user}

    return change


def _number(flag: str, text: str, what: str) -> float | None:
    """The number, or None for none. Raises ``typer.BadParameter``."""
    if not text or text.lower() == _ANY:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (what == _WHOLE and not number.is_integer()):
        message = f"{flag} {text!r} is neither {what} of 0 or more nor '{_ANY}'"
        raise typer.BadParameter(message)
    return number


def _changed(message: str, store: ObjectStore, cluster: str, quotas: Quotas, form: DocumentForm) -> None:
    if is_served(store, cluster):
        when = "its controller applies it within seconds, and ends no running job"
    elif read_lease(store, cluster) is None:
        when = "the store has seen no controller of a cluster of this name yet; one that starts will apply it"
    else:
        when = "no controller runs; the next one will apply it"
    stderr_console().print(f"{message}: {when}.", soft_wrap=True)
    _show(store, cluster, quotas, form)


def _unknown_user_note(store: ObjectStore, cluster: str, user: str) -> str:
    """A note about a user who owns no sweep: a new user, or a typo."""
    owners = _use_of(store, cluster).by_owner
    if user == ANYBODY or not owners or user in owners:
        return ""
    return f" ({user} owns no sweep on it; {did_you_mean(user, sorted(owners))})"


def _use_of(store: ObjectStore, cluster: str) -> _ClusterUse:
    use = _ClusterUse()
    for sweep in list_sweeps(store):
        try:
            snapshot = load_snapshot(store, sweep)
        except OrchestratorError:
            use.unreadable.append(sweep)
            continue
        if snapshot.cluster == cluster and snapshot.plan is not None and snapshot.plan.owner:
            held = use.by_owner.setdefault(snapshot.plan.owner, _HeldByUser())
            held.gpus += sum(attempt.resources.gpus for attempt in snapshot.live_attempts)
            held.num_live += len(snapshot.live_attempts)
    return use


def _show(store: ObjectStore, cluster: str, quotas: Quotas, form: DocumentForm) -> None:
    use = _use_of(store, cluster)
    users = _users(quotas, use)
    if form is DocumentForm.TABLE:
        stdout_console().print(_table(cluster, users))
    else:
        print_document({"cluster": cluster, "users": users, "unreadable_sweeps": use.unreadable}, form)
    if use.unreadable:
        missing = f"It is unknown what these sweeps use, because they cannot be read: {', '.join(use.unreadable)}."
        stderr_console().print(missing, soft_wrap=True)


def _users(quotas: Quotas, use: _ClusterUse) -> dict[str, Mapping[str, Any]]:
    """For every user with limits or running jobs: the limits, whose they are, and what is held."""
    running = {owner for owner, held in use.by_owner.items() if held.num_live}
    users: dict[str, Mapping[str, Any]] = {}
    for name in [*sorted((set(quotas) | running) - {ANYBODY}), *({ANYBODY} & set(quotas))]:
        source = name if name in quotas else ANYBODY
        cap, held = quotas.get(source, Cap()), use.by_owner.get(name, _HeldByUser())
        now = {} if name == ANYBODY else {"gpus": held.gpus, "attempts": held.num_live}
        users[name] = {
            "max_gpus": cap.max_gpus,
            "max_concurrent": cap.max_concurrent,
            "bounds_of": source if source in quotas else None,
            **now,
        }
    return users


def _table(cluster: str, users: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=f"Quotas of cluster {cluster}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "user" else "right")
    for name, row in users.items():
        shown = _OTHERS if name == ANYBODY else name
        bounds = [_cell(row["max_gpus"]), _cell(row["max_concurrent"])]
        table.add_row(shown, *bounds, _cell(row.get("gpus"), ""), _cell(row.get("attempts"), ""))
    table.caption, table.caption_justify = (None if users else "no user has limits"), "left"
    return table


def _cell(number: float | None, missing: str = "-") -> str:
    return missing if number is None else f"{number:g}"
