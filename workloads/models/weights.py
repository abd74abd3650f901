"""Weights as bytes: safetensors without pickle, and one hash that says whether two sets of weights are the same."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import safetensors.torch
from torch import Tensor, nn, uint8


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Sha256 over tensors in name order: name, dtype, shape, bytes."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\n{tensor.dtype}\n{list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors in safetensors form. Each is copied, because safetensors refuses shared memory (tied weights)."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content: bytes = safetensors.torch.save(plain)
    return content


def decode_tensors(content: bytes) -> dict[str, Tensor]:
    """Inverse of ``encode_tensors``."""
    tensors: dict[str, Tensor] = safetensors.torch.load(content)
    return tensors


def num_parameters(module: nn.Module) -> int:
    """How many trainable numbers a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
