"""The built-in dataset ``synthetic-hierarchy``: what its pictures show, and that it is always the same one."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestrator.sweepfile.datasets import SyntheticHierarchy
from orchestrator.sweepfile.fields import MAX_INTEGER
from workloads.data.synthetic import (
    _FLOAT_RANGES,
    _INTEGER_RANGES,
    BLOCK_SIZE,
    SyntheticParameters,
    SyntheticSample,
    class_table,
    feature_dictionary,
    feature_rows,
    render_split,
)

TREE = SyntheticParameters(branching=(2, 3, 4), num_train=600, num_val=480, num_subclass_patches=2)
CLEAN = replace(TREE, noise=0.0)  # without pixel noise a projection reads a patch's amplitudes off exactly
PIXELS = [[[140, 131, 108], [118, 163, 172]], [[69, 197, 140], [76, 81, 195]]]


def _responses(params: SyntheticParameters, sample: SyntheticSample) -> NDArray[np.float64]:
    """Amplitudes [num_patches, num_features] of every feature in every patch, as multiples of a full one."""
    size, side = params.patch_size, params.image_size // params.patch_size
    values = (sample.image_HWC.astype(np.float64) / 127.5 - 1) * params.pixel_limit
    patches = values.reshape(side, size, side, size, 3).swapaxes(1, 2).reshape(side * side, -1)
    full = np.sqrt(params.patch_length) * params.feature_amplitude
    responses: NDArray[np.float64] = patches @ feature_dictionary(params).T / full
    return responses


def _shown(params: SyntheticParameters, sample: SyntheticSample) -> Counter[int]:
    """How many patches show each feature at (nearly) full strength."""
    strong = _responses(params, sample) > np.sqrt(1 - params.amplitude_jitter) - 0.1
    return Counter({row: int(count) for row, count in enumerate(strong.sum(axis=0)) if count})


def _path_rows(params: SyntheticParameters, sample: SyntheticSample) -> list[int]:
    return [int(row) for row in feature_rows(params, np.array([sample.leaf]))[0]]


def _subset(params: SyntheticParameters, subset: str) -> list[SyntheticSample]:
    return [sample for sample in render_split(params, "val") if sample.subset == subset]


def _same(left: SyntheticSample, right: SyntheticSample) -> bool:
    is_same_image = np.array_equal(left.image_HWC, right.image_HWC)
    return is_same_image and (left.key, left.leaf, left.subset, left.metadata) == (
        (right.key, right.leaf, right.subset, right.metadata)
    )


def test_render_twice_gives_the_same_samples() -> None:
    pairs = zip(render_split(TREE, "train"), render_split(TREE, "train"), strict=True)
    assert all(_same(*pair) for pair in pairs)


@pytest.mark.parametrize("split", ["train", "val"])
def test_render_larger_dataset_starts_with_the_smaller(split: str) -> None:
    larger = replace(TREE, num_train=BLOCK_SIZE + 100, num_val=BLOCK_SIZE + 100)
    smaller = replace(TREE, num_train=BLOCK_SIZE + 7, num_val=BLOCK_SIZE + 7)
    left, right = render_split(larger, split), render_split(smaller, split)  # type: ignore[arg-type]
    pairs = list(zip(left, right, strict=False))
    assert len(pairs) == BLOCK_SIZE + 7
    assert all(_same(*pair) for pair in pairs)


def test_render_other_seed_or_split_shares_no_image() -> None:
    normal_only = replace(TREE, hard_fraction=0.0, num_train=300, num_val=300)
    runs = [
        list(render_split(normal_only, "train")),
        list(render_split(normal_only, "val")),
        list(render_split(replace(normal_only, seed=1), "train")),
    ]
    assert len({sample.image_HWC.tobytes() for samples in runs for sample in samples}) == 900
    assert len({tuple(sample.leaf for sample in samples) for samples in runs}) == 3


def test_render_known_parameters_keep_their_pixels() -> None:
    """Fails when the pictures change: then bump ``VERSION`` and write down the new numbers."""
    first = next(render_split(SyntheticParameters(), "train"))
    assert (first.key, first.leaf) == ("train-00000000", 42)
    assert first.image_HWC[:2, :2].tolist() == PIXELS


def test_render_leaves_are_balanced_and_mixed() -> None:
    leaves = [sample.leaf for sample in render_split(TREE, "train")]
    assert set(Counter(leaves).values()) == {600 // 24}
    assert all(len(set(leaves[start : start + 24])) == 24 for start in range(0, 600, 24))
    assert leaves[:24] != sorted(leaves[:24])
    assert leaves[:24] != leaves[24:48]


def test_render_number_not_divisible_by_leaves_differs_by_one() -> None:
    counts = Counter(sample.leaf for sample in render_split(replace(TREE, num_train=613), "train"))
    assert (min(counts.values()), max(counts.values()), sum(counts.values())) == (25, 26, 613)


@pytest.mark.parametrize(("fraction", "counts"), [(0.0, {0}), (0.3, {6}), (0.5, {10}), (1.0, {20})])
def test_hard_samples_of_every_leaf_make_up_their_fraction_of_val(fraction: float, counts: set[int]) -> None:
    params = replace(TREE, hard_fraction=fraction)
    hard = Counter(sample.leaf for sample in _subset(params, "hard"))
    assert {hard[leaf] for leaf in range(params.num_leaves)} == counts


def test_hard_samples_are_spread_evenly_over_the_split() -> None:
    is_hard = [sample.subset == "hard" for sample in render_split(TREE, "val")]
    assert {sum(is_hard[start : start + 24]) for start in range(0, 480, 24)} == {12}


def test_hard_samples_never_occur_in_train() -> None:
    params = replace(TREE, hard_fraction=1.0)
    assert {sample.subset for sample in render_split(params, "train")} == {"normal"}


def test_normal_sample_shows_the_features_of_its_path_and_no_others() -> None:
    for sample in _subset(CLEAN, "normal"):
        common, *finer = _path_rows(CLEAN, sample)
        assert _shown(CLEAN, sample) == {common: CLEAN.num_common_patches, **dict.fromkeys(finer, 2)}


def test_hard_sample_lacks_the_common_feature_and_keeps_the_finer_ones() -> None:
    for sample in _subset(CLEAN, "hard"):
        common, *finer = _path_rows(CLEAN, sample)
        assert _shown(CLEAN, sample) == dict.fromkeys(finer, 2)
        assert np.abs(_responses(CLEAN, sample)[:, common]).max() < 0.05


def test_feature_noise_is_weak_and_comes_from_other_superclasses() -> None:
    per_superclass = CLEAN.num_features // 2
    for sample in _subset(CLEAN, "hard")[:50]:
        responses = _responses(CLEAN, sample)
        noise = responses[responses.max(axis=1) < 0.7]
        superclass = sample.leaf // (CLEAN.num_leaves // 2)
        own = noise[:, superclass * per_superclass : (superclass + 1) * per_superclass]
        assert np.abs(own).max() < 0.05
        assert 0.1 < noise.max() <= CLEAN.num_weak_features * CLEAN.weak_amplitude + 0.05


def test_patches_of_one_class_lie_at_other_places_in_other_samples() -> None:
    samples = [sample for sample in render_split(CLEAN, "train") if sample.leaf == 0]
    row = _path_rows(CLEAN, samples[0])[0]
    places = {tuple(np.flatnonzero(_responses(CLEAN, sample)[:, row] > 0.7)) for sample in samples}
    assert len(places) > len(samples) // 2


def test_pixels_with_noise_have_the_documented_spread_and_hardly_clip() -> None:
    images = np.stack([sample.image_HWC for sample in render_split(SyntheticParameters(num_train=256), "train")])
    assert images.std() / 127.5 * SyntheticParameters().pixel_limit == pytest.approx(1.2, abs=0.1)
    assert np.isin(images, (0, 255)).mean() < 0.004


def test_dictionary_rows_are_orthonormal_in_patch_space() -> None:
    dictionary = feature_dictionary(SyntheticParameters()).astype(np.float64)
    assert dictionary.shape == (2 + 8 + 32 + 128, 8 * 8 * 3)
    assert np.abs(dictionary @ dictionary.T - np.eye(170)).max() < 1e-5


def test_feature_rows_of_all_leaves_name_every_node_once() -> None:
    rows = feature_rows(SyntheticParameters(), np.arange(128))
    assert [len(set(column)) for column in rows.T.tolist()] == [2, 8, 32, 128]
    assert sorted(set(rows.ravel().tolist())) == list(range(170))


def test_class_table_has_one_row_per_leaf_and_nested_levels() -> None:
    table = class_table(TREE)
    assert [row["class"] for row in table] == list(range(24))
    assert table[23] == {"class": 23, "name": "1.2.3", "depth1": "1", "depth2": "1.2", "depth3": "1.2.3"}
    assert [len({row[f"depth{depth}"] for row in table}) for depth in (1, 2, 3)] == [2, 6, 24]


def test_class_table_rows_share_a_node_iff_their_leaves_share_its_feature() -> None:
    rows = feature_rows(TREE, np.arange(24))
    table = class_table(TREE)
    for column in range(3):
        assert len({(row[f"depth{column + 1}"], int(rows[leaf, column])) for leaf, row in enumerate(table)}) == len(
            set(rows[:, column].tolist())
        )


def test_sample_metadata_names_its_index_class_and_subset() -> None:
    sample = _subset(TREE, "hard")[-1]
    index = int(sample.key.removeprefix("val-"))
    name = class_table(TREE)[sample.leaf]["name"]
    expected = {"index": index, "split": "val", "class": sample.leaf, "name": name, "subset": "hard"}
    assert sample.metadata == expected


def test_from_mapping_plain_values_match_the_constructor() -> None:
    mapping = {"branching": [2, 3, 4], "num_train": 600, "num_val": 480, "num_subclass_patches": 2, "noise": 1}
    assert SyntheticParameters.from_mapping(mapping) == TREE


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({"noise": -1}, ("noise", "-1", "[0.0, 100.0]")),
        ({"noise": float("nan")}, ("noise", "nan", "[0.0, 100.0]")),
        ({"hard_fraction": 1.5}, ("hard_fraction", "1.5", "[0.0, 1.0]")),
        ({"num_train": True}, ("num_train", "True", "[1, 100000000000]")),
        ({"num_train": "many"}, ("num_train", "many", "an integer")),
        ({"num_train": 0}, ("num_train", "0", "[1, 100000000000]")),
        ({"patch_size": 5}, ("patch_size", "5", "divide image_size 32")),
        ({"num_common_patches": 14}, ("num_common_patches", "17", "[1, 16]")),
        ({"branching": "24"}, ("branching", "'24'", "list of integers")),
        ({"branching": [2, 0]}, ("branching", "[2, 0]", ">= 1")),
        ({"branching": [1, 4]}, ("branching", "[1, 4]", "at least 2 superclasses")),
        ({"branching": [4]}, ("branching", "[4]", "two levels")),
        ({"branching": [2, 4, 4, 8]}, ("branching", "298", "192", "at least 10 (now 8)")),
        ({"num_class": 3}, ("num_class", "no such parameter", "num_common_patches")),
    ],
)
def test_from_mapping_bad_value_is_refused_with_field_value_and_range(
    mapping: dict[str, object], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=parts[0]) as caught:
        SyntheticParameters.from_mapping(mapping)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("name", [*_INTEGER_RANGES, *_FLOAT_RANGES])
def test_sweep_file_takes_the_values_that_the_generator_takes_and_no_others(name: str) -> None:
    low, high = {**_INTEGER_RANGES, **_FLOAT_RANGES}[name]
    beyond = 1 if name in _INTEGER_RANGES else 1e-6
    low = max(low, 1) if name == "num_val" else low  # every training is evaluated
    for value in (low, min(high, MAX_INTEGER)):
        SyntheticHierarchy.model_validate({"builtin": "synthetic-hierarchy", name: value})
    for value in (low - beyond, high + beyond):
        with pytest.raises(ValueError, match=name):
            SyntheticHierarchy.model_validate({"builtin": "synthetic-hierarchy", name: value})
