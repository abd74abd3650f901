"""The cluster's side of a submit from elsewhere: ``python -m orchestrator.cli.accept PAYLOAD``, run as a Ray job.

It does what ``submit`` does on the spot: starts or finds the controller, leaves the message, and says what became of
it. Whatever happens, one line of its output is the answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cli.exits import ExitCode, exit_code_of
from orchestrator.cli.plan_tables import diff_lines
from orchestrator.cli.resubmit import Former, find_former
from orchestrator.cli.settings import Settings
from orchestrator.core.errors import OrchestratorError, UserError
from orchestrator.core.job_kinds import KINDS, JobKind
from orchestrator.core.security import redaction
from orchestrator.planning.graph.plan import Plan
from orchestrator.remote.answer import Answer, Verdict
from orchestrator.remote.payload import Payload, Program
from orchestrator.services.look_up import look_up
from orchestrator.stack.environment import STACK_VARIABLE
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.probe import probe_store
from orchestrator.sweeps.client import Consent, SweepLedger, submit
from orchestrator.tracking import provenance

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's: what the driver of a job starts with."""
_SETTLE_S = 20.0
_POLL_S = 0.2


def accept(payload: Payload, environment: Mapping[str, str]) -> Answer:
    """Submit what has come, on this cluster.

    Args:
        payload: what to submit.
        environment: of this job; says where Ray is, and where the cluster keeps its store.

    Raises:
        OrchestratorError: it cannot be submitted.
    """
    from orchestrator.controller.connect import ensure_controller, ensure_publisher, find_controller
    from orchestrator.stack.attach import attach_cluster

    settings = _settings(payload, environment)
    notices = tuple(payload.program.differences(Program.here()))
    # Detached actors take over the environment of whoever starts them: theirs is the shipped code, and nothing else.
    attach_cluster(environment["RAY_ADDRESS"], settings.namespace, runtime_env=_code_of(environment))
    found = find_controller(settings.namespace)
    uri = payload.store_uri or (found.store_uri if found else _store_of(settings, environment))
    cluster = payload.cluster or (found.cluster if found else settings.cluster)
    plan = replace(Plan.from_json(payload.plan), store_uri=uri)
    _check_versions(plan)
    # A store that is there is asked first, and one that is not has no former plan.
    former = find_former(plan) if is_initialised(uri) else None
    if refusal := _refusal(former, plan, payload):
        return replace(refusal, notices=notices, store_uri=uri, cluster=cluster)
    probe_store(open_store(uri))
    link = ensure_controller(uri, cluster, settings.namespace)
    ensure_publisher(uri, settings.tracking_uri(), settings.namespace)
    answer = _submit(plan, payload, cluster, link.wake)
    notices += (link.notice,) if link.notice else ()
    return replace(answer, notices=notices, store_uri=uri, cluster=cluster)


def _submit(plan: Plan, payload: Payload, cluster: str, wake: Any) -> Answer:  # noqa: ANN401 - a method of a link
    store = open_store(plan.store_uri)
    counts = Counter(found.value for found in look_up(plan).dispositions.values())
    ledger = SweepLedger(store, plan.sweep)
    message = submit(
        store,
        plan,
        payload.spec_text,
        cluster,
        ownership=payload.ownership,
        sender=payload.sender,
        consent=payload.consent,
        provenance=payload.provenance,
        message_id=payload.message_id,
    )
    provenance.save(store, plan.sweep, message, provenance.Provenance.from_json(payload.provenance))
    wake(plan.sweep)
    until_s = time.monotonic() + _SETTLE_S
    while message not in (snapshot := ledger.refresh()).handled and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if refused := snapshot.refusals.get(message, ""):
        return Answer(verdict=Verdict.REFUSED, message=refused, exit_code=ExitCode.REFUSED)
    verdict = Verdict.ACCEPTED if message in snapshot.handled else Verdict.WAITING
    return Answer(verdict=verdict, counts=dict(counts))


def _settings(payload: Payload, environment: Mapping[str, str]) -> Settings:
    """Those of the stack that this job runs on, else of the cluster's environment."""
    stack = environment.get(STACK_VARIABLE, "")
    base = Settings(directory=Path(stack), ray_address="") if stack else Settings()
    return base.model_copy(update={"namespace": payload.namespace}) if payload.namespace else base


def _store_of(settings: Settings, environment: Mapping[str, str]) -> str:
    if settings.store or environment.get(STACK_VARIABLE):
        return settings.store_uri()
    raise UserError(
        "nobody says which store this cluster uses: no controller runs there, ORCHESTRATOR_STORE is not set on its "
        "nodes, and the submit names none; name it: --store URI, or orchestrator config set-context NAME store=URI"
    )


def _code_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """The part of this job's environment that the controller and its runners need: the code, if it was sent along."""
    config = json.loads(environment.get(_JOB_CONFIG) or "{}")
    modules = (config.get("runtime_env") or {}).get("py_modules")
    return {"py_modules": modules} if modules else {}


def _check_versions(plan: Plan) -> None:
    """Keys promise what a version of the code computes; this program must not write other results under them.

    Raises:
        UserError: some kind of job has another ``code_version`` here.
    """
    asked = {(job.kind, job.identity.get("code_version")) for job in plan.jobs}.union(_versions_of_trials(plan))
    other = sorted({(kind, number) for kind, number in asked if number != KINDS[kind].code_version}, key=str)
    if other:
        told = ", ".join(f"{kind.value} {number} (here {KINDS[kind].code_version})" for kind, number in other)
        raise UserError(
            f"the plan was made by a program that computes other results than the cluster's: code_version of {told}; "
            "install the same release on both sides, or send the code along with --code wheel"
        )


def _versions_of_trials(plan: Plan) -> Iterator[tuple[JobKind, Any]]:
    """Of the jobs that searches make here, and of the probes that judge them."""
    for job in plan.jobs:
        if job.kind is JobKind.SEARCH:
            parameters = job.identity["parameters"]
            trial, probe = parameters["trial"], parameters.get("probe")
            yield JobKind(trial["kind"]), trial["code_version"]
            if probe:
                yield JobKind.PROBE, probe["code_version"]


def _refusal(former: Former | None, plan: Plan, payload: Payload) -> Answer | None:
    if former is None:
        return None
    if payload.consent is not Consent.FORCE and (stranger := former.stranger(payload.sender)):
        return Answer(verdict=Verdict.REFUSED, message=stranger, exit_code=ExitCode.REFUSED)
    if payload.replaces or former.is_same(plan):
        return None
    counts = former.diff(plan).counts
    lines = [
        f"sweep {plan.sweep}, revision {former.snapshot.revision} -> this one: "
        + ", ".join(f"{number} {change.value}" for change, number in counts.items() if number),
        *diff_lines(former.diff(plan), lists_jobs=False),
    ]
    return Answer(verdict=Verdict.DIFFERS, message="\n".join(lines), exit_code=ExitCode.REFUSED)


def main(arguments: list[str]) -> int:
    """Read the payload, submit it, print the answer; returns the exit code."""
    redaction.install()
    try:
        payload = Payload.from_bytes(Path(arguments[0]).read_bytes())
        environment = dict(os.environ)
        os.environ.pop(_JOB_CONFIG, None)  # else Ray would give this job's whole environment to the controller
        answer = accept(payload, environment)
    except OrchestratorError as error:
        answer = Answer(verdict=Verdict.REFUSED, message=str(error), exit_code=exit_code_of(error))
    sys.stdout.write(f"\n{answer.to_line()}\n")
    # The job itself has done its work, whatever the answer is.
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
