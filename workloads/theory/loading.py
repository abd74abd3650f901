"""From the name of a simulation to its function, and its parameters with all defaults filled in."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ValidationError

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import SIMULATIONS as GROUP
from orchestrator.core.plugins import is_reference, load_plugin
from orchestrator.core.schema_words import why_refused
from orchestrator.core.simulation_files import SimulationCode, file_identity
from workloads.runtime.plugin_arguments import Problem, unknown_parameters
from workloads.theory.context import SimulationContext
from workloads.theory.files import load_function
from workloads.theory.shipped import SIMULATIONS

_MAX_PARAMETER: Final = 1_000_000_000
Metrics: TypeAlias = Mapping[str, float]
Function: TypeAlias = Callable[[Any, Sequence[int], SimulationContext], Iterator[Metrics]]


class ParametersError(UserError):
    """Parameters that a simulation refuses; ``problems`` are pairs of where and why."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        super().__init__(
            f"the simulation {name!r} refuses its parameters: {_described(problems)}; correct them and plan again"
        )
        self.problems = tuple(problems)


def _described(problems: Sequence[Problem]) -> str:
    return "; ".join(f"{'.'.join(map(str, at))}: {why}" if at else why for at, why in problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulation that can be run."""

    name: str
    """For people: of a plain file its name and the function, else as of the identity."""
    function: Function
    model: type[BaseModel] | None
    """What its parameters must be; None = any mapping."""

    @classmethod
    def load(cls, name: str, file: str = "") -> Simulation:
        """Load what an identity names: a shipped one, the reference of a plug-in, or a function of a plain file.

        Args:
            name: as of the identity.
            file: path of the file, where the identity means one.

        Raises:
            UserError: there is none of this name here, or another version of it, or it cannot be called as one.
        """
        if name in SIMULATIONS:
            module, _, attribute = SIMULATIONS[name].partition(":")
            function: Function = getattr(importlib.import_module(module), attribute)
        elif is_reference(name):
            function = load_plugin(name, GROUP)
        elif (wanted := file_identity(name)) is not None:
            function, name = _load_file(Path(file), *wanted), f"{Path(file).name}:{wanted[1]}"
        else:
            raise UserError(f"there is no simulation {name!r} in this release; it has {', '.join(sorted(SIMULATIONS))}")
        _check_call(name, function)
        return cls(name=name, function=function, model=_model_of(function))

    def complete(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters as plain JSON with the defaults of the model, as a job reads them again.

        Raises:
            ParametersError: the model refuses them, or would read others from what it writes.
        """
        given = self.checked(parameters)
        refused: tuple[Problem, ...] = ()
        for round_trip in (False, True):  # first as keys have always been; a model with aliases cannot read that again
            written = _written(given, round_trip=round_trip)
            try:
                again = self.checked(written)
            except ParametersError as error:
                refused = error.problems
                continue
            # Equal texts first: arrays do not compare to one truth. Sets are equal in any order of their text.
            if _written(again, round_trip=round_trip) == written or again == given:
                return written
            refused = (((), f"from {written} it makes other values"),)
        message = "a job reads what the model writes with all defaults, and the model does not take that as it is"
        remedy = (
            "let it read all names that it writes (`alias`, not `validation_alias`) and leave valid values unchanged"
        )
        raise ParametersError(self.name, [((), f"{message} ({_described(refused)}); {remedy}")])

    def checked(self, parameters: Mapping[str, Any]) -> BaseModel | Mapping[str, Any]:
        """The parameters as the function takes them. Raises ``ParametersError``."""
        if self.model is None:
            return parameters
        problems = list(unknown_parameters(self.model, parameters))
        try:
            given = self.model.model_validate(dict(parameters))
        except ValidationError as error:
            problems += [
                (at, why_refused(detail["type"], detail["msg"], detail.get("ctx", {})))
                for detail in error.errors(include_url=False)
                if (at := tuple(detail["loc"])) not in {path for path, _ in problems}
            ]
            raise ParametersError(self.name, problems) from error
        if self.name in SIMULATIONS:
            huge = [name for name, value in parameters.items() if isinstance(value, int) and value > _MAX_PARAMETER]
            problems += [((name,), f"it must be at most {_MAX_PARAMETER:,}, or no seed ever ends") for name in huge]
        if problems:
            raise ParametersError(self.name, problems)
        return given


def _written(given: BaseModel | Mapping[str, Any], *, round_trip: bool) -> dict[str, Any]:
    """Parameters as plain JSON; ``round_trip``: by the names that a model reads, without what it computes."""
    if not isinstance(given, BaseModel):
        return dict(given)
    return given.model_dump(mode="json", by_alias=round_trip or None, round_trip=round_trip)


def _load_file(path: Path, digest: str, name: str) -> Function:
    if path.suffix != ".py":
        # As the files of the node's cache, which are objects of stores: no code comes from there.
        raise UserError(f"the simulation {path} is no file *.py; submit the sweep again")
    if not path.is_file():
        message = f"the file {path} of the simulation is not on this node, and no submit has brought it"
        raise UserError(f"{message}; submit the sweep again where the file lies")
    sources = SimulationCode.read(path)
    if sources.digest != digest:
        message = (
            f"{path.name}, or a module in its folder that it imports, is not what was planned (sha256 {digest[:12]})"
        )
        raise UserError(f"{message}; submit the sweep again")
    function: Function = load_function(sources, name)
    return function


def _check_call(name: str, function: Function) -> None:
    """Raises ``UserError``: it does not take what a job gives it, or is a class whose objects yield nothing."""
    try:
        try:
            signature = inspect.signature(function, follow_wrapped=False)
        except ValueError:  # as of a cache, which is no Python function: that of what it wraps
            signature = inspect.signature(function)
        signature.bind({}, (), None)
    except (TypeError, ValueError) as error:
        message = f"the simulation {name!r} cannot be called with parameters, seeds and context: {error}"
        raise UserError(f"{message}; define it as simulate(parameters, seeds, context)") from error
    if inspect.isclass(function) and not hasattr(function, "__iter__"):
        raise UserError(f"the simulation {name!r} is a class, whose objects yield nothing; name a function")


def _model_of(function: Function) -> type[BaseModel] | None:
    """The pydantic model that the first argument is annotated with."""
    plain = inspect.unwrap(function)
    first = next(iter(inspect.signature(plain).parameters.values()), None)
    annotation = None if first is None else first.annotation
    if isinstance(annotation, str):  # only this one: the others may name what is imported for type checkers alone
        name, *parts = annotation.split(".")
        annotation = getattr(plain, "__globals__", {}).get(name)
        for part in parts:
            annotation = getattr(annotation, part, None)
    return annotation if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else None
