"""A network with the last layer that its weights bring along: of a CLIP image tower, the projection into CLIP's space.

timm keeps that projection as the tower's classifier. Without it a tower gives its own features (1,024 numbers for
ViT-L/14), with it CLIP's embedding of the image (768), which is what images and texts are compared by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import Tensor, nn

from orchestrator.core.errors import UserError
from workloads.models.build import timm_kwargs
from workloads.models.initial import converted, tensors_at, timm_model, unwrapped
from workloads.models.spec import ModelSpec


def open_projected(spec: ModelSpec, initial: Mapping[str, Any]) -> nn.Module:
    """The network and its last layer, with weights from timm's tag or a file (see ``load_initial``).

    A file may have the names of timm, OpenAI or open_clip, as far as timm knows them.

    Raises:
        UserError: the weights have no such layer, or are of another network.
        StorageError: they cannot be read now.
    """
    if "timm" in initial:
        name = f"{spec.name.partition('.')[0]}.{initial['timm']}"
        cfg = timm.get_pretrained_cfg(name)
        if cfg is not None and not cfg.num_classes:
            raise _no_projection(f"timm {name}")
        return timm_model(name, spec)
    if "uri" in initial:
        return _from_file(spec, str(initial["uri"]), initial.get("sha256"))
    raise UserError(f"embed.output: projection needs weights that have one, of init.timm or init.uri, not {initial}")


def _from_file(spec: ModelSpec, uri: str, digest: str | None) -> nn.Module:
    tensors = {unwrapped(name): tensor for name, tensor in tensors_at(uri, digest).items()}
    layer = f"{_classifier(spec)}.weight"
    weight = _named(tensors, _built(spec, 1), spec, uri).get(layer)
    if weight is None:
        raise _no_projection(uri)
    network = _built(spec, len(weight))
    own, found = network.state_dict(), _named(tensors, network, spec, uri)
    # OpenAI's projection has no bias; timm's converters of some architectures leave out the zeros.
    found = {f"{_classifier(spec)}.bias": torch.zeros(len(weight)), **found}
    wrong = [name for name in own if name not in found or found[name].shape != own[name].shape]
    if wrong:
        message = f"{uri} does not fit timm model {spec.name}: {len(wrong)} tensors are missing or of another shape, "
        raise UserError(f"{message}such as {wrong[:3]}; give weights of the same architecture and image size")
    network.load_state_dict({name: found[name] for name in own})
    return network


def _named(tensors: Mapping[str, Tensor], network: nn.Module, spec: ModelSpec, uri: str) -> dict[str, Tensor]:
    return dict(converted(dict(tensors), network, spec, uri))


def _built(spec: ModelSpec, num_outputs: int) -> nn.Module:
    network: nn.Module = timm.create_model(spec.name, num_classes=num_outputs, **timm_kwargs(spec))
    return network


def _classifier(spec: ModelSpec) -> str:
    cfg = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    name = cfg.classifier if cfg is not None else None
    if not isinstance(name, str):
        raise UserError(f"timm model {spec.name} has no single last layer, so no projection; use output: features")
    return name


def _no_projection(source: str) -> UserError:
    message = f"the weights {source} have no last layer to project features with; use output: features, or weights "
    return UserError(message + "that have one, such as vit_large_patch14_clip_quickgelu_224 with init.timm: openai")
