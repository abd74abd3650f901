"""Build a backbone and a head from a spec and a seed, and call them where they do not learn.

The backbone is built with ``num_classes=0`` from its own random stream and the head from another, so that jobs which
share a seed start from the same backbone weights, for any number of classes.

timm is imported where a network is built: that takes seconds, and jobs on cached features build none.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from orchestrator.core.errors import NO_DEVICE_MEMORY, UserError
from orchestrator.core.plugins import MODELS, is_reference, short_name
from workloads.models.refusals import REFUSALS, explain_refusal
from workloads.models.spec import ModelSpec
from workloads.runtime.enums import HeadInit
from workloads.runtime.plugin_arguments import open_plugin, takes_arguments

_LOG = logging.getLogger(__name__)
# Of exceptions that are not torch.OutOfMemoryError, those of the host's memory included.
_NO_MEMORY: Final = re.compile(rf"out of memory|can't allocate memory|{NO_DEVICE_MEMORY}", re.IGNORECASE)


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


class FrozenForward:
    """Calls networks in evaluation mode, without gradients. What it learns of the memory holds for its own life.

    A batch that does not fit into the device's memory goes through in halves: what a training step leaves room for is
    found by trial, and other passes should not fail where training fits. A batch that fits has the bits of one call.
    """

    def __init__(self) -> None:
        self.most = 0
        """Samples that go through a network at once, at most; 0 = the whole batch."""

    def __call__(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """What the network gives for a batch (B, ...) of any size, also of none."""
        if not len(inputs):
            # Many networks cannot reshape nothing.
            one: Tensor = network(inputs.new_zeros(1, *inputs.shape[1:]))
            return one[:0]
        size = min(self.most or len(inputs), len(inputs))
        outputs: list[Tensor] = []
        rest = inputs
        while len(rest):
            try:
                outputs.append(network(rest[:size]))
                rest = rest[size:]
                continue
            except Exception as error:
                if size < 2 or not is_out_of_memory(error):
                    raise
            # Outside the handler: the exception holds the frames whose tensors the halves need the room of.
            if inputs.device.type == "cuda":
                torch.cuda.empty_cache()
            self.most = size = -(-size // 2)
            _LOG.warning("a batch does not fit into memory; %d samples go through the network at a time", size)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device (or the host) had no memory left."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def build_backbone(
    spec: ModelSpec, torch_seed: int, *, dropout: float = 0.0, drop_path: float = 0.0
) -> tuple[nn.Module, int]:
    """The backbone and its number of features.

    ``dropout`` and ``drop_path`` are probabilities in [0, 1) and belong to training alone (see ``dropout_kwargs``).

    Raises:
        UserError: timm has no such model, or the model refuses its arguments, the image size or the dropout; or a
            plug-in is not installed as it was planned, or gives something else than a model.
    """
    if is_reference(spec.name):
        return _build_plugin(spec, torch_seed, has_dropout=bool(dropout or drop_path))
    import timm

    from workloads.models.table import timm_kwargs

    if not timm.is_model(spec.name):
        raise UserError(_unknown_model(spec.name))
    arguments = timm_kwargs(spec) | dropout_kwargs(spec, dropout=dropout, drop_path=drop_path)
    try:
        with seeded(torch_seed):
            backbone = timm.create_model(spec.name, num_classes=0, **arguments)
        model = json.dumps(spec.to_json(), sort_keys=True)
        if model not in _NUM_FEATURES:
            _NUM_FEATURES[model] = _num_features(backbone, spec.image_size)
        return backbone, _NUM_FEATURES[model]
    except REFUSALS as error:
        message = (
            f"timm model {spec.name} refuses image_size={spec.image_size} and kwargs={dict(spec.kwargs)}: "
            f"{explain_refusal(error)}; choose a size and arguments that the model takes"
        )
        raise UserError(message) from error


_NUM_FEATURES: Final[dict[str, int]] = {}
"""Number of features of each timm model built so far, by the JSON form of its spec. A runner builds the same model for
many jobs, and measuring takes up to a second."""

_INTERFACE: Final = ("num_features", "forward_features", "forward_head", "reset_classifier")
"""What timm's models have, and a plug-in must."""


def _build_plugin(spec: ModelSpec, torch_seed: int, *, has_dropout: bool) -> tuple[nn.Module, int]:
    """A package's ``(image_size, arguments) -> model``, without its classifier."""
    what = f"the model {short_name(spec.name)!r} of {spec.name.partition(':')[0]}"
    if has_dropout:
        raise UserError(
            f"recipe.dropout and drop_path are timm's; {what} takes what it has in model.kwargs; set them to 0"
        )
    build, arguments = open_plugin(spec.name, MODELS, spec.kwargs)
    try:
        with seeded(torch_seed):
            given = (spec.image_size, arguments) if takes_arguments(build, MODELS) else (spec.image_size,)
            model = build(*given)
            missing = [name for name in _INTERFACE if not hasattr(model, name)]
            if missing or not isinstance(model, nn.Module):
                message = f"{what} is not a module with timm's interface: {type(model).__name__} lacks "
                raise UserError(f"{message}{', '.join(missing) or 'what torch.nn.Module has'}")
            model.reset_classifier(0)  # type: ignore[operator] # checked above
        return model, _num_features(model, spec.image_size)
    except REFUSALS as error:
        raise UserError(f"{what} fails at image_size={spec.image_size} and {dict(spec.kwargs)}: {error}") from error


def dropout_kwargs(spec: ModelSpec, *, dropout: float, drop_path: float) -> dict[str, float]:
    """Arguments of timm's constructor for the two rates.

    ``dropout`` of a transformer follows the ViT paper (arXiv:2010.11929, appendix B.1): after every dense layer but
    those of queries, keys and values, and after the position embeddings; ``drop_rate``, before the head, is what other
    networks have.

    Raises:
        UserError: the model has no such thing, or ``model.kwargs`` says it already.
    """
    from workloads.models.table import takes

    rates: dict[str, float] = {}
    if dropout:
        transformer = {"proj_drop_rate": dropout, "pos_drop_rate": dropout}
        rates |= transformer if takes(spec.name, transformer) else _taken(spec, "dropout", {"drop_rate": dropout})
    if drop_path:
        rates |= _taken(spec, "drop_path", {"drop_path_rate": drop_path})
    twice = sorted(rates.keys() & spec.kwargs.keys())
    if twice:
        raise UserError(f"both the recipe's dropout or drop_path and model.kwargs set {', '.join(twice)}; remove one")
    return rates


def checkpoint_activations(model: nn.Module) -> bool:
    """Let the blocks of a classifier's backbone compute activations again in the backward pass; whether it does.

    Nothing to do where no backbone learns. "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    Raises:
        UserError: the model has no such switch.
    """
    if not isinstance(model, Classifier) or not any(weight.requires_grad for weight in model.backbone.parameters()):
        return False
    switch = getattr(model.backbone, "set_grad_checkpointing", None)
    if switch is None:
        raise _no_checkpointing(model, "it has no set_grad_checkpointing")
    try:
        switch(enable=True)
    except (AssertionError, NotImplementedError, TypeError) as error:
        raise _no_checkpointing(model, str(error) or "timm refuses it") from error
    return True


def _no_checkpointing(model: Classifier, why: str) -> UserError:
    name = type(model.backbone).__name__
    message = f"compute.activation_checkpointing is on, but {name} cannot compute activations again: {why}"
    return UserError(f"{message}; set it to false, or lower compute.micro_batch")


def memory_format(backbone: nn.Module) -> torch.memory_format:
    """Channels last for convolutional networks (on one core 15 to 30 % faster), contiguous for the others."""
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in backbone.modules())
    # One convolution is the patch embedding of a transformer, which channels last slows down.
    return torch.channels_last if convolutions > 1 else torch.contiguous_format


class PixelNormalizer:
    """Pixels 0..255 to ``(pixel / 255 - mean) / std`` per channel, in float32 on the device."""

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self._device, self._memory_format = device, memory_format
        self._mean_C11 = torch.tensor(mean, device=device).view(3, 1, 1) * 255
        self._std_C11 = torch.tensor(std, device=device).view(3, 1, 1) * 255

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Float32 images (B, 3, H, W) of uint8 ones."""
        # A quarter of the bytes cross to the device, from page-locked memory without the host waiting.
        on_device_BCHW = images_BCHW.to(self._device, non_blocking=True)
        pixels_BCHW = on_device_BCHW.to(torch.float32, memory_format=self._memory_format)
        return pixels_BCHW.sub_(self._mean_C11).div_(self._std_C11)


def build_head(
    num_features: int,
    num_classes: int,
    torch_seed: int,
    *,
    bias: float | None = None,
    init: HeadInit = HeadInit.DEFAULT,
) -> nn.Linear:
    """A linear layer, initialised as PyTorch does or with weights and bias 0; ``bias`` sets every bias.

    A bias of -10 lets a sigmoid over thousands of classes start at a probability of 5e-5 for each, where the loss is
    small, instead of at 1/2 (as the ViT code does for ImageNet21k).
    """
    with seeded(torch_seed):
        head = nn.Linear(num_features, num_classes)
    if init is HeadInit.ZEROS:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    if bias is not None:
        nn.init.constant_(head.bias, bias)
    return head


@contextmanager
def seeded(torch_seed: int) -> Iterator[None]:
    """Run the body under its own torch seed; the caller's random state is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed)
        yield


def _taken(spec: ModelSpec, field: str, rates: dict[str, float]) -> dict[str, float]:
    from workloads.models.table import takes

    if not takes(spec.name, rates):
        raise UserError(
            f"recipe.{field} is {next(iter(rates.values()))}, but timm model {spec.name} has none; set it to 0"
        )
    return rates


def _num_features(backbone: nn.Module, image_size: int) -> int:
    """Features of one sample, measured: timm's ``num_features`` is not what every model returns."""
    was_training = backbone.training
    backbone.eval()
    try:
        features = _features_on_meta(backbone, image_size)
    except REFUSALS:  # also of models that keep tensors which are no buffers: the real pass decides
        with torch.inference_mode():
            features = backbone(torch.zeros(1, 3, image_size, image_size))
    backbone.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError("the model does not return one feature vector per image")
    return int(features.shape[1])


def _features_on_meta(backbone: nn.Module, image_size: int) -> object:
    """What the backbone returns, without values: a large network on a CPU takes seconds to compute one image."""
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    with torch.inference_mode():
        abstract = {name: tensor.to("meta") for name, tensor in tensors.items()}
        image_BCHW = torch.empty(1, 3, image_size, image_size, device="meta")
        return torch.func.functional_call(backbone, abstract, (image_BCHW,))


def _unknown_model(name: str) -> str:
    import timm

    nearest = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see timm.list_models()"
    return f"timm {timm.__version__} has no model {name!r}; {hint}"
