"""The job ``embed``: features of a split under a frozen backbone, resumable by runs of rows, on one or many ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.core.errors import NumericsError, PreemptedError, StorageError
from orchestrator.core.units import MIB
from orchestrator.storage.artifacts import ArtifactWriter, read_record
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, EvalLoader
from workloads.data.source import SampleSource
from workloads.data.split_targets import SplitTargets
from workloads.features.artifact import FEATURES_PART, FinishedRows, unfinished
from workloads.features.backbone import FrozenBackbone, open_backbone
from workloads.runtime.device import pick_device
from workloads.runtime.enums import Precision
from workloads.runtime.fingerprint import deterministic_numerics, numerics_fingerprint
from workloads.runtime.precision import Arithmetic
from workloads.runtime.publish import publish
from workloads.runtime.ranks import Pace, Ranks, check_same_request, share_of

BATCH_SIZE: Final = 256
"""Fixed, because kernels may round differently for other batch sizes; runs of rows are whole batches."""
_PART_BYTES: Final = 64 * MIB


def run_embed(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the features of ``parameters["split"]``; see ``workloads.features.artifact``.

    Finished runs of rows are kept when an attempt ends (``execution.checkpoint_every_steps`` batches each; by default
    64 MiB, in a gang at most the share of a rank), and never computed again. In a gang all ranks call this, each embeds
    its share, and the first one commits.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError, PeerLostError: why there is no commit.
    """
    context.report(Progress(phase="setup"))
    device, ranks, execution = pick_device(context), Ranks.of(context), request.execution
    precision = Precision(request.parameters["precision"])
    arithmetic = Arithmetic(device, precision=precision, deterministic=execution.deterministic)
    with ranks.aborted_on_error(), deterministic_numerics(execution.num_threads), arithmetic.numerics():
        check_same_request(ranks, request)
        backbone = open_backbone(request, context, device)
        index = SampleIndex.open(context.store, request.inputs["index"], context.cache, execution.data_location)
        source = SampleSource(
            context.store,
            index,
            request.parameters["split"],
            cache_dir=context.cache,
            pixels=backbone.preprocessing.pixels,
            cache_bytes=0,
        )
        with closing(source):
            embedding = Embedding(
                request, context, backbone=backbone, source=source, arithmetic=arithmetic, ranks=ranks
            )
            embedding.run()  # of all ranks: then every rank's rows are durable
            with ranks.at_own_pace():
                result = embedding.commit() if ranks.is_first else _done_elsewhere(request)
    return result


class Embedding:
    """One attempt's work."""

    def __init__(
        self,
        request: JobRequest,
        context: ExecutionContext,
        *,
        backbone: FrozenBackbone,
        source: SampleSource,
        arithmetic: Arithmetic,
        ranks: Ranks,
    ) -> None:
        self._request, self._context, self._ranks = request, context, ranks
        self._backbone, self._source, self._arithmetic = backbone, source, arithmetic
        self._finished = FinishedRows(context.store, request.key)
        self._num_samples = source.split.num_samples
        self.num_resumed = 0
        """Rows that earlier attempts had finished."""

    def run(self) -> None:
        """Embed what is unfinished, each rank its share; returns once all ranks are through.

        Raises:
            PreemptedError: some rank was asked to stop.
            BadDataError: more samples cannot be decoded than the budget allows, those in finished rows included.
        """
        todo = self._begin()
        ordinals = np.concatenate([np.empty(0, np.int64), *(np.arange(first, last) for first, last in todo)])
        num_threads = self._request.execution.num_threads
        loader = unlabelled_loader(self._source, ordinals, num_threads=num_threads, device=self._arithmetic.device)
        batches = iter(loader) if len(ordinals) else iter(())
        # Ranks have unequal numbers of runs, and nodes unequal speed.
        with self._ranks.at_own_pace(self._report_all) as pace:
            for first, last in todo:
                self._fill(first, last, batches, pace)

    def commit(self) -> JobResult:
        """Publish the artifact.

        Raises:
            BadDataError: all ranks and attempts together could not decode more samples than the budget allows.
        """
        # Thousands of runs of rows may be looked at: each counts as work, so that this does not look like a hang.
        self._context.report(Progress(phase="write", step=self._num_samples, total_steps=self._num_samples))
        tick = self._context.activity.tick
        rows = self._finished.find(tick)
        if gaps := list(unfinished(rows, self._num_samples, self._num_samples or 1)):
            raise StorageError(
                f"finished rows of {self._request.key} are gone from the store: {gaps[:3]}; run it again"
            )
        missing = self._finished.missing(rows, tick)
        self._source.bad_samples.recall(missing)
        request, store = self._request, self._context.store
        writer = ArtifactWriter(store, request)
        for run in rows:
            run.adopt(writer)
        index = read_record(store, request.inputs["index"])
        document = {
            "split": self._source.split.name,
            "num_samples": self._num_samples,
            "dim": self._backbone.num_features,
            "dtype": "float16",
            "index": index.key,
            "dataset_digest": index.summary.get("dataset_digest", index.key),
            "look": self._backbone.preprocessing.to_json(),
            "parts": [
                {"start": run.start, "stop": run.stop, "features": run.features, "missing": run.missing} for run in rows
            ],
        }
        writer.add(FEATURES_PART, json.dumps(document, indent=1).encode())
        metrics = {
            "num_samples": float(self._num_samples),
            "dim": float(self._backbone.num_features),
            "num_missing": float(len(missing)),
        }
        return publish(writer, request, metrics=metrics, summary=self._summary(document))

    def _summary(self, document: dict[str, Any]) -> dict[str, Any]:
        fingerprint = numerics_fingerprint(
            self._arithmetic.device,
            num_threads=self._request.execution.num_threads,
            micro_batch=self._backbone.most or BATCH_SIZE,  # of the first rank in this attempt
            world_size=self._ranks.world_size,
        )
        return {
            "dataset_digest": document["dataset_digest"],
            "weights_sha256": self._backbone.weights_sha256(),
            "look": document["look"],
            "fingerprint": fingerprint | self._arithmetic.fingerprint(),
            "rows_of_earlier_attempts": self.num_resumed,
        }

    def _begin(self) -> Sequence[tuple[int, int]]:
        """Runs of rows of this rank; takes note of what earlier attempts finished.

        The first rank alone asks the store and tells the others: they need the same answer, and hundreds of ranks that
        each read thousands of objects at once would be throttled.
        """
        told = ""
        if self._ranks.is_first:
            tick = self._context.activity.tick
            finished = self._finished.find(tick)
            todo = list(unfinished(finished, self._num_samples, self._rows_per_part()))
            told = json.dumps({"todo": todo, "missing": self._finished.missing(finished, tick).tolist()})
        begun = json.loads(self._ranks.broadcast_text(told))
        self.num_resumed = self._num_samples - sum(last - first for first, last in begun["todo"])
        self._source.bad_samples.recall(begun["missing"])
        mine = share_of(len(begun["todo"]), self._ranks.rank, self._ranks.world_size)
        return [(first, last) for first, last in begun["todo"][mine.start : mine.stop]]

    def _rows_per_part(self) -> int:
        batch_bytes = BATCH_SIZE * self._backbone.num_features * 2
        # Every rank of a gang has work: there are as many runs as ranks, where there are as many batches.
        per_rank = -(-self._num_samples // (BATCH_SIZE * self._ranks.world_size))
        num_batches = max(1, min(_PART_BYTES // batch_bytes, per_rank))
        return BATCH_SIZE * (self._request.execution.checkpoint_every_steps or num_batches)

    def _fill(self, first: int, last: int, batches: Iterator[Batch], pace: Pace) -> None:
        """Embed the rows ``first <= i < last`` and store them."""
        features_PD = np.zeros((last - first, self._backbone.num_features), dtype=np.float16)
        is_there = np.zeros(last - first, dtype=np.bool_)
        for start in range(first, last, BATCH_SIZE):
            batch = next(batches)
            rows = batch.ordinals_B - first  # without the samples that could not be decoded
            features_PD[rows], is_there[rows] = self._embed(batch), True
            pace.done += min(BATCH_SIZE, last - start)
            self._tick(min(start + BATCH_SIZE, last), pace)
        self._finished.write(first, features_PD, first + np.flatnonzero(~is_there))

    def _embed(self, batch: Batch) -> NDArray[np.float16]:
        with torch.inference_mode(), self._arithmetic.autocast():
            features_BF = self._backbone(batch.images_BCHW).to(torch.float16).cpu()
        is_finite = torch.isfinite(features_BF).all(dim=1)
        if not bool(is_finite.all()):
            name = self._source.split.place(int(batch.ordinals_B[int(is_finite.to(torch.uint8).argmin())]))
            message = f"the features of {name} are NaN, infinite or beyond float16 (65504): check the weights, and "
            raise NumericsError(message + "precision, mean and std of the embed block")
        found: NDArray[np.float16] = features_BF.numpy()
        return found

    def _report_all(self, done: int) -> None:
        """Of a gang only the first rank's progress is seen: without it, a long wait would look like a hang."""
        rows = self.num_resumed + done
        self._context.report(Progress(phase="embed", step=rows, total_steps=self._num_samples))

    def _tick(self, row: int, pace: Pace) -> None:
        self._context.report(Progress(phase="embed", step=row, total_steps=self._num_samples))
        if self._context.should_stop() or pace.is_stopping:
            message = f"{self._request.job} was asked to stop; it goes on from its finished rows when it runs again"
            raise PreemptedError(message)


def unlabelled_loader(
    source: SampleSource, ordinals: NDArray[np.int64], *, num_threads: int, device: torch.device | None
) -> EvalLoader:
    """Batches of ``BATCH_SIZE`` samples whose targets nobody asks for."""
    unused = SplitTargets.of(np.zeros(source.split.num_samples, dtype=np.int8), 1)
    return EvalLoader(source, unused, batch_size=BATCH_SIZE, ordinals=ordinals, num_workers=num_threads, device=device)


def _done_elsewhere(request: JobRequest) -> JobResult:
    """What the ranks that do not commit say."""
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=Outcome.ALREADY_COMMITTED)
