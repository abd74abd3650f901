"""However a run is laid out, cut and resumed, it sees one sequence of samples and augmentation parameters."""

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest

from tests.data_jobs import DataPlane, encoded, tar_of
from workloads.data.augment import Augment, Augmenter, AugmentSpec
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, SampleSource, TrainLoader
from workloads.data.order import SampleOrder, rank_slice
from workloads.data.split_targets import SplitTargets
from workloads.data.subset import SampleView
from workloads.runtime.streams import Stage

NUM_SCHEDULES = 1000
NUM_LOADER_SCHEDULES = 15  # of the same ones, in `make test`; all of them take a minute
SHARD_SIZES = (9, 7, 11, 4)
NUM_SAMPLES = sum(SHARD_SIZES)
BATCH_SIZE, GROUP_SIZE, NUM_STEPS = 12, 2, 8  # three epochs and a bit; batches cross their ends
IMAGE_SIZE, SEED = 8, 3
SPEC = AugmentSpec(augment=Augment.RANDOM_RESIZED_CROP_FLIP, color_jitter=0.4)

Seen = tuple[int, str, object]
"""(position, key, augmentation parameters)."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A run from ``start`` on, killed after ``stop - start`` steps; ``ahead``: batches that some ranks had made."""

    start: int
    stop: int
    world_size: int
    num_workers: int
    ahead: int


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    plane = DataPlane(folder=tmp_path_factory.mktemp("plane"))
    shards = {}
    for number, size in enumerate(SHARD_SIZES):
        names = [f"{number}-{row}" for row in range(size)]
        image = encoded(size=(12, 10), seed=number)
        members = [member for name in names for member in ((f"{name}.png", image), (f"{name}.cls", b"0"))]
        shards[f"train-{number}.tar"] = tar_of(members)
    index = SampleIndex.open(plane.store, plane.index(plane.foreign(shards)).key, plane.cache)
    return SampleSource(plane.store, index, "train", cache_dir=plane.cache, image_size=IMAGE_SIZE)


def attempts(rng: random.Random) -> list[Attempt]:
    """A random schedule: the last attempt reaches the end, each starts at the last checkpoint before a kill."""
    cuts = sorted(rng.sample(range(1, NUM_STEPS), rng.randint(0, 3)))
    starts, stops = [0, *cuts], [*cuts, NUM_STEPS]
    return [
        Attempt(
            start=start,
            stop=stop,
            world_size=rng.randint(1, BATCH_SIZE // GROUP_SIZE),
            num_workers=rng.choice([0, 1, 3]),
            ahead=rng.randint(0, 2),
        )
        for start, stop in zip(starts, stops, strict=True)
    ]


def loader_of(source: SampleSource, attempt: Attempt, rank: int) -> TrainLoader:
    return TrainLoader(
        source,
        SampleOrder.over(SampleView.whole(source.split), SEED, 2),
        SplitTargets.of(np.zeros(NUM_SAMPLES, dtype=np.int64), 2),
        batch_size=BATCH_SIZE,
        start_step=attempt.start,
        total_steps=NUM_STEPS,
        seed=SEED,
        stage=Stage.PRETRAIN,
        augment=SPEC,
        rank=rank,
        world_size=attempt.world_size,
        group_size=GROUP_SIZE,
        num_workers=attempt.num_workers,
    )


def seen_of(source: SampleSource, augmenter: Augmenter, batch: Batch) -> list[tuple[Seen, bytes]]:
    rows = zip(range(*batch.positions), batch.ordinals_B.tolist(), batch.images_BCHW, strict=True)
    return [
        ((position, source.split.key(ordinal), augmenter.parameters(position, 10, 12)), image.numpy().tobytes())
        for position, ordinal, image in rows
    ]


def seen_by(source: SampleSource, attempt: Attempt) -> list[tuple[Seen, bytes]]:
    """What the ranks of an attempt see together; only steps before its interruption count."""
    augmenter = Augmenter(SPEC, seed=SEED, stage=Stage.PRETRAIN, image_size=IMAGE_SIZE)
    seen: list[tuple[Seen, bytes]] = []
    for rank in range(attempt.world_size):
        batches = iter(loader_of(source, attempt, rank))
        last = attempt.stop + (attempt.ahead if rank else 0)  # work that the kill throws away
        for batch in batches:
            if batch.step < attempt.stop:
                seen += seen_of(source, augmenter, batch)
            if batch.step + 1 >= last:
                break
        batches.close()  # type: ignore[attr-defined]
    return seen


def drawn_by(schedule: list[Attempt]) -> list[tuple[int, int, bytes]]:
    """Position, ordinal and random numbers of each sample, drawn by workers that each take a part of a rank's share."""
    return sorted(row for attempt in schedule for row in drawn_of(replace(attempt, ahead=0)))


@cache  # thousands of attempts are some hundreds of different ones
def drawn_of(attempt: Attempt) -> list[tuple[int, int, bytes]]:
    drawn: list[tuple[int, int, bytes]] = []
    for rank in range(attempt.world_size):
        order = SampleOrder(SHARD_SIZES, SEED, 2)
        augmenter = Augmenter(SPEC, seed=SEED, stage=Stage.PRETRAIN, image_size=IMAGE_SIZE)
        for step in range(attempt.start, attempt.stop):
            start, stop = step * BATCH_SIZE, (step + 1) * BATCH_SIZE
            share = rank_slice(start, stop, rank=rank, world_size=attempt.world_size, group_size=GROUP_SIZE)
            cuts = np.linspace(*share, attempt.num_workers + 2).astype(int).tolist()
            for first, last in pairwise(cuts):
                ordinals = order.ordinals(first, last).tolist()
                numbers = np.hstack([augmenter.uniforms(first, last - first), augmenter.words(first, last - first)])
                rows = zip(range(first, last), ordinals, numbers, strict=True)
                drawn += [(position, ordinal, row.tobytes()) for position, ordinal, row in rows]
    return drawn


WHOLE = Attempt(start=0, stop=NUM_STEPS, world_size=1, num_workers=0, ahead=0)


def test_order_a_thousand_schedules_draw_one_sequence() -> None:
    """World sizes that do not divide the batch, any number of workers, kills and resumes."""
    whole = drawn_by([WHOLE])
    assert [position for position, _, _ in whole] == list(range(BATCH_SIZE * NUM_STEPS))
    epochs = [whole[start : start + NUM_SAMPLES] for start in range(0, 3 * NUM_SAMPLES, NUM_SAMPLES)]
    assert all(sorted(ordinal for _, ordinal, _ in epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)
    rng = random.Random(0)  # noqa: S311 - a test's choice
    for number in range(NUM_SCHEDULES):
        schedule = attempts(rng)
        assert drawn_by(schedule) == whole, f"schedule {number}: {schedule}"


def check_loaders(source: SampleSource, num_schedules: int) -> None:
    seen_of_attempt = cache(partial(seen_by, source))  # schedules have attempts in common

    def sequence_of(schedule: list[Attempt]) -> list[tuple[Seen, bytes]]:
        return sorted((one for attempt in schedule for one in seen_of_attempt(attempt)), key=lambda one: one[0][0])

    whole = sequence_of([WHOLE])
    assert [seen[0] for seen, _ in whole] == list(range(BATCH_SIZE * NUM_STEPS))
    epochs = [whole[start : start + NUM_SAMPLES] for start in range(0, 3 * NUM_SAMPLES, NUM_SAMPLES)]
    assert all(len({key for (_, key, _), _ in epoch}) == NUM_SAMPLES for epoch in epochs)
    rng = random.Random(0)  # noqa: S311 - a test's choice
    for number in range(num_schedules):
        schedule = attempts(rng)
        assert sequence_of(schedule) == whole, f"schedule {number}: {schedule}"


def test_order_loaders_of_any_schedule_see_one_sequence(source: SampleSource) -> None:
    """The same schedules by real loaders on real shards: keys, augmentation parameters and pixels."""
    check_loaders(source, NUM_LOADER_SCHEDULES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_order_loaders_of_a_thousand_schedules_see_one_sequence(source: SampleSource) -> None:
    check_loaders(source, NUM_SCHEDULES)
