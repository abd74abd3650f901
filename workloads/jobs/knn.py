"""The job ``knn``: validation samples get the class that most of their nearest training samples have.

Similarity is the cosine of features; a neighbour's vote weighs ``exp(similarity / temperature)`` (Wu et al.,
"Unsupervised Feature Learning via Non-Parametric Instance Discrimination", section 3.4) or 1. The search is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.data.split_targets import NO_LABEL
from workloads.jobs.cached_features import CachedSamples, Measured, Poll, Rows, run_on_features
from workloads.train.evaluate import TOP, EvalInputs, OutcomeTally, evaluate
from workloads.train.objective import Objective, SigmoidObjective, SoftmaxObjective, is_wrong

_QUERIES_AT_ONCE: Final = 512
_NEIGHBOURS_AT_ONCE: Final = 65_536
"""128 MiB of similarities."""
_LEAST_SHARE: Final = 1e-9
"""Of the votes: a class without any is given so little, so that losses stay finite."""
_LARGEST_LOGIT: Final = math.log(1 / _LEAST_SHARE - 1)
"""Of a class that all neighbours have: float32 rounds 1 - 1e-9 to 1, whose logit is infinite."""


def run_knn(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``model.json`` and the metrics of the chosen number of neighbours; nothing is trained.

    Raises:
        UserError, BadDataError, PreemptedError, StorageError: why there is no commit.
    """
    return run_on_features(request, context, measure)


def measure(request: JobRequest, samples: CachedSamples, poll: Poll) -> Measured:
    """Choose k on held-out training samples, then validate with all training samples as neighbours."""
    recipe, train = request.parameters["recipe"], samples.train
    kept, held_out = samples.divided(recipe["select_holdout"], int(request.parameters["seed"]))
    counts = [k for k in sorted(recipe["k"]) if k <= kept.num_samples] or [kept.num_samples]
    votes = NeighbourVotes.of(recipe, samples)
    choices = _errors(votes, counts, find_neighbours(train.rows(kept), train.rows(held_out), counts[-1], poll))
    best = min(counts, key=lambda k: (choices[k]["error"], choices[k]["loss"], k))
    neighbours = find_neighbours(train.rows(train.view), samples.val.rows(samples.val.view), counts[-1], poll)
    tally = OutcomeTally()
    found = evaluate(
        _Voting(votes, best, neighbours),
        _batches(neighbours),
        samples.subset_names,
        objective=votes.objective,
        levels=samples.levels,
        tally=tally,
    )
    if "val_top5_error" in found:  # an output that no vote decides is no prediction
        found["val_top5_error"] = _top_error(votes, best, neighbours)
    metrics = {
        **found,
        "best_val_error": found["val_error"],
        **{f"val_k{k}_error": errors["error"] for k, errors in _errors(votes, counts, neighbours).items()},
        "select_error": choices[best]["error"],
        "select_loss": choices[best]["loss"],
        "selected_k": float(best),
        "num_classes": float(samples.num_classes),
        "num_train": float(train.view.num_samples),
    }
    left_out = [str(k) for k in recipe["k"] if k not in counts]
    note = f"k {', '.join(left_out)}: more than the {kept.num_samples} training samples to choose among; left out"
    selection = [{"k": k, "select_error": choices[k]["error"], "select_loss": choices[k]["loss"]} for k in counts]
    outcomes = tally.of_split(samples.val.split)
    notes = [note] if left_out else []
    return Measured(metrics=metrics, summary={"selection": selection}, outcomes=outcomes, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbours:
    """Of Q queries the k most similar samples, most similar first, and what the queries are themselves."""

    cosines_QK: Tensor
    targets: Tensor
    """Of the neighbours: (Q, k), or (Q, k, M) sets padded with -1."""
    queries: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourVotes:
    """How neighbours vote; ``temperature`` None = with equal weights."""

    num_classes: int
    is_multi_label: bool
    temperature: float | None

    @classmethod
    def of(cls, recipe: Mapping[str, Any], samples: CachedSamples) -> NeighbourVotes:
        """As a recipe says."""
        temperature = float(recipe["temperature"]) if recipe["votes"] == "weighted" else None
        is_multi_label = samples.train.labels.is_multi_label
        return cls(num_classes=samples.num_classes, is_multi_label=is_multi_label, temperature=temperature)

    @property
    def objective(self) -> Objective:
        """What the loss of shares is."""
        kind = SigmoidObjective if self.is_multi_label else SoftmaxObjective
        return kind(self.num_classes)

    def logits(self, cosines_BK: Tensor, targets: Tensor) -> Tensor:
        """Of each class (B, num_classes), what its share of the votes of the neighbours says.

        With one class per sample the softmax of the logits is the share, with several the sigmoid of each is.
        """
        votes_BC, total_B1 = self._votes(cosines_BK, targets)
        shares_BC = votes_BC / total_B1
        if self.is_multi_label:
            return shares_BC.logit(_LEAST_SHARE).clamp(max=_LARGEST_LOGIT)
        return shares_BC.clamp(min=_LEAST_SHARE).log()

    def is_out_of_top(self, cosines_BK: Tensor, targets: Tensor, own: Tensor) -> Tensor:
        """Whether none of the classes of a query, (B,) or a set (B, M), is among the ``TOP`` with most votes; [B].

        A class without a vote is not among them. Of classes with equal votes, that of the nearest neighbour goes first.
        """
        votes_BC, _ = self._votes(cosines_BK, targets)
        sets_BKM = targets if targets.ndim == 3 else targets[:, :, None]
        nearest_BC = torch.full_like(votes_BC, sets_BKM.shape[1])
        places_BKM = torch.arange(sets_BKM.shape[1], device=votes_BC.device, dtype=votes_BC.dtype)[None, :, None]
        places_BKM = torch.where(sets_BKM == NO_LABEL, nearest_BC[:, :1, None], places_BKM)
        nearest_BC.scatter_reduce_(1, sets_BKM.clamp(min=0).flatten(1), places_BKM.flatten(1), "amin")
        sets_BM = own if own.ndim == 2 else own[:, None]
        votes_BM1, nearest_BM1 = (of_BC.gather(1, sets_BM.clamp(min=0))[:, :, None] for of_BC in (votes_BC, nearest_BC))
        others_B1C, places_B1C = votes_BC[:, None], nearest_BC[:, None]
        is_ahead = (others_B1C > votes_BM1) | ((others_B1C == votes_BM1) & (places_B1C < nearest_BM1))
        is_in_BM = (votes_BM1[:, :, 0] > 0) & (is_ahead.sum(2) < TOP) & (sets_BM != NO_LABEL)
        return ~is_in_BM.any(1)

    def _votes(self, cosines_BK: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each class (B, num_classes), and of all neighbours (B, 1)."""
        # The most similar neighbour weighs 1: exp of cosine / temperature alone overflows below 0.0113.
        below_BK = cosines_BK - cosines_BK[:, :1]
        weights_BK = torch.exp(below_BK / self.temperature) if self.temperature else torch.ones_like(below_BK)
        sets_BKM = targets if targets.ndim == 3 else targets[:, :, None]
        spread_BKM = weights_BK[:, :, None] * (sets_BKM != NO_LABEL)
        votes_BC = torch.zeros(len(cosines_BK), self.num_classes, device=cosines_BK.device)
        votes_BC.scatter_add_(1, sets_BKM.clamp(min=0).flatten(1), spread_BKM.flatten(1))
        return votes_BC, weights_BK.sum(1, keepdim=True)


def find_neighbours(bank: Rows, queries: Rows, k: int, poll: Poll) -> Neighbours:
    """The exact k nearest samples of a bank, by cosine; a feature vector of zeros is as far from all others."""
    bank_ND = functional.normalize(bank.features_ND)
    cosines, rows = list[Tensor](), list[Tensor]()
    for number, queries_BD in enumerate(torch.split(functional.normalize(queries.features_ND), _QUERIES_AT_ONCE)):
        poll(number)
        best_BK, rows_BK = _nearest(bank_ND, queries_BD, k)
        cosines.append(best_BK)
        rows.append(rows_BK)
    return Neighbours(cosines_QK=torch.cat(cosines), targets=bank.targets[torch.cat(rows)], queries=queries)


def _nearest(bank_ND: Tensor, queries_BD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and rows (B, k) of the nearest, block by block of the bank."""
    best_BK, rows_BK = queries_BD.new_empty(len(queries_BD), 0), queries_BD.new_empty(len(queries_BD), 0).long()
    for start in range(0, len(bank_ND), _NEIGHBOURS_AT_ONCE):
        block_BN = queries_BD @ bank_ND[start : start + _NEIGHBOURS_AT_ONCE].T
        found = block_BN.topk(min(k, block_BN.shape[1]), dim=1)
        both_BK = torch.cat([best_BK, found.values], 1)
        both_rows_BK = torch.cat([rows_BK, found.indices + start], 1)
        best = both_BK.topk(min(k, both_BK.shape[1]), dim=1)
        best_BK, rows_BK = best.values, both_rows_BK.gather(1, best.indices)
    return best_BK, rows_BK


class _Voting(nn.Module):
    """Maps rows of queries to logits."""

    def __init__(self, votes: NeighbourVotes, k: int, neighbours: Neighbours) -> None:
        super().__init__()
        self._votes, self._k, self._neighbours = votes, k, neighbours

    def forward(self, rows_B: Tensor) -> Tensor:
        """See ``NeighbourVotes.logits``."""
        found = self._neighbours
        return self._votes.logits(found.cosines_QK[rows_B, : self._k], found.targets[rows_B, : self._k])


def _errors(votes: NeighbourVotes, counts: Sequence[int], neighbours: Neighbours) -> dict[int, dict[str, float]]:
    """Error and loss of each number of neighbours."""
    found = {k: {"error": 0.0, "loss": 0.0} for k in counts}
    for batch in _batches(neighbours):
        for k in counts:
            cosines_BK, targets = neighbours.cosines_QK[batch.inputs, :k], neighbours.targets[batch.inputs, :k]
            logits_BC = votes.logits(cosines_BK, targets)
            found[k]["error"] += int(is_wrong(logits_BC.argmax(1), batch.targets_B).sum())
            found[k]["loss"] += float(votes.objective.losses(logits_BC, batch.targets_B).double().sum())
    num_queries = len(neighbours.cosines_QK)
    return {k: {name: total / num_queries for name, total in sums.items()} for k, sums in found.items()}


def _top_error(votes: NeighbourVotes, k: int, neighbours: Neighbours) -> float:
    """Share of the queries for which no class of theirs has so many votes."""
    num_wrong = 0
    for batch in _batches(neighbours):
        cosines_BK, targets = neighbours.cosines_QK[batch.inputs, :k], neighbours.targets[batch.inputs, :k]
        is_wrong_B = is_wrong(votes.logits(cosines_BK, targets).argmax(1), batch.targets_B)
        num_wrong += int((votes.is_out_of_top(cosines_BK, targets, batch.targets_B) & is_wrong_B).sum())
    return num_wrong / len(neighbours.cosines_QK)


def _batches(neighbours: Neighbours) -> list[EvalInputs]:
    """The rows of the queries, in place of their features."""
    queries = neighbours.queries
    rows_N = torch.arange(len(queries.targets), device=queries.targets.device)
    return list(replace(queries, features_ND=rows_N).batches())
