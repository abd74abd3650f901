"""Equal parts of a plan become one object, and nothing else."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.graph.plan import load_shared

LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.sampled_from(["", "a", "1"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(value=VALUES)
def test_value_read_with_shared_parts_is_written_as_before(value: Any) -> None:
    text = json.dumps(value)
    assert json.dumps(load_shared(text)) == text


@given(values=st.lists(OBJECTS, max_size=5))
def test_equal_objects_are_one_object_and_others_are_not(values: list[dict[str, Any]]) -> None:
    shared = load_shared(json.dumps(values))
    for value, found in zip(values, shared, strict=True):
        for other, its in zip(values, shared, strict=True):
            assert (found is its) == (json.dumps(value) == json.dumps(other))
