"""Plain-English messages for values that a schema refuses.

Sweep files, arguments of plug-ins, parameters of simulations and arguments of models are refused in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_WORDS: Final[Mapping[str, str]] = {
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "multiple_of": "it must be a multiple of {multiple_of}",
    "finite_number": "it must be a finite number",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "string_type": "it must be text",
    "string_too_short": "it must have at least {min_length} characters",
    "string_too_long": "it must have at most {max_length} characters",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
    "too_short": "it must have at least {min_length} items, and has {actual_length}",
    "too_long": "it must have at most {max_length} items, and has {actual_length}",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "missing": "it must be given",
}
"""By kind of pydantic's error."""


def why_refused(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """Why a value is refused, as the part of a sentence after "is refused: ".

    Args:
        kind: pydantic's name of the error.
        message: pydantic's message; it is used for kinds that have no words here, such as errors of validators.
        context: pydantic's details of the error.
    """
    if kind in _WORDS:
        return _WORDS[kind].format(**{name: _shown(value) for name, value in context.items()})
    for start in ("Value error, ", "Assertion failed, ", "Input "):
        message = message.removeprefix(start)
    return message


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
