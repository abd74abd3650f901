"""The Grafana dashboard as JSON: ``python -m orchestrator.metrics.dashboard infra/grafana/orchestrator.json``.

The form is Grafana's (dashboard JSON model, schema version 39: Grafana 11 and later read it and upgrade it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from orchestrator.metrics.catalog import LIVE
from orchestrator.metrics.panels import SECTIONS, Panel, Section

UID: Final = "orchestrator"
TITLE: Final = "Pretraining orchestrator"
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_STAT_WIDTH, _STAT_HEIGHT = 4, 4
_WIDTH, _HEIGHT = 8, 8
_WARNING, _FINE = "orange", "green"


def dashboard() -> dict[str, Any]:
    """The whole document."""
    return {
        "uid": UID,
        "title": TITLE,
        "description": "Sweeps, the cluster under them, and what goes wrong. Every number is explained at its panel.",
        "tags": ["orchestrator", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _sweep_variable()]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def render() -> str:
    """The document as it stands in the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for section in SECTIONS:
        yield _row(section, number, top)
        number, top, left = number + 1, top + 1, 0
        width, height = _size(section)
        for panel in section.panels:
            if left + width > _COLUMNS:
                left, top = 0, top + height
            yield _panel(panel, number, {"x": left, "y": top, "w": width, "h": height})
            number, left = number + 1, left + width
        top += height


def _size(section: Section) -> tuple[int, int]:
    is_small = all(panel.kind == "stat" for panel in section.panels)
    return (_STAT_WIDTH, _STAT_HEIGHT) if is_small else (_WIDTH, _HEIGHT)


def _row(section: Section, number: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": section.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel)}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        style = "line" if panel.warn_above is not None or panel.warn_below is not None else "off"
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 40 if panel.is_stacked else 5,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": style},
            "showPoints": "never",
        }
    return defaults


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": _FINE, "value": None}]
    if panel.warn_above is not None:
        steps.append({"color": _WARNING, "value": panel.warn_above})
    if panel.warn_below is not None:
        steps = [{"color": _WARNING, "value": None}, {"color": _FINE, "value": panel.warn_below}]
    return {"mode": "absolute", "steps": steps}


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _sweep_variable() -> dict[str, Any]:
    query = f"label_values({LIVE.exported_name}, sweep)"
    return {
        "name": "sweep",
        "label": "Sweep",
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "sweep"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
