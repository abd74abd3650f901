"""The frozen network of an ``embed`` job and the form of its images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import timm
import torch
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.errors import UserError
from orchestrator.core.plugins import is_reference
from orchestrator.storage.artifacts import read_part, read_record
from workloads.checkpoint.retention import read_backbone
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.pixels import PixelSpec
from workloads.models.build import FrozenForward, PixelNormalizer, build_backbone, memory_format
from workloads.models.initial import initial_of, load_initial, open_projected
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors, weights_sha256

PROJECTION: Final = "projection"
"""The parameter ``output`` of embeddings that go through the last layer of their weights too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How images become the network's input."""

    pixels: PixelSpec
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_mirrored: bool

    @classmethod
    def of(cls, parameters: Mapping[str, Any], document: Mapping[str, Any] | None) -> Self:
        """From a job's parameters; what they leave open is as the weights were trained.

        That is the pretraining's mean and deviation, or what timm says of the weights: also their filter and the size
        before the centre square is cut out, ``floor(image_size / crop_pct)``.

        Args:
            parameters: the identity's.
            document: ``model.json`` of the artifact that the weights come from, if they do.
        """
        model = ModelSpec.from_mapping(parameters["model"])
        known = _timm_look(model, parameters) if document is None else document
        decoder, resize = DecoderName(parameters["decoder"]), parameters["resize"] or known.get("resize")
        interpolation = Interpolation(parameters["interpolation"] or known.get("interpolation", "bilinear"))
        size = model.image_size
        return cls(
            pixels=PixelSpec(image_size=size, resize=resize, interpolation=interpolation, decoder=decoder),
            mean=tuple(parameters["mean"] or known["mean"]),
            std=tuple(parameters["std"] or known["std"]),
            is_mirrored=parameters["view"] == "mirrored",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, for the artifact."""
        return {
            "image_size": self.pixels.image_size,
            "resize": self.pixels.resize,
            "interpolation": self.pixels.interpolation.value,
            "decoder": self.pixels.decoder.value,
            "mean": list(self.mean),
            "std": list(self.std),
            "view": "mirrored" if self.is_mirrored else "center",
        }


class FrozenBackbone:
    """A network in evaluation mode on its device."""

    def __init__(
        self, backbone: nn.Module, num_features: int, preprocessing: Preprocessing, device: torch.device
    ) -> None:
        self.num_features, self.preprocessing = num_features, preprocessing
        self._forward = FrozenForward()
        form = memory_format(backbone)
        self._backbone: nn.Module = backbone.eval().to(device=device, memory_format=form)  # type: ignore[call-overload]
        self._normalize = PixelNormalizer(preprocessing.mean, preprocessing.std, device, form)

    @property
    def network(self) -> nn.Module:
        """What computes features, for those that look inside."""
        return self._backbone

    @property
    def most(self) -> int:
        """Samples that go through the network at once, at most, because more did not fit into memory; 0 = any."""
        return self._forward.most

    def weights_sha256(self) -> str:
        """Of all its tensors."""
        return weights_sha256(self._backbone.state_dict())

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Features (B, num_features) of uint8 images."""
        pixels_BCHW = self._normalize(images_BCHW)
        return self._forward(self._backbone, pixels_BCHW.flip(3) if self.preprocessing.is_mirrored else pixels_BCHW)


def open_backbone(request: JobRequest, context: ExecutionContext, device: torch.device) -> FrozenBackbone:
    """The input ``backbone``, or the model of the parameters with the weights they name.

    Raises:
        UserError: the weights are not those of the model, or the model takes no such images.
        NotFoundError, CorruptObjectError: the artifact is not there or not what its record says.
    """
    store, parameters = context.store, request.parameters
    spec = ModelSpec.from_mapping(parameters["model"])
    if parameters.get("output") == PROJECTION:
        return _open_projected(request, spec, device)
    backbone, num_features = build_backbone(spec, 0)
    document: dict[str, Any] | None = None
    if "backbone" in request.inputs:
        record = read_record(store, request.inputs["backbone"])
        document = json.loads(read_part(store, record, "model.json"))
        backbone.load_state_dict(decode_tensors(read_backbone(store, record, parameters)))
    else:
        initial = initial_of(request)
        if initial is None:
            raise UserError(f"{request.job} names no weights of {spec.name}: features of random weights say nothing")
        load_initial(backbone, spec, initial, store)
        if "artifact" in initial:
            document = json.loads(read_part(store, read_record(store, initial["artifact"]), "model.json"))
    return FrozenBackbone(backbone, num_features, Preprocessing.of(parameters, document), device)


def _open_projected(request: JobRequest, spec: ModelSpec, device: torch.device) -> FrozenBackbone:
    network = open_projected(spec, initial_of(request) or {})
    size = spec.image_size
    with torch.inference_mode():
        num_outputs = int(network.eval()(torch.zeros(1, 3, size, size)).shape[1])
    return FrozenBackbone(network, num_outputs, Preprocessing.of(request.parameters, None), device)


def _timm_look(model: ModelSpec, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """What timm says of the weights, or of the architecture where they are a file."""
    tag = parameters["initial"].get("timm")
    if is_reference(model.name):
        return {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    cfg = timm.get_pretrained_cfg(f"{model.name.partition('.')[0]}.{tag}" if tag else model.name)
    if cfg is None:
        return {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    interpolation = cfg.interpolation if cfg.interpolation in set(Interpolation) else Interpolation.BICUBIC
    resize = int(model.image_size / cfg.crop_pct)
    return {"mean": cfg.mean, "std": cfg.std, "interpolation": interpolation, "resize": resize}
