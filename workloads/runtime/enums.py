"""Choices of a recipe that several rooms of the data plane tell apart; ``orchestrator.core.recipe`` names them all."""

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
