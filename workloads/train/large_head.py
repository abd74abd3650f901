"""Losses of a head with very many classes, without holding the logits of all classes at once.

A plain step holds logits (B, K), their normalised copy and their gradient at once: 3 x 4 bytes x B x K, 6 GB for 1,024
samples and 500,000 classes. Here the head runs over chunks of classes. The forward pass keeps three numbers per sample;
the backward pass computes each chunk of logits again. That is one more product of head size for 1/chunks of the memory,
the idea of "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009. All that a softmax needs of the
other chunks is their sum of exponentials, which is carried along with its maximum (online softmax, arXiv:1805.02867,
algorithm 3).

Measured on one core (benchmark ``test_large_head.py``): from 2**24 logits on head and loss take 4 to 14 % longer than
with all logits at once, because a chunk stays in the cache; below, it is 20 to 30 % and there is little memory to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workloads.models.build import Classifier
from workloads.train.linear_form import LinearForm, Normalizer, Targets
from workloads.train.objective import Objective

LARGE_LOGITS = 2**24
"""Logits of one forward pass (samples x classes) from which on it runs over chunks of classes."""
CHUNK_CLASSES = 4096
"""Classes per chunk on a CPU, where a chunk should stay in the cache; GPUs get chunks of ``_GPU_CHUNK_LOGITS``."""
_GPU_CHUNK_LOGITS = 2**25


class LossForward:
    """From inputs and targets to losses (B,) float32 and the number of wrong predictions (0-d int64).

    The parameters are the model's own. Runs over chunks of classes when the head is large and the objective allows it;
    that changes results by rounding only, and is decided by the sizes alone.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, compiled: Callable[[nn.Module], Callable[..., Any]] | None = None
    ) -> None:
        self.model, self.objective = model, objective
        # A head that is the whole model gets features as its inputs.
        self._head = model.head if isinstance(model, Classifier) else None
        trunk = model.backbone if isinstance(model, Classifier) else model
        self._trunk = compiled(trunk) if compiled is not None else trunk

    def __call__(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Losses (B,) and number of wrong predictions."""
        head = self._head if self._head is not None else self.model
        if isinstance(head, nn.Linear) and len(inputs) * head.out_features >= LARGE_LOGITS:
            form = self.objective.linear_form(targets)
            if form is not None:
                losses_B, predicted_B = head_losses(self._features(inputs), head, form)
                return losses_B, self.objective.num_wrong_of(predicted_B, targets)
        logits_BK = self._trunk(inputs) if self._head is None else self._head(self._trunk(inputs))
        return self.objective.losses(logits_BK, targets), self.objective.num_wrong(logits_BK, targets)

    def _features(self, inputs: Tensor) -> Tensor:
        features_BD: Tensor = inputs if self._head is None else self._trunk(inputs)
        return features_BD


def head_losses(
    features_BD: Tensor, head: nn.Linear, form: LinearForm, chunk_classes: int = 0
) -> tuple[Tensor, Tensor]:
    """Losses (B,) float32 and the classes (B,) of the largest logits; differentiable in features, weight and bias.

    Equals ``form.losses(head(features).float())`` up to rounding. Products run in autocast's dtype, all else in
    float32. ``chunk_classes`` 0 = by the rule of this module.
    """
    is_gpu = features_BD.device.type == "cuda"
    chunk = chunk_classes or (max(CHUNK_CLASSES, _GPU_CHUNK_LOGITS // len(features_BD)) if is_gpu else CHUNK_CLASSES)
    # A head without bias has None there, which torch's annotations leave out.
    bias: Tensor | None = head.bias
    bias_K = bias if bias is not None else features_BD.new_zeros(head.out_features)
    device_type = features_BD.device.type
    is_mixed = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_mixed else head.weight.dtype
    with torch.autocast(device_type, enabled=False):
        losses_B, predicted_B = _ChunkedLosses.apply(
            features_BD,
            head.weight,
            bias_K,
            form.indices_BM,
            form.weights_BM,
            (form.normalizer, form.uniform, chunk, dtype),
        )
    return losses_B, predicted_B


class _Context(Protocol):
    """What autograd keeps between the passes."""

    saved_tensors: tuple[Tensor, ...]
    settings: tuple[Normalizer, float, int, torch.dtype]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes tensors by position
        ctx: _Context,
        features_BD: Tensor,
        weight_KD: Tensor,
        bias_K: Tensor,
        indices_BM: Tensor,
        weights_BM: Tensor,
        settings: tuple[Normalizer, float, int, torch.dtype],
    ) -> tuple[Tensor, Tensor]:
        normalizer, uniform, chunk, dtype = settings
        running = _Running(len(features_BD), features_BD.device, normalizer)
        linear_B = torch.zeros(len(features_BD), device=features_BD.device)
        for low, logits_BC in _chunks(features_BD, weight_KD, bias_K, chunk, dtype):
            local_BM, is_here_BM = _local(indices_BM, low, logits_BC.shape[1])
            linear_B += (logits_BC.gather(1, local_BM) * (weights_BM * is_here_BM)).sum(1)
            linear_B += uniform * logits_BC.sum(1) if uniform else 0
            running.add(low, logits_BC)
        norms_B = running.norms()
        ctx.save_for_backward(features_BD, weight_KD, bias_K, indices_BM, weights_BM, norms_B)
        ctx.settings = settings
        ctx.mark_non_differentiable(running.predicted_B)
        return norms_B - linear_B, running.predicted_B

    @staticmethod
    def backward(ctx: _Context, grad_B: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        features_BD, weight_KD, bias_K, indices_BM, weights_BM, norms_B = ctx.saved_tensors
        normalizer, uniform, chunk, dtype = ctx.settings
        low_precision_BD = features_BD.to(dtype)
        features_grad_BD = torch.zeros(features_BD.shape, device=features_BD.device)
        weight_grad_KD, bias_grad_K = torch.empty_like(weight_KD), torch.empty_like(bias_K)
        rows_B = torch.arange(len(grad_B), device=grad_B.device)
        for low, logits_BC in _chunks(features_BD, weight_KD, bias_K, chunk, dtype):
            here = slice(low, low + logits_BC.shape[1])
            local_BM, is_here_BM = _local(indices_BM, low, logits_BC.shape[1])
            slopes_BC = (
                logits_BC.sub_(norms_B[:, None]).exp_() if normalizer is Normalizer.SOFTMAX else logits_BC.sigmoid_()
            )
            # Column by column, because two of a row's classes may be the same; before any rounding to dtype, because
            # a probability near 1 minus 1 is all the gradient there is.
            for column in range(indices_BM.shape[1]):
                local_B = local_BM[:, column]
                slopes_BC[rows_B, local_B] = slopes_BC[rows_B, local_B] - (weights_BM * is_here_BM)[:, column]
            grads_BC = (slopes_BC.sub_(uniform) if uniform else slopes_BC).mul_(grad_B[:, None])
            torch.sum(grads_BC, 0, out=bias_grad_K[here])
            products_BC = grads_BC.to(dtype)
            features_grad_BD += products_BC @ weight_KD[here].to(dtype)
            weight_grad_KD[here] = products_BC.t() @ low_precision_BD
        return features_grad_BD.to(features_BD.dtype), weight_grad_KD, bias_grad_K, None, None, None


class _Running:
    """Normaliser and largest logit of each sample over the chunks so far."""

    def __init__(self, batch_size: int, device: torch.device, normalizer: Normalizer) -> None:
        self._normalizer = normalizer
        self._largest_B = torch.full((batch_size,), -torch.inf, device=device)
        self._sum_B = torch.zeros(batch_size, device=device)
        self.predicted_B = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def add(self, low: int, logits_BC: Tensor) -> None:
        """Add a chunk; overwrites it."""
        best_B, argbest_B = logits_BC.max(1)
        # Strictly larger: of equal logits the first class wins, as in argmax over all of them.
        self.predicted_B = torch.where(best_B > self._largest_B, argbest_B + low, self.predicted_B)
        largest_B = torch.maximum(self._largest_B, best_B)
        if self._normalizer is Normalizer.SOFTMAX:
            self._sum_B *= (self._largest_B - largest_B).exp()
            self._sum_B += logits_BC.sub_(largest_B[:, None]).exp_().sum(1)
        else:
            self._sum_B += nn.functional.softplus(logits_BC).sum(1)
        self._largest_B = largest_B

    def norms(self) -> Tensor:
        """The normaliser (B,) of all logits."""
        return self._largest_B + self._sum_B.log() if self._normalizer is Normalizer.SOFTMAX else self._sum_B


def _chunks(
    features_BD: Tensor, weight_KD: Tensor, bias_K: Tensor, chunk: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """First class and float32 logits (B, C) of each chunk; the caller may overwrite them."""
    low_precision_BD = features_BD.to(dtype)
    for low in range(0, len(weight_KD), chunk):
        here = slice(low, low + chunk)
        if dtype is torch.float32:
            yield low, torch.addmm(bias_K[here], low_precision_BD, weight_KD[here].t())
        else:
            yield low, (low_precision_BD @ weight_KD[here].to(dtype).t()).float().add_(bias_K[here])


def _local(indices_BM: Tensor, low: int, size: int) -> tuple[Tensor, Tensor]:
    """Columns of a chunk that hold the classes, and whether they do; classes elsewhere point to some column."""
    local_BM = indices_BM - low
    return local_BM.clamp(0, size - 1), (local_BM >= 0) & (local_BM < size)
