"""Sending a submit to a cluster as a Ray job, and waiting for what the cluster says."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from orchestrator.core.errors import ClusterError
from orchestrator.remote.answer import Answer
from orchestrator.remote.dashboard import ENDED, Dashboard, JobState
from orchestrator.remote.payload import FILE, Payload
from orchestrator.remote.wheel import build_wheel, pack

ACCEPT = "orchestrator.cli.accept"
"""Module that runs on the cluster."""
PATIENCE_S = 300.0
"""For the job to start, find the controller and answer: a cluster that grows from nothing takes minutes."""
_SAY_EVERY_S = 10.0
_POLL_S = 0.5
_LAST_LINES = 12


def send(
    dashboard: Dashboard,
    payload: Payload,
    *,
    ships_code: bool,
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> Answer:
    """Submit through a cluster's dashboard; the cluster alone goes on from there.

    Args:
        dashboard: of the cluster.
        payload: what to submit.
        ships_code: send the running code along, instead of using what is installed there.
        say: tells the user what takes long.
        patience_s: how long to wait for an answer.

    Raises:
        ClusterError: the cluster does not answer, or its job failed without an answer; what it said is in the message.
    """
    job_id = start(dashboard, payload, ships_code=ships_code)
    state = _wait(dashboard, job_id, say, patience_s)
    log = dashboard.log(job_id)
    answer = Answer.find(log)
    if answer is not None:
        return answer
    raise ClusterError(_no_answer(job_id, state, log, patience_s))


def start(dashboard: Dashboard, payload: Payload, *, ships_code: bool) -> str:
    """Start the job that submits; returns its id. Nothing of this machine is needed afterwards."""
    content = pack(FILE, payload.to_bytes())
    runtime_env: dict[str, Any] = {
        # The name that Ray itself gives to an archive of this content.
        "working_dir": dashboard.upload(f"_ray_pkg_{sha256(content).hexdigest()[:40]}.zip", content)
    }
    if ships_code:
        runtime_env["py_modules"] = [_upload_code(dashboard, payload)]
    # One id for one submit and one answer to the question whether to replace a plan.
    job_id = f"orchestrator-{payload.message_id}{'-replace' if payload.replaces else ''}"
    dashboard.submit(job_id, shlex.join(["python", "-m", ACCEPT, FILE]), runtime_env)
    return job_id


def _upload_code(dashboard: Dashboard, payload: Payload) -> str:
    with tempfile.TemporaryDirectory(prefix="orchestrator-wheel-") as folder:
        wheel = build_wheel(Path(folder), release=payload.program.release, digest=payload.program.digest)
        return dashboard.upload(wheel.name, wheel.read_bytes())


def _wait(dashboard: Dashboard, job_id: str, say: Callable[[str], None], patience_s: float) -> JobState:
    began_s = time.monotonic()
    say_at_s = began_s + _SAY_EVERY_S
    while True:
        state = dashboard.state(job_id)
        now_s = time.monotonic()
        if state.status in ENDED or now_s - began_s > patience_s:
            return state
        if now_s > say_at_s:
            say_at_s = now_s + 3 * _SAY_EVERY_S
            say(f"The cluster works on it: job {job_id} is {state.status.lower()}. {_first_line(state.message)}")
        time.sleep(_POLL_S)


def _no_answer(job_id: str, state: JobState, log: str, patience_s: float) -> str:
    if state.status not in ENDED:
        return (
            f"the cluster has not answered within {patience_s:g} s, but goes on: job {job_id} is "
            f"{state.status.lower()}. {_first_line(state.message)} Nothing is submitted twice if you repeat the command"
        )
    tail = "\n".join(log.strip().splitlines()[-_LAST_LINES:])
    return (
        f"the cluster's job {job_id} ended as {state.status.lower()} without an answer: {_first_line(state.message)} "
        f"Is the orchestrator installed there? If not, send it along with --code wheel. The job's last words:\n{tail}"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
