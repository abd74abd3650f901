"""Canonical JSON and keys."""

import json
import math
import re

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.ids import canonical_json, make_key

_SAFE_INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | _SAFE_INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _is_encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates have no UTF-8 form
        return False
    return True


@given(JSON_VALUES.filter(_is_encodable))
def test_canonical_json_read_back_is_the_same_value(value: object) -> None:
    # Large floats are written without an exponent: JSON has one kind of number.
    assert json.loads(canonical_json(value), parse_int=float) == value


@given(JSON_VALUES.filter(_is_encodable))
def test_canonical_json_is_that_of_the_reference_package(value: object) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-25, 25))
def test_canonical_json_of_numbers_of_any_size_is_that_of_the_reference_package(number: float, exponent: int) -> None:
    for scaled in (number, math.copysign(10.0**exponent, number), round(number % 10, 3) * 10.0**exponent):
        assert canonical_json(scaled) == rfc8785.dumps(scaled)


def test_canonical_json_ignores_order_and_kind_of_sequence() -> None:
    assert (
        canonical_json({"b": [1, 2], "a": None}) == canonical_json({"a": None, "b": (1, 2)}) == b'{"a":null,"b":[1,2]}'
    )


def test_canonical_json_writes_equal_numbers_equally() -> None:
    assert canonical_json([1.0, 0.1, 1e21]) == b"[1,0.1,1e+21]"


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, {1: 2}, {"a": {3, 4}}, b"bytes", object()])
def test_canonical_json_refuses_what_has_no_stable_form(value: object) -> None:
    with pytest.raises(ValueError, match="identity"):
        canonical_json({"field": value} if not isinstance(value, dict) else value)


def test_key_is_readable_and_a_safe_object_name() -> None:
    key = make_key("pretrain", "ResNet 50 / levels/depth2 seed=0", {"kind": "pretrain"})
    assert re.fullmatch(r"pretrain-resnet-50-levels-depth2-seed-0-[0-9a-f]{16}", key)


def test_key_depends_on_identity_and_not_on_its_order() -> None:
    assert make_key("k", "r", {"a": 1, "b": 2}) == make_key("k", "r", {"b": 2, "a": 1})
    assert make_key("k", "r", {"a": 1}) != make_key("k", "r", {"a": 2})


@given(st.text())
def test_key_of_any_readable_text_has_the_promised_form(readable: str) -> None:
    assert re.fullmatch(r"k(-[a-z0-9-]{1,48})?-[0-9a-f]{16}", make_key("k", readable, {}))
