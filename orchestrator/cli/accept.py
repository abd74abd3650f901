"""The cluster's side of a submit from elsewhere: ``python -m orchestrator.cli.accept REQUEST``, run as a Ray job.

It does the same as a local ``submit``: checks the plan, starts or finds the controller, sends the message, and reports
the result. One line of its output is the answer in all cases. Older clients name this module.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from orchestrator.cli.exits import ExitCode, exit_code_of
from orchestrator.core.errors import OrchestratorError, UserError
from orchestrator.core.security import redaction
from orchestrator.core.simulation_files import SimulationCode
from orchestrator.planning.graph.data_checks import miscounted
from orchestrator.planning.graph.plan import Plan
from orchestrator.remote.job import simulation_name
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.settings import Settings
from orchestrator.services.submit import (
    Program,
    SubmitAnswer,
    SubmitCheck,
    SubmitRequest,
    SubmitVerdict,
    check_submit,
    deliver,
    difference_text,
)
from orchestrator.stack.environment import STACK_VARIABLE
from orchestrator.sweeps.client import SweepLedger

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's: what the driver of a job starts with."""
_SETTLE_S = 20.0
_POLL_S = 0.2

_LOOKUP_SILENCE_S: Final = 120.0
"""No user waits at a terminal here: a slow store is no reason to refuse."""


def accept(request: SubmitRequest, folder: Path, environment: Mapping[str, str]) -> SubmitAnswer:
    """Submit a received request on this cluster.

    Args:
        request: what to submit.
        folder: this job's package, with the simulations that came along.
        environment: of this job; it has the addresses of Ray and of the cluster's store.

    Raises:
        OrchestratorError: it cannot be submitted.
    """
    from orchestrator.controller.connect import ensure_services, find_controller
    from orchestrator.stack.attach import attach_cluster

    packages = brought_simulations(request.plan, folder)
    settings = _settings(request, environment)
    notices = tuple(request.program.differences(Program.here()))
    # Detached actors inherit the environment of the process that starts them: they get the shipped code, and nothing
    # else.
    attach_cluster(environment["RAY_ADDRESS"], settings.namespace, runtime_env=_code_of(environment))
    controller = find_controller(settings.namespace)
    uri = request.store_uri or (controller.store_uri if controller else _store_of(settings, environment))
    cluster = request.cluster or (controller.cluster if controller else settings.cluster)
    request = replace(request, plan=replace(request.plan, store_uri=uri))
    plan, found = request.plan, lookup_artifacts(request.plan, silence_s=_LOOKUP_SILENCE_S)
    measured = tuple(miscounted(plan, {key: record.metrics for key, record in found.records.items()}))
    check = check_submit(plan, found, sender=request.sender, consent=request.consent, refusals=measured)
    if refusal := _refusal(check, request):
        return replace(refusal, notices=notices, store_uri=uri, cluster=cluster)
    store = check.probed_store()
    if packages:
        from orchestrator.backends.ray.simulation_packages import keep_packages

        keep_packages(packages)
    services = ensure_services(
        uri,
        cluster,
        settings.namespace,
        settings.tracking_uri(),
        compares_tracking=bool(settings.mlflow_tracking_uri),
    )
    notices += services.notices
    ledger = SweepLedger(store, plan.sweep)
    message = deliver(request, store, cluster)
    services.link.wake(plan.sweep)
    counts = Counter(disposition.value for disposition in found.dispositions.values())
    answer = replace(_settled(ledger, message), counts=dict(counts))
    return replace(answer, notices=notices, store_uri=uri, cluster=cluster)


def brought_simulations(plan: Plan, folder: Path) -> Mapping[str, bytes]:
    """Packages of the plan's simulations in plain files, by digest. Files on the cluster's disks do not count.

    Raises:
        UserError: a package is not there, or does not hold what was planned.
    """
    packages = {}
    for digest, file in sorted(plan.simulation_files.items()):
        path = folder / simulation_name(digest)
        if not path.is_file():
            message = f"the submit did not bring the simulation {Path(file).name} (sha256 {digest[:12]})"
            raise UserError(f"{message}; send it with the release that the cluster runs")
        packages[digest] = path.read_bytes()
        SimulationCode.from_package(packages[digest], digest)
    return packages


def _settled(ledger: SweepLedger, message: str) -> SubmitAnswer:
    """The controller's answer to a message, or that it is busy."""
    until_s = time.monotonic() + _SETTLE_S
    while message not in (snapshot := ledger.refresh()).handled and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if refused := snapshot.refusals.get(message, ""):
        return SubmitAnswer(verdict=SubmitVerdict.REFUSED, message=refused, exit_code=ExitCode.REFUSED)
    return SubmitAnswer(verdict=SubmitVerdict.ACCEPTED if message in snapshot.handled else SubmitVerdict.WAITING)


def _settings(request: SubmitRequest, environment: Mapping[str, str]) -> Settings:
    """Settings of the stack on which this job runs, else those of the cluster's environment."""
    stack = environment.get(STACK_VARIABLE, "")
    base = Settings(directory=Path(stack), ray_address="") if stack else Settings()
    return base.model_copy(update={"namespace": request.namespace}) if request.namespace else base


def _store_of(settings: Settings, environment: Mapping[str, str]) -> str:
    if settings.store or environment.get(STACK_VARIABLE):
        return settings.store_uri()
    raise UserError(
        "the store of this cluster is not known: no controller runs there, ORCHESTRATOR_STORE is not set on its "
        "nodes, and the submit names no store; name it: --store URI, or orchestrator config set-context NAME "
        "store=URI"
    )


def _code_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """The part of this job's environment that the controller and its runners need: the code, if it was sent along."""
    config = json.loads(environment.get(_JOB_CONFIG) or "{}")
    modules = (config.get("runtime_env") or {}).get("py_modules")
    return {"py_modules": modules} if modules else {}


def _refusal(check: SubmitCheck, request: SubmitRequest) -> SubmitAnswer | None:
    if check.refusals:
        return SubmitAnswer(
            verdict=SubmitVerdict.REFUSED, message="; ".join(check.refusals), exit_code=ExitCode.REFUSED
        )
    if check.previous is None or not check.changes_plan or request.replaces:
        return None
    text = difference_text(check.previous, check.plan)
    return SubmitAnswer(verdict=SubmitVerdict.DIFFERS, message=text, exit_code=ExitCode.REFUSED)


def main(arguments: list[str]) -> int:
    """Read the request, submit it, print the answer; returns the exit code."""
    redaction.install()
    try:
        file = Path(arguments[0])
        request = SubmitRequest.from_bytes(file.read_bytes())
        environment = dict(os.environ)
        os.environ.pop(_JOB_CONFIG, None)  # else Ray would pass this job's whole environment on to the controller
        answer = accept(request, file.parent, environment)
    except OrchestratorError as error:
        answer = SubmitAnswer(verdict=SubmitVerdict.REFUSED, message=str(error), exit_code=exit_code_of(error))
    sys.stdout.write(f"\n{answer.to_line()}\n")
    # The job itself has done its work, whatever the answer is.
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
