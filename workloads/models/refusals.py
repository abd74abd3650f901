"""What timm and torch raise at arguments and sizes that they cannot take, and how people are told.

Their own sentences are kept. Python's, which speak of types and attributes, are replaced, and follow as the cause.
"""

from __future__ import annotations

import re
import traceback
from typing import Final

REFUSALS: Final[tuple[type[Exception], ...]] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What constructors and forward passes raise at arguments and sizes that they cannot take."""
_KINDS: Final = {
    "NoneType": "null",
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "a number",
    "list": "a list",
    "str": "text",
    "tuple": "a list",
}
_PYTHON: Final = (
    (r"unexpected keyword argument '(\w+)'", "it has no argument '{0}'"),
    (r"multiple values for keyword argument '(\w+)'", "timm sets '{0}' by itself"),
    (r"missing \d+ required", "another argument is missing"),
    (r"'float' object cannot be interpreted as an integer", "it must be a whole number"),
    (r"'\w+' object is not (?:iterable|subscriptable)|object of type '\w+' has no len", "it must be {wanted}"),
    (r"'(\w+)' object (?:is not callable|has no attribute)", "{kind} cannot be used here"),
    (r"(?:list|tuple) index out of range|not enough values to unpack", "the list is too short"),
    (r"too many values to unpack", "the list is too long"),
    (
        r"unsupported operand|not supported between|multiply sequence|must be str|can only concatenate",
        "it must be a number",
    ),
    (r"modulo by zero|division by zero", "it must not be 0, because other sizes are divided by it"),
    (r"negative dimension|number of steps must be non-negative", "a size would be below 0"),
)
"""Patterns of messages, and what they mean for a person who writes arguments into a file."""


def explain_refusal(error: Exception, *, wanted: str = "a list") -> str:
    """Why a network cannot be built or run, in words, with the message of timm, torch or Python behind it.

    Args:
        error: one of ``REFUSALS``.
        wanted: what the argument at fault must be, where Python says that it goes over its parts.
    """
    message = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, KeyError):
        return f"timm does not know the name {message} ({cause})"
    for pattern, words in _PYTHON:
        if found := re.search(pattern, message):
            groups = [group or "" for group in found.groups()]
            first = groups[0] if groups else ""
            if "has no attribute" in found[0] and first not in _KINDS:
                return f"with these arguments the network lacks a part that it needs ({cause})"
            return f"{words.format(*groups, kind=_KINDS.get(first, first), wanted=wanted)} ({cause})"
    if not message:  # an assertion, whose condition says what is needed
        frames = traceback.extract_tb(error.__traceback__)
        line = (frames[-1].line or "") if frames else ""
        return f"timm needs {line.removeprefix('assert ')} ({cause})" if line.startswith("assert ") else cause
    return message.rstrip(".")
