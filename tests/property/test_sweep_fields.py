"""Keys: what they follow, what they do not, and that the canonical form of a sweep has the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from orchestrator.core.hyper_parameters import PARAMETERS
from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.protocol import is_name
from orchestrator.sweepfile.fields import Strict
from orchestrator.sweepfile.load import canonical_text
from orchestrator.sweepfile.notify import ClusterNotifySpec
from orchestrator.sweepfile.parse.tree import parse_tree
from tests.sweep_changes import CHANGES
from tests.sweep_fields import TEXT, Role, plan_of, portable_of


def fields(base: type[BaseModel] = Strict) -> Iterator[str]:
    """Every field of the schema, under the class that declares it."""
    for model in base.__subclasses__():
        if model is ClusterNotifySpec:  # of the cluster's own file; no sweep has its fields
            continue
        declared = [name for name in vars(model).get("__annotations__", {}) if name in model.model_fields]
        # Those of a training are made of core/hyper_parameters.py; the class that reads them adds none.
        declaring = "RecipeSpec" if set(declared) == PARAMETERS.keys() else model.__name__
        yield from (f"{declaring}.{model.model_fields[name].alias or name}" for name in declared)
        yield from fields(model)


@cache
def plan(*overrides: str) -> Plan:
    return plan_of(*overrides)


def closure(after: Plan, names: set[str]) -> set[str]:
    """Jobs, and all that need them."""
    found = set(names)
    for job in after.jobs:
        if found.intersection(job.needs):
            found.add(job.name)
    return found


def test_every_field_of_the_language_says_what_changing_it_does() -> None:
    known = set(fields())
    assert known - CHANGES.keys() == set(), "declare them in tests/sweep_changes.py"
    assert CHANGES.keys() - known == set(), "these fields are gone"


@pytest.mark.parametrize("field", CHANGES)
def test_field_changes_its_jobs_and_exactly_their_descendants(field: str) -> None:
    change = CHANGES[field]
    before, after = plan(*change.given).by_name(), plan_of(*change.given, *change.overrides)
    jobs = after.by_name()
    assert all(map(is_name, jobs))
    common = before.keys() & jobs.keys()
    changed = {name for name in common if before[name].key != jobs[name].key}
    if change.role is Role.EXECUTION:
        assert changed == set()
        assert before.keys() == jobs.keys()
        return
    if change.role is Role.SHARING:
        assert {name for name in changed if "/part" not in name} == set()
        assert before.keys() != jobs.keys()
        return
    own = {name for name in common if before[name].identity["parameters"] != jobs[name].identity["parameters"]}
    rewired = {name for name in common if before[name].needs != jobs[name].needs}
    new = jobs.keys() - before.keys()
    assert {before[name].kind.value for name in own} == set(change.kinds)
    assert changed == closure(after, own | rewired | new) - new
    if change.role is Role.IDENTITY:
        assert before.keys() == jobs.keys()
    else:
        assert new or before.keys() - jobs.keys() or field.endswith("SweepSpec.datasets")


def test_execution_field_that_changes_a_key_would_be_found() -> None:
    """The test above can fail: a change of identity that is declared as execution."""
    before, after = plan().by_name(), plan_of("pretrain.first.recipe.lr=0.5").by_name()
    assert {name for name in before if before[name].key != after[name].key}


def test_keys_are_the_digests_of_whole_identities() -> None:
    """Parts that jobs share are encoded once; that changes nothing."""
    for job in plan().jobs:
        assert job.key.endswith(f"-{sha256_hex(canonical_json(job.identity))[:16]}")


# ---------------------------------------------------------------------------------------------------- order, processes


def shuffled(value: Any, order: random.Random, path: tuple[str, ...] = ()) -> Any:
    """The value with the keys of its mappings in another order."""
    if isinstance(value, list):
        return [shuffled(item, order, (*path, "")) for item in value]
    if not isinstance(value, dict):
        return value
    items = [(key, shuffled(item, order, (*path, key))) for key, item in value.items()]
    if path and path[-1] != "groups":  # the order of merged groups numbers them
        order.shuffle(items)
    return dict(items)


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.integers(0, 2**32))
def test_keys_do_not_follow_the_order_of_yaml_keys(seed: int) -> None:
    document = shuffled(portable_of().portable, random.Random(seed))  # noqa: S311 - no secret
    again = plan_of(text=canonical_text(document, document["recipes"]))
    assert {job.name: job.key for job in again.jobs} == {job.name: job.key for job in plan().jobs}


def test_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    script = (
        "import json; from tests.sweep_fields import plan_of;"
        "print(json.dumps({job.name: job.key for job in plan_of().jobs}))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == {job.name: job.key for job in plan().jobs}


# ---------------------------------------------------------------------------------------------------------- canonical

_CHOICES = sorted(field for field, change in CHANGES.items() if not change.given)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(_CHOICES))
def test_canonical_form_plans_the_same(field: str) -> None:
    overrides = CHANGES[field].overrides
    canonical = portable_of(*overrides).canonical
    assert plan_of(text=canonical).to_json() == plan_of(*overrides).to_json()
    assert portable_of(text=canonical).canonical == canonical


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12).filter(
    lambda s: "${" not in s
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXT,
    st.sampled_from(["no", "on", "1e-4", "010", "2020-01-01", "~", "null", "1_000", "0x1f", ".5", "1:30", "=", "<<"]),
)
_VALUES = st.recursive(
    _SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(_TEXT, part, max_size=3), max_leaves=8
)


@settings(max_examples=100, deadline=None)
@given(_VALUES)
def test_canonical_form_reads_back_every_value_with_its_type(value: Any) -> None:
    text = canonical_text({"version": 1, "report": {"value": value}}, {})
    found = parse_tree(text, "f").value["report"]["value"]
    assert repr(found) == repr(value)


def test_canonical_form_names_no_file_variable_or_shipped_recipe() -> None:
    canonical = portable_of().canonical.partition("\nnotify:")[0]  # which holds references to secrets, and nothing else
    assert "cached-probe:" in canonical  # written out below recipes
    assert not any(word in canonical for word in ("include", "vars", "${"))
    assert "version: 1" in TEXT
