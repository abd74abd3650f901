"""Submitting through a dashboard, against a server that answers as Ray's does: what is sent, told and refused."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.core.errors import ClusterError, InfeasibleError, UserError
from orchestrator.planning.graph.build import build_plan
from orchestrator.remote.dashboard import Dashboard
from orchestrator.remote.job import FILE, build_wheel, pack, start_job, wait_for_answer
from orchestrator.services.settings import Settings
from orchestrator.services.settings_sources import Code
from orchestrator.services.submit import Program, SubmitAnswer, SubmitRequest, SubmitVerdict
from orchestrator.services.transports import DashboardTransport
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import Consent, Ownership
from tests.scripted_sweep import diamond, make_plan

TOKEN = "token-of-the-lab"  # noqa: S105 - of nobody
PLAN = make_plan(*diamond(), store_uri="s3://lab/studies")
PROGRAM = Program(release="0.1.0", digest="d" * 64, libraries={"python": "3.11", "torch": "2.0"})


@dataclass
class Cluster:
    """What the server knows, and how it is to behave."""

    packages: dict[str, bytes] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: list[SubmitAnswer] = field(default_factory=list)
    """Of its next jobs, in turn."""
    log: str = ""
    status: str = "SUCCEEDED"
    loses_next_answer: bool = False
    leads_to: str = ""
    page: str = ""
    """What a proxy before it answers to every request; empty = no proxy."""
    failures: list[int] = field(default_factory=list)
    """Of a proxy before it: the HTTP status of the next answers about jobs."""
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def _reply(self, code: int, document: Any = None) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def _may_pass(self) -> bool:
        if self.cluster.leads_to:
            self.send_response(302)
            self.send_header("Location", self.cluster.leads_to)
            self.end_headers()
            return False
        given = self.headers.get("Authorization")
        if given == f"Bearer {TOKEN}":
            return True
        self._reply(403 if given else 401)
        return False

    def do_GET(self) -> None:
        if not self._may_pass():
            return
        name = self.path.rsplit("/", 1)[-1]
        if self.cluster.page:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.cluster.page.encode())
        elif name in self.cluster.jobs and self.cluster.failures:
            self._reply(self.cluster.failures.pop(), "no upstream")
        elif self.path == "/api/version":
            self._reply(200, {"ray_version": "2.60.0"})
        elif self.path.startswith("/api/packages/"):
            self._reply(200 if name in self.cluster.packages else 404)
        elif self.path.endswith("/logs"):
            self._reply(200, {"logs": self.cluster.log})
        elif name in self.cluster.jobs:
            self._reply(200, {"status": self.cluster.status, "message": "as told\nand more"})
        else:
            self._reply(404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._may_pass():
            self.cluster.packages[self.path.rsplit("/", 1)[-1]] = content
            self._reply(200)

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may_pass():
            return
        if job["submission_id"] in self.cluster.jobs:
            self._reply(400, "already exists")
            return
        self.cluster.jobs[job["submission_id"]] = job
        if self.cluster.answers:
            self.cluster.log = f"noise\n{self.cluster.answers.pop(0).to_line()}\n"
        if self.cluster.loses_next_answer:
            self.cluster.loses_next_answer = False
            self.close_connection = True
            return
        self._reply(200, {"submission_id": job["submission_id"]})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.remote.dashboard._PAUSE_S", 0.0)
    # Looks at every installed package, for seconds.
    monkeypatch.setattr("orchestrator.services.submit.captured_document", lambda: {"commit": "c0ffee"})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    known = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": known}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    known.address = f"http://127.0.0.1:{server.server_port}"
    yield known
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def dashboard(cluster: Cluster) -> Dashboard:
    return Dashboard(cluster.address, TOKEN)


def payload(**changes: Any) -> SubmitRequest:
    given: dict[str, Any] = {
        "message_id": "0001-abc",
        "plan": PLAN,
        "spec_text": "name: mine",
        "program": PROGRAM,
        "provenance": {"commit": "c0ffee"},
    }
    return SubmitRequest(**given | changes)


def start(dashboard: Dashboard, request: SubmitRequest, *, code: tuple[str, str] | None = None) -> str:
    return start_job(dashboard, f"orchestrator-{request.message_id}", request.to_bytes(), code=code)


def send(dashboard: Dashboard, request: SubmitRequest) -> SubmitAnswer:
    return wait_for_answer(dashboard, start(dashboard, request), SubmitAnswer.find, say=pytest.fail)


def test_submit_sends_the_payload_and_nothing_secret_in_what_ray_shows(cluster: Cluster, dashboard: Dashboard) -> None:
    cluster.answers = [SubmitAnswer(verdict=SubmitVerdict.ACCEPTED, counts={"new": 6}, cluster="team")]
    answer = send(dashboard, payload())
    assert (answer.verdict, answer.counts) == (SubmitVerdict.ACCEPTED, {"new": 6})
    (job,) = cluster.jobs.values()
    assert job["entrypoint"] == f"python -m orchestrator.cli.accept {FILE}"
    assert list(job["runtime_env"]) == ["working_dir"]
    assert TOKEN not in json.dumps(job)
    with zipfile.ZipFile(BytesIO(cluster.packages[job["runtime_env"]["working_dir"].removeprefix("gcs://")])) as sent:
        assert SubmitRequest.from_bytes(sent.read(FILE)) == payload()


def test_code_travels_as_a_wheel_that_names_its_content(cluster: Cluster, dashboard: Dashboard) -> None:
    start(dashboard, payload(), code=(PROGRAM.release, PROGRAM.digest))
    (job,) = cluster.jobs.values()
    (uri,) = job["runtime_env"]["py_modules"]
    assert uri.endswith(f"+code.{PROGRAM.digest[:16]}-py3-none-any.whl")
    assert len(cluster.packages) == 2


def test_job_whose_answer_got_lost_is_not_started_twice(cluster: Cluster, dashboard: Dashboard) -> None:
    cluster.answers = [SubmitAnswer(verdict=SubmitVerdict.ACCEPTED)]
    cluster.loses_next_answer = True
    assert send(dashboard, payload()).verdict is SubmitVerdict.ACCEPTED
    assert len(cluster.jobs) == 1


@pytest.mark.parametrize("page", ["<html>\n<body>Sign in</body>", '["ray"]', "{"])
def test_server_that_is_no_dashboard_is_told_from_one(cluster: Cluster, dashboard: Dashboard, page: str) -> None:
    cluster.page = page
    for ask in (dashboard.check, lambda: dashboard.state("a"), lambda: dashboard.log("a")):
        with pytest.raises(ClusterError, match="does not answer as a Ray dashboard does"):
            ask()


def test_proxy_that_loses_the_dashboard_for_a_moment_is_asked_again(cluster: Cluster, dashboard: Dashboard) -> None:
    cluster.answers, cluster.failures = [SubmitAnswer(verdict=SubmitVerdict.ACCEPTED)], [502, 504]
    assert send(dashboard, payload()).verdict is SubmitVerdict.ACCEPTED
    cluster.failures = [503, 503, 503]
    with pytest.raises(ClusterError, match="answers HTTP 503"):
        dashboard.state("orchestrator-0001-abc")


@pytest.mark.parametrize(("token", "told"), [("", "asks for a token"), ("wrong", "refuses the token")])
def test_missing_and_wrong_tokens_are_told_apart_and_never_shown(cluster: Cluster, token: str, told: str) -> None:
    with pytest.raises(ClusterError, match=told) as refused:
        Dashboard(cluster.address, token).check()
    assert not token or token not in str(refused.value).replace("wrong token", "")


def test_token_does_not_follow_a_redirect(cluster: Cluster, dashboard: Dashboard) -> None:
    cluster.leads_to = "http://127.0.0.1:9/elsewhere"
    with pytest.raises(ClusterError, match="leads elsewhere"):
        dashboard.check()


def test_this_machine_is_asked_without_a_proxy(
    cluster: Cluster, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    Dashboard(cluster.address, TOKEN).check()


def test_dashboard_that_is_not_there_is_said_not_to_answer() -> None:
    with pytest.raises(ClusterError, match=r"http://127\.0\.0\.1:9 does not answer"):
        Dashboard("http://127.0.0.1:9", TOKEN).check()


@pytest.mark.parametrize("address", ["ftp://ray", "http://169.254.169.254", "http://ann:pw@ray:8265", "ray:8265"])
def test_address_that_must_not_be_asked_is_refused(address: str) -> None:
    with pytest.raises(UserError):
        Dashboard(address)


@pytest.mark.parametrize(
    ("address", "is_clear"),
    [("http://ray.example.org:8265", True), ("https://ray.example.org", False), ("http://127.0.0.1:8265", False)],
)
def test_token_in_clear_is_noticed(address: str, is_clear: bool) -> None:
    assert Dashboard(address, TOKEN).sends_token_in_clear is is_clear
    assert not Dashboard(address).sends_token_in_clear


def test_job_that_fails_without_an_answer_shows_its_last_words(cluster: Cluster, dashboard: Dashboard) -> None:
    cluster.status, cluster.log = "FAILED", "Traceback\nModuleNotFoundError: No module named 'orchestrator'"
    with pytest.raises(ClusterError) as failed:
        send(dashboard, payload())
    assert "No module named 'orchestrator'" in str(failed.value)
    assert "--code wheel" in str(failed.value)


def test_cluster_that_takes_its_time_is_left_to_it(
    cluster: Cluster, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.status = "PENDING"
    monkeypatch.setattr("orchestrator.remote.job.PATIENCE_S", 0.0)
    with pytest.raises(ClusterError, match="goes on"):
        send(dashboard, payload())


def request() -> SubmitRequest:
    sweep, text = load_sweep("quickstart")
    return SubmitRequest(plan=build_plan(sweep, store_uri="s3://lab/studies"), spec_text=text).sent_now()


def submitter(cluster: Cluster, tmp_path: Path, *, agrees: bool) -> DashboardTransport:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    settings = Settings(dashboard_address=cluster.address, ray_token=f"file:{token}", ray_address="", code=Code.IMAGE)
    return DashboardTransport(settings=settings, store=None, asks=lambda question: agrees)


def sent(cluster: Cluster) -> list[SubmitRequest]:
    archives = [job["runtime_env"]["working_dir"].removeprefix("gcs://") for job in cluster.jobs.values()]
    return [
        SubmitRequest.from_bytes(zipfile.ZipFile(BytesIO(cluster.packages[archive])).read(FILE)) for archive in archives
    ]


def test_changed_sweep_is_shown_and_replaced_once_the_user_agrees(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers = [
        SubmitAnswer(verdict=SubmitVerdict.DIFFERS, message="revision 1 -> this one: 2 added", exit_code=3),
        SubmitAnswer(verdict=SubmitVerdict.ACCEPTED, cluster="team", notices=("the cluster has torch 1, here is 2",)),
    ]
    message = submitter(cluster, tmp_path, agrees=True).submit(request())
    first, second = sent(cluster)
    assert (first.replaces, second.replaces) == (False, True)
    assert first.message_id == second.message_id == message
    assert first.store_uri == "s3://lab/studies"
    told = capsys.readouterr().err
    assert "2 added" in told
    assert "note: the cluster has torch 1, here is 2" in told


def test_submit_says_once_that_a_tracking_server_of_this_machine_does_not_count_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "to choose one, write tracking: {uri: ...} in the sweep file"
    cluster.answers = [SubmitAnswer(verdict=SubmitVerdict.DIFFERS), SubmitAnswer(verdict=SubmitVerdict.ACCEPTED)] * 2
    submitter(cluster, tmp_path, agrees=True).submit(request())
    assert told not in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.lab")
    submitter(cluster, tmp_path, agrees=True).submit(request())
    assert capsys.readouterr().err.count(told) == 1


def test_ctrl_c_while_the_cluster_works_on_it_names_the_job_that_goes_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.services.transports.wait_for_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submitter(cluster, tmp_path, agrees=True).submit(request())
    (job,) = cluster.jobs
    told = " ".join(capsys.readouterr().err.split())
    assert f"its job {job} submits the sweep, or is refused. Repeat the command" in told


def test_changed_sweep_stays_as_it_is_unless_the_user_agrees(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answers = [SubmitAnswer(verdict=SubmitVerdict.DIFFERS, message="2 added", exit_code=3)]
    with pytest.raises(InfeasibleError, match="left as it is"):
        submitter(cluster, tmp_path, agrees=False).submit(request())
    assert len(cluster.jobs) == 1


def test_refusal_of_the_cluster_reaches_the_user(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answers = [SubmitAnswer(verdict=SubmitVerdict.REFUSED, message="it belongs to ann", exit_code=3)]
    with pytest.raises(InfeasibleError, match="belongs to ann"):
        submitter(cluster, tmp_path, agrees=True).submit(request())


def test_payload_survives_its_journey_and_other_forms_are_refused() -> None:
    there = payload(consent=Consent.FORCE, ownership=Ownership.TAKE, replaces=True, cluster="team")
    assert SubmitRequest.from_bytes(there.to_bytes()) == there
    newer = json.dumps({**json.loads(there.to_bytes()), "version": 99}).encode()
    with pytest.raises(UserError, match="install the same release"):
        SubmitRequest.from_bytes(newer)
    older = {
        name: value for name, value in json.loads(there.to_bytes()).items() if name not in {"cluster", "namespace"}
    }
    assert SubmitRequest.from_bytes(json.dumps({**older, "of_a_newer_release": 1}).encode()) == replace(
        there, cluster=""
    )
    for damaged in (b"", b"[]", b"{}", b'{"version": 1}', b"[" * 100_000):
        with pytest.raises(UserError, match="cannot be read"):
            SubmitRequest.from_bytes(damaged)


def test_answer_is_found_in_whatever_a_job_prints() -> None:
    answer = SubmitAnswer(verdict=SubmitVerdict.WAITING, notices=("a", "b"), counts={"new": 1})
    assert SubmitAnswer.find(f"(pid=1) noise\n{answer.to_line()}\nmore") == answer
    for log in ("", "noise", "ORCHESTRATOR-ANSWER {", 'ORCHESTRATOR-ANSWER {"verdict": "perhaps"}'):
        assert SubmitAnswer.find(log) is None


def test_skew_of_code_and_libraries_is_told() -> None:
    there = Program(release="0.2.0", digest="e" * 64, libraries={"python": "3.11", "torch": "2.1"})
    code, torch = PROGRAM.differences(there)
    assert "the cluster runs release 0.2.0" in code
    assert torch == "the cluster has torch 2.1, here is 2.0; the cluster's counts"
    assert PROGRAM.differences(PROGRAM) == []
    assert Program.here().libraries["ray"]


def test_wheel_holds_all_of_the_code_and_is_the_same_every_time(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (build_wheel(folder, release="0.1.0", digest=code_digest()) for folder in folders)
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"orchestrator/cli/accept.py", "workloads/run.py", "workloads/sweeps/quickstart.yaml"} <= names
    assert not any("__pycache__" in name for name in names)
    assert "Requires-Dist" not in metadata  # pip would fetch torch once more
    assert pack({"x": b"1"}) == pack({"x": b"1"})
