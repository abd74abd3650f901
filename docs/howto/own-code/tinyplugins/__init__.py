"""One plug-in of each kind: a label rule, an objective, a model, an augmentation and a measure of features."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor, nn

from workloads.analysis.features import FeatureStream
from workloads.train.linear_form import Targets
from workloads.train.objective import SoftmaxObjective
from workloads.train.recipe import Recipe

# ------------------------------------------------------------------------------------------------------ a label rule


class Initial(BaseModel):
    """Arguments of ``by-initial``."""

    letters: int = Field(1, ge=1, description="How many letters of a name count.")
    without: list[str] = Field(default_factory=list, description="Classes that are left out.")


def by_initial(classes: Sequence[Mapping[str, Any]], arguments: Initial) -> list[str | None]:
    """Classes whose names begin alike are one class."""
    names = [str(row["name"]) for row in classes]
    return [None if name in arguments.without else name[: arguments.letters] for name in names]


# ------------------------------------------------------------------------------------------------------ an objective


class Focus(BaseModel):
    """Arguments of ``focal``."""

    gamma: float = Field(2.0, ge=0, description="How little well-classified samples count; 0 = cross-entropy.")


@dataclass(frozen=True)
class FocalObjective:
    """``(1 - p)^gamma`` times the cross-entropy ``-log p`` of a sample (arXiv:1708.02002, equation 4)."""

    softmax: SoftmaxObjective
    gamma: float

    def losses(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """Loss of each sample (B,), float32."""
        losses_B = self.softmax.losses(logits_BK, targets)
        return (1 - torch.exp(-losses_B)) ** self.gamma * losses_B

    def num_wrong(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """Wrong predictions, a 0-d int64 tensor."""
        return self.softmax.num_wrong(logits_BK, targets)

    def num_wrong_of(self, predicted_B: Tensor, targets: Targets) -> Tensor:
        """The same of predicted classes (B,)."""
        return self.softmax.num_wrong_of(predicted_B, targets)

    def linear_form(self, targets: Targets) -> None:
        """There is none: the loss is no linear function of the log-probabilities."""

    def unsmoothed(self) -> Self:
        """What is reported for validation."""
        return replace(self, softmax=self.softmax.unsmoothed())


def focal(recipe: Recipe, num_classes: int, arguments: Focus) -> FocalObjective:
    """The objective of a training."""
    return FocalObjective(SoftmaxObjective(num_classes, recipe.label_smoothing), arguments.gamma)


# ------------------------------------------------------------------------------------------------------------ a model


class Size(BaseModel):
    """Arguments of ``small-mixer``."""

    width: int = Field(32, ge=4, le=1024, description="Features of a patch.")
    patch_size: int = Field(4, ge=1, description="Side of a patch, pixels; divides the image's.")


class SmallMixer(nn.Module):
    """Patches, a layer that mixes them, a layer that mixes their features; timm's interface."""

    def __init__(self, image_size: int, size: Size) -> None:
        super().__init__()
        if image_size % size.patch_size:
            raise ValueError(f"image_size {image_size} is no multiple of patch_size {size.patch_size}")
        num_patches = (image_size // size.patch_size) ** 2
        self.num_features = size.width
        self.patches = nn.Conv2d(3, size.width, size.patch_size, size.patch_size)
        self.across = nn.Linear(num_patches, num_patches)
        self.within = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.head: nn.Module = nn.Linear(size.width, 1000)

    def forward_features(self, images_BCHW: Tensor) -> Tensor:
        """Features of the patches (B, P, F)."""
        patches_BFP = self.patches(images_BCHW).flatten(2)
        patches_BPF = (patches_BFP + self.across(patches_BFP).relu()).transpose(1, 2)
        mixed_BPF: Tensor = self.norm(patches_BPF + self.within(patches_BPF).relu())
        return mixed_BPF

    def forward_head(self, patches_BPF: Tensor) -> Tensor:
        """Logits (B, K), or features (B, F) without a classifier."""
        logits_BK: Tensor = self.head(patches_BPF.mean(1))
        return logits_BK

    def reset_classifier(self, num_classes: int) -> None:
        """Another classifier; 0 = none."""
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """See `forward_head`."""
        return self.forward_head(self.forward_features(images_BCHW))


def small_mixer(image_size: int, arguments: Size) -> SmallMixer:
    """The network for square images of a side in pixels; its weights follow from torch's seed, which is set."""
    return SmallMixer(image_size, arguments)


# ---------------------------------------------------------------------------------------------------- an augmentation


class Erasing(BaseModel):
    """Arguments of ``erase``."""

    side: int = Field(4, ge=1, description="Side of the square that is erased, pixels.")
    share: float = Field(0.5, ge=0, le=1, description="Share of the images.")


Image = NDArray[np.uint8]


def erase(arguments: Erasing) -> Callable[[Image, np.random.Generator], Image]:
    """A grey square somewhere; ``random`` is the position's own stream, and the only chance that may be used."""

    def apply(image_HWC: Image, random: np.random.Generator) -> Image:
        if random.random() < arguments.share:
            top, left = (int(random.integers(0, side)) for side in image_HWC.shape[:2])
            image_HWC[top : top + arguments.side, left : left + arguments.side] = 128
        return image_HWC

    return apply


# --------------------------------------------------------------------------------------------- a measure of features


class NearestMean(BaseModel):
    """Arguments of ``nearest-mean``."""

    level: str = Field("", description="A level of the hierarchy; default: the original classes.")


def nearest_mean(
    features: FeatureStream,
    targets: Mapping[str, NDArray[np.int64]],
    hierarchy: Mapping[str, NDArray[np.int64]],
    arguments: NearestMean,
) -> dict[str, float]:
    """Share of samples whose nearest class mean is that of their own class (NC4 of arXiv:2008.08186)."""
    ids_N = targets["classes"]
    if arguments.level:
        ids_N = hierarchy[arguments.level][ids_N]
    sums_CD, start = np.zeros((int(ids_N.max()) + 1, features.dim)), 0
    for chunk_BD in features:  # a pass over all samples, some thousands at a time
        np.add.at(sums_CD, ids_N[start : start + len(chunk_BD)], chunk_BD)
        start += len(chunk_BD)
    means_CD = sums_CD / np.bincount(ids_N)[:, None]
    num_right = start = 0
    for chunk_BD in features:
        distances_BC = (means_CD**2).sum(axis=1) - 2 * chunk_BD.astype(np.float64) @ means_CD.T
        num_right += int((distances_BC.argmin(axis=1) == ids_N[start : start + len(chunk_BD)]).sum())
        start += len(chunk_BD)
    return {"accuracy": num_right / features.num_samples}
