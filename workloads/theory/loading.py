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
from workloads.runtime.plugin_arguments import unknown_parameters
from workloads.theory.context import SimulationContext
from workloads.theory.files import load_function
from workloads.theory.shipped import SIMULATIONS

_MAX_PARAMETER: Final = 1_000_000_000
Metrics: TypeAlias = Mapping[str, float]
Function: TypeAlias = Callable[[Any, Sequence[int], SimulationContext], Iterator[Metrics]]


class ParametersError(UserError):
    """Parameters that a simulation refuses; ``problems`` are pairs of where and why."""

    def __init__(self, name: str, problems: Sequence[tuple[tuple[str | int, ...], str]]) -> None:
        reasons = "; ".join(f"{'.'.join(map(str, at))}: {why}" if at else why for at, why in problems)
        super().__init__(f"the simulation {name!r} refuses its parameters: {reasons}; correct them and plan again")
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulation that can be run."""

    name: str
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
            UserError: there is none of this name here, or another version of it.
        """
        if name in SIMULATIONS:
            module, _, attribute = SIMULATIONS[name].partition(":")
            function: Function = getattr(importlib.import_module(module), attribute)
        elif is_reference(name):
            function = load_plugin(name, GROUP)
        elif (wanted := file_identity(name)) is not None:
            function = _load_file(Path(file), *wanted)
        else:
            raise UserError(f"there is no simulation {name!r} in this release; it has {', '.join(sorted(SIMULATIONS))}")
        return cls(name=name, function=function, model=_model_of(function))

    def complete(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters as plain JSON with the defaults of the model. Raises ``ParametersError``."""
        checked = self.checked(parameters)
        return checked.model_dump(mode="json") if isinstance(checked, BaseModel) else dict(parameters)

    def checked(self, parameters: Mapping[str, Any]) -> BaseModel | Mapping[str, Any]:
        """The parameters as the function takes them. Raises ``ParametersError``."""
        if self.model is None:
            return parameters
        try:
            given = self.model.model_validate(dict(parameters))
        except ValidationError as error:
            found = [
                (tuple(detail["loc"]), why_refused(detail["type"], detail["msg"], detail.get("ctx", {})))
                for detail in error.errors(include_url=False)
                if detail["type"] != "extra_forbidden" or len(detail["loc"]) > 1
            ]
            raise ParametersError(self.name, [*unknown_parameters(self.model, parameters), *found]) from error
        problems = list(unknown_parameters(self.model, parameters))
        if self.name in SIMULATIONS:
            huge = [name for name, value in parameters.items() if isinstance(value, int) and value > _MAX_PARAMETER]
            problems += [((name,), f"it must be at most {_MAX_PARAMETER:,}, or no seed ever ends") for name in huge]
        if problems:
            raise ParametersError(self.name, problems)
        return given


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
