"""The pretrained backbone that a transfer starts from."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import read_part, read_record
from workloads.checkpoint.kept_part import read_backbone
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors
from workloads.train.images import new_backbone
from workloads.train.job import Setting
from workloads.transfer.unseen import unseen_notes


def pretrained_backbone(setting: Setting) -> tuple[nn.Module, int]:
    """The backbone of the input ``backbone``, and its number of features.

    Raises:
        UserError: the transfer asks for another model or epoch than was pretrained, or no validation sample can be
            right after training on these samples.
        NotFoundError, CorruptObjectError: the artifact is not there or not what its record says.
    """
    store, key = setting.context.store, setting.request.inputs["backbone"]
    record = read_record(store, key)
    document: dict[str, Any] = json.loads(read_part(store, record, "model.json"))
    _check_same_model(setting.parameters.model, ModelSpec.from_mapping(document), key)
    backbone, num_features = new_backbone(setting)
    weights = read_backbone(store, record, setting.request.parameters)
    backbone.load_state_dict(decode_tensors(weights))
    samples = setting.samples
    train, val = samples.train, samples.val
    setting.notes.extend(unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals()))
    return backbone, num_features


def _check_same_model(wanted: ModelSpec, pretrained: ModelSpec, key: str) -> None:
    if wanted.to_json() != pretrained.to_json():
        message = (
            f"the transfer asks for the model {wanted.to_json()}, but {key} is {pretrained.to_json()}: weights of "
        )
        raise UserError(message + "one do not fit the other; give the transfer the model of its pretraining")
