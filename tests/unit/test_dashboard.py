"""The Grafana dashboard and the alert rules: their form, and that they ask for metrics which exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.metrics.catalog import EXPORTED_METRICS, reference
from tests.prometheus_server import write_configuration

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "infra" / "grafana"
PROMETHEUS = ROOT / "infra" / "prometheus"
OURS = re.compile(r"ray_orchestrator_\w+")
MATCHED = re.compile(r"(ray_\w+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
SHOWN = re.compile(r"\{\{(\w+)\}\}")
LABELS_OF_SCRAPES = ("instance", "NodeAddress")
KNOWN = {metric.exported_name for metric in EXPORTED_METRICS}
OF_RAY = {"ray_node_gpus_utilization", "ray_node_cpu_utilization", "ray_node_mem_used", "ray_node_mem_total"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "orchestrator.json").read_text())
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_dashboard_ids_are_unique_and_every_panel_explains_itself(dashboard) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert dashboard["uid"]
    for panel in panels(dashboard):
        assert panel["description"].endswith(".")
        assert panel["targets"]
        assert panel["type"] in {"stat", "timeseries"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_dashboard_asks_the_chosen_data_source_everywhere(dashboard) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    asked = [panel["datasource"] for panel in panels(dashboard)]
    asked += [target["datasource"] for panel in panels(dashboard) for target in panel["targets"]]
    asked.append(variables["sweep"]["datasource"])
    assert {source["uid"] for source in asked} == {"${datasource}"}


def test_dashboard_panels_do_not_overlap(dashboard) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


def test_dashboard_shows_every_metric_and_no_other(dashboard) -> None:
    text = " ".join(target["expr"] for panel in panels(dashboard) for target in panel["targets"])
    assert set(OURS.findall(text)) == KNOWN - {"ray_orchestrator_steps_total"}
    assert set(re.findall(r"ray_(?!orchestrator)\w+", text)) <= OF_RAY


def test_dashboard_uses_only_labels_that_the_metrics_of_a_query_have(dashboard) -> None:
    labels = {metric.exported_name: {*metric.labels, *LABELS_OF_SCRAPES} for metric in EXPORTED_METRICS}
    targets = [target for panel in panels(dashboard) for target in panel["targets"]]
    for expression, legend in [(target["expr"], target["legendFormat"]) for target in targets]:
        for name, matchers in MATCHED.findall(expression):
            assert set(MATCHER.findall(matchers)) <= labels.get(name, {*LABELS_OF_SCRAPES}), expression
        asked = [labels[name] for name in OURS.findall(expression)] or [{*LABELS_OF_SCRAPES}]
        kept = {label for group in GROUPED.findall(expression) for label in group.replace(" ", "").split(",")}
        assert kept <= set.intersection(*asked), expression
        assert set(SHOWN.findall(legend)) <= kept, expression


def test_alerts_ask_for_metrics_that_exist_and_say_what_to_do() -> None:
    rules = alerts()
    labels = {metric.exported_name: {*metric.labels, *LABELS_OF_SCRAPES} for metric in EXPORTED_METRICS}
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(OURS.findall(rule["expr"])) <= KNOWN, rule["alert"]
        for name, matchers in MATCHED.findall(rule["expr"]):
            assert set(MATCHER.findall(matchers)) <= labels.get(name, {*LABELS_OF_SCRAPES}), rule["alert"]
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_alerts_are_each_tested_by_firing() -> None:
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    assert not [rule["alert"] for rule in alerts() if f'alertname="{rule["alert"]}"' not in tested]


@pytest.mark.ci
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: the package prometheus)")
    command = [promtool, "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_configuration_of_a_stack_follows_its_own_ray(tmp_path) -> None:
    path = write_configuration(tmp_path, tmp_path / "ray")
    (scrape,) = yaml.safe_load(path.read_text())["scrape_configs"]
    assert scrape["file_sd_configs"] == [{"files": [f"{tmp_path}/ray/prom_metrics_service_discovery.json"]}]
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_documentation_has_the_metrics_as_they_are() -> None:
    assert reference() in (ROOT / "docs" / "operations.md").read_text()
