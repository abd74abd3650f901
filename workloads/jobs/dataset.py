"""The job ``dataset``: writes a data set as shards, alone or after part jobs that wrote some of them.

The shards of a data set are always the same, and known before any of them is written. Part jobs and interrupted
attempts put theirs into the checkpoint folder of the job of the whole, which writes missing ones and commits all of
them; so its key, and every key below it, do not depend on how many jobs shared the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, Self

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import ArtifactWriter, is_committed
from orchestrator.storage.dataset_files import ClassRows
from workloads.convert.listing import open_listed, run_listing
from workloads.data.builtin import BuiltinDataset, open_builtin
from workloads.data.index import CLASSES_PART
from workloads.data.shards import SAMPLES_PER_SHARD, FinishedShard, FinishedShards, shard_name, write_samples
from workloads.runtime.publish import publish, report_or_stop

_PART: Final = "part"
_LISTING: Final = "listing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which shards a job writes: run ``number`` of ``num`` equal runs of those of the data set with the key ``of``."""

    of: str
    number: int = 0
    num: int = 1

    @classmethod
    def of_request(cls, request: JobRequest) -> Self:
        """The part that a request asks for; all of its own data set if it names none."""
        named: Mapping[str, Any] | None = request.parameters.get(_PART)
        part = cls(**named) if named else cls(of=request.key)
        if not 0 <= part.number < part.num:
            raise UserError(f"{request.job} is to write part {part.number} of {part.num}; parts count from 0")
        return part

    def numbers(self, num_shards: int) -> range:
        """Numbers of its shards."""
        return range(self.number * num_shards // self.num, (self.number + 1) * num_shards // self.num)


def run_dataset(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Write a data set: ``<split>-<number>.tar`` and ``classes.json``.

    The parameters describe a built-in data set, or with the input ``listing`` shards of a converted one; with ``part``
    the job writes a share of them and commits no more than a receipt. A parameter ``listing`` asks for the listing of a
    source instead: see ``run_listing``. Shards that are there already, by whichever job, are not written again.

    Raises:
        UserError: the parameters describe no data set, or an image of the source cannot be read.
        PreemptedError: asked to stop; finished shards stay.
    """
    if _LISTING in request.parameters:
        return run_listing(request, context)
    part = Part.of_request(request)
    is_whole = part.of == request.key
    if not is_whole and is_committed(context.store, part.of):
        return _publish(request, context, [], num_written=0)
    shards = _open(request, context)
    names = shards.names
    numbers, finished = part.numbers(len(names)), FinishedShards(context.store, part.of, names)
    found = finished.find(numbers)
    missing = [number for number in numbers if number not in found]
    for shard in _written(shards, finished, missing, request, context):
        found[shard.number] = shard
        progress = Progress(phase="write", step=len(found), total_steps=len(numbers))
        report_or_stop(request, context, progress, f" after {len(found)} shards; it goes on with the others")
    whole = [found[number] for number in numbers]
    return _publish(request, context, whole, num_written=len(missing), classes=shards.classes if is_whole else None)


def _open(request: JobRequest, context: ExecutionContext) -> ShardSet:
    if _LISTING in request.inputs:
        return open_listed(request, context)
    parameters = {name: value for name, value in request.parameters.items() if name != _PART}
    return BuiltinShards(open_builtin(parameters))


def _written(
    shards: ShardSet,
    finished: FinishedShards,
    missing: Sequence[int],
    request: JobRequest,
    context: ExecutionContext,
) -> Iterator[FinishedShard]:
    """Write shards, as many at once as there are threads; each is durable when it is yielded."""

    def write(number: int) -> FinishedShard:
        path = context.scratch / f"{number}.tar"
        try:
            shards.write(number, path)
            return finished.write(number, path)
        finally:
            path.unlink(missing_ok=True)

    # No more are begun than threads can write: what a job that is asked to stop has begun, it ends.
    num_threads, todo = max(1, request.execution.num_threads), iter(missing)
    with ThreadPoolExecutor(num_threads) as pool:
        pending = {pool.submit(write, number) for number in islice(todo, num_threads)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from [future.result() for future in done]
            pending |= {pool.submit(write, number) for number in islice(todo, len(done))}


def _publish(
    request: JobRequest,
    context: ExecutionContext,
    shards: Sequence[FinishedShard],
    *,
    num_written: int,
    classes: Sequence[Mapping[str, Any]] | None = None,
) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    metrics = {"num_shards": float(len(shards))}
    if len(shards) != num_written:
        metrics["num_adopted"] = float(len(shards) - num_written)
    if classes is None:
        receipt = {shard.name: {"size_bytes": shard.entry.size_bytes, "sha256": shard.entry.sha256} for shard in shards}
        writer.add("shards.json", json.dumps(receipt, indent=1, sort_keys=True).encode())
    else:
        for shard in shards:
            shard.adopt(writer)
        writer.add(CLASSES_PART, json.dumps(classes, indent=1).encode())
        metrics = {"num_classes": float(len(classes)), **metrics}
    return publish(writer, request, metrics=metrics, summary={})


class ShardSet(Protocol):
    """The shards of a data set by number; their bytes depend on the data set and the number alone."""

    @property
    def names(self) -> Sequence[str]:
        """Basenames, ``<split>-<number>.tar``."""

    @property
    def classes(self) -> ClassRows:
        """The class table."""

    def write(self, number: int, path: Path) -> None:
        """Write one shard to a file; may be called from many threads."""


class BuiltinShards:
    """Shards of a built-in data set, ``SAMPLES_PER_SHARD`` samples each."""

    def __init__(self, dataset: BuiltinDataset) -> None:
        self._dataset = dataset
        self._places = [
            (split, first)
            for split, found in dataset.splits.items()
            for first in range(0, found.num_samples, SAMPLES_PER_SHARD)
        ]
        self._names = [shard_name(split, first // SAMPLES_PER_SHARD) for split, first in self._places]

    @property
    def names(self) -> Sequence[str]:
        """See `ShardSet`."""
        return self._names

    @property
    def classes(self) -> ClassRows:
        """See `ShardSet`."""
        return [dict(sorted(row.items())) for row in self._dataset.classes]  # as they were always written

    def write(self, number: int, path: Path) -> None:
        """See `ShardSet`."""
        split, first = self._places[number]
        found = self._dataset.splits[split]
        write_samples(found.samples(first, min(first + SAMPLES_PER_SHARD, found.num_samples)), path)
