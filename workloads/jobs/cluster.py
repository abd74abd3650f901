"""The job ``cluster``: k-means on the features of a training split, and the label map that is made of it.

Clusters are of the whole data set, or of each class of a coarser label space.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import UserError
from orchestrator.core.units import GIB
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.split_targets import NO_LABEL
from workloads.features.artifact import FeatureTable
from workloads.labels.label_map import LabelMap, SampleLabels
from workloads.labels.rules import make_label_map, one_target_each
from workloads.runtime.device import pick_device
from workloads.runtime.npy import from_npy_bytes, npy_bytes
from workloads.runtime.publish import Ticker, publish
from workloads.solvers.kmeans import (
    Clusters,
    Library,
    Search,
    Settings,
    Tick,
    assign,
    kmeans,
    one_thread_per_call,
    open_search,
    operations,
)

_LOG = logging.getLogger(__name__)
_CLUSTERS_PART: Final = "clusters.json"
_SPLITS: Final = ("train", "val")
LADDER: Final = (2, 8, 32, 64, 128, 256, 512, 1024)
"""Numbers of clusters per superclass that the rebalanced variant chooses from."""
_IN_MEMORY_BYTES: Final = 2 * GIB
"""Of all groups that are clustered at the same time; larger ones are read from the disk's cache block by block."""
OpenSearch = Callable[[int], Search]


def run_cluster(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Cluster the training samples; a validation sample gets the nearest centroid of its own group.

    Inputs: ``index``, and the features ``train`` and ``val``. Parameters: ``k`` or ``rebalanced``, ``within`` (the
    definition of a label space, or null), ``seed``, ``iterations``, ``num_init`` and ``library``.

    Raises:
        UserError: more clusters than samples; features of another data set; the library is not installed.
        BadDataError: features are NaN or infinite.
        PreemptedError: asked to stop; it starts over.
    """
    parameters, execution = request.parameters, request.execution
    index = SampleIndex.open(context.store, request.inputs["index"], context.cache, execution.data_location)
    digest = _digest_of(context.store, index.key)
    tables = {split: _features(request, context, split, digest) for split in _SPLITS}
    within = _within(request, index)
    names = within.class_names if within is not None else ("",)
    groups = {split: _groups(within, index.split(split), tables[split]) for split in _SPLITS}
    library = Library(parameters["library"])
    version = library.version
    clustering = Clustering(
        rule=Rule.of(parameters),
        settings=Settings(**{name: parameters[name] for name in ("seed", "iterations", "num_init")}),
        open_search=partial(open_search, library, device=pick_device(context)),
        num_threads=execution.num_threads,
        tick=Ticker(request, context, "cluster"),
    )
    expected = clustering.operations(tables["train"], groups["train"])
    _LOG.info("k-means of %d samples: at most %.3g operations", tables["train"].num_samples, expected)
    with one_thread_per_call():
        space = clustering.fit(tables["train"], groups["train"], names)
        val = space.assign(tables["val"], groups["val"], clustering.open_search, execution.num_threads)
    document = {**_document(space), "dataset_digest": digest, "library": library.value, "library_version": version}
    return _commit(request, context, space, {"train": space.targets_N, "val": val}, document)


def cluster_labels(store: ObjectStore, clusters_key: str, index_key: str) -> SampleLabels:
    """The label map of a ``cluster`` artifact. Raises ``UserError`` if it is of another data set than the index."""
    record = read_record(store, clusters_key)
    document = json.loads(read_part(store, record, _CLUSTERS_PART))
    if document["dataset_digest"] != _digest_of(store, index_key):
        raise UserError(f"{clusters_key} was made of other data than {index_key} is the index of; plan the sweep again")
    return SampleLabels(
        num_classes=document["num_classes"],
        names=tuple(document["class_names"]),
        targets={split: from_npy_bytes(read_part(store, record, _targets_part(split))) for split in _SPLITS},
    )


def _features(request: JobRequest, context: ExecutionContext, split: str, digest: str) -> FeatureTable:
    table = FeatureTable.open(context.store, request.inputs[split], context.cache, context.activity.tick)
    if table.dataset_digest != digest or table.split != split:
        message = f"features {table.key} are of split {table.split!r} of the data {table.dataset_digest[:12]}, but "
        message += f"{request.inputs['index']} is the index of {digest[:12]}: clusters would get the wrong samples; "
        raise UserError(message + "embed the data set that is indexed")
    return table


def _digest_of(store: ObjectStore, index_key: str) -> str:
    """What tells data sets apart: the digest of their shards."""
    return str(read_record(store, index_key).summary.get("dataset_digest", index_key))


def _within(request: JobRequest, index: SampleIndex) -> LabelMap | None:
    definition = request.parameters["within"]
    if definition is None:
        return None
    files, num_train = request.execution.label_files, index.split("train").num_samples
    return one_target_each(make_label_map(definition, index.classes, num_train=num_train, files=files), "clusters")


def _groups(within: LabelMap | None, split: SplitIndex, table: FeatureTable) -> NDArray[np.int64]:
    """Group (N,) of each sample; -1 for those that are not part of the label space, or have no features."""
    groups_N = np.zeros(split.num_samples, np.int64) if within is None else within.resolve_targets(split).targets_N()
    groups_N[table.missing] = NO_LABEL
    return groups_N


def _document(space: ClusterSpace) -> dict[str, Any]:
    return {
        "num_classes": int(space.firsts[-1]),
        "class_names": list(space.class_names),
        "groups": [
            {
                "name": name,
                "num_clusters": len(group.centroids_KD),
                "smallest": int(group.sizes.min()),
                "largest": int(group.sizes.max()),
                "inertia": group.inertia,
                "num_iterations": group.num_iterations,
            }
            for name, group in zip(space.names, space.groups, strict=True)
        ],
    }


def _commit(
    request: JobRequest,
    context: ExecutionContext,
    space: ClusterSpace,
    targets: Mapping[str, NDArray[np.int32]],
    document: Mapping[str, Any],
) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    writer.add(_CLUSTERS_PART, json.dumps(document, indent=1).encode())
    writer.add("centroids.npy", npy_bytes(np.concatenate([group.centroids_KD for group in space.groups])))
    for split, targets_N in targets.items():
        writer.add(_targets_part(split), npy_bytes(targets_N))
    sizes = [group.sizes for group in space.groups]
    metrics = {
        "num_classes": float(space.firsts[-1]),
        "inertia": sum(group.inertia for group in space.groups),
        "smallest_class": float(min(size.min() for size in sizes)),
        "largest_class": float(max(size.max() for size in sizes)),
    }
    summary = {name: document[name] for name in ("groups", "dataset_digest", "library", "library_version")}
    return publish(writer, request, metrics=metrics, summary=summary)


def _targets_part(split: str) -> str:
    return f"targets/{split}.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How many clusters a group gets."""

    k: int | None = None
    min_samples: int | None = None
    """Without ``k``: the finest of ``LADDER`` whose smallest cluster still holds so many."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """From a job's parameters ``k`` or ``rebalanced``."""
        if "k" in parameters:
            return cls(k=parameters["k"])
        return cls(min_samples=parameters["rebalanced"]["min_samples"])

    def candidates(self, num_points: int) -> Iterator[int]:
        """Numbers of clusters to try, finest first; the last one is taken whatever comes out."""
        if self.k is not None:
            yield self.k
            return
        yield from (k for k in reversed(LADDER) if k * (self.min_samples or 1) <= num_points)
        yield 1

    def check(self, name: str, num_points: int) -> None:
        """Raises ``UserError`` if a group of so many samples cannot be divided."""
        if not num_points:
            raise UserError(f"{_shown(name)} has no training samples; choose a level whose classes all have some")
        if self.k is not None and num_points < self.k:
            message = f"{_shown(name)} has {num_points} training samples and should have {self.k} clusters; "
            raise UserError(message + "use at most as many clusters as samples")

    def accepts(self, clusters: Clusters) -> bool:
        """Whether these clusters will do."""
        return self.min_samples is None or int(clusters.sizes.min()) >= self.min_samples


class Group:
    """The samples ``ordinals`` (ascending) of a table, as points; held in memory if they fit into ``limit_bytes``."""

    def __init__(self, table: FeatureTable, ordinals: NDArray[np.int64], limit_bytes: int = _IN_MEMORY_BYTES) -> None:
        self._table, self._ordinals = table, ordinals
        size_bytes = len(ordinals) * table.dim * 2
        self._held = table.take(ordinals) if size_bytes <= limit_bytes else None

    def __len__(self) -> int:
        return len(self._ordinals)

    def take(self, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """See ``workloads.solvers.kmeans.Points``."""
        found = self._table.take(self._ordinals[rows_B]) if self._held is None else self._held[rows_B]
        return found.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterSpace:
    """What was found: clusters by group, and the target ids of the samples that were clustered."""

    names: tuple[str, ...]
    """Of the groups."""
    groups: tuple[Clusters, ...]
    targets_N: NDArray[np.int32]

    @property
    def firsts(self) -> NDArray[np.int64]:
        """First target id (G + 1) of each group; the last one is the number of classes."""
        return np.concatenate([[0], np.cumsum([len(group.centroids_KD) for group in self.groups])])

    @property
    def class_names(self) -> tuple[str, ...]:
        """``<group>/<cluster>``, or ``<cluster>`` without groups."""
        return tuple(
            f"{name}/{cluster}" if name else str(cluster)
            for name, group in zip(self.names, self.groups, strict=True)
            for cluster in range(len(group.centroids_KD))
        )

    def assign(
        self, table: FeatureTable, groups_N: NDArray[np.int64], open_search: OpenSearch, num_threads: int
    ) -> NDArray[np.int32]:
        """Target ids (N,) of other samples: of the nearest centroid in their own group; -1 for those without one."""
        targets_N = np.full(len(groups_N), NO_LABEL, dtype=np.int32)
        for number, (group, first) in enumerate(zip(self.groups, self.firsts, strict=False)):
            ordinals = np.flatnonzero(groups_N == number)
            if len(ordinals):
                search = open_search(len(group.centroids_KD))
                search.load(group.centroids_KD)
                targets_N[ordinals] = first + assign(Group(table, ordinals), search, num_threads)
        return targets_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """How to cluster, and with how many threads; the latter change nothing."""

    rule: Rule
    settings: Settings
    open_search: OpenSearch
    num_threads: int
    tick: Tick = lambda: None

    def fit(self, table: FeatureTable, groups_N: NDArray[np.int64], names: Sequence[str]) -> ClusterSpace:
        """Cluster the samples of each group; ``groups_N`` is -1 for samples that take no part.

        Raises:
            UserError: a group has fewer (different) samples than it should have clusters.
            PreemptedError: ``tick`` raised it.
        """
        ordinals = [np.flatnonzero(groups_N == number) for number in range(len(names))]
        # Before anything is computed, which may take hours.
        for name, members in zip(names, ordinals, strict=True):
            self.rule.check(name, len(members))
        groups = self._groups(table, ordinals, names)
        targets_N = np.full(len(groups_N), NO_LABEL, dtype=np.int32)
        space = ClusterSpace(names=tuple(names), groups=groups, targets_N=targets_N)
        for members, group, first in zip(ordinals, groups, space.firsts, strict=False):
            targets_N[members] = first + group.ids_N
        return space

    def operations(self, table: FeatureTable, groups_N: NDArray[np.int64]) -> float:
        """Floating-point operations at most."""
        sizes = np.bincount(groups_N[groups_N >= 0])
        return sum(
            operations(int(size), table.dim, k, self.settings)
            for size in sizes
            for k in self.rule.candidates(int(size))
        )

    def _groups(
        self, table: FeatureTable, ordinals: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> tuple[Clusters, ...]:
        # Many groups side by side, or the blocks of a few: either way every block is computed by one thread.
        side_by_side = self.num_threads if len(names) >= self.num_threads else 1
        each, failed = self.num_threads // side_by_side, threading.Event()

        def tick() -> None:
            if failed.is_set():
                raise CancelledError
            self.tick()

        with ThreadPoolExecutor(side_by_side) as pool:
            jobs = [
                pool.submit(self._group, table, members, number, names[number], each, tick)
                for number, members in enumerate(ordinals)
            ]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                return tuple(job.result() for job in jobs if job in done)
            except BaseException:
                # No other group begins, and those that are computed end with their iteration.
                failed.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _group(  # noqa: PLR0917 - called by a pool
        self,
        table: FeatureTable,
        ordinals: NDArray[np.int64],
        number: int,
        name: str,
        num_threads: int,
        tick: Tick,
    ) -> Clusters:
        limit_bytes = _IN_MEMORY_BYTES * num_threads // self.num_threads
        points = Group(table, ordinals, limit_bytes)
        for k in self.rule.candidates(len(points)):
            try:
                found = kmeans(
                    points,
                    k,
                    self.open_search(k),
                    self.settings,
                    stream=(number, k),
                    num_threads=num_threads,
                    tick=tick,
                )
            except UserError as error:
                if self.rule.k is None and k > 1:  # too many for what is different in it: a coarser one may do
                    continue
                raise UserError(f"{_shown(name)}: {error}") from error
            if k == 1 or self.rule.accepts(found):
                return found
        raise AssertionError("one cluster is always possible")


def _shown(group: str) -> str:
    return repr(group or "the data set")
