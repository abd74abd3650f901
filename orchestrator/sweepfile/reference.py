"""The reference of the language, written from its schema: the lower part of ``docs/sweep.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.sweepfile.json_schema import build_schema

MARK = "<!-- From here on: python -m orchestrator.sweepfile.reference docs/sweep.md -->"

_ORDER: Mapping[str, tuple[str, ...]] = {
    "datasets": (
        "SyntheticHierarchy",
        "Digits",
        "ExternalShards",
        "BadSamplesSpec",
        "MixtureSpec",
        "ConvertedShards",
        "ConversionSpec",
    ),
    "labels": (
        "LabelEntry",
        "RandomIds",
        "RandomSplit",
        "Merge",
        "WordNetLevels",
        "Taxonomy",
        "ClustersSpec",
        "Rebalanced",
        "EmbedSpec",
        "SweptBackbone",
        "Plugin",
        "ClassChoice",
    ),
    "pretrain": (
        "PretrainSpec",
        "ModelSpec",
        "BackboneInitSpec",
        "InitialSpec",
        "SubsetSpec",
        "CheckpointsSpec",
        "IntervalSpec",
        "KeepSpec",
        "BestSpec",
    ),
    "transfer": ("TransferSpec", "SearchSpec", "AshaSpec", "RandomSpec", "OptunaSpec", "RangeSpec"),
    "analyze": (
        "AnalysisSpec",
        "MeasureSpec",
        "DistancesSpec",
        "ClpSpec",
        "PuritySpec",
        "EmbeddingSpec",
        "PluginMeasure",
    ),
    "recipes": ("TrainingRecipe", "ProbeRecipe", "CachedSgdRecipe", "LogisticRecipe", "KnnRecipe"),
    "simulate": (
        "SimulateSpec",
        "SeedBlocksSpec",
        "ExpectSpec",
        "SlopeSpec",
        "RatioSpec",
        "OrderingSpec",
        "MonotoneSpec",
        "ThresholdSpec",
        "ClosedFormSpec",
    ),
    "report": ("ReportSpec", "PublishedSpec"),
    "resources": ("ResourceGroups", "ResourcesSpec"),
    "compute": ("ComputeSpec",),
    "tracking": ("TrackingSpec",),
    "policy": ("PolicySpec", "BudgetSpec"),
    "notify": ("NotifySpec", "EmailSpec"),
}
_LONG_DEFAULT = 40


def reference_text() -> str:
    """Markdown: a table for each part of the language."""
    schema = build_schema()
    definitions: Mapping[str, Mapping[str, Any]] = schema["definitions"]
    lines = [MARK, "", "## Reference", "", "### The file", "", *_table(schema)]
    for section, names in _sections(schema).items():
        lines += ["", f"### `{section}`"]
        for name in names:
            part = definitions[name]
            lines += ["", f"#### {_title(name)}", "", _sentence(part.get("description", "")), ""]
            lines += _table(part, of=definitions["TrainingRecipe"] if _extends(name) else None)
    return "\n".join(lines) + "\n"


def _sections(schema: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """The parts of each section: those that `_ORDER` does not name come last in the first section that needs them."""
    found = {section: list(names) for section, names in _ORDER.items()}
    shown = {name for names in found.values() for name in names} | {"Substitution"}
    for section, names in found.items():
        reached = _reached(schema["properties"][section], schema["definitions"])
        names.extend(sorted(reached - shown))
        shown |= reached
    return found


def _reached(part: object, definitions: Mapping[str, object], known: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the definitions that a part of the schema refers to, also by way of others, besides the known ones."""
    if isinstance(part, Mapping) and (name := str(part.get("$ref", "")).rpartition("/")[2]) and name not in known:
        known = _reached(definitions[name], definitions, known | {name})
    values = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    for value in values:
        known = _reached(value, definitions, known)
    return known


def _extends(name: str) -> bool:
    """Whether a recipe has all fields of a training, and some more."""
    return name in {"ProbeRecipe", "CachedSgdRecipe"}


def _table(part: Mapping[str, Any], of: Mapping[str, Any] | None = None) -> Iterator[str]:
    """One row per field; of a part that extends another one, those that it adds."""
    required = {*part.get("required", ()), *part.get("then", {}).get("required", ())}
    inherited = (of or {}).get("properties", {})
    yield "| field | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in part["properties"].items():
        if name in inherited:
            continue
        default = "*needed*" if name in required else _default(field)
        yield f"| `{name}` | {_kind(field)} | {default} | {_cell(field.get('description', ''))} |"
    if of is not None:
        yield "| ... | | | every field of a training |"


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    text = json.dumps(value, ensure_ascii=False)
    return "" if value in (None, "", [], {}) or len(text) > _LONG_DEFAULT else f"`{_cell(text)}`"


def _kind(field: Mapping[str, Any]) -> str:
    """Such as ``number > 0`` or ``list of text``."""
    if "anyOf" in field:
        forms = [form for form in field["anyOf"] if form != {"$ref": "#/definitions/Substitution"}]
        return " or ".join(dict.fromkeys(kind for form in forms if (kind := _kind(form)) != "nothing"))
    if "$ref" in field:
        return f"[{_title(name := field['$ref'].rpartition('/')[2])}](#{_anchor(name)})"
    if "allOf" in field:
        return _kind(field["allOf"][0])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    return _of_type(field)


def _of_type(field: Mapping[str, Any]) -> str:
    kind = field.get("type")
    if kind == "array":
        items = _kind(field.get("items", {}))
        size = field.get("minItems")
        same = size == field.get("maxItems") and size is not None
        return f"list of {size} {items}" if same else f"list of {items}"
    if kind == "object":
        entries = [*field.get("patternProperties", {}).values(), field.get("additionalProperties")]
        of = next((_kind(entry) for entry in entries if isinstance(entry, dict) and entry), "")
        return f"mapping of names to {of}" if of else "mapping"
    names = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "null": "nothing",
    }
    return names.get(str(kind), "any value") + _range(field)


def _range(field: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field and field[key] < 2**52]
    return f" {', '.join(bounds)}" if bounds else ""


def _title(name: str) -> str:
    """``SyntheticHierarchy`` -> ``Synthetic hierarchy``."""
    words = "".join(f" {sign.lower()}" if sign.isupper() else sign for sign in name.removesuffix("Spec")).strip()
    return words[:1].upper() + words[1:]


def _anchor(name: str) -> str:
    return _title(name).lower().replace(" ", "-")


def _sentence(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return _sentence(text).replace("|", "\\|")


if __name__ == "__main__":
    import sys
    from pathlib import Path

    path = Path(sys.argv[1])
    path.write_text(path.read_text(encoding="utf-8").partition(MARK)[0] + reference_text(), encoding="utf-8")
