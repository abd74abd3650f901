"""The declared role of every field of data sets; see ``tests/sweep_fields.py``."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sweep_change_forms import identity, runs, shares
from tests.sweep_fields import Change

_PHOTOS = "datasets.photos"


def _tree(field: str, value: str) -> Change:
    return identity(f"datasets.tree.{field}={value}", of="dataset")


DATASETS: Mapping[str, Change] = {
    "SyntheticHierarchy.builtin": identity("datasets.tree.builtin=synthetic-hierarchy", of=""),  # there is no other one
    "SyntheticHierarchy.branching": _tree("branching", "[2, 8]"),
    "SyntheticHierarchy.num_train": _tree("num_train", "600"),
    "SyntheticHierarchy.num_val": _tree("num_val", "300"),
    "SyntheticHierarchy.image_size": _tree("image_size", "64"),
    "SyntheticHierarchy.patch_size": _tree("patch_size", "4"),
    "SyntheticHierarchy.hard_fraction": _tree("hard_fraction", "0.4"),
    "SyntheticHierarchy.noise": _tree("noise", "0.9"),
    "SyntheticHierarchy.feature_amplitude": _tree("feature_amplitude", "1.1"),
    "SyntheticHierarchy.amplitude_jitter": _tree("amplitude_jitter", "0.1"),
    "SyntheticHierarchy.weak_amplitude": _tree("weak_amplitude", "0.1"),
    "SyntheticHierarchy.num_weak_features": _tree("num_weak_features", "1"),
    "SyntheticHierarchy.num_common_patches": _tree("num_common_patches", "5"),
    "SyntheticHierarchy.num_subclass_patches": _tree("num_subclass_patches", "2"),
    "SyntheticHierarchy.seed": _tree("seed", "1"),
    "SyntheticHierarchy.jobs": shares("datasets.tree.jobs=3"),
    "Digits.jobs": shares("datasets.scans.jobs=2"),
    # Which images a source holds is in its listing, which the survey has; how it was found changes nothing.
    "ConversionSpec.format": identity("datasets.told.convert.format=parquet", of="dataset"),
    "ConversionSpec.source": runs("datasets.told.convert.source=/elsewhere"),
    "ConversionSpec.splits": runs("datasets.told.convert.splits={train: a.csv}"),
    "ConversionSpec.val_fraction": runs("datasets.told.convert.val_fraction=0.1"),
    "ConversionSpec.listing": runs(
        f"datasets.told.convert.listing={'e' * 64}",
        given=tuple(
            f"datasets.told.{one}" for one in ("num_train=512", "num_val=256", "num_classes=4", "levels={a: 2}")
        ),
    ),
    "ConversionSpec.labels": runs("datasets.synsets.convert.labels=/labels.csv"),
    "ConversionSpec.path_column": runs("datasets.told.convert.path_column=file"),
    "ConversionSpec.label_column": runs("datasets.told.convert.label_column=tags"),
    "ConversionSpec.separator": runs("datasets.told.convert.separator=;"),
    "ConversionSpec.level_columns": runs("datasets.told.convert.level_columns=[a]"),
    "ConversionSpec.follow_links": runs("datasets.told.convert.follow_links=true"),
    "ConversionSpec.root": runs("datasets.told.convert.root=/photos"),
    "ConversionSpec.seed": identity("datasets.told.convert.seed=1", of="dataset"),
    "ConversionSpec.shard_mib": identity("datasets.told.convert.shard_mib=64", of="dataset"),
    "ConversionSpec.shuffle": identity("datasets.told.convert.shuffle=false", of="dataset"),
    "ConvertedShards.convert": identity("datasets.told.convert.seed=2", of="dataset"),
    "ConvertedShards.jobs": shares("datasets.told.jobs=3"),
    "ConvertedShards.num_train": runs("datasets.told.num_train=512"),
    "ConvertedShards.num_val": runs("datasets.told.num_val=256"),
    "ConvertedShards.num_classes": runs("datasets.told.num_classes=4"),
    "ConvertedShards.levels": runs("datasets.told.levels={a: 2}"),
    "ConvertedShards.multi_label": runs("datasets.told.multi_label=false"),
    "ConvertedShards.bad_samples": identity("datasets.told.bad_samples.policy=replace", of="index"),
    "Digits.builtin": identity("datasets.scans.builtin=digits", of=""),  # there is no other one
    "Digits.val_fraction": identity("datasets.scans.val_fraction=0.3", of="dataset"),
    "Digits.seed": identity("datasets.scans.seed=1", of="dataset"),
    "BadSamplesSpec.policy": identity(f"{_PHOTOS}.bad_samples.policy=replace", of="index"),
    "BadSamplesSpec.budget": identity(
        f"{_PHOTOS}.bad_samples.budget=0.2", of="index", given=(f"{_PHOTOS}.bad_samples.policy=replace",)
    ),
    "ExternalShards.from": runs("datasets.described.from=file:///elsewhere"),
    "ExternalShards.shards": runs(f"{_PHOTOS}.shards.train=file:///elsewhere/"),
    "ExternalShards.classes": runs(f"{_PHOTOS}.classes=file:///elsewhere.json"),
    "ExternalShards.num_train": runs(f"{_PHOTOS}.num_train=513"),
    "ExternalShards.num_val": runs(f"{_PHOTOS}.num_val=100"),
    "ExternalShards.num_classes": identity("datasets.counted.num_classes=5", of="index"),
    "ExternalShards.levels": runs(f"{_PHOTOS}.levels={{a: 2}}"),
    "ExternalShards.multi_label": identity(
        f"{_PHOTOS}.multi_label=true", of="index", given=("pretrain.first.recipe.loss=sigmoid",)
    ),
    "ExternalShards.digest": identity(f"{_PHOTOS}.digest={'e' * 64}", of="index"),
    "ExternalShards.bad_samples": identity(f"{_PHOTOS}.bad_samples.policy=replace", of="index"),
    "MixtureSpec.mixture": identity("datasets.both.mixture=[described, photos]", of=""),
    "MixtureSpec.weights": identity("datasets.both.weights=[1, 3]", of="index"),
}
