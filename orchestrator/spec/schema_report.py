"""What ``report:`` and ``tracking:`` may say."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Strict


class ReportSpec(Strict):
    """The answer."""

    baseline: str | None = Field(
        None, description="Label space to compare with: pretrained on the target's own labels."
    )
    metric: Literal["val_error", "best_val_error"] = Field("val_error", description="What is compared.")


class TrackingSpec(Strict):
    """Where MLflow is."""

    uri: str = Field("", description="Tracking URI without user and password; default: the project's own.")
    experiment: str = Field("", description="Experiment; default: the sweep's name.")

    @field_validator("uri")
    @classmethod
    def _refuse_credentials(cls, uri: str) -> str:
        # No message shows the URI: what stands before an @ may be a password.
        try:
            authority = urlsplit(uri).netloc
        except ValueError:
            message = "this is not a URI; write http(s)://host:port or sqlite:///absolute/path"
            raise PydanticCustomError("refused", message) from None
        if "@" in authority:
            message = (
                "a URI with a user or password is refused, because sweeps are stored and shared; "
                "remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
            raise PydanticCustomError("refused", message)
        return uri
