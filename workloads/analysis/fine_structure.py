"""Cluster-and-linear-probe: predicts original classes from features that were trained on coarser labels.

The protocol of "Are Neurons Actually Collapsed?", section 4.3: within every trained class the training samples are
clustered into as many clusters as it holds original classes; a linear classifier learns the clusters from the features
themselves; on other samples it is right where the cluster it names is mapped to the original class, by the best mapping
of clusters to classes. The probe of the original labels (LPO), and both on raw pixels, are controls: if pixels alone
give the same accuracy, it does not come from the features. The mapping is chosen on the samples that it is judged by,
so the accuracy is also compared with that of the same predictions in a random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from workloads.analysis.geometry import no_tick
from workloads.runtime.streams import Purpose, Stage, seed_sequence

Reduction = Literal["none", "pca", "tsne"]
Tick = Callable[[], None]
_PERPLEXITY: Final = 30.0
_ITERATIONS: Final = 1000
_STARTS: Final = 10
_CHANCE_DRAWS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbedSamples:
    """Samples in memory, with their original classes and the coarser ones that the backbone was trained on."""

    features_ND: NDArray[np.float32]
    classes_N: NDArray[np.int64]
    trained_N: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccuracy:
    """Accuracies in [0, 1] under the best mapping of clusters to classes."""

    accuracy: float
    chance: float
    """Mean over a few draws in which predictions are permuted among the test samples of each predicted trained class:
    what the best mapping finds in clusters that say nothing beyond the trained class."""


def cluster_and_probe(
    train: ProbedSamples, test: ProbedSamples, *, reduce: Reduction, seed: int, tick: Tick = no_tick
) -> ClusterAccuracy:
    """Accuracy on the test samples, and its chance level.

    Args:
        train: what is clustered and learnt from.
        test: what is judged.
        reduce: what features become before they are clustered; ``tsne`` as in the source, 2 dimensions.
        seed: of where t-SNE and k-means start, and of the draws of chance; means nothing else to ``pca``.
        tick: called before each trained class is clustered, after each iteration of the classifier, and before each
            mapping; what it raises ends the call.
    """
    clusters_N, trained_of_cluster = np.empty_like(train.classes_N), list[int]()
    for trained in np.unique(train.trained_N).tolist():
        tick()
        members = np.flatnonzero(train.trained_N == trained)
        num_clusters = len(np.unique(train.classes_N[members]))
        found = _clusters(train.features_ND[members], num_clusters, reduce, seed)
        clusters_N[members] = len(trained_of_cluster) + found
        trained_of_cluster += [trained] * num_clusters
    predicted_N = _fit(train.features_ND, clusters_N, tick).predict(test.features_ND)
    tick()
    accuracy = _mapped_accuracy(predicted_N, test.classes_N)
    groups_N, chances = np.array(trained_of_cluster)[predicted_N], list[float]()
    random = np.random.Generator(np.random.PCG64(seed_sequence(seed, Stage.ANALYZE, Purpose.CLUSTER_CHANCE)))
    for _ in range(_CHANCE_DRAWS):
        tick()
        chances.append(_mapped_accuracy(_permuted_within(predicted_N, groups_N, random), test.classes_N))
    return ClusterAccuracy(accuracy=accuracy, chance=fmean(chances))


def linear_probe(train: ProbedSamples, test: ProbedSamples, tick: Tick = no_tick) -> float:
    """Accuracy in [0, 1] of a linear classifier that learns the original classes; ``tick`` after each iteration."""
    fitted = _fit(train.features_ND, train.classes_N, tick)
    return float((fitted.predict(test.features_ND) == test.classes_N).mean())


def best_mapping(counts_KC: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The one-to-one mapping of clusters to classes under which most samples are right, and how many these are.

    Args:
        counts_KC: samples of each cluster (K) and class (C).

    Returns:
        the class of each cluster, -1 for one that no class is left for; and the number of samples.
    """
    rows, columns = linear_sum_assignment(counts_KC, maximize=True)
    mapping_K = np.full(len(counts_KC), -1, np.int64)
    mapping_K[rows] = columns
    return mapping_K, int(counts_KC[rows, columns].sum())


def reduced(features_ND: NDArray[np.float32], reduce: Reduction, seed: int) -> NDArray[np.float32]:
    """Features in two dimensions, or as they are; ``seed`` is of the places that t-SNE starts from."""
    if reduce == "none" or len(features_ND) < 4:
        return features_ND
    if reduce == "pca":
        return np.asarray(PCA(n_components=2, svd_solver="full").fit_transform(features_ND), np.float32)
    perplexity = min(_PERPLEXITY, (len(features_ND) - 1) / 3)
    # From the principal components, as by default, every seed would end at the same picture.
    picture = TSNE(n_components=2, init="random", perplexity=perplexity, random_state=seed)
    return np.asarray(picture.fit_transform(features_ND), np.float32)


def _clusters(features_ND: NDArray[np.float32], num_clusters: int, reduce: Reduction, seed: int) -> NDArray[np.int64]:
    if num_clusters == 1:
        return np.zeros(len(features_ND), np.int64)
    points_ND = reduced(features_ND, reduce, seed)
    found = KMeans(n_clusters=num_clusters, n_init=_STARTS, random_state=seed).fit_predict(points_ND)
    return np.asarray(found, np.int64)


def _mapped_accuracy(clusters_N: NDArray[np.int64], classes_N: NDArray[np.int64]) -> float:
    # Only clusters and classes that occur: of thousands of others the table would not fit in memory.
    clusters, rows_N = np.unique(clusters_N, return_inverse=True)
    classes, columns_N = np.unique(classes_N, return_inverse=True)
    counts_KC = np.zeros((len(clusters), len(classes)), np.int64)
    np.add.at(counts_KC, (rows_N, columns_N), 1)
    return best_mapping(counts_KC)[1] / len(classes_N)


def _permuted_within(
    values_N: NDArray[np.int64], groups_N: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.int64]:
    """Values in a random order within each group."""
    permuted_N = np.empty_like(values_N)
    permuted_N[np.argsort(groups_N, kind="stable")] = values_N[np.lexsort((random.random(len(values_N)), groups_N))]
    return permuted_N


class _EachIteration:
    """scikit-learn's callbacks of a fit; they do not change what it finds."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick

    def setup(self, estimator: object, context: object) -> None:
        """Nothing."""

    def teardown(self, estimator: object, context: object) -> None:
        """Nothing."""

    def on_fit_task_begin(self, estimator: object, context: object) -> None:
        self._tick()

    def on_fit_task_end(self, estimator: object, context: object) -> None:
        """Nothing."""


def _fit(features_ND: NDArray[np.float32], targets_N: NDArray[np.int64], tick: Tick) -> Any:  # noqa: ANN401 - no types
    # With thousands of classes a fit takes hours: without a sign of life it would count as a hang.
    classifier = LogisticRegression(max_iter=_ITERATIONS).set_callbacks(_EachIteration(tick))
    return make_pipeline(StandardScaler(), classifier).fit(features_ND, targets_N)
