"""The language as JSON Schema: what editors say must be what the product says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from pydantic import BaseModel

from orchestrator.cli.commands.init import Template
from orchestrator.sweepfile.fields import Strict
from orchestrator.sweepfile.json_schema import FILE, build_schema, schema_text
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.templates import template_text

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "workloads" / "sweeps").glob("*.yaml"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in SWEEPS}
TEXTS |= {f"template {name}": template_text(name) for name in Template}
SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft7Validator(SCHEMA)


def problems_of(text: str) -> list[str]:
    value = parse_tree(text, "f").value
    return [f"{list(error.absolute_path)}: {error.message}" for error in VALIDATOR.iter_errors(value)]


def models(base: type[BaseModel] = Strict) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def test_schema_in_the_package_is_that_of_the_code() -> None:
    message = "run: python -m orchestrator.sweepfile.json_schema"
    assert FILE.read_text(encoding="utf-8") == schema_text(), message


def test_schema_is_draft_07_and_resolves_all_references() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    references = set(find_references(SCHEMA))
    assert references
    assert references <= {f"#/definitions/{name}" for name in SCHEMA["definitions"]}
    assert "$defs" not in json.dumps(SCHEMA)


def find_references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            assert len(part) == 1  # beside a reference draft-07 reads nothing
            yield part["$ref"]
        for value in part.values():
            yield from find_references(value)
    elif isinstance(part, list):
        for value in part:
            yield from find_references(value)


@pytest.mark.parametrize("name", TEXTS)
def test_schema_takes_every_sweep_that_we_ship(name: str) -> None:
    assert problems_of(TEXTS[name]) == []


QUICKSTART = TEXTS["quickstart.yaml"]
WRONG = [
    ("version: 1", "version: 2"),
    ("name: quickstart", "name: a/b"),
    ("name: quickstart", "nmae: quickstart"),
    ("num_train: 4096", "num_train: many"),
    ("num_train: 4096", "num_train: 0"),
    ("num_train: 4096", "num_trian: 4096"),
    ("builtin: synthetic-hierarchy", "builtin: synthetic"),
    ("hierarchy: [depth1, depth2, depth3, depth4]", "hierarchy: depth1"),
    ("hierarchy: [depth1, depth2, depth3, depth4]", "hierarchy: [depth1], modulo: 2"),
    ("dataset: tree, hierarchy", "hierarchy"),
    ('labels: ["levels/*", "random/*"]', "labels: []"),
    ("optimizer: sgd\n    lr: 0.3", "optimizer: sdg\n    lr: 0.3"),
    ("lr: 0.3", "lr: -1"),
    ("lr: 0.3", "lerning_rate: 0.3"),
    ("seeds: [0, 1, 2, 3, 4]", "seeds: [0, -1]"),
    ("protocol: finetune", "protocol: tune"),
    ("metric: val_error", "metric: [val_error]"),
    ("resources: {pretrain: {cpus: 1}", "resources: {pretrain: {cpu: 1}"),
    ("transfer:", "transfers:"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_schema_refuses_what_the_product_refuses(old: str, new: str) -> None:
    assert old in QUICKSTART
    assert problems_of(QUICKSTART.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_train: 4096", 'num_train: "${vars.size}"'),
        ("seeds: [0, 1, 2]", 'seeds: "${vars.seeds}"'),
        ("lr: 0.3", 'lr: "${vars.lr}"'),
        ("cpus: 1", 'cpus: "${env:CPUS:-1}"'),
        ("name: quickstart", "name: quickstart\ninclude: [more.yaml]"),
    ],
)
def test_schema_takes_substitutions_and_includes(old: str, new: str) -> None:
    assert problems_of(QUICKSTART.replace(old, new)) == []


def test_schema_lets_an_including_file_leave_parts_out() -> None:
    assert problems_of("version: 1\nname: x\ninclude: rest.yaml\n") == []
    assert problems_of("version: 1\nname: x\n")


def test_every_field_of_the_language_has_a_description() -> None:
    without = [
        f"{model.__name__}.{name}"
        for model in models()
        for name, field in model.model_fields.items()
        if len(field.description or "") < 4
    ]
    assert without == []


def test_every_part_of_the_language_has_a_docstring() -> None:
    assert [model.__name__ for model in models() if not model.__doc__] == []


def test_schema_shows_descriptions_of_nested_parts() -> None:
    properties = build_schema()["properties"]
    assert "description" in properties["resources"]
    assert "description" in properties["pretrain"]
