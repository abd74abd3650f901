"""The named choices of a recipe."""

from __future__ import annotations

from enum import StrEnum

MIXES = 2
"""Images that are mixed together: the pair of positions p and p XOR 1."""


class OptimizerName(StrEnum):
    """Optimisers: the first three of ``torch.optim``, the others of timm."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"
    LAMB = "lamb"
    LARS = "lars"


class DecayedParameters(StrEnum):
    """Which parameters the weight decay applies to."""

    ALL = "all"
    NO_BIAS_NORM = "no_bias_norm"
    """All but vectors and scalars: biases, scales of normalisation layers, layer scales."""


class ScheduleName(StrEnum):
    """What the learning rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    STEP = "step"
    EXPONENTIAL = "exponential"


class LrEvery(StrEnum):
    """How often a decaying learning rate takes a new value (a warm-up always does at every step)."""

    STEP = "step"
    HALF_EPOCH = "half_epoch"
    EPOCH = "epoch"


class AverageName(StrEnum):
    """Which average of the weights is evaluated and committed."""

    NONE = "none"
    EMA = "ema"
    POLYAK = "polyak"


class Precision(StrEnum):
    """Arithmetic of forward and backward passes; weights, gradients and optimiser state are float32 always."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class HeadInit(StrEnum):
    """Initial weights of a head."""

    DEFAULT = "default"
    """PyTorch's for a linear layer."""
    ZEROS = "zeros"
