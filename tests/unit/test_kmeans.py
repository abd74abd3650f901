"""k-means: the same bits on any number of threads, never worse than it should be, and clear about what cannot be."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from orchestrator.core.errors import UserError
from workloads.features.artifact import FeatureTable
from workloads.jobs.cluster import Clustering, Rule
from workloads.solvers import kmeans as kmeans_module
from workloads.solvers.kmeans import (
    Library,
    Search,
    Settings,
    assign,
    kmeans,
    one_thread_per_call,
    open_search,
    operations,
)

CPU = torch.device("cpu")


def _installed(library: Library) -> bool:
    try:
        return bool(library.version)
    except UserError:
        return False


LIBRARIES = [pytest.param(library, marks=pytest.mark.skipif(not _installed(library), reason=f"needs {library}"))
             for library in Library]  # fmt: skip


@dataclass(frozen=True)
class Held:
    """Points in memory."""

    points_ND: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.points_ND)

    def take(self, rows_B: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.points_ND[rows_B]


def blobs(num_points: int, num_blobs: int, *, dim: int = 16, spread: float = 0.1, seed: int = 0) -> Held:
    random = np.random.default_rng(seed)
    centers = random.normal(size=(num_blobs, dim))
    points = centers[random.integers(0, num_blobs, num_points)] + spread * random.normal(size=(num_points, dim))
    return Held(points.astype(np.float32))


def search(num_clusters: int, library: Library = Library.SCIKIT_LEARN) -> Search:
    return open_search(library, num_clusters, CPU)


@pytest.mark.parametrize("library", LIBRARIES)
def test_kmeans_on_any_number_of_threads_gives_the_same_bits(library: Library) -> None:
    points = blobs(20_000, 50, spread=1.0)
    with one_thread_per_call():
        found = [kmeans(points, 40, search(40, library), Settings(seed=3), num_threads=n) for n in (1, 4)]
    assert len(points) > 2 * search(40, library).block_rows
    assert found[0].ids_N.tobytes() == found[1].ids_N.tobytes()
    assert found[0].centroids_KD.tobytes() == found[1].centroids_KD.tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_kmeans_of_separated_blobs_finds_them(library: Library) -> None:
    points = blobs(600, 6, spread=0.01)
    found = kmeans(points, 6, search(6, library), Settings(seed=0, num_init=3))
    assert found.inertia < 600 * 16 * 0.01**2 * 1.2
    assert found.sizes.min() > 0


def test_kmeans_is_as_good_as_scikit_learns() -> None:
    points = blobs(4_000, 60, spread=1.0)
    theirs = min(KMeans(40, n_init=1, random_state=seed).fit(points.points_ND).inertia_ for seed in range(3))
    ours = min(kmeans(points, 40, search(40), Settings(seed=seed)).inertia for seed in range(3))
    assert ours <= 1.005 * theirs


def test_kmeans_other_seed_gives_other_clusters_and_same_seed_the_same() -> None:
    points = blobs(2_000, 30, spread=1.0)
    first, again, other = (kmeans(points, 20, search(20), Settings(seed=seed)) for seed in (0, 0, 1))
    assert np.array_equal(first.ids_N, again.ids_N)
    assert not np.array_equal(first.ids_N, other.ids_N)


def test_kmeans_more_starts_are_never_worse() -> None:
    points = blobs(1_000, 30, spread=1.0)
    inertias = [kmeans(points, 20, search(20), Settings(seed=0, num_init=n)).inertia for n in (1, 4)]
    assert inertias[1] <= inertias[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_kmeans_of_different_points_leaves_no_cluster_empty(num_points: int, num_clusters: int, seed: int) -> None:
    points = blobs(num_points, 3, seed=seed)
    if num_clusters > num_points:
        with pytest.raises(UserError, match="fewer clusters"):
            kmeans(points, num_clusters, search(num_clusters), Settings(seed=seed))
        return
    found = kmeans(points, num_clusters, search(num_clusters), Settings(seed=seed))
    assert found.sizes.min() >= 1
    assert found.sizes.sum() == num_points
    distances = ((points.points_ND[:, None] - found.centroids_KD[None]) ** 2).sum(axis=2)
    chosen = distances[np.arange(num_points), found.ids_N]
    assert chosen == pytest.approx(distances.min(axis=1), abs=1e-4)
    assert found.inertia == pytest.approx(float(distances.min(axis=1).sum()), abs=1e-3)


@pytest.mark.parametrize("num_clusters", [1, 20_000, 50_000])
def test_kmeans_of_large_blocks_adds_points_up_as_that_of_small_ones(num_clusters: int) -> None:
    """A block on a GPU has up to 131,072 points: in one sum in float32, digits of their means were lost."""
    points = Held(np.random.default_rng(0).normal(100, 1, size=(40_000, 3)).astype(np.float32))
    found = []
    for block_rows in (1 << 13, 1 << 15):
        one = search(1)
        one.block_rows = block_rows
        lloyd = kmeans_module._Lloyd(points, one, ThreadPoolExecutor(1), 1)
        lloyd._shape = (num_clusters, 3)
        one.load(points.points_ND[:1])
        found.append(lloyd.assign())
    assert found[0].sums_KD.tobytes() == found[1].sums_KD.tobytes()
    assert found[0].sizes_K.tolist() == found[1].sizes_K.tolist()


def test_kmeans_with_fewer_different_points_than_clusters_says_so() -> None:
    points = Held(np.repeat(np.eye(3, 8, dtype=np.float32), 10, axis=0))
    with pytest.raises(UserError, match="different features"):
        kmeans(points, 5, search(5), Settings(seed=0))


def test_assign_other_points_gives_the_nearest_centroid() -> None:
    search_of_two = search(2)
    search_of_two.load(np.array([[0, 0], [10, 0]], dtype=np.float32))
    points = Held(np.array([[1, 0], [6, 1], [4, 0]], dtype=np.float32))
    assert assign(points, search_of_two).tolist() == [0, 1, 0]


def test_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata
    import importlib.util

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"no faiss.*library: scikit-learn"):
        _ = Library.FAISS.version


def test_operations_of_the_largest_published_case() -> None:
    assert operations(12_700_000, 768, 21_841, Settings(seed=0)) == pytest.approx(1.1e16, rel=0.02)


def clustering_of(groups: list[NDArray[np.float16]], ticks: list[float]) -> Callable[[], object]:
    """Cluster samples of some groups into four each; every iteration takes a moment."""
    features = np.concatenate(groups)
    table = FeatureTable(
        key="embed-x",
        split="train",
        index_key="",
        dataset_digest="",
        dim=features.shape[1],
        starts=np.array([0]),
        parts=(features,),
        missing=np.empty(0, dtype=np.int64),
    )

    def tick() -> None:
        ticks.append(time.monotonic())
        time.sleep(0.02)

    clustering = Clustering(rule=Rule(k=4), settings=Settings(seed=0), open_search=search, num_threads=1, tick=tick)
    groups_N = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return lambda: clustering.fit(table, groups_N, [f"group {number}" for number in range(len(groups))])


def noise(num_points: int) -> NDArray[np.float16]:
    return np.random.default_rng(0).normal(size=(num_points, 8)).astype(np.float16)


@pytest.mark.parametrize(("number", "said"), [(3, "'group 2' has 3 .* 4 clusters"), (0, "'group 0' has no training")])
def test_group_that_is_too_small_is_refused_before_others_are_clustered(number: int, said: str) -> None:
    ticks: list[float] = []
    groups = [noise(number), noise(500), noise(500)] if not number else [noise(500), noise(500), noise(number)]
    with pytest.raises(UserError, match=said):
        clustering_of(groups, ticks)()
    assert ticks == []


def test_group_that_cannot_be_clustered_ends_the_others() -> None:
    """Alone, each of them takes ten iterations or more."""
    ticks: list[float] = []
    clustering_of([noise(500)], ticks)()
    num_alone, same = len(ticks), np.ones((500, 8), dtype=np.float16)
    ticks.clear()
    with pytest.raises(UserError, match=r"'group 0': .*different features"):
        clustering_of([same, noise(500), noise(500)], ticks)()
    assert num_alone >= 10
    assert len(ticks) < num_alone
