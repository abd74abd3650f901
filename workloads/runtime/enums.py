"""Values of hyper-parameters that several packages compare; ``orchestrator.core.hyper_parameters`` defines them all."""

from __future__ import annotations

from enum import StrEnum


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
