"""Submitting to a cluster that this process does not join: through its dashboard, or through the store alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from orchestrator.cli.arguments import Code
from orchestrator.cli.asking import confirmed
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import stderr_console
from orchestrator.cli.settings import UNKNOWN_STORE, Settings
from orchestrator.cli.wish import Wish, captured_document
from orchestrator.core.errors import (
    ClusterError,
    ControllerError,
    InfeasibleError,
    NotFoundError,
    OrchestratorError,
    SpecError,
)
from orchestrator.core.units import format_duration
from orchestrator.remote.answer import Answer, Verdict
from orchestrator.remote.dashboard import Dashboard
from orchestrator.remote.payload import Payload, Program
from orchestrator.remote.send import send
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import current_user, new_message_id
from orchestrator.sweeps.lease import read_lease


def require_meeting_place(settings: Settings, store_uri: str) -> None:
    """Refuse to leave a message for a cluster where it surely does not look.

    Raises:
        SpecError: the cluster is only reached through its store, and the store is this project's own folder.
    """
    by_store = settings.is_remote and not settings.jobs_address
    if by_store and store_uri == settings.own_store_uri and not settings.store and not settings.store_shared:
        where = "its context (orchestrator config set-context NAME store=s3://...) or --store"
        raise SpecError((f"cluster {settings.cluster} is reached through its store: set store=... in {where}",))


class Submitter(Protocol):
    """What leads to a controller."""

    @property
    def settings(self) -> Settings:
        """Where this process submits to."""

    @property
    def store(self) -> ObjectStore | None:
        """None = only the cluster reaches it."""

    @property
    def addresses(self) -> dict[str, str]:
        """What people may open, by name."""

    def submit(self, wish: Wish) -> str:
        """Submit; returns the message's id."""

    def keep_alive(self) -> None:
        """Called again and again while somebody follows the sweep."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """Wait until MLflow has all of an ended sweep; false if that takes too long."""


@dataclass(slots=True, kw_only=True)
class ThroughStore:
    """The controller's inbox: whoever may write the store may submit, and nothing else is needed."""

    settings: Settings
    store: ObjectStore | None
    addresses: dict[str, str] = field(default_factory=dict)

    def submit(self, wish: Wish) -> str:
        """Leave the message; says when nobody is there to read it."""
        if self.store is None:  # pragma: no cover - there is no other way
            raise AssertionError
        message = wish.leave(self.store, self.settings)
        cluster = self.settings.cluster
        lease, now = read_lease(self.store, cluster), time.time()
        if lease is None or lease.expires_at_s < now:
            since = "" if lease is None else f" (the last one was seen {format_duration(now - lease.expires_at_s)} ago)"
            _say(
                f"No controller of cluster {cluster} runs{since}: the sweep waits in the store until one does. One "
                "starts with a submit on the cluster itself, or through its dashboard."
            )
        return message

    def keep_alive(self) -> None:
        """The cluster's own watchdog does that."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """The cluster's publisher works whether anybody waits or not."""
        return True


@dataclass(slots=True, kw_only=True)
class ThroughDashboard:
    """A job of the cluster, which submits there: the cluster's token is all that is needed."""

    settings: Settings
    store: ObjectStore | None
    asks: Callable[[str], bool] = field(default=lambda question: confirmed(question, subject="a changed sweep"))
    addresses: dict[str, str] = field(default_factory=dict)
    dashboard: Dashboard = field(init=False)

    def __post_init__(self) -> None:
        """Raises ``ClusterError`` if the cluster does not answer, or refuses us."""
        self.dashboard = Dashboard(self.settings.jobs_address, self.settings.read_token())
        if self.dashboard.sends_token_in_clear:
            _say(
                f"warning: the token goes to {self.dashboard.address} unencrypted, and whoever is on the way can "
                "submit as you; use https, or a tunnel: ssh -L 8265:localhost:8265 HEAD"
            )
        self.dashboard.version()
        self.addresses = {"Ray dashboard": self.dashboard.address}

    def submit(self, wish: Wish) -> str:
        """Send it, and again with the user's consent where it replaces another plan.

        Raises:
            OrchestratorError: the cluster refused it, or the user did.
        """
        payload = self._payload(wish)
        answer = self._send(payload)
        if answer.verdict is Verdict.DIFFERS:
            _say(answer.message)
            if not self.asks("Replace its plan and submit?"):
                raise InfeasibleError(f"sweep {wish.plan.sweep} has another plan there, and was left as it is")
            answer = self._send(replace(payload, replaces=True))
        _raise_refusal(answer)
        counts = ", ".join(f"{number} {what}" for what, number in answer.counts.items())
        waits = "" if answer.verdict is Verdict.ACCEPTED else "; its controller is busy, and takes it in its turn"
        _say(f"Cluster {answer.cluster} has it ({counts}; store {answer.store_uri}){waits}.")
        return payload.message_id

    def keep_alive(self) -> None:
        """The cluster's own watchdog does that."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """The cluster's publisher works whether anybody waits or not."""
        return True

    def _payload(self, wish: Wish) -> Payload:
        settings, plan = self.settings, wish.plan
        return Payload(
            message_id=new_message_id(time.time()),
            plan=plan.to_json(),
            spec_text=wish.text,
            program=Program.here(),
            provenance=captured_document(),
            sender=current_user(),
            consent=wish.consent,
            ownership=wish.ownership,
            replaces=wish.replaces,
            store_uri="" if plan.store_uri == UNKNOWN_STORE else plan.store_uri,
            cluster=settings.cluster_name,
            namespace=settings.namespace,
        )

    def _send(self, payload: Payload) -> Answer:
        _say(f"Sending it to {self.dashboard.address} ...")
        answer = send(self.dashboard, payload, ships_code=self.settings.code is Code.WHEEL, say=_say)
        for notice in answer.notices:
            _say(f"note: {notice}")
        return answer


def _raise_refusal(answer: Answer) -> None:
    if answer.verdict not in {Verdict.REFUSED, Verdict.DIFFERS}:
        return
    kinds: dict[int, type[OrchestratorError]] = {
        ExitCode.REFUSED: InfeasibleError,
        ExitCode.NOT_FOUND: NotFoundError,
        ExitCode.FAILURE: ClusterError,
    }
    message = f"the cluster refused it: {answer.message}"
    if answer.exit_code == ExitCode.SPEC:
        raise SpecError((message,))
    raise kinds.get(answer.exit_code, ControllerError)(message)


def _say(text: str) -> None:
    stderr_console().print(text, markup=False, soft_wrap=True)
