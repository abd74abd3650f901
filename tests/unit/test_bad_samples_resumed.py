"""Bad samples of a run that was interrupted: its record names those of all attempts, and it has one budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.contract import Execution, JobRequest, Progress
from orchestrator.core.errors import BadDataError, PreemptedError
from orchestrator.storage.artifacts import Record, read_record
from tests.tiny_training import NO_BATCHNORM
from tests.training.test_gang_bad_samples import BAD, NUM_TRAIN, Damaged
from workloads.data.bad_samples import BadSampleTally, BadSlot
from workloads.data.index import BadSamplePolicy, BadSamples, SplitIndex
from workloads.data.order import SampleOrder
from workloads.data.reasons import BadSampleError, Reason

BATCH_SIZE, STOP_AFTER = 4, 10
RECIPE = {"epochs": 1, "batch_size": BATCH_SIZE, "augment": "random_resized_crop"}


def request(lab: Damaged, attempt: int) -> JobRequest:
    execution = Execution(checkpoint_every_steps=2)
    return lab.training(model=NO_BATCHNORM, recipe=RECIPE, execution=execution, attempt=attempt)


def stopped_after(steps: int) -> Callable[[], bool]:
    asked = itertools.count()
    return lambda: next(asked) >= steps


def record(lab: Damaged) -> Record:
    return read_record(lab.store, lab.run(request(lab, 1)).key)


def test_record_of_a_resumed_run_names_the_bad_samples_of_its_earlier_attempts(tmp_path: Path) -> None:
    first = set(SampleOrder((NUM_TRAIN,), 0, 4).ordinals(0, STOP_AFTER * BATCH_SIZE).tolist())
    assert first & BAD["train"], "the first attempt would meet none"
    whole = record(Damaged(tmp_path / "whole", budget=0.2))
    lab = Damaged(tmp_path / "cut", budget=0.2)
    with pytest.raises(PreemptedError):
        lab.run(request(lab, 1), should_stop=stopped_after(STOP_AFTER))
    told: list[Progress] = []
    resumed = read_record(lab.store, lab.run(request(lab, 2), report=told.append).key)
    # Metrics add up what the attempts counted.
    assert told[-1].counters["bad_samples"] <= len(BAD["train"] - first)
    assert resumed.summary["resumed_steps"] == [STOP_AFTER]
    found = resumed.summary["bad_samples"]
    assert {split: found[split]["undecodable"]["count"] for split in found} == {"train": 8, "val": 2}
    assert {split: set(found[split]["undecodable"]["first"]) for split in found} == {
        split: set(whole.summary["bad_samples"][split]["undecodable"]["first"]) for split in found
    }
    assert resumed.metrics == whole.metrics


def test_budget_of_a_run_is_not_renewed_by_its_attempts(tmp_path: Path) -> None:
    lab = Damaged(tmp_path / "lab", budget=7 / NUM_TRAIN)  # one too few

    def attempts() -> None:
        for attempt in itertools.count(1):
            with suppress(PreemptedError):
                lab.run(request(lab, attempt), should_stop=stopped_after(4))
                return

    with pytest.raises(BadDataError, match="more than 7 samples that cannot be decoded"):
        attempts()


SPLIT = SplitIndex.in_memory(leaves=np.zeros(40, dtype=np.int64), shard_sizes=(40,))


def tally(budget: float) -> BadSampleTally:
    return BadSampleTally(SPLIT, BadSamples(policy=BadSamplePolicy.REPLACE, budget=budget))


def slot(ordinal: int) -> BadSlot:
    return BadSlot(slot=0, ordinal=ordinal, error=BadSampleError(Reason.TRUNCATED, "cannot be decoded"))


def test_tally_recalled_from_json_goes_on_counting_within_one_budget() -> None:
    before = tally(0.1)
    for ordinal in (3, 5, 3):
        before.add(slot(ordinal))
    told = before.take_news()
    after = tally(0.1)
    after.merge(json.loads(json.dumps(before.to_json())))
    assert (after.num_bad, after.summary(), after.take_news()) == (2, before.summary(), [])
    assert after.to_json() == before.to_json() == told
    for ordinal in (5, 7, 9):
        after.add(slot(ordinal))
    assert after.num_bad == 4
    assert [row[0] for row in after.take_news()] == [7, 9]
    with pytest.raises(BadDataError, match="more than 4 samples"):
        after.add(slot(11))


@pytest.mark.parametrize(
    ("budget", "num_samples", "allowed"),
    [(0.0003, 10_000, 3), (0.00029, 10_000, 2), (1 / 3, 3, 1), (2 / 600, 600, 2), (0.01, 150, 1), (1.0, 7, 7)],
)
def test_budget_is_not_one_sample_too_small_because_a_product_is_rounded(
    budget: float, num_samples: int, allowed: int
) -> None:
    split = SplitIndex.in_memory(leaves=np.zeros(num_samples, dtype=np.int64), shard_sizes=(num_samples,))
    counted = BadSampleTally(split, BadSamples(policy=BadSamplePolicy.REPLACE, budget=budget))
    for ordinal in range(allowed):
        counted.add(slot(ordinal))
    if allowed < num_samples:
        with pytest.raises(BadDataError, match=f"more than {allowed} samples"):
            counted.add(slot(allowed))
