"""`report:` and `tracking:`: their schema, and checks that names are part of the sweep. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.metrics import METRIC_FAMILIES, RECORDED_METRICS, is_recorded, level_of
from orchestrator.core.security.urls import forbidden_host
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import Count, Fraction, Name, Strict
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.pretrain import is_in_doubt
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import BLOCK_FACTOR, LABELS_FACTOR, Dataset, LabelSpace, Pretrain

_HOST_AND_PORT: Final = re.compile(r"[A-Za-z0-9.-]+:[0-9]+(/.*)?")
_NEARLY: Final = 0.85
"""Similarity of names, of ``difflib``, from which on one is taken for a slip of the other."""


class PublishedSpec(Strict):
    """A published number to show next to ours, and which row of the report it belongs to."""

    transfer: str = Field(description="Name of the transfer that it belongs to.")
    label_space: str = Field(
        "", description="Label space of the pretraining, by its path; default: training on the target alone."
    )
    value: Fraction = Field(description="The metric as a fraction of 1, not in percent: 0.0525.")
    std: Fraction | None = Field(None, description="Its standard deviation, a fraction of 1; default: not printed.")
    source: str = Field("", description="Where it is printed: paper and table.")
    pretrain: str = Field("", description="Block of pretrain; default: the unnamed one.")
    checkpoint: str = Field("", description="Checkpoint that was measured (epoch50); default: the final weights.")
    fraction: str = Field("", description="Share of the labels as text ('0.1'); default: all.")
    cell: str = Field("", description="Cell of a grid (lr=0.4); default: the selected one.")
    num_runs: Count | None = Field(None, description="Number of runs of the published number; default: not printed.")


class ReportSpec(Strict):
    """The answer."""

    rows: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="Factors whose combinations are the rows of a table (optimizer, labels); default: those of "
        "'factors', and 'labels' where there are none. The other factors make tables of their own.",
    )
    baseline: str | dict[str, str | int | float] | None = Field(
        None,
        description="Label space to compare with: pretrained on the target's own labels. Or by factor the value to "
        "compare with ({optimizer: sgd, mix: none}).",
    )
    metric: Name = Field(
        "val_error",
        description="What is compared: an error, a loss or a size that the records of the transfers hold; or what "
        "pretraining their backbones took: gpu_hours, cpu_hours, images_per_s.",
    )
    published: list[PublishedSpec] = Field(
        default_factory=list, description="Published numbers, shown next to those of this sweep."
    )


class TrackingSpec(Strict):
    """Where MLflow is."""

    uri: str = Field("", description="Tracking URI without user and password; default: the project's own.")
    experiment: str = Field("", description="Experiment; default: the sweep's name.")
    register_: Literal["none", "best"] = Field(
        "none", alias="register", description="best: MLflow's model registry gets the backbone of the best level."
    )

    @field_validator("uri")
    @classmethod
    def _refuse_credentials(cls, uri: str) -> str:
        # No message shows the URI: what stands before an @ may be a password.
        try:
            authority, host = urlsplit(uri).netloc, urlsplit(uri).hostname or ""
        except ValueError:
            message = "this is not a URI; write http(s)://host:port or sqlite:///absolute/path"
            raise PydanticCustomError("refused", message) from None
        if _HOST_AND_PORT.fullmatch(uri):
            raise PydanticCustomError("refused", "this has no scheme; write http://host:port or https://host:port")
        if "@" in authority:
            message = (
                "a URI with a user or password is refused, because sweeps are stored and shared; "
                "remove it from the file and revoke it; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
            raise PydanticCustomError("refused", message)
        if reason := forbidden_host(host):
            message = f"the host is {host}, {reason}; name your own tracking server"
            raise PydanticCustomError("refused", message.replace("{", "{{"))
        return uri


def resolve_baseline(spec: ReportSpec, pretrains: Sequence[Pretrain], complaints: Complaints) -> dict[str, str]:
    """By factor the value that others are compared with; empty without a baseline."""
    if spec.baseline is None:
        return {}
    if isinstance(spec.baseline, str):
        _check_baseline_space(("report", "baseline"), spec.baseline, pretrains, complaints)
        return {LABELS_FACTOR: spec.baseline}
    factors = _factors(pretrains)
    for name, value in spec.baseline.items():
        where: Path = ("report", "baseline", name)
        if name not in factors:
            complaints.add(where, f"'{name}' is not a factor of this sweep: {did_you_mean(name, factors)}")
        elif name == LABELS_FACTOR:
            _check_baseline_space(where, str(value), pretrains, complaints)
        elif str(value) not in factors[name]:
            complaints.add(where, f"'{value}' is not a value of '{name}': {did_you_mean(str(value), factors[name])}")
    return {name: str(value) for name, value in spec.baseline.items()}


def _check_baseline_space(path: Path, space: str, pretrains: Sequence[Pretrain], complaints: Complaints) -> None:
    pretrained = [name for pretrain in pretrains for name in pretrain.labels]
    if pretrained and space not in pretrained and not is_in_doubt(space, pretrains, complaints):
        complaints.add(path, f"'{space}' is not pretrained in this sweep: {did_you_mean(space, pretrained)}")


def check_metric(
    spec: ReportSpec, complaints: Complaints, *, levels: Sequence[str] | None = None, has_plugins: bool
) -> None:
    """Complain about a metric that is nearly one of ours; other names may belong to plug-ins and cannot be checked.

    Args:
        spec: the block of the file.
        complaints: takes what is wrong.
        levels: see ``known_levels``.
        has_plugins: whether a recipe names an objective of another package, which may have metrics of its own.
    """
    name = spec.metric
    if is_recorded(name):
        level = level_of(name)
        has_doubts = has_plugins or complaints.doubts(("labels",))
        if level and levels is not None and level not in levels and not has_doubts:
            message = f"'{level}' is not a level of a data set of this sweep: {did_you_mean(level, levels)}"
            complaints.add(("report", "metric"), message)
        return
    near = get_close_matches(name, RECORDED_METRICS, n=1, cutoff=_NEARLY)
    if not near and not has_plugins:
        known = [*RECORDED_METRICS, *METRIC_FAMILIES]
        hint = did_you_mean(name, known, most=len(known))
        message = f"'{name}' is not a metric of built-in losses, which are all that this sweep has: {hint}"
        complaints.add(("report", "metric"), message)
    if near:
        message = f"'{name}' is nearly the name of a metric; write {near[0]}, or give your own metric another name"
        complaints.add(("report", "metric"), message)


def known_levels(labels: Mapping[str, LabelSpace], datasets: Mapping[str, Dataset]) -> list[str] | None:
    """Levels that classes of label spaces of a sweep may lie in; None where only the data plane knows all of them."""
    found: dict[str, int] = {}
    for space in labels.values():
        definition, dataset = space.space, datasets[space.dataset]
        while "base" in definition:
            definition = definition["base"]
        if (
            dataset.uncounted
            or not (dataset.levels or dataset.class_table)
            or {"wordnet", "taxonomy"} & set(definition)
        ):
            return None
        found |= dataset.levels
    return list(found) if labels else None


def resolve_rows(spec: ReportSpec, pretrains: Sequence[Pretrain], complaints: Complaints) -> tuple[str, ...]:
    """The factors of the rows; empty if the file does not name them."""
    factors, rows = _factors(pretrains), spec.rows or []
    complaints.refuse_repeats(("report", "rows"), rows)
    for position, name in enumerate(rows):
        if name not in factors:
            message = f"'{name}' is not a factor of this sweep: {did_you_mean(name, factors)}"
            complaints.add(("report", "rows", position), message)
    return tuple(rows)


def _factors(pretrains: Sequence[Pretrain]) -> dict[str, list[str]]:
    """Values by factor, as ``planning.graph.design`` finds them in the plan."""
    found: dict[str, list[str]] = {}
    for pretrain in pretrains:
        for name, value in pretrain.factors.items():
            found.setdefault(name, []).append(value)
    named = [pretrain.name for pretrain in pretrains if pretrain.name and pretrain.initial_from is None]
    if not found and len(named) > 1:
        found[BLOCK_FACTOR] = named
    return {**found, LABELS_FACTOR: [name for pretrain in pretrains for name in pretrain.labels]}


def check_published(
    spec: ReportSpec, transfers: Sequence[str], pretrains: Sequence[Pretrain], complaints: Complaints
) -> None:
    """Complain about published numbers that match no row of the report."""
    spaces = [name for one in pretrains for name in one.labels] + [name for one in pretrains for name in one.baselines]
    known = {
        "transfer": transfers,
        "label_space": ["", *dict.fromkeys(spaces)],
        "pretrain": [pretrain.name for pretrain in pretrains],
    }
    for position, entry in enumerate(spec.published):
        for field, names in known.items():
            if (value := getattr(entry, field)) not in names:
                if field == "label_space" and is_in_doubt(value, pretrains, complaints):
                    continue
                hint = did_you_mean(value, filter(None, names))
                message = (
                    f"'{value}' is not a {field.replace('_', ' ')} of this sweep: {hint}"
                    if value
                    else f"say which one: {hint}"
                )
                complaints.add(("report", "published", position, field), message)
