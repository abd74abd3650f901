"""The recipe of a training job: named hyper-parameters, fully resolved by the planner, checked again here.

``orchestrator.core.hyper_parameters`` defines them; this is how the JSON of an identity becomes their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any, Final, Self

from orchestrator.core.errors import UserError
from orchestrator.core.hyper_parameters import PARAMETERS, RELATIONS, Form, HyperParameters, Parameter

_OF_FEATURES: Final = ("features", "solver")
"""Of recipes on cached features: what trains them does not need to know."""
_NAMED_FREEZES: Final[Mapping[str, tuple[str, ...]]] = {"none": (), "backbone": ("backbone.*",)}
_MAY_BE_ZERO: Final = "lr"
"""A rate of 0 keeps a network as it is. The language refuses it; who makes a job by hand may mean it."""
_LENGTHS: Final = {2: "two ", 3: "three "}
_ALWAYS_TOLD: Final = ("epochs", "batch_size", "optimizer", "lr", "schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(HyperParameters):
    """Hyper-parameters that fit each other; ``batch_size`` is the global batch, ``lr`` that after warm-up.

    A field with a default may be missing in a resolved recipe: identities leave such fields out at their default.
    """

    def __post_init__(self) -> None:
        for name, wanted in _refusals({name: getattr(self, name) for name in PARAMETERS}):
            raise UserError(f"recipe.{name} is {getattr(self, name)!r}; it must be {wanted}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """From the ``recipe`` of a job's parameters. Raises ``UserError`` naming the field that is wrong."""
        mapping = {name: value for name, value in mapping.items() if name not in _OF_FEATURES}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        missing, unknown = required - mapping.keys(), mapping.keys() - {field.name for field in fields(cls)}
        if missing or unknown:
            wrong = f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            raise UserError(f"recipe is not fully resolved: {wrong}; plan the sweep again")
        return cls(**{name: _read(name, value) for name, value in mapping.items()})

    @property
    def is_mixed(self) -> bool:
        """Whether training images are blended or cut together in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def rewind_steps(self) -> int | None:
        """Updates to go back after a numerics failure; None = stop."""
        return self.on_numerics


def tell_recipe(recipe: Recipe) -> str:
    """One line for people who read logs.

    ``name=value`` of the fields that every reader asks for, and of all others that are not at their default; those
    that every identity holds come last.
    """
    defaults = {field.name: field.default for field in fields(recipe) if field.default is not MISSING}
    defaults |= {name: one.default for name, one in PARAMETERS.items() if one.always and name not in _ALWAYS_TOLD}
    others = [name for name in defaults if getattr(recipe, name) != defaults[name]]
    return " ".join(f"{name}={_plain(getattr(recipe, name))}" for name in (*_ALWAYS_TOLD, *others))


def _plain(value: object) -> str:
    """As a sweep would have it: ``[0.9, 0.99]``, ``adamw``, ``0.001``."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------- from JSON to typed values


def _read(name: str, value: Any) -> Any:  # noqa: ANN401 - JSON from an identity
    parameter = PARAMETERS[name]
    # Sweep files that name a removed option are refused; stored plans of former releases are finished.
    if parameter.form is Form.CHOICE and value not in (*parameter.options, *parameter.removed):
        raise UserError(f"recipe.{name} is {value!r}; choose one of {', '.join(parameter.options)}")
    if parameter.form is Form.NUMBERS:
        return _read_numbers(name, value, parameter.length)
    if parameter.form is Form.FREEZE:
        return _read_patterns(name, value)
    return _read_rewind(name, value) if parameter.form is Form.REACTION else value


def _read_numbers(name: str, value: Any, length: int | None) -> tuple[float, ...]:  # noqa: ANN401 - see _read
    if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
        raise UserError(f"recipe.{name} is {value!r}; give a list of {length or 'ascending'} numbers")
    return tuple(float(item) for item in value)


def _read_patterns(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401 - see _read
    if isinstance(value, str) and value in _NAMED_FREEZES:
        return _NAMED_FREEZES[value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        wanted = "choose none, backbone or a list of patterns of parameter names"
        raise UserError(f"recipe.{name} is {value!r}; {wanted}")
    return tuple(value)


def _read_rewind(name: str, value: Any) -> int | None:  # noqa: ANN401 - see _read
    if value is None or value == "stop":
        return None
    if isinstance(value, Mapping) and value.keys() == {"rewind"}:
        return int(value["rewind"])
    raise UserError(f"recipe.{name} is {value!r}; choose stop or {{rewind: number of updates}}")


# ------------------------------------------------------------------------------------------------------------- checks


def _refusals(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of values that are wrong, and what they must be: first by themselves, then because of others."""
    for name, parameter in PARAMETERS.items():
        if name == _MAY_BE_ZERO and values[name] == 0:
            continue
        if not _is_inside(parameter, values[name]):
            yield name, _wanted(parameter)
    for relation in RELATIONS:
        if relation.wanted and relation.is_broken(values):
            yield relation.name, relation.wanted.format(**values)


def _is_inside(parameter: Parameter, value: Any) -> bool:  # noqa: ANN401 - of several types
    if value is None or parameter.form not in {Form.NUMBER, Form.WHOLE, Form.NUMBERS}:
        return value is not None or bool(parameter.null) or parameter.form is Form.REACTION
    numbers = value if isinstance(value, tuple) else (value,)
    ascends = not parameter.is_ascending or all(low <= high for low, high in pairwise(numbers))
    return ascends and all(parameter.bounds.holds(number) for number in numbers)


def _wanted(parameter: Parameter) -> str:
    """``> 0``, ``two ascending numbers in (0, 1]``, ``>= 1, or null for whole shards``, ``>= 0 (0 = none)``."""
    order = "ascending " if parameter.is_ascending else ""
    what = f"{_LENGTHS.get(parameter.length or 0, '')}{order}{parameter.items} " * (parameter.form is Form.NUMBERS)
    zero = f" (0 = {parameter.zero})" if parameter.zero else ""
    return f"{what}{parameter.bounds}{zero}" + (f", or null for {parameter.null}" if parameter.null else "")
