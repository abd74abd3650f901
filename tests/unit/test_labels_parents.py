"""Parents of classes: which levels lie above a label space, what its artifact says of them, and what training reads."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract import ExecutionContext, JobKind
from orchestrator.storage.artifacts import ArtifactWriter, read_part
from tests.data_jobs import TREE, DataPlane
from tests.tiny_training import RECIPE
from tests.unit.test_wordnet import NET, OAK, PLANT, THING, TOOL, TREE as TREE_SYNSET
from workloads.data.arrays import from_npy_bytes
from workloads.data.index import SampleIndex
from workloads.labels.label_map import ClassLabels, LabelMap
from workloads.labels.parents import CoarserLevel, find_parents, read_parents, write_parents
from workloads.labels.setting import Setting
from workloads.labels.spaces import make_label_map
from workloads.train.levels import eval_levels
from workloads.train.recipe import Recipe
from workloads.train.samples import LabelledSamples

DEPTHS = ("depth1", "depth2", "depth3")
FOLDERS = {"folders": ["root", "top", "middle", "leaf"], "separator": "-"}
SYNSETS = [
    {"class": number, "name": synset, "synset": synset, "kind": kind}
    for number, (synset, kind) in enumerate(zip([OAK, PLANT, TOOL, TREE_SYNSET], "aabb", strict=True))
]


def nouns(level: int, paths: str = "all", **modifiers: Any) -> dict[str, Any]:
    return {"wordnet": {"level": level, "paths": paths, "key": "synset", "digest": ""}, **modifiers}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    (tmp_path / "data.noun").write_text(NET)
    return Setting(classes=SYNSETS, num_train=0, files={"wordnet": str(tmp_path)})


def levels_of(space: dict[str, Any], setting: Setting) -> dict[str, CoarserLevel]:
    label_map = make_label_map(space, setting.classes, num_train=0, files=setting.files)
    return {level.name: level for level in find_parents(label_map, space, setting)}


def named(space: dict[str, Any], setting: Setting) -> dict[str, dict[str, set[str]]]:
    """Level -> class -> its parents, by name."""
    label_map = make_label_map(space, setting.classes, num_train=0, files=setting.files)
    return {
        level.name: {
            name: {level.class_names[node] for node in row if node >= 0}
            for name, row in zip(label_map.class_names, level.parents_KP.tolist(), strict=True)
        }
        for level in find_parents(label_map, space, setting)
    }


def test_parents_of_synsets_are_all_that_a_step_upwards_leads_to(setting: Setting) -> None:
    found = named(nouns(0), setting)
    assert found["wordnet1"] == {OAK: {TREE_SYNSET}, PLANT: {THING}, TOOL: {THING}, TREE_SYNSET: {PLANT, TOOL}}
    assert "wordnet9" not in found  # a single class is left
    # Leaf classes have several targets there; each target has parents of its own.
    rows = [*SYNSETS, {"class": 4, "name": "n00000007", "synset": "n00000007"}]
    wider = Setting(classes=rows, num_train=0, files=setting.files)
    above = named(nouns(1), wider)["wordnet2"]
    assert above[TREE_SYNSET] == {PLANT, TOOL}
    assert above[PLANT] == above[TOOL] == {THING}
    assert above["n00000007"] == {"n00000007"}


@pytest.mark.parametrize("paths", ["all", "first", "random"])
@pytest.mark.parametrize("modifiers", [{}, {"classes": {"names": [1, 2, 3]}}], ids=["whole", "part"])
@pytest.mark.parametrize(("fine", "coarse"), [(0, 1), (1, 2), (0, 2)])
def test_parents_between_levels_have_the_ids_of_the_coarser_space(
    setting: Setting, paths: str, modifiers: dict[str, Any], fine: int, coarse: int
) -> None:
    rows = [*SYNSETS, {"class": 4, "name": "n00000007", "synset": "n00000007"}]
    setting = Setting(classes=rows, num_train=0, files=setting.files)
    below, above = (
        make_label_map(nouns(level, paths, **modifiers), rows, num_train=0, files=setting.files)
        for level in (fine, coarse)
    ) if not (modifiers and coarse == 2) else (None, None)
    if below is None:  # the part has a single class at that level: there is no such space
        assert "wordnet2" not in levels_of(nouns(0, paths, **modifiers), setting) or paths == "all"
        return
    assert isinstance(below, ClassLabels)
    assert isinstance(above, ClassLabels)
    level = levels_of(nouns(fine, paths, **modifiers), setting).get(f"wordnet{coarse}")
    if above.num_classes >= below.num_classes:
        assert level is None
        return
    assert level is not None
    assert level.class_names == above.class_names
    for targets, expected in zip(below.table_CM.tolist(), above.table_CM.tolist(), strict=True):
        folded = {node for target in targets if target >= 0 for node in level.parents_KP[target].tolist() if node >= 0}
        assert folded == {node for node in expected if node >= 0}
