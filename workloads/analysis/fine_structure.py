"""Cluster-and-linear-probe: predicts original classes from features that were trained on coarser labels.

The protocol of "Are Neurons Actually Collapsed?", section 4.3: within every trained class the training samples are
clustered into as many clusters as it holds original classes; a linear classifier learns the clusters from the features
themselves; on other samples it is right where the cluster it names is mapped to the original class, by the best mapping
of clusters to classes. The probe of the original labels (LPO), and both on raw pixels, are controls: if pixels alone
give the same accuracy, it does not come from the features.
"""

from __future__ import annotations

from dataclasses import dataclass
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

Reduction = Literal["none", "pca", "tsne"]
_PERPLEXITY: Final = 30.0
_ITERATIONS: Final = 1000
_STARTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbedSamples:
    """Samples in memory, with their original classes and the coarser ones that the backbone was trained on."""

    features_ND: NDArray[np.float32]
    classes_N: NDArray[np.int64]
    trained_N: NDArray[np.int64]


def cluster_and_probe(train: ProbedSamples, test: ProbedSamples, *, reduce: Reduction, seed: int) -> float:
    """Accuracy in [0, 1] on the test samples.

    Args:
        train: what is clustered and learnt from.
        test: what is judged.
        reduce: what features become before they are clustered; ``tsne`` as in the source, 2 dimensions.
        seed: of where t-SNE and k-means start; means nothing to ``pca``.
    """
    clusters_N, offset = np.empty_like(train.classes_N), 0
    for trained in np.unique(train.trained_N).tolist():
        members = np.flatnonzero(train.trained_N == trained)
        num_clusters = len(np.unique(train.classes_N[members]))
        clusters_N[members] = offset + _clusters(train.features_ND[members], num_clusters, reduce, seed)
        offset += num_clusters
    predicted_N = _fit(train.features_ND, clusters_N).predict(test.features_ND)
    num_classes = int(max(train.classes_N.max(), test.classes_N.max())) + 1
    counts_KC = np.zeros((offset, num_classes), np.int64)
    np.add.at(counts_KC, (predicted_N, test.classes_N), 1)
    return best_mapping(counts_KC)[1] / len(test.classes_N)


def linear_probe(train: ProbedSamples, test: ProbedSamples) -> float:
    """Accuracy in [0, 1] of a linear classifier that learns the original classes."""
    return float((_fit(train.features_ND, train.classes_N).predict(test.features_ND) == test.classes_N).mean())


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


def _fit(features_ND: NDArray[np.float32], targets_N: NDArray[np.int64]) -> Any:  # noqa: ANN401 - without types
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS)).fit(features_ND, targets_N)
