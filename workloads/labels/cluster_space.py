"""Clusters of a data set's samples, of the whole set or of each class of a coarser label space by itself.

Group g has the target ids ``firsts[g] <= id < firsts[g + 1]``: with k clusters per group, ``g * k + cluster``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.core.units import GIB
from workloads.embed.features import FeatureTable
from workloads.labels.bound import NO_LABEL
from workloads.labels.kmeans import Clusters, Settings, Tick, assign, kmeans, operations
from workloads.labels.kmeans_search import Search

LADDER: Final = (2, 8, 32, 64, 128, 256, 512, 1024)
"""Numbers of clusters per superclass that the rebalanced variant chooses from."""
_IN_MEMORY_BYTES: Final = 2 * GIB
"""Of all groups that are clustered at the same time; larger ones are read from the disk's cache block by block."""

OpenSearch = Callable[[int], Search]


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
        """See ``workloads.labels.kmeans.Points``."""
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
        """
        ordinals = [np.flatnonzero(groups_N == number) for number in range(len(names))]
        # Many groups side by side, or the blocks of a few: either way every block is computed by one thread.
        side_by_side = self.num_threads if len(names) >= self.num_threads else 1
        each = self.num_threads // side_by_side
        with ThreadPoolExecutor(side_by_side) as pool:
            jobs = [
                pool.submit(self._group, table, ordinals[number], number, names, each) for number in range(len(names))
            ]
            groups = tuple(job.result() for job in jobs)
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

    def _group(
        self, table: FeatureTable, ordinals: NDArray[np.int64], number: int, names: Sequence[str], num_threads: int
    ) -> Clusters:
        limit_bytes = _IN_MEMORY_BYTES * num_threads // self.num_threads
        points, name = Group(table, ordinals, limit_bytes), names[number] or "the data set"
        for k in self.rule.candidates(len(points)):
            if len(points) < k:
                message = f"{name!r} has {len(points)} training samples and should have {k} clusters; "
                raise UserError(message + "use at most as many clusters as samples")
            try:
                found = kmeans(
                    points,
                    k,
                    self.open_search(k),
                    self.settings,
                    stream=(number, k),
                    num_threads=num_threads,
                    tick=self.tick,
                )
            except UserError as error:
                if self.rule.k is None:  # too many for what is different in it: a coarser one may do
                    continue
                raise UserError(f"{name!r}: {error}") from error
            if k == 1 or self.rule.accepts(found):
                return found
        raise UserError(f"{name!r} has no training samples; choose a level whose classes all have some")
