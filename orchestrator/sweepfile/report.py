"""`report:` and `tracking:`: what they may say, and what of it must be part of the sweep. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.security.urls import forbidden_host
from orchestrator.sweepfile.fields import Count, Fraction, Strict
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweepfile.values import Pretrain


class PublishedSpec(Strict):
    """A printed number to stand beside ours: what it measures, as the report's rows are called."""

    transfer: str = Field(description="Name of the transfer that it belongs to.")
    label_space: str = Field("", description="Label space of the pretraining, by its path; default: one-pass training.")
    value: Fraction = Field(description="The metric as a fraction of 1, not in percent: 0.0525.")
    std: Fraction | None = Field(None, description="Its standard deviation, a fraction of 1; default: not printed.")
    source: str = Field("", description="Where it is printed: paper and table.")
    pretrain: str = Field("", description="Block of pretrain; default: the unnamed one.")
    checkpoint: str = Field("", description="Checkpoint that was measured (epoch50); default: the final weights.")
    fraction: str = Field("", description="Share of the labels as text ('0.1'); default: all.")
    cell: str = Field("", description="Cell of a grid (lr=0.4); default: the selected one.")
    num_runs: Count | None = Field(None, description="Runs behind the number; default: not printed.")


class ReportSpec(Strict):
    """The answer."""

    baseline: str | None = Field(
        None, description="Label space to compare with: pretrained on the target's own labels."
    )
    metric: Literal["val_error", "best_val_error"] = Field("val_error", description="What is compared.")
    published: list[PublishedSpec] = Field(
        default_factory=list, description="Numbers of papers, shown beside those of this sweep."
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
        if "@" in authority:
            message = (
                "a URI with a user or password is refused, because sweeps are stored and shared; "
                "remove it from the file and revoke it; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
            raise PydanticCustomError("refused", message)
        if reason := forbidden_host(host):
            message = f"the host is {host}, {reason}; name a tracking server of your own"
            raise PydanticCustomError("refused", message.replace("{", "{{"))
        return uri


def resolve_baseline(spec: ReportSpec, pretrained: Sequence[str], complaints: Complaints) -> str:
    """The label space that others are compared with; empty without one."""
    if spec.baseline is not None and pretrained and spec.baseline not in pretrained:
        hint = did_you_mean(spec.baseline, pretrained)
        complaints.add(("report", "baseline"), f"'{spec.baseline}' is not pretrained in this sweep: {hint}")
    return spec.baseline or ""


def check_published(
    spec: ReportSpec, transfers: Sequence[str], pretrains: Sequence[Pretrain], complaints: Complaints
) -> None:
    """Complain about printed numbers that would stand beside no row of the report."""
    spaces = [name for one in pretrains for name in one.labels] + [name for one in pretrains for name in one.baselines]
    known = {
        "transfer": transfers,
        "label_space": ["", *dict.fromkeys(spaces)],
        "pretrain": [pretrain.name for pretrain in pretrains],
    }
    for position, entry in enumerate(spec.published):
        for field, names in known.items():
            if (value := getattr(entry, field)) not in names:
                hint = did_you_mean(value, filter(None, names))
                message = f"'{value}' is no {field} of this sweep: {hint}" if value else f"say which one: {hint}"
                complaints.add(("report", "published", position, field), message)
