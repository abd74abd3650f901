"""The part of a sweep.yaml that names data sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.spec.fields import MAX_INTEGER, Count, Fraction, Seed, Strict


class SyntheticHierarchy(Strict):
    """Procedural images of a label tree; levels are ``depth1`` (coarsest) ... ``depthN`` (leaf)."""

    builtin: Literal["synthetic-hierarchy"]
    branching: Annotated[list[Count], Field(min_length=2, max_length=8)] = Field(
        [2, 4, 4, 4], description="Children per node, from the root down; the product is the number of leaf classes."
    )
    num_train: Count = Field(4096, description="Training samples.")
    num_val: Count = Field(2048, description="Validation samples.")
    image_size: Count = Field(32, description="Side of the square images, pixels; a multiple of patch_size.")
    patch_size: Count = Field(8, description="Side of a patch, pixels.")
    hard_fraction: Fraction = Field(0.5, description="Share of validation samples without common-feature patches.")
    noise: float = Field(1.0, ge=0, description="Standard deviation of the pixel noise.")
    feature_amplitude: float = Field(1.0, gt=0, description="Root-mean-square pixel value of a feature patch.")
    amplitude_jitter: float = Field(
        0.2, ge=0, lt=1, description="iota: squared amplitudes lie in [1 - iota, 1 + iota]."
    )
    weak_amplitude: Fraction = Field(0.2, description="gamma: largest amplitude of a weak feature of another class.")
    num_weak_features: int = Field(2, ge=0, le=MAX_INTEGER, description="Weak features in each remaining patch.")
    num_common_patches: Count = Field(4, description="Patches that name the superclass, in a normal sample.")
    num_subclass_patches: Count = Field(1, description="Patches that name each finer level.")
    seed: Seed = Field(0, description="Seed of the generator.")


class Digits(Strict):
    """The handwritten digits inside scikit-learn: 1,797 real scans of 8x8 pixels; one level, ``digit``."""

    builtin: Literal["digits"]
    val_fraction: float = Field(0.2, gt=0, lt=1, description="Share of samples held out for validation, per class.")
    seed: Seed = Field(0, description="Seed of the split.")


DatasetSpec = Annotated[SyntheticHierarchy | Digits, Field(discriminator="builtin")]
