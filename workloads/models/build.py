"""Build a backbone and a head from a spec and a seed.

The backbone is built with ``num_classes=0`` from its own random stream and the head from another, so that jobs which
share a seed start from the same backbone weights, whatever their number of classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from torch import Tensor, nn

from orchestrator.errors import UserError
from workloads.models.spec import ModelSpec


class Classifier(nn.Module):
    """A backbone that maps images to features, and a linear head that maps features to logits."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        logits_BK: Tensor = self.head(self.backbone(images_BCHW))
        return logits_BK


def timm_kwargs(spec: ModelSpec) -> dict[str, Any]:
    """Constructor arguments with which timm builds the backbone; ``img_size`` only where the model's size is fixed."""
    fixed = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    size = {"img_size": spec.image_size} if fixed is not None and fixed.fixed_input_size else {}
    return {**size, **spec.kwargs}


def build_backbone(spec: ModelSpec, torch_seed: int) -> tuple[nn.Module, int]:
    """The backbone and its number of features.

    Raises:
        UserError: timm has no such model, or the model refuses its arguments or the image size.
    """
    if not timm.is_model(spec.name):
        raise UserError(_unknown_model(spec.name))
    try:
        with seeded(torch_seed):
            backbone = timm.create_model(spec.name, num_classes=0, **timm_kwargs(spec))
        return backbone, _num_features(backbone, spec.image_size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        message = (
            f"timm model {spec.name} refuses image_size={spec.image_size} and kwargs={dict(spec.kwargs)}: {error}; "
        )
        raise UserError(message + "choose a size and arguments that the model takes") from error


def memory_format(backbone: nn.Module) -> torch.memory_format:
    """Channels last for convolutional networks (on one core 15 to 30 % faster), contiguous for the others."""
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in backbone.modules())
    # One convolution is the patch embedding of a transformer, which channels last slows down.
    return torch.channels_last if convolutions > 1 else torch.contiguous_format


def build_head(num_features: int, num_classes: int, torch_seed: int) -> nn.Linear:
    """A linear layer in PyTorch's default initialisation."""
    with seeded(torch_seed):
        return nn.Linear(num_features, num_classes)


@contextmanager
def seeded(torch_seed: int) -> Iterator[None]:
    """Run the body under its own torch seed; the caller's random state is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed)
        yield


def _num_features(backbone: nn.Module, image_size: int) -> int:
    """Features of one sample, measured: timm's ``num_features`` is not what every model returns."""
    was_training = backbone.training
    with torch.inference_mode():
        features = backbone.eval()(torch.zeros(1, 3, image_size, image_size))
    backbone.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError("the model does not return one feature vector per image")
    return int(features.shape[1])


def _unknown_model(name: str) -> str:
    nearest = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see timm.list_models()"
    return f"timm {timm.__version__} has no model {name!r}; {hint}"
