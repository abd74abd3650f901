"""Measures of features against what is known exactly, and streams against arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from cka import cka_from_features
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import nn

from orchestrator.core.errors import CorruptObjectError, PreemptedError, UserError
from workloads.analysis import geometry, units
from workloads.analysis.features import SampleClasses, class_moments
from workloads.analysis.fine_structure import ProbedSamples, best_mapping, cluster_and_probe, linear_probe
from workloads.analysis.layers import ActivityCounter
from workloads.analysis.measures import AnalyzedFeatures, Findings, ProbeInputs, measure
from workloads.analysis.similarity import linear_cka
from workloads.analysis.units import feature_ranks, purities, sparsity, top_samples
from workloads.models.build import FrozenForward
from workloads.runtime import plugin_arguments

C, PER_CLASS = 5, 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayStream:
    """Features (N, D) that are in memory, as a ``FeatureStream``."""

    features_ND: NDArray[Any]
    rows_at_once: int = 8192

    @property
    def num_samples(self) -> int:
        return len(self.features_ND)

    @property
    def dim(self) -> int:
        return int(self.features_ND.shape[1])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for start in range(0, self.num_samples, self.rows_at_once):
            yield self.features_ND[start : start + self.rows_at_once]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def simplex(noise: float, seed: int) -> tuple[NDArray[np.float64], SampleClasses]:
    """Five classes at the corners of a simplex in 16 dimensions."""
    ids = np.tile(np.arange(C), PER_CLASS)
    corners = np.pad(np.eye(C) - 1 / C, ((0, 0), (0, 16 - C)))
    features = corners[ids] + noise * rng(seed).normal(size=(len(ids), 16))
    return features, SampleClasses.of(ids, [str(number) for number in range(C)])


def blobs(dim: int = 12) -> tuple[NDArray[np.float64], SampleClasses, NDArray[np.int64]]:
    """Six classes of different sizes, in three groups."""
    ids = np.repeat(np.arange(6), [30, 11, 25, 40, 7, 18])
    groups_C = np.array([0, 0, 1, 1, 1, 2])
    centres = rng(3).normal(size=(6, dim)) + 3 * rng(4).normal(size=(3, dim))[groups_C]
    shuffled = rng(5).permutation(len(ids))
    features = (centres[ids] + rng(6).normal(size=(len(ids), dim)))[shuffled] + 100
    return features, SampleClasses.of(ids[shuffled], list("abcdef")), groups_C


def dense_distances(features: NDArray[Any], ids: NDArray[np.int64], num_classes: int) -> NDArray[np.float64]:
    squared = ((features[:, None] - features[None]) ** 2).sum(-1)
    return np.array(
        [[squared[np.ix_(ids == i, ids == j)].mean() for j in range(num_classes)] for i in range(num_classes)]
    )


def collapse_of(noise: float, seed: int = 2) -> tuple[float, float, float]:
    features, classes = simplex(noise, seed)
    moments = class_moments(ArrayStream(features_ND=features), classes)
    nc1, nc2, cdnv = geometry.nc1(moments), geometry.nc2(moments), geometry.cdnv(moments)
    assert nc1 is not None
    assert nc2 is not None
    assert cdnv is not None
    return nc1, nc2, cdnv


def test_collapse_exact_simplex_is_zero_to_the_last_digits() -> None:
    nc1, nc2, cdnv = collapse_of(0)
    # 6.2e-32, and 1.57e-16 to 1.69e-16 with OpenBLAS' kernels for six processors: 25 entries of one rounding each.
    assert 0 <= nc1 < 3e-30
    assert nc2 < np.finfo(np.float64).eps
    assert 0 <= cdnv < 3e-30


def test_collapse_noise_around_a_simplex_is_as_large_as_theory_says() -> None:
    nc1, nc2, cdnv = collapse_of(0.01)
    assert nc1 == pytest.approx(3.988e-4, rel=1e-4)
    assert nc2 == pytest.approx(3.028e-3, rel=1e-4)
    assert cdnv == pytest.approx(7.920e-4, rel=1e-4)
    draws = np.array([collapse_of(0.01, seed) for seed in range(100)])
    sigma2, mean_sigma2 = 1e-4, 1e-4 / PER_CLASS
    # Tr(S_W S_B^+) / C: scatter sigma^2 (n - 1) / n in each of C - 1 directions, in which means have variance 1 / C.
    assert draws[:, 0].mean() == pytest.approx((C - 1) * sigma2 * (1 - 1 / PER_CLASS), rel=0.01)
    # M M^T / norm moves by a symmetric Gaussian matrix of C - 1 rows; its part along the simplex changes only the norm.
    freedoms = (C - 1) * C / 2 - 1
    assert (draws[:, 1] ** 2).mean() == pytest.approx(4 * freedoms * mean_sigma2 / (C - 1), rel=0.2)
    assert draws[:, 1].min() < 2.5e-3 < draws[:, 1].max()
    # All pairs are 2 apart, squared; a class's variance is 16 sigma^2.
    assert draws[:, 2].mean() == pytest.approx(16 * sigma2 / 2, rel=0.02)


def test_collapse_equal_means_have_no_value() -> None:
    moments = class_moments(ArrayStream(features_ND=np.ones((4, 3))), SampleClasses.of(np.array([0, 1, 0, 1]), "ab"))
    assert (geometry.nc1(moments), geometry.nc2(moments), geometry.cdnv(moments)) == (None, None, None)
    draws, classes = rng(), SampleClasses.of(np.repeat(np.arange(4), 10), "abcd")
    for _ in range(20):  # rounding makes their distance 0 in some draws, and more in others
        features_ND = draws.normal(size=(40, 512))
        features_ND[20:] = features_ND[:20]  # classes 2 and 3 hold the samples of classes 0 and 1
        assert geometry.cdnv(class_moments(ArrayStream(features_ND=features_ND), classes)) is None


@pytest.mark.parametrize("per_class", [1, 3, 20])
def test_collapse_of_few_samples_is_told_and_of_one_sample_has_no_value(per_class: int) -> None:
    """A sample is its class's mean: scatter of 0 says nothing about collapse."""
    classes = SampleClasses.of(np.repeat(np.arange(C), per_class), [str(number) for number in range(C)])
    stream = ArrayStream(features_ND=rng().normal(size=(C * per_class, 6)))
    subject = AnalyzedFeatures(features=stream, classes=classes, trained=classes, levels={})
    found = measure(subject, "collapse", {})
    assert set(found.metrics) == ({"nc2"} if per_class == 1 else {"nc1", "nc2", "cdnv"})
    words = {1: "nc1, cdnv: no class has two samples", 3: "nc1, cdnv: the median class has 3 samples"}
    assert [note[: len(words[per_class])] for note in found.notes] == ([words[per_class]] if per_class < 20 else [])


def test_distances_of_few_samples_say_what_msdr_is_without_structure() -> None:
    per_class, num_classes = 5, 200
    ids_N = np.repeat(np.arange(num_classes), per_class)
    classes = SampleClasses.of(ids_N, [str(number) for number in range(num_classes)])
    trained = SampleClasses.of(ids_N % 20, [str(number) for number in range(20)])
    stream = ArrayStream(features_ND=rng().normal(size=(len(ids_N), 64)))
    subject = AnalyzedFeatures(features=stream, classes=classes, trained=trained, levels={})
    found = measure(subject, "distances", {"levels": None})
    assert found.metrics["msdr"] == pytest.approx(per_class / (per_class - 1), rel=0.02)
    assert "the median class has 5 samples" in found.notes[-1]
    assert "msdr is n / (n - 1)" in found.notes[-1]


def test_products_of_all_pairs_of_classes_take_as_many_rows_as_fit_in_memory() -> None:
    few, many = (next(geometry._grams(np.zeros((num_classes, 1))))[1] for num_classes in (2_000, 500_000))
    assert few.shape == (1024, 2_000)
    assert many.nbytes <= 128 * 1024**2


def test_sums_over_pairs_of_classes_show_that_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 500,000 classes take an hour, in which no features are read."""
    monkeypatch.setattr(geometry, "_CLASSES_AT_ONCE", 2)
    ticks: list[int] = []
    subject = replace(subject_of_blobs(), trained=None, tick=lambda: ticks.append(1))
    measure(subject, "collapse", {})
    assert len(ticks) == 3 * 3  # three passes over six classes

    def stop() -> None:
        raise PreemptedError("asked to stop")

    with pytest.raises(PreemptedError):
        measure(replace(subject, tick=stop), "collapse", {})


def test_distance_to_a_simplex_of_many_classes_is_that_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = SampleClasses.of(np.repeat(np.arange(40), 3), [str(number) for number in range(40)])
    for scale in (1.0, 1e-6):
        moments = class_moments(ArrayStream(features_ND=scale * rng().normal(size=(120, 19)) + 5), classes)
        monkeypatch.setattr(geometry, "_MANY_CLASSES", 1000)
        direct = geometry.nc2(moments)
        monkeypatch.setattr(geometry, "_MANY_CLASSES", 4)
        assert geometry.nc2(moments) == pytest.approx(direct, rel=1e-13)
    equal = class_moments(ArrayStream(features_ND=np.ones((120, 19))), classes)
    assert geometry.nc2(equal) is None


def test_moments_streamed_in_chunks_of_any_size_are_those_of_the_whole() -> None:
    features, classes, _ = blobs()
    whole = class_moments(ArrayStream(features_ND=features), classes)
    for rows in (1, 7, 64):
        found = class_moments(ArrayStream(features_ND=features, rows_at_once=rows), classes)
        np.testing.assert_allclose(found.means_CD, whole.means_CD, rtol=1e-13)
        np.testing.assert_allclose(found.variances_C, whole.variances_C, rtol=1e-11)
        np.testing.assert_allclose(found.within_DD, whole.within_DD, rtol=1e-10, atol=1e-12)
    centred = features - whole.means_CD[classes.ids_N]
    weights = 1 / (6 * classes.counts_C[classes.ids_N])
    np.testing.assert_allclose(whole.within_DD, (centred * weights[:, None]).T @ centred, rtol=1e-10, atol=1e-12)


def test_distances_are_means_over_all_pairs_of_samples() -> None:
    features, classes, groups_C = blobs()
    moments = class_moments(ArrayStream(features_ND=features), classes)
    dense = dense_distances(features, classes.ids_N, 6)
    np.testing.assert_allclose(geometry.distance_matrix(moments), dense, rtol=1e-9)
    off = ~np.eye(6, dtype=bool)
    same = (groups_C[:, None] == groups_C) & off
    within, between = geometry.distances_by_group(moments, groups_C)
    assert (within.num_pairs, between.num_pairs) == (8, 22)
    assert within.mean == pytest.approx(dense[same].mean())
    assert between.mean == pytest.approx(dense[off & ~same].mean())
    msdr = geometry.msdr(within, geometry.self_distance(moments))
    assert msdr == pytest.approx(dense[same].mean() / np.diag(dense).mean())


def test_distances_by_common_ancestor_take_the_deepest_level() -> None:
    features, classes, groups_C = blobs()
    moments = class_moments(ArrayStream(features_ND=features), classes)
    dense = dense_distances(features, classes.ids_N, 6)
    top_C = np.array([0, 0, 0, 0, 0, 1])
    found = geometry.distances_by_ancestor(moments, {"top": top_C, "group": groups_C})
    assert list(found) == [geometry.ROOT, "top", "group"]
    off = ~np.eye(6, dtype=bool)
    group, top = (groups_C[:, None] == groups_C) & off, (top_C[:, None] == top_C) & off
    assert found["group"].mean == pytest.approx(dense[group].mean())
    assert found["top"].mean == pytest.approx(dense[top & ~group].mean())
    assert found[geometry.ROOT].mean == pytest.approx(dense[off & ~top].mean())


def test_msdr_of_trained_classes_with_one_class_each_has_no_value() -> None:
    features, classes, _ = blobs()
    moments = class_moments(ArrayStream(features_ND=features), classes)
    within, _ = geometry.distances_by_group(moments, np.arange(6))
    assert geometry.msdr(within, geometry.self_distance(moments)) is None


def dense_debiased_cka(x: NDArray[Any], y: NDArray[Any]) -> float:
    def hsic(k: NDArray[Any], m: NDArray[Any]) -> float:
        n = len(k)
        k, m = k * (1 - np.eye(n)), m * (1 - np.eye(n))
        one = np.ones(n)
        last = 2 / (n - 2) * (one @ k @ m @ one)
        return float((np.trace(k @ m) + one @ k @ one * (one @ m @ one) / ((n - 1) * (n - 2)) - last) / (n * (n - 3)))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / float(np.sqrt(hsic(k, k) * hsic(m, m)))


def test_cka_of_independent_gaussians_is_near_zero_as_it_has_no_bias() -> None:
    x, y = rng(1).normal(size=(256, 512)), rng(2).normal(size=(256, 512))
    streams = [ArrayStream(features_ND=x, rows_at_once=50), ArrayStream(features_ND=y, rows_at_once=50)]
    assert linear_cka(streams)[0, 1] == pytest.approx(-0.0024, abs=1e-4)
    others = [
        linear_cka([ArrayStream(features_ND=rng(seed).normal(size=(256, 512))) for seed in (first, first + 1)])[0, 1]
        for first in (3, 5, 7, 9)
    ]
    assert max(map(abs, others)) < 0.01


def test_cka_is_the_estimate_over_all_pairs_of_samples() -> None:
    x = rng(1).normal(size=(60, 5)) + 3
    y = np.maximum(x @ rng(2).normal(size=(5, 9)) + rng(3).normal(size=(60, 9)), 0)
    found = linear_cka([ArrayStream(features_ND=x, rows_at_once=7), ArrayStream(features_ND=y, rows_at_once=7)])
    assert found[0, 1] == found[1, 0] == pytest.approx(dense_debiased_cka(x, y), rel=1e-9)
    np.testing.assert_allclose(np.diag(found), 1)


def test_cka_is_what_pytorch_cka_gives() -> None:
    x = rng(1).normal(size=(300, 40)) + 3
    y = np.maximum(x @ rng(2).normal(size=(40, 64)) + 5 * rng(3).normal(size=(300, 64)), 0)
    matrices = [x, y, x[:, :7] ** 2, rng(4).normal(size=(300, 500))]
    found = linear_cka([ArrayStream(features_ND=matrix, rows_at_once=70) for matrix in matrices])
    tensors = [torch.from_numpy(matrix) for matrix in matrices]
    expected = np.array([[float(cka_from_features(first, second)) for second in tensors] for first in tensors])
    # What is negative is 0 there.
    np.testing.assert_allclose(np.maximum(found, 0), expected, rtol=1e-10, atol=1e-13)
    assert 0.2 < found[1, 2] < found[0, 1] < 0.5


def test_cka_refuses_streams_of_different_samples() -> None:
    with pytest.raises(ValueError, match="the same samples"):
        linear_cka([ArrayStream(features_ND=np.ones((5, 2))), ArrayStream(features_ND=np.ones((6, 2)))])


@pytest.mark.parametrize("num", range(1, 9))
def test_best_mapping_is_that_of_brute_force(num: int) -> None:
    orders = np.array(list(permutations(range(num))))
    # A few values, so that many mappings are as good as others; and fewer clusters than classes.
    for highest, clusters in ((50, num), (2, num), (50, max(1, num - 2))):
        counts = rng(10 * num + highest).integers(0, highest, size=(clusters, num))
        best = counts[np.arange(clusters), orders[:, :clusters]].sum(axis=1).max()
        mapping, right = best_mapping(counts)
        assert right == best == counts[np.arange(clusters), mapping].sum()
        assert len(set(mapping.tolist())) == clusters


def test_fine_structure_that_is_there_is_found_and_noise_is_not() -> None:
    ids = np.arange(400) % 4
    centres = rng(1).normal(size=(4, 8)) * 3
    fine = (centres[ids] + rng(2).normal(size=(400, 8))).astype(np.float32)
    collapsed = (centres[ids % 2] + rng(3).normal(size=(400, 8))).astype(np.float32)

    def halves(features: NDArray[np.float32]) -> list[ProbedSamples]:
        parts = (slice(0, 200), slice(200, 400))
        return [ProbedSamples(features_ND=features[p], classes_N=ids[p], trained_N=ids[p] % 2) for p in parts]

    for reduce in ("none", "pca"):
        assert cluster_and_probe(*halves(fine), reduce=reduce, seed=0).accuracy > 0.95
    assert cluster_and_probe(*halves(collapsed), reduce="none", seed=0).accuracy < 0.7
    train, test = halves(fine)
    assert linear_probe(train, test) > 0.95


def probed_noise(part: int, *, num_samples: int = 400, num_classes: int = 32) -> ProbedSamples:
    """Two trained classes that features tell apart, each of ``num_classes / 2`` classes that they do not."""
    ids = np.arange(num_samples) % num_classes
    features = rng(part).normal(size=(num_samples, 6)) + 9 * (ids % 2)[:, None]
    return ProbedSamples(features_ND=features.astype(np.float32), classes_N=ids, trained_N=ids % 2)


def test_chance_of_clusters_is_what_the_best_mapping_finds_in_noise() -> None:
    """One in sixteen is .0625, but the mapping is chosen on the samples that are judged."""
    found = cluster_and_probe(probed_noise(1), probed_noise(2), reduce="none", seed=0)
    assert found.chance > 0.12
    assert found.accuracy == pytest.approx(found.chance, abs=0.02)
    train, test = (replace(noise, classes_N=noise.trained_N) for noise in (probed_noise(1), probed_noise(2)))
    found = cluster_and_probe(
        train, test, reduce="none", seed=0
    )  # predictions are permuted within trained classes alone
    assert found.chance == found.accuracy == 1


def test_probe_of_many_classes_stops_between_the_iterations_of_its_fit() -> None:
    """A fit of thousands of classes takes hours."""
    left = [20]  # of 32

    def tick() -> None:
        left[0] -= 1
        if not left[0]:
            raise PreemptedError("asked to stop")

    with pytest.raises(PreemptedError):
        linear_probe(probed_noise(1), probed_noise(2), tick)


def clp_of(train: ProbedSamples, test: ProbedSamples, **of_subject: Any) -> Findings:
    classes = SampleClasses.of(test.classes_N, [str(number) for number in range(32)])
    subject = AnalyzedFeatures(
        features=ArrayStream(features_ND=test.features_ND),
        classes=classes,
        trained=SampleClasses.of(test.trained_N, "ab"),
        levels={},
        **{"probe_inputs": lambda _: ProbeInputs(train=train, test=test)} | of_subject,
    )
    return measure(subject, "clp", {"reduce": "none", "seeds": [0, 1]})


def test_clp_shows_that_it_goes_on_in_every_fit() -> None:
    train, test = probed_noise(1), probed_noise(2)
    inputs = ProbeInputs(train=train, test=test, raw_train=test, raw_test=train)

    def ticks_of(fit: Callable[[Callable[[], None]], object]) -> int:
        ticks: list[int] = []
        fit(lambda: ticks.append(1))
        return len(ticks)

    expected = 0
    for parts in ((train, test), (test, train)):
        expected += ticks_of(lambda tick: linear_probe(*parts, tick))  # noqa: B023 - called within the iteration
        for seed in (0, 1):
            expected += ticks_of(lambda tick: cluster_and_probe(*parts, reduce="none", seed=seed, tick=tick))  # noqa: B023
    assert ticks_of(lambda tick: clp_of(train, test, probe_inputs=lambda _: inputs, tick=tick)) == expected > 100


def test_probe_of_classes_without_training_samples_says_what_it_cannot_exceed() -> None:
    train, test = probed_noise(1, num_samples=24), probed_noise(2, num_samples=64)
    found = clp_of(train, test)
    (note,) = found.notes
    assert "the median class has 1 training samples, and 25.0 % of the test samples are of classes without any" in note
    assert "lpo_accuracy is at most 75.0 %; raise `samples`" in note
    assert found.metrics["lpo_accuracy"] <= 0.75
    enough = clp_of(probed_noise(1, num_samples=640), test)
    assert enough.notes == ()
    assert {"clp_accuracy", "clp_chance_accuracy", "clp_std", "lpo_accuracy"} == enough.metrics.keys()


def test_ranks_of_flat_and_single_spectra() -> None:
    flat = np.linalg.qr(rng(1).normal(size=(50, 6)))[0]
    found = feature_ranks(ArrayStream(features_ND=flat, rows_at_once=9))
    assert found is not None
    assert found.rankme == pytest.approx(6, rel=1e-4)
    assert found.stable == pytest.approx(6)
    single = feature_ranks(ArrayStream(features_ND=np.outer(np.arange(1, 9), [1.0, 2.0, 3.0])))
    assert single is not None
    assert single.rankme == pytest.approx(1, rel=1e-4)
    assert single.stable == pytest.approx(1)
    assert feature_ranks(ArrayStream(features_ND=np.zeros((3, 2)))) is None


def test_purity_finds_the_units_of_a_level_and_leaves_out_silent_ones() -> None:
    ids = np.tile(np.arange(4), 50)
    features = np.concatenate([(ids[:, None] == np.arange(4)).astype(float), np.zeros((200, 1))], axis=1)
    features[:, :4] += 0.1 * rng(1).random((200, 4))
    top = top_samples(ArrayStream(features_ND=features, rows_at_once=33), 20)
    assert top.shape == (20, 4)
    assert (ids[top] == np.arange(4)).all()
    found = purities(top, {"class": ids, "half": ids // 2, "noise": rng(2).integers(0, 4, 200)})
    assert found["class"].mean == found["half"].mean == 1
    assert found["class"].above_chance == pytest.approx(1 - found["class"].chance)
    assert 0.3 < found["class"].chance < 0.45  # of 20 random samples the commonest of 4 classes
    assert abs(found["noise"].above_chance) < 0.1


def test_purity_of_all_samples_is_no_more_than_chance() -> None:
    ids = np.repeat(np.arange(4), [1, 2, 3, 14])
    assert purities(np.arange(20)[:, None], {"class": ids})["class"].above_chance == 0


def test_purity_of_many_groups_draws_a_few_sets_at_a_time_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    top = rng(1).integers(0, 300, size=(20, 4))
    ids = {"class": rng(2).integers(0, 150, 300), "half": rng(3).integers(0, 2, 300)}
    at_once = purities(top, ids)
    monkeypatch.setattr(units, "_NUMBERS_AT_ONCE", 7 * 150)
    assert purities(top, ids) == at_once


def test_purity_of_classes_of_one_sample_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 sets of a million classes took 8 GB."""
    monkeypatch.setattr(units, "_RANDOM_SETS", 0)
    found = purities(np.arange(40).reshape(20, 2), {"class": np.arange(10**6)})["class"]
    assert found.chance == found.mean == 1 / 20


def test_fine_structure_of_noise_depends_on_the_seed_of_tsne() -> None:
    noise = [
        ProbedSamples(
            features_ND=rng(part).normal(size=(60, 6)).astype(np.float32),
            classes_N=np.arange(60) % 3,
            trained_N=np.zeros(60, np.int64),
        )
        for part in (1, 2)
    ]
    with threadpool_limits(limits=1):  # as in a job of one thread; more of them wait for each other most of the time
        found = [cluster_and_probe(noise[0], noise[1], reduce="tsne", seed=seed).accuracy for seed in (0, 0, 1, 2)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_sparsity_counts_activations_above_zero() -> None:
    found = sparsity(ArrayStream(features_ND=np.array([[1.0, 0.0, -1.0], [2.0, 0.0, 3.0]]), rows_at_once=1))
    assert found.active == pytest.approx(0.5)
    assert found.dead == pytest.approx(1 / 3)


def test_activity_by_layer_counts_what_is_above_zero_behind_each_call() -> None:
    shared, linear = nn.ReLU(), nn.Linear(2, 2, bias=False)
    network = nn.Sequential(nn.Identity(), shared, linear, nn.GELU(), shared, nn.Sigmoid())
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    with ActivityCounter(network) as counter:
        for batch in ([[1.0, 2.0], [-1.0, 3.0]], [[-1.0, -2.0]]):
            network(torch.tensor(batch))
    assert dict(counter.shares) == pytest.approx({"1": 3 / 6, "3": 1 / 6, "1:2": 1 / 6})
    assert list(counter.shares) == ["1", "3", "1:2"]
    network(torch.ones(1, 2))
    assert counter.shares["1"] == pytest.approx(3 / 6)  # nothing is counted once it is left


def test_activity_of_a_pass_that_does_not_fit_into_memory_is_that_of_its_halves() -> None:
    class Narrow(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if len(inputs) > 2 or (len(inputs) > 1 and not inputs[:, 0].any()):  # the second half, too
                raise torch.OutOfMemoryError("out of memory")
            return inputs

    samples = torch.tensor([[1.0, 2.0], [1.0, 3.0], [-1.0, 3.0], [-1.0, 4.0]])
    network = nn.Sequential(nn.ReLU(), Narrow(), nn.ReLU())
    with ActivityCounter(network) as counter:
        assert torch.equal(FrozenForward()(network, samples), samples.relu())
    assert counter.shares == {"0": 6 / 8, "2": 6 / 8}


def test_sparsity_of_a_network_without_activation_modules_says_so() -> None:
    subject = replace(subject_of_blobs(), layer_activity=lambda _: {})
    found = measure(subject, "sparsity", {"samples": 5})
    assert "cannot be told apart" in found.notes[0]
    assert "layers" not in found.pictures


def subject_of_blobs() -> AnalyzedFeatures:
    features, classes, groups_C = blobs()
    trained = SampleClasses.of(groups_C[classes.ids_N], ["x", "y", "z"])
    return AnalyzedFeatures(
        features=ArrayStream(features_ND=features), classes=classes, trained=trained, levels={"group": groups_C}
    )


def test_measures_of_the_registry_name_what_they_found() -> None:
    subject = subject_of_blobs()
    collapse = measure(subject, "collapse", {}).metrics
    assert set(collapse) == {"nc1", "nc2", "cdnv", "original_nc1", "original_nc2", "original_cdnv"}
    distances = measure(subject, "distances", {"levels": None})
    names = {"distance_self", "distance_same", "distance_other", "msdr", "distance_root", "distance_group"}
    assert set(distances.metrics) == names
    assert distances.metrics["distance_self"] < distances.metrics["distance_same"] < distances.metrics["distance_other"]
    assert distances.arrays["distances"].shape == (6, 6)
    assert distances.pictures["distances"]["names"] == list("abcdef")


TOP_C = np.array([0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("name", "parameters", "taken", "metrics"),
    [
        ("distances", {"levels": None}, ("root", "same"), ("distance_level_root", "distance_level_same")),
        ("purity", {"top": 5}, ("trained", "units"), ("purity_level_trained", "purity_level_units")),
    ],
)
def test_levels_that_are_called_like_other_metrics_have_metrics_of_their_own(
    name: str, parameters: dict[str, Any], taken: tuple[str, str], metrics: tuple[str, str]
) -> None:
    subject = subject_of_blobs()

    def found(*levels: str) -> dict[str, float]:
        groups = dict(zip(levels, (TOP_C, subject.levels["group"]), strict=True))
        return dict(measure(replace(subject, levels=groups), name, parameters).metrics)

    plain, of_taken = found("coarse", "fine"), found(*taken)
    prefix = metrics[0].partition("_")[0]
    values = [of_taken.pop(metric) for metric in metrics]
    assert values == [plain.pop(f"{prefix}_{level}") for level in ("coarse", "fine")]
    assert of_taken == plain


@pytest.mark.parametrize(
    ("trained", "why"),
    [
        (None, "it is not so that all samples of a class have the same trained class"),
        (list("abcdef"), "no trained class holds two of the classes, or one holds all of them"),
    ],
)
def test_distances_that_follow_from_no_trained_class_are_told(trained: list[str] | None, why: str) -> None:
    subject = subject_of_blobs()
    assert measure(subject, "distances", {"levels": None}).notes == ()
    classes = SampleClasses.of(subject.classes.ids_N, trained) if trained else None
    missing = ("distance_same", "msdr") if trained else ("distance_same", "distance_other", "msdr")
    found = measure(replace(subject, trained=classes), "distances", {"levels": None})
    assert found.notes == tuple(f"{name}: {why}" for name in missing)
    assert found.metrics.keys().isdisjoint(missing)


def test_levels_that_do_not_lie_in_one_another_are_told() -> None:
    subject = subject_of_blobs()
    levels = {"top": TOP_C, "group": subject.levels["group"], "odd": np.arange(6) % 2}
    assert geometry.unnested(levels) == [("group", "odd")]
    (note,) = measure(replace(subject, levels=levels), "distances", {"levels": None}).notes
    assert "classes that share 'odd' and not 'group' count as sharing what comes before" in note
    assert not measure(replace(subject, levels=levels), "distances", {"levels": ["top", "group"]}).notes


def test_measures_where_a_class_has_several_trained_classes_leave_out_what_is_not_defined() -> None:
    features, classes, _ = blobs()
    split = SampleClasses.of(classes.ids_N * 2 + np.arange(len(features)) % 2, [str(n) for n in range(12)])
    subject = AnalyzedFeatures(features=ArrayStream(features_ND=features), classes=classes, trained=split, levels={})
    assert "msdr" not in measure(subject, "distances", {"levels": None}).metrics
    assert measure(subject, "clp", {}).notes


@pytest.mark.parametrize(
    "error",
    [PreemptedError("asked to stop"), CorruptObjectError("features.bin differs"), OSError(5, "EIO"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_what_a_measure_of_another_package_meets_and_is_not_its_fault_stays_what_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while it reads features made the analysis fail for good."""
    with pytest.raises(type(error)):
        found_by(lambda *_: (_ for _ in ()).throw(error), monkeypatch)
    with pytest.raises(UserError, match=r"the measure pkg==1:mine failed: ZeroDivisionError"):
        found_by(lambda *_: {"mean": 1 / 0}, monkeypatch)


def found_by(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Mapping[str, float]:
    monkeypatch.setattr(plugin_arguments, "load_plugin", lambda *_: function)
    return measure(subject_of_blobs(), "plugin", {"name": "pkg==1:mine", "arguments": {}}).metrics


def test_measure_of_another_package_may_give_any_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float16(2), "d": 1, "e": Fraction(1, 4)}
    found = found_by(lambda *_: numbers, monkeypatch)
    assert found == {"mine_a": 0.5, "mine_b": 3, "mine_c": 2, "mine_d": 1, "mine_e": 0.25}
    assert {type(value) for value in found.values()} == {float}
    for wrong in (np.complex64(1), np.float32("inf"), "1", np.ones(2), 10**400):
        with pytest.raises(UserError, match="the measure pkg==1:mine "):
            found_by(lambda *_, wrong=wrong: {"a": wrong}, monkeypatch)


def test_measure_of_another_package_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="comes from no-such-package"):
        measure(subject_of_blobs(), "plugin", {"name": "no-such-package==1:mine", "arguments": {}})
