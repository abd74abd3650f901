"""A sweep on a stack with S3, published to a real PostgreSQL and followed by a real Prometheus."""

from __future__ import annotations

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

from orchestrator.metrics.catalog import EXPORTED_METRICS
from orchestrator.stack import Stack, ensure_stack, stop_stack
from orchestrator.stack.description import BUCKET
from orchestrator.stack.environment import METRICS_VARIABLE
from orchestrator.stack.ports import free_ports
from tests.mlflow_servers import postgres_cluster
from tests.prometheus_server import start_prometheus
from tests.s3_server import read_client_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SHORT, LONG, GANGS = "short", "long", "gangs"
DEADLINE_S = 800.0
OF_GANGS = "slow_rank"
"""In names of metrics that only a gang has, which does not run beside the long sweep."""
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


def train_runs(stack: Stack) -> list[Mapping[str, object]]:
    """What Ray Train tells the dashboard's interface of gangs; none before the first one."""
    token = Path(stack.token_path).read_text().strip()
    url = f"{stack.dashboard_url}/api/train/v2/runs/v1"
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=20) as answer:  # noqa: S310
            found: list[Mapping[str, object]] = json.load(answer)["train_runs"]
            return found
    except HTTPError as error:
        if b"Train state data is not available" in error.read():
            return []
        raise


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="orc-mon-"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(METRICS_VARIABLE, "1")
            stack = ensure_stack(folder, with_s3=True)
        yield stack
    finally:
        stop_stack(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> Iterator[str]:
    """Address of a Prometheus that follows the stack."""
    (port,) = free_ports(1)
    child = start_prometheus(Path(stack.directory), port=port)
    yield f"http://127.0.0.1:{port}"
    child.end(0.0)


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """URI of an empty PostgreSQL."""
    with postgres_cluster() as uri:
        yield uri


@pytest.fixture(scope="module")
def environment(stack: Stack) -> dict[str, str]:
    """A shell's that uses the stack and its S3 server."""
    return {
        **os.environ,
        **read_client_environment(Path(stack.directory)),
        "ORCHESTRATOR_STORE": f"s3://{BUCKET}/store",
        "ORCHESTRATOR_DIRECTORY": stack.directory,
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


def ask(url: str) -> tuple[int, bytes]:
    try:
        with urlopen(url, timeout=30) as answer:  # noqa: S310 - our own server
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    filled = expression.replace("$__rate_interval", "1m").replace("$sweep", ".*")
    status, content = ask(f"{prometheus}/api/v1/query?{urlencode({'query': filled})}")
    assert status == 200, (expression, content)
    found: list[dict[str, Any]] = json.loads(content)["data"]["result"]
    return found


def unanswered(prometheus: str, expressions: list[str], deadline_s: float = DEADLINE_S) -> list[str]:
    """Those that return nothing until the deadline."""
    end_s, left = time.monotonic() + deadline_s, expressions
    while left := [expression for expression in left if not query(prometheus, expression)]:
        if time.monotonic() > end_s:
            break
        time.sleep(2.0)
    return left


def test_sweep_on_s3_is_published_to_postgres(environment, database) -> None:
    short = changes(f"name={SHORT}", *SMALL, "pretrain.recipe.epochs=2")
    done = run({**environment, "MLFLOW_TRACKING_URI": database}, "submit", "quickstart", "-y", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads(run(environment, "status", SHORT, "-o", "json").stdout)
    assert status["state"] == "succeeded", status
    import psycopg

    with psycopg.connect(database) as connection:
        row = connection.execute(
            "select count(*) from runs join experiments using (experiment_id) where experiments.name = %s", (SHORT,)
        ).fetchone()
    assert row is not None
    assert row[0] == 1 + len(status["jobs"])


def test_every_query_of_the_dashboard_returns_data(prometheus, long_sweep) -> None:
    dashboard = json.loads((ROOT / "infra/grafana/orchestrator.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions = [expression for expression in expressions if OF_GANGS not in expression]
    assert len(expressions) >= 30
    assert not unanswered(prometheus, expressions)
    exported = [metric.exported_name for metric in EXPORTED_METRICS if OF_GANGS not in metric.name]
    assert not unanswered(prometheus, exported, 30.0)


def test_metrics_have_the_labels_that_the_catalogue_names(prometheus, long_sweep) -> None:
    known = {metric.exported_name: set(metric.labels) for metric in EXPORTED_METRICS}
    of_ray = {"__name__", "Component", "NodeAddress", "SessionName", "Version", "WorkerId", "instance", "job"}
    found = query(prometheus, '{__name__=~"ray_orchestrator_.*"}')
    for series in found:
        labels = {name for name in series["metric"] if not name.startswith("otel_")} - of_ray
        assert labels == known[series["metric"]["__name__"]], series["metric"]
    assert len(found) < 200, "a few tens per sweep, however many jobs it has"


def test_every_alert_is_evaluated_and_none_fires_for_a_sound_sweep(prometheus, long_sweep, until) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = json.loads(ask(f"{prometheus}/api/v1/rules")[1])["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] == "ok" for rule in rules()), 120.0)
    shipped = yaml.safe_load((ROOT / "infra/prometheus/alerts.yml").read_text())
    names = {rule["alert"] for group in shipped["groups"] for rule in group["rules"]}
    assert {rule["name"] for rule in rules()} == names
    assert not [rule["name"] for rule in rules() if rule["state"] == "firing"]
    for rule in rules():
        query(prometheus, rule["query"])  # answered, whatever it is


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
