"""A student learns its teacher's labels on digits and on injected noise: structure of inputs speeds learning up.

Source: Shi, Wei, Liang, "A Theoretical Analysis on Feature Learning in Neural Networks" (ICLR 2022), section 6 and
appendix E.5, on scikit-learn's 8 x 8 digits in place of MNIST. FC(m) is one hidden layer of m neurons with the
quadratic activation. The teacher is trained on labelled digits and pulled to even and certain answers on the injected
inputs (R = R1 + lambda R2); then it labels both parts, and a fresh student learns the mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from pydantic import Field
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from workloads.theory.context import ShippedParameters, SimulationContext
from workloads.theory.two_layer import adam, batches, stream, train

_TEST: Final = 500
"""Digits, and injected inputs, that the student is measured on."""
_CLASSES: Final = 10


class TeacherStudentParameters(ShippedParameters):
    """Sizes of the networks, the mixture and the training; the paper prints neither lambda nor rates nor steps."""

    teacher: int = Field(9, ge=1, le=10_000, description="m of the teacher FC(m)")
    student: int = Field(9, ge=1, le=10_000, description="m of the student FC(m)")
    injected_share: float = Field(0.5, gt=0, lt=1, description="alpha, the share of injected inputs in the mixture")
    certainty: float = Field(1.0, ge=0, le=100, description="lambda, the weight of R2 beside R1")
    pull: float = Field(1.0, ge=0, le=100, description="the weight of R beside the teacher's cross-entropy")
    learning_rate: float = Field(0.005, gt=0, le=1, description="of Adam")
    batch: int = Field(128, ge=1, le=1_000, description="samples of a step")
    teacher_steps: int = Field(1_000, ge=1, le=1_000_000, description="of the teacher")
    steps: int = Field(1_500, ge=1, le=1_000_000, description="of the student")
    measures: int = Field(30, ge=2, le=1_000, description="evenly spaced measurements of the student while it learns")


@dataclass(slots=True, kw_only=True, eq=False)
class QuadraticNetwork:
    """``sum_i a_i (<w_i, x> + b_i)^2 + c``: FC(m)."""

    weights_MD: Tensor
    bias_M: Tensor
    head_CM: Tensor
    offset_C: Tensor

    @classmethod
    def initial(cls, neurons: int, dim: int, generator: torch.Generator, device: torch.device) -> Self:
        """Normal weights of variance 1 / fan-in."""
        weights_MD = torch.randn(neurons, dim, generator=generator) / dim**0.5
        head_CM = torch.randn(_CLASSES, neurons, generator=generator) / neurons**0.5
        zeros = (torch.zeros(neurons), torch.zeros(_CLASSES))
        tensors = [tensor.to(device) for tensor in (weights_MD, zeros[0], head_CM, zeros[1])]
        return cls(weights_MD=tensors[0], bias_M=tensors[1], head_CM=tensors[2], offset_C=tensors[3])

    @property
    def tensors(self) -> list[Tensor]:
        """All that is learned."""
        return [self.weights_MD, self.bias_M, self.head_CM, self.offset_C]

    def scores(self, inputs_ND: Tensor) -> Tensor:
        """(N, C)."""
        return (inputs_ND @ self.weights_MD.T + self.bias_M).square() @ self.head_CM.T + self.offset_C

    def answers(self, inputs_ND: Tensor) -> Tensor:
        """The classes, int64 (N,)."""
        return self.scores(inputs_ND).argmax(1)


def evenness_and_certainty(scores_NC: Tensor, certainty: float) -> Tensor:
    """R = R1 + lambda R2: negative entropy of the mean answer, and lambda times the mean entropy of an answer."""
    logs_NC = torch.log_softmax(scores_NC, dim=1)
    mean_C = logs_NC.exp().mean(0)
    r2 = -(logs_NC.exp() * logs_NC).sum(1).mean()
    return (mean_C * (mean_C + 1e-12).log()).sum() + certainty * r2


class _Parts:
    """Digits with their classes and injected normal inputs, divided into training and test samples."""

    def __init__(self, parameters: TeacherStudentParameters, seed: int, device: torch.device) -> None:
        pixels, classes = load_digits(return_X_y=True)
        order_N = torch.randperm(len(classes), generator=stream(seed, 0))
        digits_ND = torch.from_numpy(pixels).float()[order_N]
        digits_ND = ((digits_ND - digits_ND.mean()) / digits_ND.std()).to(device)
        self.classes_N = torch.from_numpy(classes)[order_N][_TEST:].to(device)
        self.test_ND, self.digits_ND = digits_ND[:_TEST], digits_ND[_TEST:]
        share = parameters.injected_share
        num = max(round(len(self.digits_ND) * share / (1 - share)), 1)
        injected_ND = torch.randn(num + _TEST, digits_ND.shape[1], generator=stream(seed, 1)).to(device)
        self.injected_test_ND, self.injected_ND = injected_ND[:_TEST], injected_ND[_TEST:]


def _teacher(parameters: TeacherStudentParameters, parts: _Parts, seed: int) -> QuadraticNetwork:
    p = parameters
    digits_ND, classes_N = parts.digits_ND, parts.classes_N
    network = QuadraticNetwork.initial(p.teacher, digits_ND.shape[1], stream(seed, 2), digits_ND.device)
    injected = batches(len(parts.injected_ND), min(p.batch, len(parts.injected_ND)), p.teacher_steps, stream(seed, 3))

    def loss(at: Tensor) -> Tensor:
        fit = functional.cross_entropy(network.scores(digits_ND[at]), classes_N[at])
        injected_NC = network.scores(parts.injected_ND[next(injected)])
        return fit + p.pull * evenness_and_certainty(injected_NC, p.certainty)

    train(
        network.tensors, loss, batches(len(digits_ND), p.batch, p.teacher_steps, stream(seed, 4)), adam(p.learning_rate)
    )
    return network


def _student(
    parameters: TeacherStudentParameters,
    training: tuple[Tensor, Tensor],
    tests: Sequence[tuple[Tensor, Tensor]],
    seed: int,
) -> list[list[float]]:
    """Accuracies on each test set at each measurement."""
    p, (inputs_ND, classes_N) = parameters, training
    network = QuadraticNetwork.initial(p.student, inputs_ND.shape[1], stream(seed, 5), inputs_ND.device)
    measured: list[list[float]] = [[] for _ in tests]

    def rows() -> Iterator[Tensor]:
        marks = {max(round((n + 1) * p.steps / p.measures), 1) for n in range(p.measures)}
        for step, at in enumerate(batches(len(inputs_ND), p.batch, p.steps, stream(seed, 6))):
            yield at
            if step + 1 in marks:
                for curve, (test_ND, test_N) in zip(measured, tests, strict=True):
                    curve.append(float((network.answers(test_ND.detach()) == test_N).float().mean()))

    loss = lambda at: functional.cross_entropy(network.scores(inputs_ND[at]), classes_N[at])  # noqa: E731
    train(network.tensors, loss, rows(), adam(p.learning_rate))
    return measured


def simulate_teacher_student(
    parameters: TeacherStudentParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """Of the student's agreement with its teacher on fresh inputs: the mean over training (``original_curve``,
    ``injected_curve``, and ``baseline_curve`` of a student of digits alone) and the end (``original``, ``injected``,
    ``baseline``); ``speed_gap`` = original_curve - injected_curve; ``teacher_accuracy`` on digits; ``largest_class``:
    the share of the teacher's most frequent label among injected inputs.
    """
    for seed in seeds:
        parts = _Parts(parameters, seed, context.device)
        teacher = _teacher(parameters, parts, seed)
        tests = [(part, teacher.answers(part)) for part in (parts.test_ND, parts.injected_test_ND)]
        mixture_ND = torch.cat([parts.digits_ND, parts.injected_ND])
        original, injected = _student(parameters, (mixture_ND, teacher.answers(mixture_ND)), tests, seed)
        digits = (parts.digits_ND, teacher.answers(parts.digits_ND))
        (baseline,) = _student(parameters, digits, tests[:1], seed)
        curves = {"original": original, "injected": injected, "baseline": baseline}
        means = {f"{name}_curve": sum(curve) / len(curve) for name, curve in curves.items()}
        yield {
            **means,
            **{name: curve[-1] for name, curve in curves.items()},
            "speed_gap": means["original_curve"] - means["injected_curve"],
            "teacher_accuracy": float((teacher.answers(parts.digits_ND) == parts.classes_N).float().mean()),
            "largest_class": float(tests[1][1].bincount(minlength=_CLASSES).max()) / _TEST,
        }
