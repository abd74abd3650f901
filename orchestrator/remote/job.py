"""A submit as a job of a Ray cluster: sending it, with this machine's code if necessary, and waiting for its answer.

The code is sent as a wheel, made from a checkout or an installation. The wheel has no requirements, because Ray
installs it into a separate folder, where pip would download all of them again; the cluster's image must have them.
"""

from __future__ import annotations

import shlex
import tempfile
import time
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.core.errors import ClusterError
from orchestrator.remote.dashboard import ENDED, Dashboard, DashboardJob

FILE = "payload.json"
Answer = TypeVar("Answer")
ACCEPT = "orchestrator.cli.accept"
"""Module that runs on the cluster."""
PATIENCE_S = 300.0
"""Time for the job to start, find the controller and answer: a cluster that first adds nodes takes minutes."""
_PRINT_EVERY_S = 10.0
_POLL_S = 0.5
_LAST_LINES = 12
_PACKAGES = ("orchestrator", "workloads")
_DATE = (1980, 1, 1, 0, 0, 0)
"""The same code makes the same bytes, so that it is uploaded once."""
_LEFT_OUT = {".pyc", ".pyo"}


def start_job(
    dashboard: Dashboard,
    job_id: str,
    content: bytes,
    *,
    code: tuple[str, str] | None = None,
    simulations: Mapping[str, bytes] | None = None,
) -> str:
    """Start the job that submits; returns its id. Nothing of this machine is needed afterwards.

    Args:
        dashboard: of the cluster.
        job_id: two jobs of one id are one job.
        content: the request, as ``orchestrator.cli.accept`` reads it there.
        code: release and digest of the running code, to send it along; None = what is installed there.
        simulations: packages of simulations in plain files, by the digest of their sources.

    Raises:
        ClusterError: the cluster does not answer.
    """
    packages = {simulation_name(digest): package for digest, package in (simulations or {}).items()}
    archive = pack({FILE: content, **packages})
    runtime_env: dict[str, Any] = {
        # The name that Ray itself gives to an archive of this content.
        "working_dir": dashboard.upload(f"_ray_pkg_{sha256(archive).hexdigest()[:40]}.zip", archive)
    }
    if code is not None:
        runtime_env["py_modules"] = [_upload_code(dashboard, *code)]
    dashboard.submit(job_id, shlex.join(["python", "-m", ACCEPT, FILE]), runtime_env)
    return job_id


def wait_for_answer(
    dashboard: Dashboard,
    job_id: str,
    find: Callable[[str], Answer | None],
    *,
    say: Callable[[str], None],
) -> Answer:
    """Wait for a job's answer; afterwards the cluster needs this machine no more.

    Args:
        dashboard: of the cluster.
        job_id: of the job.
        find: finds the answer in the job's output.
        say: prints progress for the user.

    Raises:
        ClusterError: the cluster does not answer, or its job failed without an answer; what it said is in the message.
    """
    state = _wait(dashboard, job_id, say)
    log = dashboard.log(job_id)
    answer = find(log)
    if answer is not None:
        return answer
    raise ClusterError(_no_answer(job_id, state, log))


def _upload_code(dashboard: Dashboard, release: str, digest: str) -> str:
    with tempfile.TemporaryDirectory(prefix="orchestrator-wheel-") as folder:
        wheel = build_wheel(Path(folder), release=release, digest=digest)
        return dashboard.upload(wheel.name, wheel.read_bytes())


def _wait(dashboard: Dashboard, job_id: str, say: Callable[[str], None]) -> DashboardJob:
    began_s = time.monotonic()
    print_at_s = began_s + _PRINT_EVERY_S
    while True:
        state = dashboard.state(job_id)
        now_s = time.monotonic()
        if state.status in ENDED or now_s - began_s > PATIENCE_S:
            return state
        if now_s > print_at_s:
            print_at_s = now_s + 3 * _PRINT_EVERY_S
            say(f"The cluster works on it: job {job_id} is {state.status.lower()}. {_first_line(state.message)}")
        time.sleep(_POLL_S)


def _no_answer(job_id: str, state: DashboardJob, log: str) -> str:
    if state.status not in ENDED:
        return (
            f"the cluster has not answered within {PATIENCE_S:g} s, but goes on: job {job_id} is "
            f"{state.status.lower()}. {_first_line(state.message)} Nothing is submitted twice if you repeat the command"
        )
    tail = "\n".join(log.strip().splitlines()[-_LAST_LINES:])
    return (
        f"the cluster's job {job_id} ended as {state.status.lower()} without an answer: {_first_line(state.message)} "
        f"Is the orchestrator installed there? If not, send it along with --code wheel. The job's last words:\n{tail}"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def build_wheel(folder: Path, *, release: str, digest: str) -> Path:
    """Write the wheel into a folder; returns its path.

    Args:
        folder: must exist.
        release: version of the distribution, such as ``0.1.0``.
        digest: of the code. It becomes part of the version: Ray takes two wheels of one name for the same.
    """
    number = release.partition("+")[0]
    version = f"{number if number[:1].isdigit() else '0'}+code.{digest[:16]}"
    info = f"pretraining_orchestrator-{version}.dist-info"
    contents = [
        *_sources(),
        (f"{info}/METADATA", f"Metadata-Version: 2.1\nName: pretraining-orchestrator\nVersion: {version}\n".encode()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: orchestrator\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ]
    record = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in contents]
    contents.append((f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode()))
    path = folder / f"pretraining_orchestrator-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents:
            wheel.writestr(_entry(name), content)
    return path


def simulation_name(digest: str) -> str:
    """Of the package of a simulation, in the job's working directory."""
    return f"simulations/{digest}.zip"


def pack(contents: Mapping[str, bytes]) -> bytes:
    """A zip archive of files by name, of the same bytes every time; what Ray takes for a working directory."""
    from io import BytesIO

    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(_entry(name), content)
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or []:
            root = Path(folder)
            for path in sorted(root.rglob("*")):
                if path.is_file() and path.suffix not in _LEFT_OUT:
                    yield path.relative_to(root.parent).as_posix(), path.read_bytes()


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
