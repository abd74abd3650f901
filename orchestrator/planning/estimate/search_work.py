"""How much of their work the trials of a search do, before any of them ran. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.estimate.flops import Work
from orchestrator.planning.graph.plan import Job

LABEL_SPACE = "label_space"


def filled(recipe: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A recipe with typical values of the fields that a search is to find: the middle of a range or list."""
    return {**recipe, **{field: _typical(values) for field, values in space.items() if field != LABEL_SPACE}}


def typical_trial(job: Job) -> Job:
    """The job that a search's middle trial is, with the search's name and inputs."""
    parameters, trial = job.identity["parameters"], job.identity["parameters"]["trial"]
    recipe = filled(trial["parameters"]["recipe"], parameters["space"])
    own = {**trial["parameters"], "recipe": recipe}
    labels = next((key for role, key in job.identity["inputs"].items() if role.startswith("labels")), "")
    inputs = {"labels": labels, **job.identity["inputs"]}
    identity = {**job.identity, "kind": trial["kind"], "parameters": own, "inputs": inputs}
    return replace(job, kind=JobKind(trial["kind"]), identity=identity)


def num_full_trials(job: Job) -> float:
    """Whole trials that a search's trials are worth: at each rung all but the best ``1 / reduction`` are stopped."""
    parameters = job.identity["parameters"]
    number, options = float(parameters["trials"]), parameters["algorithm"].get("asha")
    epochs = float(typical_trial(job).identity["parameters"]["recipe"].get("epochs", 0.0))
    if options is None or not epochs:
        return number
    rung, left, done = float(options["grace_epochs"] or 1), number, 0.0
    before = 0.0
    while rung < epochs:
        done += left * (rung - before)
        before, rung, left = rung, rung * options["reduction"], max(1.0, left / options["reduction"])
    return (done + left * (epochs - before)) / epochs


def times(work: Work, factor: float) -> Work:
    """So many times the work."""
    return replace(
        work,
        operations=work.operations * factor,
        eval_operations=work.eval_operations * factor,
        images=work.images * factor,
        eval_images=work.eval_images * factor,
        num_steps=round(work.num_steps * factor),
        core_s=work.core_s * factor,
    )


def _typical(values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - recipe fields are of any JSON type
    ((scale, content),) = values.items()
    if scale == "values":
        return content[len(content) // 2]
    low, high = content
    middle = (low * high) ** 0.5 if scale.startswith("log") else (low + high) / 2
    return round(middle) if "integer" in scale else middle
