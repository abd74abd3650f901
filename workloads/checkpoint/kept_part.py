"""The backbone that an artifact of a training job holds: its final weights, or those of a kept epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.core.errors import UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import Record, read_part

_WEIGHTS: Final = "backbone.safetensors"


def read_backbone(store: ObjectStore, record: Record, parameters: Mapping[str, Any]) -> bytes:
    """The weights that a job's ``checkpoint`` parameter names (an epoch), or the final ones without it.

    Raises:
        UserError: that epoch was not kept.
        NotFoundError, CorruptObjectError: the weights are gone, or not what the record says.
    """
    epoch = parameters.get("checkpoint")
    name = _WEIGHTS if epoch is None else f"epochs/{epoch}/{_WEIGHTS}"
    if epoch is not None and name not in record.parts:
        kept = sorted(
            int(part.split("/")[1]) for part in record.parts if part.startswith("epochs/") and _WEIGHTS in part
        )
        has = f"it has those of epochs {kept}" if kept else "it has only the final ones"
        message = f"{record.key} has no weights of epoch {epoch}; {has}: list the epoch in pretrain.checkpoints.keep"
        raise UserError(f"{message}.epochs, which makes another artifact, and measure that")
    return read_part(store, record, name)
