"""Submitting a sweep: one procedure for the command line, for Python, and for requests from another machine.

``prepare_submit`` plans and checks a sweep, ``SubmitRequest`` is then sent, and ``deliver`` puts it into the sweep's
inbox. Invariants:

- Only ``check_submit`` refuses submits, and nothing is written before it.
- Another plan replaces the one that was submitted under a name only if its sender agreed.
- A request that is sent twice is handled once: ``sent_now`` gives it its id.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from orchestrator.core.code import package_digest, version_or_empty
from orchestrator.core.errors import StorageError, UserError
from orchestrator.core.job_kinds import describe_versions, other_versions
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.simulation_files import SimulationCode
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.diff import Change, PlanDiff, diff_plans
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.artifact_lookup import ArtifactStatus
from orchestrator.services.costs import read_prices
from orchestrator.services.fleets import StatedCluster, choose_fleet
from orchestrator.services.preview import Preview, diff_lines, diff_table, make_preview, never_runs
from orchestrator.services.settings import UNKNOWN_STORE, Settings
from orchestrator.services.terminal import say, show
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.open import open_store
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.survey import require_datasets
from orchestrator.sweepfile.values import ResolvedSweep
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Consent, Ownership, SweepLedger, current_user, list_sweeps, new_message_id
from orchestrator.sweeps.requests import list_inbox
from orchestrator.tracking import provenance

REQUEST_VERSION = 1
DISTRIBUTION = "pretraining-orchestrator"
ANSWER_MARK = "ORCHESTRATOR-ANSWER "
_COMPARED_LIBRARIES = ("ray", "torch", "timm", "torchvision", "numpy")
"""Libraries whose versions change results or may not fit together."""
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Which code and libraries a process has."""

    release: str
    digest: str
    """Of the code of both packages."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions by name."""

    @classmethod
    def here(cls) -> Self:
        """Of this process; imports none of the libraries."""
        libraries = {name: found for name in _COMPARED_LIBRARIES if (found := version_or_empty(name))}
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(
            release=version_or_empty(DISTRIBUTION) or "a source tree",
            digest=package_digest(),
            libraries={"python": python, **libraries},
        )

    def differences(self, there: Program) -> list[str]:
        """What to tell a user whose own program this is of the one that will run; empty if they are alike."""
        told = []
        if self.digest != there.digest:
            told.append(
                f"the cluster runs release {there.release} (code {there.digest[:12]}), this is {self.release} (code "
                f"{self.digest[:12]}): its code runs the sweep; send yours along with --code wheel"
            )
        for name in sorted(self.libraries.keys() & there.libraries.keys()):
            mine, theirs = self.libraries[name], there.libraries[name]
            if mine != theirs:
                told.append(f"the cluster has {name} {theirs}, here is {mine}; the cluster's counts")
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """What a submit asks for, whichever way it takes to the cluster. As JSON it is what travels to another machine.

    It holds everything that is needed there, and no secret. Fields are only ever added, with defaults: the two sides
    may be of different releases.
    """

    plan: Plan
    """Its store is ``UNKNOWN_STORE`` where only the cluster knows it."""
    spec_text: str
    """The sweep.yaml."""
    ownership: Ownership = Ownership.KEEP
    consent: Consent = Consent.ASK
    replaces: bool = False
    """Whether the sender agrees to replace another plan of this name, should there be one."""
    replaced_revision: int | None = None
    """Where the sender agrees to replace that one alone; as of ``Submit``."""
    sender: str = field(default_factory=current_user)
    cluster: str = ""
    """Name in leases; empty = as the cluster itself says."""
    namespace: str = ""
    message_id: str = ""
    """Of ``sent_now``, as what follows."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where it was sent from: commit and changes of the directory, packages, machine."""
    program: Program = field(default_factory=lambda: Program(release="", digest=""))
    """Of the process that sends it."""
    version: int = REQUEST_VERSION

    @property
    def store_uri(self) -> str:
        """Of the plan; empty = the cluster's own."""
        return "" if self.plan.store_uri == UNKNOWN_STORE else self.plan.store_uri

    def sent_now(self) -> SubmitRequest:
        """The same with its id and where it comes from. Ids sort by time: make one when it is sent, not earlier."""
        return replace(
            self,
            message_id=new_message_id(time.time()),
            provenance=captured_document(),
            program=Program.here(),
        )

    def to_bytes(self) -> bytes:
        """JSON document."""
        # Not ``asdict``, which copies the plan.
        document = {item.name: getattr(self, item.name) for item in fields(self)}
        more = {"plan": self.plan.to_json(), "program": asdict(self.program), "store_uri": self.store_uri}
        return json.dumps(document | more).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Inverse of ``to_bytes``; what newer releases may have added is left out.

        Raises:
            UserError: it is of another version of this program, or damaged.
        """
        try:
            document = parse_json(content)
            number = document["version"]
            if number != REQUEST_VERSION:
                message = (
                    f"this submit has form {number} and the cluster's program reads {REQUEST_VERSION}: install the "
                    "same release on both sides, or send the code along with --code wheel"
                )
                raise UserError(message)
            plan = replace(Plan.from_json(document["plan"]), store_uri=document.get("store_uri") or UNKNOWN_STORE)
            known = {item.name: document[item.name] for item in fields(cls) if item.name in document}
            return cls(
                **known
                | {
                    "plan": plan,
                    "program": Program(**document["program"]),
                    "consent": Consent(document["consent"]),
                    "ownership": Ownership(document["ownership"]),
                }
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            message = f"this submit cannot be read: {error!r}; send it with the release that the cluster runs"
            raise UserError(message) from error


class SubmitVerdict(StrEnum):
    """What became of a submit."""

    ACCEPTED = "accepted"
    """Its controller has taken it."""
    WAITING = "waiting"
    """It is in the inbox; the controller is busy."""
    DIFFERS = "differs"
    """Nothing was submitted: a sweep of this name has another plan, and the sender has not agreed to replace it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitAnswer:
    """What a cluster says to a request from elsewhere: one line among all that the job there prints."""

    verdict: SubmitVerdict
    message: str = ""
    """Why it is refused, or how the plans differ."""
    notices: tuple[str, ...] = ()
    store_uri: str = ""
    cluster: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Jobs of the plan by what becomes of them."""
    exit_code: int = 0
    """Of the command that sent the submit."""

    def to_line(self) -> str:
        """``ORCHESTRATOR-ANSWER {...}``."""
        return ANSWER_MARK + json.dumps(asdict(self))

    @classmethod
    def find(cls, log: str) -> Self | None:
        """The last answer in a job's log; None without one."""
        lines = [line for line in log.splitlines() if line.startswith(ANSWER_MARK)]
        if not lines:
            return None
        try:
            document = parse_json(lines[-1].removeprefix(ANSWER_MARK))
            verdict, notices = SubmitVerdict(document.pop("verdict")), tuple(document.pop("notices"))
            return cls(**document, verdict=verdict, notices=notices)
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRevision:
    """A sweep as it stands before a submit under its name."""

    snapshot: Snapshot
    plan: Plan
    """Its current revision's."""

    def diff(self, plan: Plan) -> PlanDiff:
        """From what stands to what is submitted."""
        return diff_plans(self.plan, plan)

    def is_same(self, plan: Plan) -> bool:
        """Whether a submit would only give failed jobs another chance."""
        return replace(self.plan, revision=0, owner="") == replace(plan, revision=0, owner="")

    def owned_by_other(self, sender: str) -> str:
        """Why this user may not submit it; empty if they may."""
        owner, users = self.plan.owner, self.plan.policy.users
        if not owner or not sender or sender == owner or sender in users:
            return ""
        return (
            f"sweep '{self.plan.sweep}' belongs to {owner}, and you are {sender}: submit it under another name (--set "
            "name=...), let them list you under policy.users, or insist with --force"
        )


def find_previous(store: ObjectStore, sweep: str) -> PreviousRevision | None:
    """The sweep of this name; None if there is none yet."""
    if sweep not in list_sweeps(store):
        return None
    snapshot = SweepLedger(store, sweep).refresh()
    return None if snapshot.plan is None else PreviousRevision(snapshot=snapshot, plan=snapshot.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCheck:
    """What is known of a plan before it is submitted."""

    plan: Plan
    store: ObjectStore | None
    """None = it is not there yet, or only the cluster reaches it."""
    previous: PreviousRevision | None
    refusals: tuple[str, ...]
    """Why it must not be submitted: the budget, the data, or the owner."""
    seen_revision: int | None = None
    """Which its sender sees, and may agree to replace; 0: none yet. None = unknown: the store is not there, or another
    request still waits.
    """

    @property
    def changes_plan(self) -> bool:
        """Whether it replaces another plan, to which its sender must agree."""
        return self.previous is not None and not self.previous.is_same(self.plan)

    def probed_store(self) -> ObjectStore:
        """The store, which keeps what is promised. Raises ``StorageError``.

        Asked before anything depends on it: a store that ignores conditional writes could lose a sweep later.
        """
        store = self.store or open_store(self.plan.store_uri)
        probe_store(store)
        return store


def check_submit(
    plan: Plan, found: ArtifactStatus, *, sender: str, consent: Consent, refusals: Sequence[str] = ()
) -> SubmitCheck:
    """Look at all that can forbid a submit. Whoever submits asks this, wherever they are; it changes nothing.

    Args:
        plan: what is submitted.
        found: what its store holds.
        sender: who submits.
        consent: ``FORCE`` submits also what belongs to somebody else.
        refusals: what the plan's preview found. A cluster has none of the budget: it knows less of the data than the
            sender of a request, who read the sweep.yaml, and could refuse what is allowed.

    Raises:
        UserError: this program computes other results than the one that made the plan.
        StorageError: the store cannot be asked, or holds damaged records of the plan.
    """
    check_code_versions(plan)
    if found.problems:
        raise StorageError("; ".join(found.problems))
    previous = find_previous(found.store, plan.sweep) if found.store is not None else None
    told = tuple(refusals)
    if not told and previous is not None and consent is not Consent.FORCE:
        told = tuple(filter(None, (previous.owned_by_other(sender),)))
    seen = None
    if found.store is not None and not list_inbox(found.store, plan.sweep):
        seen = previous.plan.revision if previous is not None else 0
    return SubmitCheck(plan=plan, store=found.store, previous=previous, refusals=told, seen_revision=seen)


def simulation_packages(plan: Plan) -> Mapping[str, bytes]:
    """What travels with a plan to a cluster: the simulations in plain files, by the digest of their sources.

    Raises:
        UserError: a file is gone, or not as it was when it was planned.
    """
    packages = {}
    for digest, file in plan.simulation_files.items():
        sources = SimulationCode.read(Path(file))
        if sources.digest != digest:
            message = f"{Path(file).name}, or a module beside it that it imports, has changed since it was planned"
            raise UserError(f"{message}; submit the sweep again")
        packages[digest] = sources.to_package()
    return packages


def check_code_versions(plan: Plan) -> None:
    """Keys promise what a version of the code computes; this program must not write other results under them.

    Raises:
        UserError: some kind of job has another ``code_version`` here.
    """
    other = {one for job in plan.jobs for one in other_versions(job.kind, job.identity)}
    if other:
        raise UserError(
            "the plan was made by a program that computes other results than the cluster's: code_version of "
            f"{describe_versions(other)}; install the same release on both sides, or send the code along with --code "
            "wheel"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSubmit:
    """A sweep that was planned and checked, and not submitted yet."""

    preview: Preview
    check: SubmitCheck
    text: str
    """The sweep.yaml."""
    is_elsewhere: bool
    """Whether the cluster alone reads and writes the store, even if it is known here."""

    @property
    def plan(self) -> Plan:
        """What would be submitted."""
        return self.preview.plan

    def probed_store(self) -> ObjectStore | None:
        """As of the check; None where only the cluster uses it, which asks it there."""
        return None if self.is_elsewhere else self.check.probed_store()


def prepare_submit(
    sweep: ResolvedSweep,
    text: str,
    settings: Settings,
    *,
    store_uri: str,
    priority: int | None = None,
    prices: str = "",
    consent: Consent = Consent.ASK,
    runs_here: bool = False,
) -> PreparedSubmit:
    """Plan a sweep and check the plan; changes nothing.

    Args:
        sweep: read of the file.
        text: the file.
        settings: say which cluster.
        store_uri: where results go.
        priority: instead of the policy's.
        prices: path of a table of prices.
        consent: as of ``check_submit``.
        runs_here: in this process, which needs a store that it reaches.

    Raises:
        SpecError: a data set is declared, but not there; or nobody would find what is submitted.
        UserError, StorageError: as ``check_submit``.
    """
    require_datasets(sweep)
    plan = build_plan(sweep, store_uri=store_uri)
    if priority is not None:
        plan = replace(plan, policy=replace(plan.policy, priority=priority))
    fleet, table = choose_fleet(settings, StatedCluster()), read_prices(prices)
    preview = make_preview(sweep, plan, fleet=fleet, prices=table)
    found = preview.found
    is_elsewhere = bool(settings.jobs_address) and not runs_here
    if is_elsewhere:  # it is checked there, and what is known here is only shown
        found = replace(found, problems=())
    if runs_here:
        settings.known_store_uri(plan.store_uri)
    else:
        settings.require_meeting_place(plan.store_uri)
    refusals = preview.refusals if runs_here else (*preview.refusals, *never_runs(preview))
    check = check_submit(plan, found, sender=current_user(), consent=consent, refusals=refusals)
    return PreparedSubmit(preview=preview, check=check, text=text, is_elsewhere=is_elsewhere)


def deliver(request: SubmitRequest, store: ObjectStore, cluster: str) -> str:
    """Put a request into the inbox of its sweep; returns the message's id. Raises as ``client.submit``."""
    message = client.submit(
        store,
        request.plan,
        request.spec_text,
        cluster,
        ownership=request.ownership,
        replaced_revision=request.replaced_revision,
        sender=request.sender,
        consent=request.consent,
        provenance=request.provenance,
        message_id=request.message_id,
    )
    provenance.save(store, request.plan.sweep, message, provenance.Provenance.from_json(request.provenance))
    return message


def captured_document() -> Mapping[str, Any]:
    """Where this process submits from, as JSON: commit and changes of the directory, packages, machine."""
    return provenance.capture_all(Path.cwd(), package_digest()).to_json()


def show_difference(previous: PreviousRevision, plan: Plan) -> None:
    """Tell what changes, on stderr."""
    snapshot = previous.snapshot
    if previous.is_same(plan):
        again = "; failed jobs are retried" if snapshot.state.is_final else ""
        say(f"Sweep {plan.sweep} ({snapshot.outcome}) has the same plan{again}.")
        return
    diff = previous.diff(plan)
    show(diff_table(diff, f"{plan.sweep}, revision {snapshot.revision} -> this one"))
    show(*diff_lines(diff, lists_jobs=False), *_stopped(snapshot, diff))


def difference_text(previous: PreviousRevision, plan: Plan) -> str:
    """The same as plain text, for a terminal elsewhere."""
    diff = previous.diff(plan)
    changes = ", ".join(f"{number} {change.value}" for change, number in diff.counts.items() if number)
    title = f"sweep {plan.sweep}, revision {previous.snapshot.revision} -> this one: {changes}"
    return "\n".join([title, *diff_lines(diff, lists_jobs=False), *_stopped(previous.snapshot, diff)])


def _stopped(snapshot: Snapshot, diff: PlanDiff) -> Iterator[str]:
    """Jobs that run now and do not go on."""
    left = {job.name for job in diff.jobs if job.change in {Change.REMOVED, Change.REKEYED}}
    left |= {job.old_name for job in diff.jobs if job.change is Change.RENAMED}
    names = [name for name in snapshot.jobs.running if name in left]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        yield f"{len(names)} running jobs are no longer part of the plan and end after a checkpoint: {shown}"
