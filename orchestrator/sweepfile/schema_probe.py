"""Recipes of transfers that look at features: probes and nearest neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Count, Strict
from orchestrator.sweepfile.schema_recipe import RecipeSpec, Scales, Triple

TRAINING = "training"
"""Protocol of what is neither a probe nor nearest neighbours: all else that trains."""
LOOK_FIELDS = ("resize", "interpolation", "decoder", "mean", "std", "precision")
"""How images are seen before they become features; where a recipe leaves one open, as in the pretraining."""


def _distinct(values: list[Any]) -> list[Any]:
    """The values, if none stands there twice."""
    for position, value in enumerate(values):
        if value in values[:position]:
            raise PydanticCustomError("repeated", "{value} stands here a second time; keep one", {"value": value})
    return values


Strengths = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1), AfterValidator(_distinct)]
Counts = Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)]
Views = Annotated[list[Literal["center", "mirrored"]], Field(min_length=1), AfterValidator(_distinct)]
Holdout = Annotated[float, Field(gt=0, le=0.5)]


class ProbeSpec(RecipeSpec):
    """A linear head trained by the recipe's optimiser on images, as any other training."""

    features: Literal["online", "cached"] = Field(
        "online", description="online: images go through the backbone in this job; cached: embed jobs did that."
    )

    def resolved(self) -> dict[str, Any]:
        """As any training: nothing says ``online`` in an identity."""
        return {name: value for name, value in super().resolved().items() if name not in {"features", "solver"}}


class CachedSgdSpec(ProbeSpec):
    """The same head and optimiser on features that embed jobs computed; images are seen unaugmented."""

    solver: Literal["lbfgs", "sgd"] = Field("sgd", description="lbfgs: to the optimum; sgd: as the recipe says.")

    def resolved(self) -> dict[str, Any]:
        """With where the features come from."""
        return {**super().resolved(), "features": "cached", "solver": "sgd"}


class _Frozen(Strict):
    """What recipes on cached features share."""

    select_holdout: Holdout = Field(
        0.1, description="Share of the training samples on which a choice is made, stratified and keyed by the seed."
    )
    resize: Count | None = Field(
        None, description="Shorter side before the centre square is cut out, pixels; default: as in pretraining."
    )
    interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="Filter of resizing; default: as in pretraining."
    )
    decoder: Literal["pillow", "turbo", "nvjpeg"] | None = Field(
        None, description="Decoder; default: as in pretraining."
    )
    mean: Triple | None = Field(None, description="Channel means in [0, 1]; default: as in pretraining.")
    std: Scales | None = Field(None, description="Channel standard deviations, > 0; default: as in pretraining.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Arithmetic of the backbone; features are stored in float16, whatever this says."
    )

    def resolved(self) -> dict[str, Any]:
        """All fields."""
        return self.model_dump()


class LogisticSpec(_Frozen):
    """Logistic regression on cached features, to its optimum; its strength is chosen on held-out training samples."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"features", "solver"})

    features: Literal["online", "cached"] = Field("cached", description="Read from embed jobs that all probes share.")
    solver: Literal["lbfgs", "sgd"] = Field("lbfgs", description="lbfgs: to the optimum; sgd: as a recipe says.")
    l2: Strengths = Field(
        [1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6],
        description="Strengths to choose from: l2 / 2 * |weights|^2 is added to the mean loss; 1 / (l2 N) is called C.",
    )
    loss: Literal["softmax", "sigmoid"] = Field("softmax", description="sigmoid: several classes per sample.")
    scaling: Literal["standardize", "none"] = Field(
        "standardize", description="Whether weights act on features of deviation 1 while they are regularised."
    )
    views: Views = Field(["center"], description="Views of every training sample; validation samples: center.")
    max_iterations: Count = Field(500, description="Iterations per strength at most; a note says where that ended one.")
    tolerance: float = Field(
        1e-4, gt=0, le=0.1, description="A fit ends when a Newton step would lower the objective by less, relatively."
    )


class KnnSpec(_Frozen):
    """Nearest neighbours by cosine; k is chosen on held-out training samples, and all are reported."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"k", "temperature", "votes"})

    k: Counts = Field([1, 5, 10, 20, 50, 100, 200], description="Neighbours that vote: numbers to choose from.")
    votes: Literal["weighted", "equal"] = Field("weighted", description="weighted: by exp(cosine / temperature).")
    temperature: float = Field(0.07, gt=0, description="Of weighted votes.")


def schema_of(recipe: Mapping[str, Any], protocol: str = "") -> type[RecipeSpec | LogisticSpec | KnnSpec]:
    """What a recipe, with the fields of its base, may say; without a protocol as its own fields tell."""
    if protocol == "knn" or (not protocol and KnnSpec.KEYS & recipe.keys()):
        return KnnSpec
    is_probe = protocol == "probe" or (not protocol and LogisticSpec.KEYS & recipe.keys())
    if is_probe and recipe.get("features") == "cached":
        return CachedSgdSpec if recipe.get("solver") == "sgd" else LogisticSpec
    return ProbeSpec if is_probe else RecipeSpec
