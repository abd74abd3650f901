"""Fifty secrets in everything that a lab has; none of them in anything that is stored, shown or served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from orchestrator.stack import read_stack, stop_stack
from orchestrator.stack.children import ray_directory
from orchestrator.stack.description import Stack
from tests.hostile.canaries import Canaries, plant
from tests.hostile.listening import is_loopback, listeners_of
from tests.hostile.telltale import FAILING_SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
MIN_CANARIES = 50
SWEEP = f"""
version: 1
name: telltale
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 64, num_val: 32}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1]}}
pretrain:
  model: {{name: test_vit, image_size: 16, kwargs: {{patch_size: 4}}}}
  labels: ["levels/*"]
  seeds: [0, {FAILING_SEED}]
  recipe: {{epochs: 1, batch_size: 16, lr: 1e-3}}
policy: {{failures: 1}}
"""
COMMANDS = (
    ("status", "telltale"),
    ("status", "telltale", "-o", "json"),
    ("describe", "telltale", f"pretrain/levels/depth1/seed{FAILING_SEED}"),
    ("logs", "telltale", "pretrain/levels/depth1/seed0"),
    ("logs", "telltale", f"pretrain/levels/depth1/seed{FAILING_SEED}"),
    ("report", "telltale"),
    ("config", "--origin"),
    ("doctor", "-o", "json"),
    ("ls", "-o", "json"),
    ("fsck",),
    ("reproduce", "telltale", "--into", "again"),
    ("explain", "telltale", "pretrain/levels/depth1/seed0"),
    ("plan", "sweep.yaml", "-o", "json"),
    ("plan", "sweep.yaml", "--set", "store=s3://ann:{password}@bucket/x"),
    ("plan", "sweep.yaml", "--set", "tracking.uri=https://ann:{password}@host/x"),
    ("status", "telltale", "--store", "s3://ann:{password}@bucket/x"),
    ("status", "telltale", "--store", "postgresql://ann:{password}@host/x"),
)
DASHBOARD = (
    "api/v0/actors",
    "api/v0/tasks",
    "api/v0/nodes",
    "api/v0/workers",
    "api/jobs/",
    "nodes?view=summary",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A sweep of telltale jobs that has ended, on a stack that still runs."""

    stack: Stack
    project: Path
    planted: Canaries
    output: bytes


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    # Not pytest's own folder: a socket's path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="orc-hc-"))
    project, home = folder / "project", folder / "home"
    project.mkdir()
    home.mkdir()
    (project / "sweep.yaml").write_text(SWEEP)
    planted = plant(home, folder / "lab")
    environment = {**os.environ, **planted.environment, "PYTHONPATH": str(ROOT)}
    directory = project / ".orchestrator"
    try:
        arguments = [str(directory), str(project / "sweep.yaml"), str(folder / "lab")]
        done = _run(["-m", "tests.hostile.telltale_sweep", *arguments], environment, project)
        stack = read_stack(directory)
        assert stack is not None, done.stdout[-3000:].decode() + done.stderr[-3000:].decode()
        assert done.stdout.strip() == b"failed", done.stderr[-3000:].decode()
        yield Ran(stack=stack, project=project, planted=planted, output=done.stdout + done.stderr)
    finally:
        stop_stack(directory)
        shutil.rmtree(ray_directory(directory), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _run(arguments: list[str], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False, timeout=900
    )


def leaks(planted: Canaries, texts: Mapping[str, bytes]) -> list[str]:
    """``place: secret`` of everything found, as it stands or as in a URI."""
    wanted = {
        (name, form.encode())
        for name, value in planted.all.items()
        for line in value.splitlines()
        for form in (line, quote(line, safe=""))
    }
    return sorted(f"{place}: {name}" for place, text in texts.items() for name, word in wanted if word in text)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def test_canaries_are_fifty_and_differ(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    planted = plant(tmp_path / "home", tmp_path / "lab")
    assert len(set(planted.all.values())) == len(planted.all) >= MIN_CANARIES


def test_store_database_and_files_of_a_sweep_hold_no_secret(ran: Ran) -> None:
    files = files_below(ran.project)
    names = "\n".join(files)
    for part in ("journal", "logs/telltale", "record.json", "provenance-0001.json", "mlflow.db", "logs/stack.log"):
        assert part in names
    told = b"".join(content for name, content in files.items() if "/store/logs/" in name)
    assert told.count(b"[hidden]") > MIN_CANARIES  # the jobs did tell
    assert leaks(ran.planted, {**files, "driver": ran.output}) == []


def test_ray_files_of_a_sweep_hold_no_secret(ran: Ran) -> None:
    files = files_below(ray_directory(Path(ran.stack.directory)))
    assert any("worker-" in name for name in files)
    assert any(b"in pieces: " in content for content in files.values())
    assert leaks(ran.planted, files) == []


def test_ray_dashboard_of_a_sweep_shows_no_secret(ran: Ran) -> None:
    token = Path(ran.stack.token_path).read_text(encoding="utf-8").strip()
    answers = {path: _ask(f"{ran.stack.dashboard_url}/{path}", token) for path in DASHBOARD}
    assert b"Runner" in answers["api/v0/actors"]
    assert leaks(ran.planted, answers) == []
    assert not any(token.encode() in answer for answer in answers.values())


def test_commands_show_no_secret(ran: Ran) -> None:
    environment = {**os.environ, **ran.planted.environment, "PYTHONPATH": str(ROOT)}
    word = ran.planted.known["DB_PASSWORD"]
    told: dict[str, bytes] = {}
    for command in COMMANDS:
        arguments = [part.replace("{password}", quote(word, safe="")) for part in command]
        done = _run(["-m", "orchestrator.cli", *arguments], environment, ran.project)
        told[" ".join(command)] = done.stdout + done.stderr
        assert b"Traceback (most recent call last)" not in done.stderr, command
    assert b"[hidden]" in told[" ".join(COMMANDS[4])]
    assert leaks(ran.planted, told | files_below(ran.project / "again")) == []


def test_ports_of_a_stack_are_loopback_alone_and_known(ran: Ran) -> None:
    found = listeners_of(ran.stack.pid)
    assert found
    assert [one for one in found if not is_loopback(one)] == []
    assert [one for one in found if not one.reason] == []


def test_ports_of_ray_refuse_who_has_no_token(ran: Ran) -> None:
    for path in DASHBOARD:
        assert _status(f"{ran.stack.dashboard_url}/{path}", "") in {401, 403}
        assert _status(f"{ran.stack.dashboard_url}/{path}", "0" * 64) in {401, 403}
    # Ray's own client: without a token, with a wrong one, and with the right one, which shows that the question works.
    wrong = ran.project / "wrong_token"
    wrong.write_text("0" * 64)
    assert b"refused" in _nodes(ran, RAY_AUTH_MODE="disabled")
    assert b"refused" in _nodes(ran, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(wrong))
    assert b"let in" in _nodes(ran, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=ran.stack.token_path)


def _nodes(ran: Ran, **variables: str) -> bytes:
    """What Ray's control store tells of the cluster's nodes."""
    code = (
        "from ray._raylet import GcsClient\nfrom ray.exceptions import AuthenticationError\n"
        f"try:\n    GcsClient(address={ran.stack.ray_address!r}).get_all_node_info(timeout=60)\n"
        "except AuthenticationError:\n    print('refused')\nelse:\n    print('let in')\n"
    )
    return _run(["-c", code], {**os.environ, "HOME": "/nonexistent", **variables}, ran.project).stdout


def test_secret_files_of_a_stack_are_its_users_alone(ran: Ran) -> None:
    assert Path(ran.stack.token_path).stat().st_mode & 0o077 == 0


def _ask(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        content: bytes = response.read()
        return content


def _status(url: str, token: str) -> int:
    try:
        _ask(url, token)
    except urllib.error.HTTPError as error:
        return error.code
    return 200
