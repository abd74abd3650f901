"""The language as JSON Schema draft-07, for editors; ``sweep.schema.json`` in this folder is its text.

It is made from the pydantic models, which decide: the schema is as strict as draft-07 allows, and accepts every valid
sweep.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orchestrator.sweepfile.fields import Strict
from orchestrator.sweepfile.pretrain import PretrainSpec
from orchestrator.sweepfile.recipe import CachedSgdSpec, KnnSpec, LogisticSpec, ProbeSpec, RecipeSpec
from orchestrator.sweepfile.sweep import SweepSpec

FILE = Path(__file__).with_name("sweep.schema.json")

Schema = dict[str, Any]

_REF = "#/definitions/{model}"
_SUBSTITUTION = {"$ref": "#/definitions/Substitution"}
_KEPT = ("description", "default")
_ALTERNATIVES = ("RULES", "SOURCES", "UNITS")
"""Class variables that name fields of which exactly one is given."""
_RECIPES: Mapping[str, type[BaseModel]] = {
    "TrainingRecipe": RecipeSpec,
    "ProbeRecipe": ProbeSpec,
    "CachedSgdRecipe": CachedSgdSpec,
    "LogisticRecipe": LogisticSpec,
    "KnnRecipe": KnnSpec,
}
_DOCUMENT: Mapping[str, Schema] = {
    "include": {
        "description": "Files that this file includes, relative to its folder; this file overrides them, and later "
        "files override earlier ones.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
    "vars": {
        "description": "Values by name, for ${vars.NAME} anywhere in the file.",
        "type": "object",
    },
    "tiny": {
        "description": "What --scale tiny changes: merged over the file, so that a rehearsal takes minutes.",
        "type": "object",
    },
}


def build_schema() -> Schema:
    """The schema of a whole sweep.yaml."""
    root = _plain(SweepSpec.model_json_schema(by_alias=True, ref_template=_REF))
    definitions = root.pop("definitions")
    for name, model in _RECIPES.items():
        recipe = _plain(model.model_json_schema(by_alias=True, ref_template=_REF))
        definitions |= recipe.pop("definitions", {})
        definitions[name] = _open_recipe(recipe)
    for model in _models():
        if model.__name__ in definitions:
            definitions[model.__name__] |= _alternatives(model)
    _use_recipes(root, definitions)
    complete = {name: _substitutable(part) for name, part in sorted(definitions.items())}
    complete["Substitution"] = {
        "description": "A value by ${vars.NAME} or ${env:NAME}.",
        "type": "string",
        "pattern": r"\$\{",
    }
    properties = _substitutable(root)["properties"] | dict(_DOCUMENT)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "sweep.yaml of pretraining-orchestrator",
        **root,
        "required": ["version", "name"],
        # Included files may hold any part, and simulations need no backbones.
        "if": {"not": {"anyOf": [{"required": ["include"]}, {"required": ["simulate"]}]}},
        "then": {"required": [*root["required"]]},
        "properties": properties,
        "definitions": complete,
    }


def schema_text() -> str:
    """The content of ``sweep.schema.json``."""
    return json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"


@cache
def shipped_schema() -> str:
    """The text of the file in the package."""
    return FILE.read_text(encoding="utf-8")


def _models(base: type[BaseModel] = Strict) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def _alternatives(model: type[BaseModel]) -> Schema:
    """That exactly one of some fields is given."""
    for variable in _ALTERNATIVES:
        fields: Sequence[str] = getattr(model, variable, ())
        if fields:
            return {"oneOf": [{"required": [field]} for field in fields]}
    return {}


def _plain(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Pydantic's schema of the newest draft, translated to draft-07; without titles made of names."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for key, part in schema.items():
        if key in {"properties", "$defs", "patternProperties"}:
            name = "definitions" if key == "$defs" else key
            found[name] = {field: _plain(value) for field, value in part.items()}
        elif key == "default":
            found[key] = part
        elif key not in {"title", "discriminator"}:
            found["anyOf" if key == "oneOf" else key] = _plain(part)
    if isinstance(found.get("default"), dict):
        del found["default"]  # which the parts say by themselves
    if "patternProperties" in found:
        found.setdefault("additionalProperties", False)
    if "$ref" in found and len(found) > 1:  # in draft-07 nothing beside a reference counts
        found["allOf"] = [{"$ref": found.pop("$ref")}]
    return found


def _open_recipe(schema: Schema) -> Schema:
    """A recipe, whose missing fields its base may give."""
    base = {"description": "Recipe whose fields these override.", "type": "string"}
    rest = {key: part for key, part in schema.items() if key != "required"}
    return {**rest, "properties": {"base": base, **schema["properties"]}}


def _use_recipes(root: Schema, definitions: dict[str, Schema]) -> None:
    """Recipes are validated after their bases are known; the schema says what they may hold before."""
    any_recipe = {"anyOf": [{"$ref": _REF.format(model=name)} for name in _RECIPES]}
    training = {"$ref": _REF.format(model="TrainingRecipe")}
    by_name: Schema = root["properties"]["recipes"]["patternProperties"]
    root["properties"]["recipes"]["patternProperties"] = dict.fromkeys(by_name, any_recipe)
    blocks = root["properties"]["pretrain"]
    for form in blocks["anyOf"]:
        if "patternProperties" in form:
            form |= {"minProperties": 1, "propertyNames": {"not": {"enum": sorted(PretrainSpec.model_fields)}}}
    for model, recipe in (("PretrainSpec", training), ("TransferSpec", any_recipe)):
        field = definitions[model]["properties"]["recipe"]
        forms = [form for form in field["anyOf"] if form.get("type") != "object"]
        field["anyOf"] = [*forms, recipe]


def _substitutable(schema: Schema) -> Schema:
    """The schema, each value of which may be a substitution in place of itself."""
    found = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in found:
            found[key] = {name: _or_substitution(part) for name, part in found[key].items()}
    if isinstance(found.get("items"), dict):
        found["items"] = _or_substitution(found["items"])
    for key in ("anyOf", "allOf"):
        if key in found:
            found[key] = [_substitutable(part) for part in found[key]]
    return found


def _or_substitution(schema: Schema) -> Schema:
    if not schema.keys() - {"description", "default"}:
        return schema  # anything
    if schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern"}:
        return schema
    outside = {key: schema[key] for key in _KEPT if key in schema}
    inside = {key: part for key, part in _substitutable(schema).items() if key not in _KEPT}
    forms = (
        inside["anyOf"] if inside.keys() == {"anyOf"} else inside["allOf"] if inside.keys() == {"allOf"} else [inside]
    )
    return {**outside, "anyOf": [*forms, _SUBSTITUTION]}


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
