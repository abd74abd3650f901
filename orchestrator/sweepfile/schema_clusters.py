"""The part of a sweep.yaml that makes label spaces of clusters of embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orchestrator.sweepfile.fields import Count, OneRule, Seed, Strict
from orchestrator.sweepfile.schema_model import InitialSpec, ModelSpec

PerChannel = Annotated[list[float], Field(min_length=3, max_length=3)]
Deviations = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=3, max_length=3)]


class SweptBackbone(Strict):
    """A backbone that this sweep pretrains."""

    pretrain: str | None = Field(None, description="Its block; needed where the sweep has several.")
    labels: str = Field(description="Label space that it is pretrained on, by its path (levels/depth4).")
    seed: Seed = Field(0, description="Pretraining seed.")


class EmbedSpec(OneRule):
    """Whose features are clustered: of a backbone of this sweep, or of another one with its weights (init)."""

    RULES: ClassVar[tuple[str, ...]] = ("backbone", "model")

    backbone: SweptBackbone | None = Field(None, description="A backbone that this sweep pretrains.")
    model: ModelSpec | None = Field(None, description="Another network, by its timm name; needs init.")
    init: InitialSpec | None = Field(None, description="The weights of model.")
    output: Literal["features", "projection"] = Field(
        "features",
        description="projection: of model, with the last layer that its weights bring along, as CLIP embeds images.",
    )
    view: Literal["center", "mirrored"] = Field("center", description="The centre square, or its mirror image.")
    resize: Count | None = Field(
        None, description="Shorter side before the centre square is cut out, pixels; default: as the weights were used."
    )
    interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="Filter of resizing; default: as the weights were trained."
    )
    decoder: Literal["pillow", "turbo", "nvjpeg"] | None = Field(
        None, description="Decoder and resizer; default: as the sweep pretrains, or pillow."
    )
    mean: PerChannel | None = Field(None, description="Per channel, of pixels in [0, 1]; default: that of the weights.")
    std: Deviations | None = Field(None, description="Per channel, of pixels in [0, 1]; default: that of the weights.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Arithmetic; features are stored in float16."
    )


class Rebalanced(Strict):
    """Clusters per class that follow from its size: the finest of 2, 8, 32, 64, 128, 256, 512 and 1024."""

    min_samples: Count = Field(description="Training samples that the smallest cluster must still hold.")


class ClustersSpec(OneRule):
    """k-means on features. A validation sample gets the nearest centroid, of its own class where within is given."""

    RULES: ClassVar[tuple[str, ...]] = ("k", "rebalanced")

    k: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] | None = Field(
        None, description="Clusters, of each class of within or of the whole set; one label space per number."
    )
    rebalanced: Rebalanced | None = Field(None, description="As many clusters per class as its size allows.")
    within: str = Field(
        "dataset", description="Label space whose classes are clustered each by itself; dataset: the whole set."
    )
    embed: EmbedSpec = Field(description="Whose features are clustered, and how images are seen.")
    seed: Seed = Field(0, description="Seed of the first centroids; never follows the pretrain seed.")
    iterations: Count = Field(25, description="Steps of Lloyd's algorithm at most.")
    num_init: Count = Field(1, description="Starts, of which the one with the smallest inertia is kept.")
    library: Literal["auto", "faiss", "scikit-learn"] = Field(
        "auto", description="Part of the identity; auto: faiss if it is installed where the sweep is planned."
    )
