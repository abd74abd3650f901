"""The arguments that a sweep gives a plug-in, validated by the plug-in's type, and whose fault its exceptions are.

A plug-in is a function; if it has parameters, it has an argument ``arguments`` (of a label rule: the second one, of a
measure: the fourth one, with any name). If that is annotated with a pydantic model, the model validates the sweep's
arguments, and the function gets an instance; else it gets the mapping.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from typing import Any, Final, get_type_hints

from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError

from orchestrator.core.errors import OrchestratorError, UserError, is_trouble_of_machine
from orchestrator.core.plugins import GROUPS, LABEL_SPACES, MEASURES, load_plugin, short_name
from orchestrator.core.schema_words import why_refused
from orchestrator.core.suggest import did_you_mean

_ARGUMENTS: Final = "arguments"
_POSITIONS: Final = {LABEL_SPACES: 1, MEASURES: 3}
"""Plug-ins of these groups are called by position; this is that of their arguments."""
_SHOWN: Final = 60
_OF_DEVICES: Final = frozenset({"OutOfMemoryError", "AcceleratorError"})
"""Torch's, by name: who only checks arguments does not import it."""
Problem = tuple[tuple[str | int, ...], str]
"""The path below the arguments, and what is wrong there."""


class PluginArgumentsError(UserError):
    """A plug-in refuses its arguments; ``problems`` are all that are wrong."""

    def __init__(self, message: str, problems: tuple[Problem, ...]) -> None:
        super().__init__(message, problems)
        self.problems = problems

    def __str__(self) -> str:
        return str(self.args[0])


def takes_arguments(function: Callable[..., Any], group: str) -> bool:
    """Whether a plug-in of a group has parameters of its own."""
    return bool(_parameter_of(function, group))


def _parameter_of(function: Callable[..., Any], group: str) -> str:
    """The name of the function's argument for them; empty = there is none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some functions in C nobody knows
        return _ARGUMENTS
    if _ARGUMENTS in parameters or any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        return _ARGUMENTS
    position = _POSITIONS.get(group, len(parameters))
    return list(parameters)[position] if len(parameters) > position else ""


def open_plugin(
    reference: str, group: str, arguments: Mapping[str, Any]
) -> tuple[Callable[..., Any], BaseModel | dict[str, Any]]:
    """The function of a reference, and the arguments as it wants them.

    Raises:
        UserError: it is not installed as it was planned.
        PluginArgumentsError: it takes no such arguments.
    """
    function: Callable[..., Any] = load_plugin(reference, group)
    try:
        return function, _read(function, arguments, _parameter_of(function, group))
    except _RefusedError as error:
        said = "; ".join(f"{'.'.join(map(str, path)) or _ARGUMENTS}: {why}" for path, why in error.problems)
        message = f"the {GROUPS[group]} {short_name(reference)!r} refuses its arguments: {said}"
        raise PluginArgumentsError(message, error.problems) from error


class _RefusedError(Exception):
    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


def _read(function: Callable[..., Any], arguments: Mapping[str, Any], parameter: str) -> BaseModel | dict[str, Any]:
    if not parameter:
        if arguments:
            raise _RefusedError((((), "it has no parameters; remove them"),))
        return {}
    model = _model_of(function, parameter)
    if model is None:
        return dict(arguments)
    problems = list(unknown_parameters(model, arguments))
    try:
        made = model.model_validate(dict(arguments))
    except ValidationError as error:
        problems += [_problem(dict(detail)) for detail in error.errors(include_url=False)]
        problems = list({path: (path, why) for path, why in reversed(problems)}.values())[::-1]
        raise _RefusedError(tuple(problems)) from error
    if problems:
        raise _RefusedError(tuple(problems))
    return made


def _model_of(function: Callable[..., Any], parameter: str) -> type[BaseModel] | None:
    try:
        hint = get_type_hints(function).get(parameter)
    except (NameError, TypeError):  # annotations that cannot be read say nothing
        return None
    return hint if isinstance(hint, type) and issubclass(hint, BaseModel) else None


def unknown_parameters(model: type[BaseModel], arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Names that a model does not have: most models ignore them, and a typing error would mean a default."""
    if model.model_config.get("extra") == "allow":
        return
    known = list(_accepted_names(model))
    for name in arguments:
        if name not in known:
            yield (name,), f"there is no parameter '{name}': {did_you_mean(name, known)}"


def _accepted_names(model: type[BaseModel]) -> Iterator[str]:
    """What a model reads: of a field with an alias that alone, unless the model is told to read its name, too."""
    config = model.model_config
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    for name, field in model.model_fields.items():
        alias = field.validation_alias  # pydantic puts a plain `alias` there
        if alias is not None and config.get("validate_by_alias", True):
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            yield from (str(one.path[0]) if isinstance(one, AliasPath) else one for one in choices)
        if alias is None or by_name:
            yield name


def _problem(detail: Mapping[str, Any]) -> Problem:
    path = tuple(detail["loc"])
    if detail["type"] == "missing":
        return path[:-1], f"'{path[-1]}' is missing; add '{path[-1]}: ...' here"
    why = why_refused(detail["type"], str(detail["msg"]), detail.get("ctx", {}))
    if detail["type"] == "value_error":  # a sentence of the plug-in's own
        return path, why
    shown = repr(detail["input"])
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return path, f"{shown} is refused: {why}"


def is_fault_of_code(error: Exception) -> bool:
    """Whether an exception that left a user's code means that the code is wrong, so that no other attempt helps.

    Our own errors (a stop or bad data, met while it reads what it was given) say themselves what they mean. Another
    attempt or node may not meet those of disks, memory and devices.
    """
    if isinstance(error, OrchestratorError | OSError | MemoryError | BrokenExecutor):
        return False
    is_of_device = any(base.__name__ in _OF_DEVICES for base in type(error).__mro__)
    return not is_of_device and not is_trouble_of_machine(str(error))
