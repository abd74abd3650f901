"""The settings of a search job, from its identity, and the jobs of its trials. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from pydantic import ValidationError

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import UserError
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.schema_words import why_refused
from orchestrator.planning.graph.identity import make_identity
from orchestrator.planning.graph.transfers import LABEL_SPACE
from orchestrator.search.asha import AshaRule
from orchestrator.search.samplers import InOrder, OptunaSampler, RandomSampler, Sampler, Space
from orchestrator.sweepfile.recipe import TRAINING, RecipeSpec, ignored_fields, over_base, schema_of


class Over(StrEnum):
    """What a search varies."""

    RECIPE = "recipe"
    """Fields of a transfer's recipe; its trials are transfers."""
    PRETRAIN = "pretrain"
    """Fields of the pretraining's recipe; its trials are pretrainings, judged by a cached probe of the target."""
    LABELS = "labels"
    """The label space of the pretraining; judged in the same way, never by accuracy on their own labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """One search; ``template`` is what its trials share: ``{"kind", "protocol", "readable", "parameters"}``."""

    over: Over
    algorithm: str
    options: Mapping[str, Any]
    space: Space
    num_trials: int
    seed: int
    metric: str
    """Name of the reported metric that is minimised."""
    template: Mapping[str, Any]
    probe: Mapping[str, Any]
    """Parameters of the cached probe that evaluates trials; empty if trials evaluate themselves."""
    inputs: Mapping[str, str]

    @classmethod
    def of(cls, request: JobRequest) -> Self:
        """From the request of a search job."""
        parameters = request.parameters
        ((algorithm, options),) = parameters["algorithm"].items()
        return cls(
            over=Over(parameters["over"]),
            algorithm=algorithm,
            options=options,
            space=Space.from_json(parameters["space"]),
            num_trials=parameters["trials"],
            seed=parameters["seed"],
            metric=parameters["metric"],
            template=parameters["trial"],
            probe=parameters.get("probe", {}),
            inputs=request.inputs,
        )

    @property
    def max_epochs(self) -> float:
        """Epochs of a whole trial; of the longest, where they vary."""
        varied = [one.ends for one in self.space.dimensions if one.field == "epochs"]
        return float(max(varied[0]) if varied else self.template["parameters"]["recipe"].get("epochs", 0.0))

    def epochs_of(self, params: Mapping[str, Any]) -> float:
        """Epochs of a trial with these values that runs to its end."""
        return float(params.get("epochs", self.max_epochs))

    def eval_every_of(self, params: Mapping[str, Any]) -> int:
        """Epochs between two validations of a trial with these values."""
        recipe: Mapping[str, Any] = {**self.template["parameters"]["recipe"], **params}
        return int(recipe.get("eval_every_epochs", 1))

    @property
    def rule(self) -> AshaRule | None:
        """The rule that stops trials; None if all run to their end."""
        if self.algorithm != "asha":
            return None
        grace, reduction = self.options["grace_epochs"], self.options["reduction"]
        return AshaRule(grace_epochs=grace, reduction=reduction, max_epochs=self.max_epochs)

    def sampler(self) -> Sampler:
        """The sampler that proposes trials. Raises ``UserError`` if its library is missing."""
        if self.over is Over.LABELS:
            return InOrder(self.space)
        if self.algorithm == "optuna":
            return OptunaSampler(self.space, self.seed, self.options["startup_trials"])
        return RandomSampler(self.space, self.seed)

    def identity_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The identity of a trial: that of the ordinary job which does the same.

        Raises:
            UserError: the values are no recipe together.
        """
        kind, parameters = JobKind(self.template["kind"]), dict(self.template["parameters"])
        if self.over is not Over.LABELS:
            protocol = self.template["protocol"]
            parameters["recipe"] = combined(parameters["recipe"], params, protocol)
        return make_identity(kind, parameters, self._inputs_of(params))

    def key_of(self, params: Mapping[str, Any]) -> str:
        """Key of a trial. Raises ``UserError`` as above."""
        identity = self.identity_of(params)
        return make_key(identity["kind"], self._readable(params), identity)

    def chosen_by(self, params: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The values of the best trial for jobs that use the search (``JobRequest.chosen``)."""
        if self.over is not Over.RECIPE:
            return {"inputs": {"backbone": key}}
        recipe = {name: value for name, value in self.template["parameters"]["recipe"].items() if name not in params}
        held_out = self.template.get("adds", {})
        kept = {name: value for name, value in recipe.items() if held_out.get(name) != value}
        return {"parameters": {"recipe": combined(kept, params, self.template["protocol"])}}

    def request_of(self, request: JobRequest, params: Mapping[str, Any], number: int, attempt: int) -> JobRequest:
        """The request of an attempt at trial ``number`` of a search job's ``request``."""
        identity, key = self.identity_of(params), self.key_of(params)
        return JobRequest(
            attempt_id=f"{key}.{attempt}",
            attempt_number=attempt,
            sweep=request.sweep,
            job=f"{request.job}#{number}",
            key=key,
            kind=JobKind(identity["kind"]),
            identity=identity,
            store_uri=request.store_uri,
            execution=replace(request.execution, num_workers=1, target_location={}),
        )

    def watched_probe(self, request: JobRequest) -> dict[str, Any]:
        """``Watch.probe`` of its trials."""
        if not self.probe:
            return {}
        inputs = {"index": self.inputs["target_index"], "labels": self.inputs["target_labels"]}
        return {"parameters": self.probe, "inputs": inputs, "location": dict(request.execution.target_location)}

    def _inputs_of(self, params: Mapping[str, Any]) -> dict[str, str]:
        own = {role: key for role, key in self.inputs.items() if ":" not in role and not role.startswith("target_")}
        if self.over is Over.LABELS:
            own["labels"] = self.inputs[f"labels:{params[LABEL_SPACE]}"]
        return own

    def _readable(self, params: Mapping[str, Any]) -> str:
        readable: Any = self.template["readable"]
        return str(readable[params[LABEL_SPACE]] if self.over is Over.LABELS else readable)


def combined(recipe: Mapping[str, Any], params: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """A resolved recipe with some other values, resolved as a sweep's recipes are.

    Raises:
        UserError: together they are no recipe.
    """
    fields = over_base(recipe, params)
    try:
        spec = schema_of(fields, protocol or TRAINING).model_validate(fields)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))}: {why_refused(one['type'], one['msg'], one.get('ctx', {}))}"
            for one in error.errors()
        ]
        raise UserError(f"{dict(params)} does not fit the rest of the recipe: {'; '.join(problems)}") from error
    if not isinstance(spec, RecipeSpec):
        return spec.resolved()
    read = spec.model_fields_set - ignored_fields(spec, protocol).keys()
    return type(spec).model_construct(**{name: getattr(spec, name) for name in read}).resolved()
