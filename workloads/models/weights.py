"""Weights as bytes: safetensors without pickle, and one hash that is equal for equal sets of weights.

An external file is safetensors or a file of ``torch.save``, read without executing anything in it: torch's restricted
reader (``weights_only``) takes tensors and plain containers. Beside those it may build an ``argparse.Namespace``, in
which timm's training script keeps its arguments: a plain record, which runs no code.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from hashlib import sha256

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn, uint8

from orchestrator.core.errors import UserError

# Where training scripts keep their tensors, averaged ones first, as timm takes them.
_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "module")
_ZIP = b"PK\x03\x04"
_READ_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    struct.error,
)
"""All that torch's restricted reader raises on bytes that nobody wrote with ``torch.save``."""
_TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_REFUSED = re.compile(r"unsupported (?:global:? (?:global )?|class )(\S+)", re.IGNORECASE)


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


def decode_weights(content: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of a weights file by their names there: safetensors, or what ``torch.save`` wrote.

    Raises:
        UserError: the file is neither, is damaged, or asks to execute something.
    """
    if not _is_torch_file(content):
        try:
            return decode_tensors(content)
        except safetensors.SafetensorError as error:
            raise UserError(f"{name} is not a weights file (safetensors or torch.save): {error}") from error
    _refuse_bomb(content, name)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            document = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        remedy = "store the tensors alone, with safetensors.torch.save_file"
        raise UserError(f"{name} {_why_unreadable(str(error))}; {remedy}") from error
    return _tensors_of(document)


def _refuse_bomb(content: bytes, name: str) -> None:
    """``torch.save`` compresses nothing: what would become larger as it is read was written by something else."""
    if content[:4] != _ZIP:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise UserError(f"{name} is a damaged archive ({error}); copy it again") from error
    if sum(member.file_size for member in members) > len(content):
        raise UserError(f"{name} is compressed, as torch.save never does: it could become of any size; save it anew")


def _why_unreadable(message: str) -> str:
    """What torch said, without its terminal escapes and its advice to trust the file."""
    plain = _TERMINAL_ESCAPE.sub("", message)
    if refused := _REFUSED.search(plain):
        found = refused.group(1).rstrip(".,")
        return f"cannot be read without executing what it says: it holds {found}, which is not plain data"
    reason = plain.rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return f"cannot be read without executing what it says, or is damaged ({reason})"


def _is_torch_file(content: bytes) -> bool:
    """A zip archive, or a bare pickle as torch wrote before version 1.6."""
    return content[:4] == _ZIP or (content[:1] == b"\x80" and content[8:9] != b"{")


def _tensors_of(document: object) -> dict[str, Tensor]:
    if not isinstance(document, Mapping):
        return {}
    inner = next((document[name] for name in _CONTAINERS if isinstance(document.get(name), Mapping)), None)
    if inner is not None:
        return _tensors_of(inner)
    return {str(name): tensor for name, tensor in document.items() if isinstance(tensor, Tensor)}
