"""The full stack of one machine: real PostgreSQL, S3, MLflow with accounts and Prometheus around a real sweep."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import yaml

from orchestrator.errors import ClusterError
from orchestrator.observability.catalog import METRICS
from orchestrator.stack import Stack, ensure_stack, read_stack, stop_stack
from orchestrator.stack.children import ray_directory
from orchestrator.stack.description import FULL_FILE
from orchestrator.stack.full import check_installed
from tests.stack_screenshots import login_of, train_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SHORT, LONG, GANGS = "full-short", "full-long", "full-gangs"
DEADLINE_S = 800.0
SMALL = (
    'pretrain.labels=["levels/depth1"]', "pretrain.seeds=[0]", "report.baseline=levels/depth1",
    "policy.budget.gpu_hours=5",
)  # fmt: skip
# Its epochs are no other sweep's here: resources are no identity, so that its backbone would be taken as it is.
GANG = ("resources.pretrain.workers=2", "resources.pretrain.cpus=2", "pretrain.recipe.epochs=3")


def run(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


def changes(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    try:
        check_installed()
    except ClusterError as error:
        pytest.skip(str(error))
    folder = Path(tempfile.mkdtemp(prefix="orc-full-"))
    folder.chmod(0o711)  # root's PostgreSQL is another user's
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(home: Path) -> Iterator[Stack]:
    try:
        yield ensure_stack(home, is_full=True)
    finally:
        stop_stack(home)


@pytest.fixture(scope="module")
def environment(home: Path, stack: Stack) -> dict[str, str]:
    """A shell's that has read the stack's file."""
    lines = subprocess.run(
        ["bash", "-c", f"source {home / FULL_FILE} && env -0"], env={}, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    read = dict(line.split("=", 1) for line in lines if "=" in line)
    return {
        **os.environ,
        **read,
        "PATH": os.environ["PATH"],
        "ORCHESTRATOR_DIRECTORY": str(home),
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def long_sweep(environment: dict[str, str]) -> Iterator[str]:
    """It trains for as long as somebody looks."""
    long = changes(f"name={LONG}", *SMALL, "pretrain.recipe.epochs=2000")
    done = run(environment, "submit", "quickstart", "-y", "--no-wait", *long)
    assert done.returncode == 0, done.stdout + done.stderr
    yield LONG
    run(environment, "cancel", LONG, "-y")


def ask(url: str, login: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    request = Request(url)  # noqa: S310 - our own server
    if login:
        word = base64.b64encode(f"{login['username']}:{login['password']}".encode()).decode()
        request.add_header("Authorization", f"Basic {word}")
    try:
        with urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def query(stack: Stack, expression: str) -> list[dict[str, Any]]:
    filled = expression.replace("$__rate_interval", "1m").replace("$sweep", ".*")
    status, content = ask(f"{stack.prometheus_url}/api/v1/query?{urlencode({'query': filled})}")
    assert status == 200, (expression, content)
    found: list[dict[str, Any]] = json.loads(content)["data"]["result"]
    return found


def unanswered(stack: Stack, expressions: list[str], deadline_s: float = DEADLINE_S) -> list[str]:
    """Those that return nothing until the deadline."""
    end_s, left = time.monotonic() + deadline_s, expressions
    while left := [expression for expression in left if not query(stack, expression)]:
        if time.monotonic() > end_s:
            break
        time.sleep(2.0)
    return left


def test_sweep_runs_end_to_end_on_s3_and_postgres(stack, environment) -> None:
    short = changes(f"name={SHORT}", *SMALL, "pretrain.recipe.epochs=2")
    done = run(environment, "submit", "quickstart", "-y", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads(run(environment, "status", SHORT, "-o", "json").stdout)
    assert status["state"] == "succeeded", status
    assert stack.mlflow_url in run(environment, "status", SHORT).stdout
    login = login_of(Path(stack.directory))
    found = ask(f"{stack.mlflow_url}/api/2.0/mlflow/experiments/get-by-name?experiment_name={SHORT}", login)
    assert found[0] == 200, found
    import psycopg

    with psycopg.connect(stack.tracking_uri, passfile=environment["PGPASSFILE"]) as connection:
        row = connection.execute(
            "select count(*) from runs join experiments using (experiment_id) where experiments.name = %s", (SHORT,)
        ).fetchone()
    assert row is not None
    assert row[0] == 1 + len(status["jobs"])
    assert not list(Path(stack.directory).glob("mlflow.db*")), "nothing goes to sqlite"


def test_mlflow_lets_nobody_in_without_its_own_password(stack) -> None:
    url = f"{stack.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
    login = login_of(Path(stack.directory))
    assert ask(url)[0] == 401
    for password in ("", "password", "password1234", "admin"):
        assert ask(url, {**login, "password": password})[0] == 401
    assert ask(url, login)[0] == 200
    for name in ("mlflow-login.env", FULL_FILE, "services/mlflow_accounts.ini", "services/postgresql/pgpass"):
        assert (Path(stack.directory) / name).stat().st_mode & 0o077 == 0, name


def test_passwords_stand_in_no_argument_and_no_log(stack) -> None:
    home = Path(stack.directory)
    hidden = [login_of(home)["password"], (home / "services/postgresql/password").read_text()]
    arguments = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    logs = "".join(path.read_text(errors="replace") for path in home.rglob("logs/*.log"))
    for password in hidden:
        assert password not in arguments
        assert password not in logs


def test_every_query_of_the_dashboard_returns_data(stack, long_sweep) -> None:
    dashboard = json.loads((ROOT / "infra/grafana/orchestrator.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 30
    assert not unanswered(stack, expressions)
    assert not unanswered(stack, [metric.exported_name for metric in METRICS], 30.0)


def test_metrics_have_the_labels_that_the_catalogue_names(stack, long_sweep) -> None:
    known = {metric.exported_name: set(metric.labels) for metric in METRICS}
    of_ray = {"__name__", "Component", "NodeAddress", "SessionName", "Version", "WorkerId", "instance", "job"}
    found = query(stack, '{__name__=~"ray_orchestrator_.*"}')
    for series in found:
        labels = {name for name in series["metric"] if not name.startswith("otel_")} - of_ray
        assert labels == known[series["metric"]["__name__"]], series["metric"]
    assert len(found) < 200, "a few tens per sweep, however many jobs it has"


def test_every_alert_is_evaluated_and_none_fires_for_a_sound_sweep(stack, long_sweep, until) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = json.loads(ask(f"{stack.prometheus_url}/api/v1/rules")[1])["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] == "ok" for rule in rules()), 120.0)
    shipped = yaml.safe_load((ROOT / "infra/prometheus/alerts.yml").read_text())
    names = {rule["alert"] for group in shipped["groups"] for rule in group["rules"]}
    assert {rule["name"] for rule in rules()} == names
    assert not [rule["name"] for rule in rules() if rule["state"] == "firing"]
    for rule in rules():
        query(stack, rule["query"])  # answered, whatever it is


def test_gang_fills_the_train_tab_and_actors_have_names(stack, environment, until) -> None:
    run(environment, "cancel", LONG, "-y")  # there are two CPUs
    gangs = changes(f"name={GANGS}", *SMALL, *GANG)
    done = run(environment, "submit", "quickstart", "-y", "--no-wait", *gangs)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: len(train_runs(stack)) > 0, DEADLINE_S)
    named = [str(run["name"]) for run in train_runs(stack)]
    assert all(name.startswith("pretrain-") for name in named), named
    token = Path(stack.token_path).read_text()
    request = Request(f"{stack.dashboard_url}/logical/actors", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    with urlopen(request, timeout=30) as answer:  # noqa: S310
        actors = json.load(answer)["data"]["actors"].values()
    names = {actor["name"] for actor in actors}
    assert {"controller", "watchdog", "publisher"} <= names
    assert any(re.fullmatch(r"runner/cpus.*", name) for name in names)


def test_down_ends_exactly_what_up_started(home, stack, until) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(home)], cwd=home)
    try:
        sockets = stack.tracking_uri.partition("host=")[2]
        assert Path(sockets).is_dir()
        assert stop_stack(home)
        assert read_stack(home) is None

        def left() -> list[str]:
            listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
            mine = [line for line in listed.splitlines() if str(home) in line or str(ray_directory(home)) in line]
            return [line for line in mine if int(line.split()[0]) != bystander.pid]

        until(lambda: not left())
        assert bystander.poll() is None
        assert not Path(sockets).exists()
    finally:
        bystander.kill()
        bystander.wait()
