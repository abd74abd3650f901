"""Evaluation: every metric against a loop over samples, and the same bits on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from workloads.data.index import SplitIndex
from workloads.runtime.ranks import Ranks, share_of
from workloads.train.evaluate import EvalInputs, EvalLevel, OutcomeTally, evaluate, order_digest
from workloads.train.freezing import freeze, train_mode
from workloads.train.linear_form import Targets
from workloads.train.objective import SigmoidObjective, SoftmaxObjective

CLASSES = 8
NAMES = ("easy", "hard", "absent")
LEVELS = (
    EvalLevel(name="depth2", coarser_K=np.array([0, 0, 1, 1, 2, 2, 3, 3])),
    EvalLevel(name="depth1", coarser_K=np.array([0, 0, 0, 0, 1, 1, 1, 1])),
)


class Logits(nn.Module):
    """Its inputs are the logits already."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@dataclass(kw_only=True)
class Split:
    """Samples whose model outputs are given."""

    logits_NK: Tensor
    targets_N: Tensor
    subsets_N: np.ndarray[Any, np.dtype[np.integer[Any]]]

    def batches(self, size: int, *, rank: int = 0, world_size: int = 1) -> list[EvalInputs]:
        starts = range(0, len(self.logits_NK), size)
        mine = share_of(len(starts), rank, world_size)
        return [
            EvalInputs(
                inputs=self.logits_NK[start : start + size],
                targets_B=self.targets_N[start : start + size],
                subsets_B=self.subsets_N[start : start + size],
                ordinals_B=np.arange(start, min(start + size, len(self.logits_NK))),
            )
            for start in starts[mine.start : mine.stop]
        ]


def split_of(num_samples: int, *, is_multi_label: bool = False, num_classes: int = CLASSES) -> Split:
    generator = torch.Generator().manual_seed(num_samples)
    targets = torch.randint(0, num_classes - 1, (num_samples,), generator=generator)  # the last class has no samples
    if is_multi_label:
        second = (targets + 3) % num_classes
        targets = torch.stack([targets, torch.where(second % 2 == 0, second, -1)], 1)
    return Split(
        logits_NK=2 * torch.randn(num_samples, num_classes, generator=generator),
        targets_N=targets,
        subsets_N=(np.arange(num_samples) % 3 - 1).astype(np.int16),
    )


def expected_metrics(split: Split) -> dict[str, float]:
    """By hand, sample by sample; single-label."""
    wrong: list[bool] = []
    top_wrong: list[bool] = []
    by_class: dict[int, list[bool]] = {}
    levels: dict[str, list[bool]] = {level.name: [] for level in LEVELS}
    for logits_K, target in zip(split.logits_NK.tolist(), split.targets_N.tolist(), strict=True):
        ranking = sorted(range(len(logits_K)), key=lambda k: -logits_K[k])
        wrong.append(ranking[0] != target)
        top_wrong.append(target not in ranking[:5])
        by_class.setdefault(target, []).append(wrong[-1])
        for level in LEVELS:
            levels[level.name].append(level.coarser_K[ranking[0]] != level.coarser_K[target])
    losses = functional.cross_entropy(split.logits_NK.double(), split.targets_N, reduction="none")
    found: dict[str, Any] = {
        "val_error": np.mean(wrong),
        "val_loss": float(losses.mean()),
        "val_top5_error": np.mean(top_wrong),
    }
    found["val_class_error"] = np.mean([np.mean(errors) for errors in by_class.values()])
    found |= {f"val_level_error_{name}": np.mean(errors) for name, errors in levels.items()}
    mine = {name: [w for w, s in zip(wrong, split.subsets_N, strict=True) if s == n] for n, name in enumerate(NAMES)}
    return found | {f"val_error_{name}": np.mean(errors) for name, errors in mine.items() if errors}


@pytest.mark.parametrize(("num_samples", "batch_size"), [(100, 7), (100, 1), (64, 64), (5, 8)])
def test_metrics_are_those_of_a_loop_over_samples(num_samples: int, batch_size: int) -> None:
    split = split_of(num_samples)
    found = evaluate(Logits(), split.batches(batch_size), NAMES, levels=LEVELS)
    assert found == pytest.approx(expected_metrics(split), rel=1e-6)


def test_errors_are_exact_fractions_and_loss_has_the_bits_of_sums_over_batches() -> None:
    split = split_of(100)
    found = evaluate(Logits(), split.batches(7), NAMES)
    assert found["val_error"] * 100 == int((split.logits_NK.argmax(1) != split.targets_N).sum())
    total = 0.0
    for batch in split.batches(7):
        losses = functional.cross_entropy(batch.inputs, batch.targets_B, reduction="none")
        total += float(losses.double().numpy().sum())
    assert found["val_loss"] == total / 100


def test_errors_of_very_many_subsets_are_counted_apart() -> None:
    split = split_of(100)
    many = replace(split, subsets_N=np.arange(100, dtype=np.int32) * 500)
    found = evaluate(Logits(), many.batches(7), [f"s{number}" for number in range(50_000)])
    wrong_N = (split.logits_NK.argmax(1) != split.targets_N).tolist()
    assert [found[f"val_error_s{500 * row}"] for row in range(100)] == wrong_N
    assert sum(name.startswith("val_error_s") for name in found) == 100


def test_few_classes_have_no_top5_error_and_no_samples_no_metrics() -> None:
    assert "val_top5_error" not in evaluate(Logits(), split_of(20, num_classes=5).batches(8), ())
    assert evaluate(Logits(), [], NAMES, levels=LEVELS) == {}


def test_sets_of_classes_hit_with_any_of_them_on_every_level() -> None:
    split = split_of(50, is_multi_label=True)
    found = evaluate(Logits(), split.batches(8), (), objective=SigmoidObjective(CLASSES), levels=LEVELS)
    predicted = split.logits_NK.argmax(1).tolist()
    rows = [[label for label in row if label >= 0] for row in split.targets_N.tolist()]
    assert found["val_error"] == np.mean([guess not in row for guess, row in zip(predicted, rows, strict=True)])
    for level in LEVELS:
        fold = level.coarser_K
        missed = [fold[guess] not in {fold[k] for k in row} for guess, row in zip(predicted, rows, strict=True)]
        assert found[f"val_level_error_{level.name}"] == np.mean(missed)
    tops = split.logits_NK.topk(5).indices.tolist()
    assert found["val_top5_error"] == np.mean([not {*top} & {*row} for top, row in zip(tops, rows, strict=True)])
    assert "val_class_error" not in found


def test_loss_is_the_objective_without_smoothing() -> None:
    split = split_of(50)
    plain = evaluate(Logits(), split.batches(8), ())
    assert evaluate(Logits(), split.batches(8), (), objective=SoftmaxObjective(CLASSES, 0.3)) == plain
    sigmoid = evaluate(Logits(), split.batches(8), (), objective=SigmoidObjective(CLASSES, 0.3))
    expected = SigmoidObjective(CLASSES).losses(split.logits_NK, split.targets_N)
    assert sigmoid["val_loss"] == pytest.approx(float(expected.mean()), rel=1e-6)


def test_level_of_another_label_space_is_refused() -> None:
    level = EvalLevel(name="depth1", coarser_K=np.array([0, 1]))
    with pytest.raises(ValueError, match="'depth1' folds 2 classes, but the model predicts 8"):
        evaluate(Logits(), split_of(8).batches(8), (), levels=[level])


def test_evaluation_leaves_every_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(CLASSES, 4), nn.BatchNorm1d(4)), nn.Linear(4, CLASSES))
    freeze(model, ["0.*"])
    train_mode(model)
    before = [module.training for module in model.modules()]
    assert before == [True, False, False, False, True]
    evaluate(model, split_of(20).batches(8), ())
    assert [module.training for module in model.modules()] == before


@dataclass(slots=True)
class _Meeting:
    """Where the threads of a gang add up their tensors."""

    world_size: int
    barrier: threading.Barrier = field(init=False)
    parts: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size, timeout=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    meeting: _Meeting

    def sum_(self, tensor: Tensor) -> Tensor:
        self.meeting.parts.append(tensor.clone())
        self.meeting.barrier.wait()
        shapes = {part.shape for part in self.meeting.parts}
        total = torch.stack(self.meeting.parts).sum(0) if len(shapes) == 1 else None
        if self.meeting.barrier.wait() == 0:
            self.meeting.parts.clear()
        self.meeting.barrier.wait()
        assert total is not None, f"ranks came with the shapes {shapes}"
        return tensor.copy_(total)


class Thirds(SoftmaxObjective):
    """Losses with all 53 bits: the order in which they are summed shows."""

    def losses(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        return logits_BK.double().abs().sum(1) / 3


def gang_metrics(split: Split, size: int, world_size: int) -> list[tuple[dict[str, float], list[bool]]]:
    """Metrics, and which samples were right, as each rank knows them."""
    meeting, index = _Meeting(world_size), SplitIndex.in_memory(leaves=split.subsets_N)
    found: list[tuple[dict[str, float], list[bool]]] = [({}, []) for _ in range(world_size)]

    def work(rank: int) -> None:
        ranks, tally = ThreadRanks(rank=rank, world_size=world_size, meeting=meeting), OutcomeTally()
        mine: Sequence[EvalInputs] = split.batches(size, rank=rank, world_size=world_size)
        metrics = evaluate(Logits(), mine, NAMES, objective=Thirds(CLASSES), levels=LEVELS, ranks=ranks, tally=tally)
        found[rank] = (metrics, tally.of_split(index, ranks).right_N.tolist())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
@example(60, 7, 3)  # here another order of the sum has another last bit
def test_metrics_on_any_number_of_ranks_have_the_bits_of_one_process(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    split = split_of(num_samples)
    alone = evaluate(Logits(), split.batches(batch_size), NAMES, objective=Thirds(CLASSES), levels=LEVELS)
    right_N = (split.logits_NK.argmax(1) == split.targets_N).tolist()
    assert gang_metrics(split, batch_size, world_size) == [(alone, right_N)] * world_size


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_outcomes_are_those_of_a_loop_over_samples_and_survive_their_record(is_multi_label: bool) -> None:
    split, tally = split_of(37, is_multi_label=is_multi_label), OutcomeTally()
    index = SplitIndex.in_memory(leaves=np.zeros(40, dtype=np.int32))  # three more samples, which nobody evaluated
    objective = SigmoidObjective(CLASSES) if is_multi_label else SoftmaxObjective(CLASSES)
    metrics = evaluate(Logits(), split.batches(8), (), objective=objective, tally=tally)
    found = tally.of_split(index)
    rows = split.targets_N.tolist() if is_multi_label else split.targets_N[:, None].tolist()
    guesses = split.logits_NK.argmax(1).tolist()
    assert found.right_N.tolist()[:37] == [guess in row for guess, row in zip(guesses, rows, strict=True)]
    assert found.counted_N.tolist() == [True] * 37 + [False] * 3
    assert found.num_wrong / found.num_counted == metrics["val_error"]
    assert sum(len(part) for part in found.parts().values()) < 2 * (128 + 6)  # headers of numpy, and a bit per sample


def test_outcomes_of_batches_that_do_not_name_their_samples_are_refused() -> None:
    split, tally = split_of(8), OutcomeTally()
    evaluate(Logits(), [replace(batch, ordinals_B=None) for batch in split.batches(4)], (), tally=tally)
    with pytest.raises(ValueError, match="a batch of 4 samples does not name each of them"):
        tally.of_split(SplitIndex.in_memory(leaves=split.subsets_N))


def test_order_digest_tells_orders_apart_and_nothing_else() -> None:
    def digest(*keys: str, sizes: tuple[int, ...] = (), name: str = "val", leaf: int = 0) -> str:
        leaves = np.full(len(keys), leaf)
        return order_digest(SplitIndex.in_memory(leaves=leaves, keys=keys, shard_sizes=sizes, name=name))

    assert digest("a", "b", "c") == digest("a", "b", "c", leaf=1)
    others = [digest("b", "a", "c"), digest("a", "bc"), digest("a", "b", "c", sizes=(1, 2)), digest("ab", "c")]
    assert len({digest("a", "b", "c"), digest("a", "b", "c", name="test"), *others}) == 6
