"""Checks of a sweep's data before it starts: absent files, wrong counts, sorted or cut shards, long clusterings. Pure.

Sorted shards: samples are shuffled inside blocks of shards, so a batch has only classes of its block. If shards are
sorted by class these are few, and training gets worse without an error. The measure is the expected
number of distinct leaf classes in a batch, against that of a full shuffle; it follows from the index and the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from orchestrator.core.class_mixing import is_poor, repair_of
from orchestrator.core.job_kinds import BACKBONE_TRAINING_KINDS, JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.sweepfile.known_models import shipped_models
from orchestrator.sweepfile.values import Clustering, Dataset, LabelSpace, ResolvedSweep

SPREAD_FIELD: Final = "class_spread"
"""Field of an index record's summary, and of the answer of ``data index``."""
DEFAULT_BLOCK_SHARDS: Final = 16
DEFAULT_BATCH_SIZE: Final = 256
_LADDER = (2, 8, 32, 64, 128, 256, 512, 1024)  # as in workloads.jobs.cluster, which a test compares
_WORTH_SAYING = 1e13
"""Operations: minutes on a core or two."""
_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """The fields of a recipe that decide which samples may meet in a batch."""

    batch_size: int = DEFAULT_BATCH_SIZE
    block_shards: int = DEFAULT_BLOCK_SHARDS
    chunk_samples: int | None = None
    data_groups: int = 1

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Self:
        """From the recipe of an identity."""
        return cls(
            batch_size=recipe["batch_size"],
            block_shards=recipe.get("shuffle_block_shards", DEFAULT_BLOCK_SHARDS),
            chunk_samples=recipe.get("shuffle_chunk_samples"),
            data_groups=recipe.get("data_groups", 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSpread:
    """Over how many shards the classes of a split are spread."""

    num_shards: int
    rows: Sequence[tuple[float, int, int]]
    """(shards that hold such a class, number of such classes, samples of all of them)."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """As an index record's summary holds it for a split."""
        rows = [(float(shards), int(classes), int(samples)) for shards, classes, samples in document["rows"]]
        return cls(num_shards=int(document["num_shards"]), rows=rows)

    def classes_per_batch(self, shuffle: Shuffle) -> float:
        """Expected distinct classes of a batch.

        A class of n samples lies in u of R units (shards, or runs of ``chunk_samples``), a block has b of them. It is
        in the block with p = 1 - C(R - u, b) / C(R, b); given that, its expected share of the block is n / (N p), and
        it is in the batch with 1 - (1 - n / (N p))^B. How a class lies within its shards is not known: u counts it as
        sorted, the worst case. It is the mean over the blocks of an epoch: the last one is smaller.
        """
        total = sum(samples for _, _, samples in self.rows)
        units, blocks = self._blocks(total, shuffle)
        run = total / units
        expected = 0.0
        for shards, classes, samples in self.rows:
            size = samples / classes
            held = shards if shuffle.chunk_samples is None else max(shards, size / run)
            for share, per_block in blocks:
                in_block = 1.0 - _missed(units, min(held, units), per_block)
                expected += share * classes * in_block * _hit(size / total / in_block, shuffle.batch_size)
        return expected

    def fully_shuffled(self, batch_size: int) -> float:
        """Expected distinct classes of a batch of a full shuffle."""
        total = sum(samples for _, _, samples in self.rows)
        return sum(classes * _hit(samples / classes / total, batch_size) for _, classes, samples in self.rows)

    def complaint(self, shuffle: Shuffle) -> str:
        """A warning about a shuffle, with the setting that repairs it; empty if it is fine."""
        if not self.rows:
            return ""  # no sample has a class
        wanted, found = self.fully_shuffled(shuffle.batch_size), self.classes_per_batch(shuffle)
        if not is_poor(found, wanted):
            return ""
        held = sum(classes for _, classes, _ in self.rows)
        block = f"shuffle_block_shards: {shuffle.block_shards}"
        if shuffle.chunk_samples is not None:
            block += f", shuffle_chunk_samples: {shuffle.chunk_samples}"
        if shuffle.data_groups > 1:
            block += f", data_groups: {shuffle.data_groups}"
        return (
            f"the shards are sorted by class: with {block}, a batch of {shuffle.batch_size} holds {found:.0f} of the "
            f"{held} classes, fully shuffled {wanted:.0f}; {self._repair(shuffle, wanted)}"
        )

    def _repair(self, shuffle: Shuffle, wanted: float) -> str:
        def mixed_by(chunk: int) -> float:
            tried = Shuffle(batch_size=shuffle.batch_size, block_shards=shuffle.block_shards, chunk_samples=chunk)
            return self.classes_per_batch(tried)

        return repair_of(mixed_by, wanted, num_shards=self.num_shards, is_grouped=shuffle.data_groups > 1)

    def _blocks(self, total: int, shuffle: Shuffle) -> tuple[float, Sequence[tuple[float, float]]]:
        """R, and the kinds of blocks as ``SampleOrder`` cuts them: their share of the batches, and b.

        A batch that is larger than a block draws on several, parts too. With data groups a batch draws on a block of
        each group, of at most all its shards, and blocks are of equal size.
        """
        shard = total / self.num_shards
        units, per_block = float(self.num_shards), float(shuffle.block_shards)
        if shuffle.chunk_samples is not None:
            units *= math.ceil(shard / shuffle.chunk_samples)
            per_block = max(1.0, round(shuffle.block_shards * shard / shuffle.chunk_samples))
        groups = shuffle.data_groups
        if groups > 1:
            per_group = units / groups
            per_block = per_group / math.ceil(per_group / per_block)
        rest = units % per_block if groups == 1 else 0.0
        if rest * total / units < shuffle.batch_size:
            rest = 0.0  # no batch lies in it alone

        def drawn_on(size: float) -> float:
            num_blocks = max(1.0, shuffle.batch_size / groups / (size * total / units) + 0.5)
            return min(units, size * num_blocks * groups)

        last = [(rest / units, drawn_on(rest))] if rest else []
        return units, [(1.0 - rest / units, drawn_on(per_block)), *last]


def sorted_shards(plan: Plan, summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One line per data set and shuffle whose batches hold far fewer classes than those of a full shuffle.

    Args:
        plan: the plan.
        summaries: of committed records, by key.
    """
    for job, index_key, spread, shuffle in _shuffles(plan, summaries):
        if complaint := spread.complaint(shuffle):
            yield f"{_dataset_of(plan, index_key)}: {complaint} (first: {job.name})"


def cut_shards(plan: Plan, summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One line per data set and number of data groups that is above that of the shards to train on.

    Args:
        plan: the plan.
        summaries: of committed records, by key.
    """
    warned = set()
    for job, index_key, spread, shuffle in _shuffles(plan, summaries):
        groups, num_shards = shuffle.data_groups, spread.num_shards
        if groups > max(1, num_shards) and (index_key, groups) not in warned:
            warned.add((index_key, groups))
            yield (
                f"{_dataset_of(plan, index_key)}: data_groups: {groups} cuts its {num_shards} training shards into "
                "smaller parts; a worker reads the samples of less than half a shard one by one, in every epoch; use "
                f"data_groups of at most {num_shards} (this changes the key), or shard the data set into more "
                f"(first: {job.name})"
            )


def _shuffles(
    plan: Plan, summaries: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Job, str, ClassSpread, Shuffle]]:
    """The first training of each data set and shuffle, with the key of the index, if this is committed."""
    seen = set()
    for job in plan.jobs:
        index_key, recipe = job.identity["inputs"].get("index", ""), job.identity["parameters"].get("recipe", {})
        spread = summaries.get(index_key, {}).get(SPREAD_FIELD, {}).get("train")
        if job.kind not in BACKBONE_TRAINING_KINDS or not spread or "batch_size" not in recipe:
            continue
        shuffle = Shuffle.of(recipe)
        if (index_key, shuffle) not in seen:
            seen.add((index_key, shuffle))
            yield job, index_key, ClassSpread.from_json(spread), shuffle


def _dataset_of(plan: Plan, index_key: str) -> str:
    indexes: Iterator[Job] = (job for job in plan.jobs if job.key == index_key)
    return next((f"datasets.{job.name.partition('/')[2]}" for job in indexes), index_key)


def _hit(share: float, batch_size: int) -> float:
    """Probability that a batch has at least one sample with the given share."""
    return 1.0 if share >= 1.0 else -math.expm1(batch_size * math.log1p(-share))


def _missed(units: float, held: float, drawn: float) -> float:
    """C(R - u, b) / C(R, b): that none of u units is among b of R that are drawn."""
    if held + drawn > units:
        return 0.0
    terms = math.lgamma(units - held + 1) - math.lgamma(units - held - drawn + 1)
    return min(1.0, math.exp(terms + math.lgamma(units - drawn + 1) - math.lgamma(units + 1)))


def miscounted(plan: Plan, metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Why the plan must not start: numbers of samples that are not those of an index that will not be made again.

    Args:
        plan: the plan.
        metrics: of committed records, by key.
    """
    for job in plan.jobs:
        if job.kind is not JobKind.INDEX or job.key not in metrics:
            continue
        found = metrics[job.key]
        for split, number in job.execution.data_location.get("num_samples", {}).items():
            good, bad = found.get(f"num_{split}"), found.get(f"num_bad_{split}", 0)
            # Samples that were left out as bad may be among those that were declared, or not.
            if number is None or good is None or good <= number <= good + bad:
                continue
            left_out = f" and {bad:.0f} bad ones" if bad else ""
            message = f"datasets.{job.name.partition('/')[2]}.num_{split} declares {number} samples, but its index, "
            yield f"{message}{job.key}, has {good:.0f}{left_out}; correct the number, or the URIs if they name others"


def kmeans_operations(space: LabelSpace, clustering: Clustering, sweep: ResolvedSweep) -> float:
    """``clustering_operations`` of a label space; 0 if the number of features is not known."""
    model = clustering.embedding.model or sweep.pretrain(clustering.embedding.pretrain).model
    known = shipped_models().find(model.name)
    dim = 0 if known is None or model.kwargs else known.num_features or 0
    return clustering_operations(clustering.parameters, sweep.datasets[space.dataset].num_train, dim)


def clustering_operations(rule: Mapping[str, Any], num_train: int, dim: int) -> float:
    """Floating-point operations of a k-means at most, by the parameters of a ``cluster`` job.

    Per iteration, and once more at the end, 2 N k D, whether the N samples are clustered together or class by class.
    """
    passes = (int(rule.get("iterations", 100)) + 1) * int(rule.get("num_init", 1))
    return 2.0 * num_train * most_clusters(rule) * dim * passes


def most_clusters(rule: Mapping[str, Any]) -> int:
    """Clusters of a ``cluster`` job; of a rebalanced one the sum of all numbers that it tries."""
    return int(rule["k"]) if "k" in rule else sum(_LADDER)


def long_clusterings(sweep: ResolvedSweep) -> list[str]:
    """One line for each k-means that takes more than minutes on a few cores, and one if GPUs would be idle."""
    lines = []
    by_faiss = [
        space.name
        for space in sweep.labels.values()
        if space.clustering is not None and space.clustering.parameters.get("library") == "faiss"
    ]
    if by_faiss and sweep.resources[JobKind.CLUSTER].gpus:
        line = (
            f"cluster/{by_faiss[0]}: faiss clusters on the CPU, so the GPU of resources.cluster is idle; set gpus: 0, "
        )
        lines.append(f"{line}or library: scikit-learn, which clusters on it")
    for space in sweep.labels.values():
        found = kmeans_operations(space, space.clustering, sweep) if space.clustering is not None else 0.0
        if found >= _WORTH_SAYING:
            num_train, hours = sweep.datasets[space.dataset].num_train, found / _TERA / 3600
            line = f"cluster/{space.name}: k-means of {num_train:,} samples takes at most {found:.1e} operations, "
            lines.append(f"{line}{hours:.2g} h at 1 TFLOP/s (resources.cluster: some 30 cores, or less than one GPU)")
    return lines


def lenient_mixtures(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of mixtures that replace more bad samples of a data set than its own entry allows."""
    for mixture in sweep.datasets.values():
        budgets = {name: _budget(sweep.datasets[name]) for name in mixture.components}
        most = max((budget for budget in budgets.values() if budget is not None), default=0.0)
        stricter = [name for name, budget in budgets.items() if budget is not None and budget < most]
        if stricter:
            message = (
                f"datasets.{mixture.name}: a mixture has the most lenient bad_samples of its data sets, so images "
            )
            message += f"of {', '.join(stricter)} that cannot be decoded are replaced up to the budget {most:g}, which "
            yield f"{message}their own bad_samples do not allow; give all data sets of the mixture the same bad_samples"


def _budget(dataset: Dataset) -> float | None:
    """Share of bad samples that its entry allows; None for a built-in data set, which has none."""
    policy = (dataset.scan or dataset.parameters).get("bad_samples")
    if policy is None:
        return None
    return float(policy["budget"]) if policy["policy"] == "replace" else 0.0


def missing_datasets(sweep: ResolvedSweep) -> list[str]:
    """One line for each data set that is planned from its declaration, because it cannot be read."""
    return [
        f"{dataset.missing}; planned from what the file declares: it cannot be submitted, and its keys are not final"
        for dataset in sweep.datasets.values()
        if dataset.missing
    ]
