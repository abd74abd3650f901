"""The ``probe`` with ``features: cached, solver: lbfgs``: logistic regression; its strength is chosen as it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import NumericsError, UserError
from orchestrator.core.hyper_parameters import SIGMOID, SOFTMAX
from workloads.data.subset import SampleView
from workloads.jobs.cached_features import CachedSamples, Measured, Poll, Rows, run_on_features
from workloads.models.weights import encode_tensors, weights_sha256
from workloads.solvers.lbfgs import End, Minimum
from workloads.solvers.logistic import LearnedHessian, LogisticRegression, Scaling
from workloads.train.evaluate import OutcomeTally, evaluate
from workloads.train.objective import Objective, SigmoidObjective, SoftmaxObjective

_CHOICE_SLACK: Final = 10.0
"""Times the tolerance: a choice between strengths needs no more."""
_PATIENCE: Final = 2
"""Strengths in a row that are worse than the best one end the search: weaker ones fit ever more closely."""


def run_logistic_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` (it acts on raw features) and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_on_features(request, context, measure)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """One strength and what the samples that were held out say of it."""

    l2: float
    error: float
    loss: float
    fit: Minimum

    @property
    def rank(self) -> tuple[float, float, float]:
        """Smaller is better: fewer errors, then the smaller loss, then the stronger regularisation."""
        return (self.error, self.loss, -self.l2)

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        fit = {"iterations": self.fit.num_iterations, "end": self.fit.end.value}
        return {"l2": self.l2, "select_error": self.error, "select_loss": self.loss, **fit}


def measure(request: JobRequest, samples: CachedSamples, poll: Poll) -> Measured:
    """Choose on held-out samples, fit to all, validate."""
    recipe, passes = request.parameters["recipe"], _Passes(poll)
    objective = _objective(recipe["loss"], samples)
    kept, held_out = samples.divided(recipe["select_holdout"], int(request.parameters["seed"]))
    rows, num_kept = _training_rows(samples, kept, held_out)
    scaling = Scaling.of(rows.features_ND, is_standardized=recipe["scaling"] == "standardize")
    scaling.apply_(rows.features_ND)
    path = _Path(recipe, scaling, samples, objective, passes)
    choices = path.search(rows, num_kept, samples.train.rows(held_out))
    best = min(choices, key=lambda choice: choice.rank)
    final = path.regression(rows.features_ND, rows.targets).fit(
        best.fit.x,
        best.l2,
        tolerance=recipe["tolerance"],
        max_iterations=recipe["max_iterations"],
        learned=path.learned,
    )
    head, tally = _head(*scaling.head(final.x)), OutcomeTally()
    metrics = {
        **_scores(head, samples, objective, tally),
        "select_error": best.error,
        "select_loss": best.loss,
        "selected_l2": best.l2,
        "num_classes": float(samples.num_classes),
        "num_steps": float(final.num_iterations),
        "num_train": float(samples.train.view.num_samples),
    }
    summary = {
        "selection": [choice.to_json() for choice in choices],
        "weights_sha256": weights_sha256(head.state_dict()),
        "passes": passes.count,
    }
    notes = [*_fit_notes(recipe, [*choices, replace(best, fit=final)]), *_edge_notes(recipe, best)]
    return Measured(
        metrics=metrics,
        summary=summary,
        outcomes=tally.of_split(samples.val.split),
        notes=notes,
        parts={"head.safetensors": encode_tensors(head.state_dict())},
    )


class _Passes:
    """Counts passes over the data, and asks each time whether to go on."""

    def __init__(self, poll: Poll) -> None:
        self.count, self._poll = 0, poll

    def __call__(self) -> None:
        self.count += 1
        self._poll(self.count)


class _Path:
    """Fits from strong to weak regularisation, each from where the one before ended."""

    def __init__(
        self,
        recipe: Mapping[str, Any],
        scaling: Scaling,
        samples: CachedSamples,
        objective: Objective,
        poll: Callable[[], None],
    ) -> None:
        self._recipe, self._scaling, self._samples = recipe, scaling, samples
        self._objective, self._poll = objective, poll
        self.learned = LearnedHessian()

    def regression(self, features_ND: Tensor, targets: Tensor) -> LogisticRegression:
        """On scaled features."""
        loss = self._recipe["loss"]
        return LogisticRegression(
            features_ND, targets, num_classes=self._samples.num_classes, loss=loss, poll=self._poll
        )

    def search(self, rows: Rows, num_kept: int, held_out: Rows) -> list[Choice]:
        """Fits to the first rows, judged on what was held out."""
        recipe = self._recipe
        regression = self.regression(rows.features_ND[:num_kept], rows.targets[:num_kept])
        start, choices, num_worse = regression.start(), list[Choice](), 0
        for l2 in sorted(recipe["l2"], reverse=True):
            tolerance, most = min(recipe["tolerance"] * _CHOICE_SLACK, 0.1), recipe["max_iterations"]
            fit = regression.fit(start, l2, tolerance=tolerance, max_iterations=most, learned=self.learned)
            found = evaluate(_head(*self._scaling.head(fit.x)), held_out.batches(), (), objective=self._objective)
            choice = Choice(l2=l2, error=found["val_error"], loss=found["val_loss"], fit=fit)
            is_worse = any(other.error <= choice.error and other.loss < choice.loss for other in choices)
            start, num_worse = fit.x, num_worse + 1 if is_worse else 0
            choices.append(choice)
            if num_worse == _PATIENCE:
                break
        return choices


def _objective(loss: str, samples: CachedSamples) -> Objective:
    if samples.num_classes < 2:
        raise UserError("the label space has 1 class: there is nothing to tell apart; transfer to 2 or more")
    if loss == SIGMOID:
        return SigmoidObjective(samples.num_classes)
    if samples.train.labels.is_multi_label:
        message = f"recipe.loss is {SOFTMAX!r}, but the samples of this label space have several classes each"
        raise UserError(f"{message}; use loss: {SIGMOID}")
    return SoftmaxObjective(samples.num_classes)


def _training_rows(samples: CachedSamples, kept: SampleView, held_out: SampleView) -> tuple[Rows, int]:
    """All views of all training samples, those that were kept first; and how many rows these are."""
    train = samples.train
    parts = [train.rows(view, table) for view in (kept, held_out) for table in range(len(train.tables))]
    rows = Rows(
        features_ND=torch.cat([part.features_ND for part in parts]),
        targets=torch.cat([part.targets for part in parts]),
        subsets_N=parts[0].subsets_N,
    )
    return rows, kept.num_samples * len(train.tables)


def _head(weight_KD: Tensor, bias_K: Tensor) -> nn.Linear:
    head = nn.Linear(weight_KD.shape[1], weight_KD.shape[0], device=weight_KD.device)
    head.load_state_dict({"weight": weight_KD, "bias": bias_K})
    return head


def _scores(head: nn.Linear, samples: CachedSamples, objective: Objective, tally: OutcomeTally) -> dict[str, float]:
    val, train = samples.val.rows(samples.val.view), samples.train.rows(samples.train.view)
    found = evaluate(head, val.batches(), samples.subset_names, objective=objective, levels=samples.levels, tally=tally)
    trained = evaluate(head, train.batches(), (), objective=objective)
    metrics = {**found, "train_error": trained["val_error"], "train_loss": trained["val_loss"]}
    if not all(torch.isfinite(torch.tensor(value)) for value in metrics.values()):
        raise NumericsError(f"the fitted head gives {metrics}; use stronger regularisation (recipe.l2)")
    return {**metrics, "best_val_error": found["val_error"]}


def _fit_notes(recipe: Mapping[str, Any], choices: Sequence[Choice]) -> list[str]:
    ended = [f"{choice.l2:g}" for choice in choices if choice.fit.end is End.MAX_ITERATIONS]
    if not ended:
        return []
    return [f"max_iterations ({recipe['max_iterations']}) ended fits before their optimum, with l2 {', '.join(ended)}"]


def _edge_notes(recipe: Mapping[str, Any], best: Choice) -> list[str]:
    """The best strength of several may lie beyond them."""
    strengths = recipe["l2"]
    if len(strengths) == 1 or min(strengths) < best.l2 < max(strengths):
        return []
    edge = "strongest" if best.l2 == max(strengths) else "weakest"
    return [f"the {edge} regularisation of those to choose from (l2 {best.l2:g}) was the best; others may be better"]
