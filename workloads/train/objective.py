"""Objectives: what a batch's logits cost, sample by sample, and which predictions count as wrong.

Losses are per sample and float32, so that a caller can weight uneven slices of a batch exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self, cast

from torch import Tensor
from torch.nn import functional

from orchestrator.core.errors import UserError
from orchestrator.core.hyper_parameters import SIGMOID, SOFTMAX
from orchestrator.core.plugins import OBJECTIVES as OBJECTIVE_PLUGINS
from orchestrator.core.plugins import is_reference
from workloads.runtime.plugin_arguments import open_plugin, takes_arguments
from workloads.train.linear_form import LinearForm, MixedTargets, Normalizer, Targets, weighted_classes
from workloads.train.recipe import Recipe


class Objective(Protocol):
    """What is minimised. All methods work on the device of their arguments and never wait for it."""

    def losses(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """Loss of each sample (B,), float32, whatever the dtype of the logits."""

    def num_wrong(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """How many samples are predicted wrongly, a 0-d int64 tensor; see ``is_wrong``."""

    def num_wrong_of(self, predicted_B: Tensor, targets: Targets) -> Tensor:
        """``num_wrong`` of predicted classes (B,)."""

    def linear_form(self, targets: Targets) -> LinearForm | None:
        """The losses as a linear form, for heads too large to hold all logits; None if they have none."""

    def unsmoothed(self) -> Self:
        """The objective that is reported for validation: the same without label smoothing."""


_NEEDED: Final = ("losses", "num_wrong", "unsmoothed")
"""Methods that every run calls. The others serve heads with very many classes."""


class _Counting:
    """Predictions are the classes with the largest logits, in every objective here."""

    def num_wrong(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """See ``Objective``."""
        return self.num_wrong_of(logits_BK.detach().argmax(1), targets)

    def num_wrong_of(self, predicted_B: Tensor, targets: Targets) -> Tensor:
        """See ``Objective``."""
        return is_wrong(predicted_B, targets).sum()


@dataclass(frozen=True)
class SoftmaxObjective(_Counting):
    """Cross-entropy with the softmax of the logits; smoothing as in "Rethinking the Inception Architecture".

    ``label_smoothing`` e replaces a one-hot target y by ``(1 - e) y + e / K`` (arXiv:1512.00567, section 7).
    """

    num_classes: int
    label_smoothing: float = 0.0

    def losses(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """See ``Objective``. Raises ``UserError`` for sets of classes."""
        if isinstance(targets, MixedTargets):
            return self.linear_form(targets).losses(logits_BK.float())
        _refuse_sets(targets)
        smoothing = self.label_smoothing
        return functional.cross_entropy(logits_BK.float(), targets, reduction="none", label_smoothing=smoothing)

    def linear_form(self, targets: Targets) -> LinearForm:
        """See ``Objective``."""
        _refuse_sets(targets.first if isinstance(targets, MixedTargets) else targets)
        return _linear_form(Normalizer.SOFTMAX, targets, self.num_classes, self.label_smoothing)

    def unsmoothed(self) -> Self:
        """See ``Objective``."""
        return replace(self, label_smoothing=0.0)


@dataclass(frozen=True)
class SigmoidObjective(_Counting):
    """Binary cross-entropy of every class, summed over the classes of a sample, as the ViT paper trains ImageNet21k.

    With targets y in [0, 1]^K: ``sum_k log(1 + exp(z_k)) - sum_k y_k z_k``, which equals
    ``sum_k BCE(sigmoid(z_k), y_k)``; only the logits of a sample's own classes are picked, so no (B, K) target matrix
    exists. ``label_smoothing`` e makes y ``(1 - e) y + e / K``, as for the softmax.
    """

    num_classes: int
    label_smoothing: float = 0.0

    def losses(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        """See ``Objective``."""
        return self.linear_form(targets).losses(logits_BK.float())

    def linear_form(self, targets: Targets) -> LinearForm:
        """See ``Objective``."""
        return _linear_form(Normalizer.SIGMOID, targets, self.num_classes, self.label_smoothing)

    def unsmoothed(self) -> Self:
        """See ``Objective``."""
        return replace(self, label_smoothing=0.0)


OBJECTIVES: Final[Mapping[str, Callable[[int, float], Objective]]] = {
    SOFTMAX: SoftmaxObjective,
    SIGMOID: SigmoidObjective,
}
"""Builders of the losses that are built in, of the number of classes and the label smoothing."""


def build_objective(recipe: Recipe, num_classes: int, *, is_multi_label: bool = False) -> Objective:
    """The objective of a recipe.

    Raises:
        UserError: there is a single class; softmax is asked to learn sets of classes; a plug-in is not installed in
            the version that the plan names; or what it gives lacks methods that every run calls.
    """
    if num_classes < 2:
        message = f"the label space has {num_classes} class: there is nothing to tell apart; train on 2 or more"
        raise UserError(message)
    if recipe.loss == SOFTMAX and is_multi_label:
        raise UserError(_softmax_of_sets())
    if recipe.loss in OBJECTIVES:
        return OBJECTIVES[recipe.loss](num_classes, recipe.label_smoothing)
    return _plugin(recipe, num_classes)


def is_wrong(predicted_B: Tensor, targets: Targets) -> Tensor:
    """Whether each prediction (B,) misses.

    It must be the target, or one of the set of targets (a sample without any is wrong always), or of a mixture the one
    with the larger weight.
    """
    if isinstance(targets, MixedTargets):
        return is_wrong(predicted_B, targets.heavier)
    if targets.ndim == 1:
        return predicted_B != targets
    return (predicted_B[:, None] != targets).all(1)


def _linear_form(normalizer: Normalizer, targets: Targets, num_classes: int, smoothing: float) -> LinearForm:
    indices_BM, weights_BM = weighted_classes(targets)
    weights_BM = weights_BM * (1 - smoothing) if smoothing else weights_BM
    return LinearForm(
        normalizer=normalizer, indices_BM=indices_BM, weights_BM=weights_BM, uniform=smoothing / num_classes
    )


def _refuse_sets(targets: Tensor) -> None:
    if targets.ndim != 1:
        raise UserError(_softmax_of_sets())


def _softmax_of_sets() -> str:
    return (
        "recipe.loss is 'softmax', but the samples of this label space have several classes each, and a softmax can "
        "give only one of them probability 1; use loss: sigmoid"
    )


def _plugin(recipe: Recipe, num_classes: int) -> Objective:
    """Of an installed package: ``(recipe, num_classes) -> Objective``, or with ``arguments`` as a third argument."""
    if not is_reference(recipe.loss):
        message = f"recipe.loss is {recipe.loss!r}: {SOFTMAX}, {SIGMOID} or an objective of a package, as "
        raise UserError(f"{message}<distribution>==<version>:<name>; plan the sweep again")
    build, arguments = open_plugin(recipe.loss, OBJECTIVE_PLUGINS, recipe.loss_arguments or {})
    given = {"arguments": arguments} if takes_arguments(build, OBJECTIVE_PLUGINS) else {}
    objective = build(recipe, num_classes, **given)
    # Now, and not at the first evaluation, which may be hours away.
    if missing := [name for name in _NEEDED if not callable(getattr(objective, name, None))]:
        message = f"recipe.loss: {recipe.loss} gives {type(objective).__name__}, which lacks {', '.join(missing)}; "
        raise UserError(f"{message}give it these methods of Objective (workloads/train/objective.py)")
    return cast("Objective", objective)
