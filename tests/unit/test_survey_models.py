"""Networks are built once for the check of their arguments, however often and with what others a sweep names them.

That a process of the data plane is asked, the how-to pages show, in homes that remember nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.data_plane import MODELS, Question
from orchestrator.sweepfile import survey
from orchestrator.sweepfile.survey import check_models

GOOD = {"name": "test_vit", "image_size": 16, "kwargs": {"patch_size": 4}}
OTHER = {"name": "test_vit", "image_size": 32, "kwargs": {"depth": 2}}
WRONG = {"name": "test_vit", "image_size": 16, "kwargs": {"patchsize": 4}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[Any]]:
    """What is asked, with a cache of its own; whatever spells an argument wrong is refused."""
    requests: list[list[Any]] = []

    def ask(question: Question[Any, Any], request: Mapping[str, Any], **_: object) -> dict[str, Any]:
        assert question is MODELS
        requests.append(list(request["models"]))
        wrong = [number for number, model in enumerate(request["models"]) if "patchsize" in model["kwargs"]]
        return {"problems": [{"model": number, "path": ["kwargs"], "message": "no such"} for number in wrong]}

    monkeypatch.setattr(survey, "ask", ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    new_process()
    return requests


def new_process() -> None:
    survey._ANSWERS.clear()


def test_network_of_many_cells_is_asked_about_once(asked: list[list[Any]]) -> None:
    assert not check_models([GOOD, OTHER, GOOD, GOOD])
    assert asked == [[GOOD, OTHER]]


def test_accepted_networks_are_remembered_each_by_itself(asked: list[list[Any]]) -> None:
    assert not check_models([GOOD])
    new_process()
    assert not check_models([GOOD, GOOD])
    assert not check_models([OTHER, GOOD])
    assert asked == [[GOOD], [OTHER]]
    check_models([{**GOOD, "is_alone": True}])  # which is another question
    assert len(asked) == 3


def test_only_the_newest_accepted_networks_are_remembered(
    asked: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "_MOST_ACCEPTED", 2)
    networks = [{**GOOD, "image_size": size} for size in (16, 32, 64)]
    for age, network in zip((2, 1, 0), networks, strict=True):
        check_models([network])
        file = survey._accepted_model_file(json.dumps(network, sort_keys=True))
        os.utime(file, (1e9 - age, 1e9 - age))
    new_process()
    check_models(networks)
    assert asked[3:] == [[networks[0]]]
    assert len([*file.parent.iterdir()]) == 2


def test_refused_network_is_refused_at_each_of_its_places_and_again(asked: list[list[Any]]) -> None:
    for _ in range(2):
        problems = check_models([WRONG, GOOD, OTHER, WRONG])
        assert [problem["model"] for problem in problems] == [0, 3]
        assert [problem["message"] for problem in problems] == ["no such"] * 2
        new_process()
    assert asked == [[WRONG, GOOD, OTHER], [WRONG]]


def test_refused_network_is_asked_about_once_in_a_process(asked: list[list[Any]]) -> None:
    assert check_models([WRONG, GOOD]) == check_models([WRONG, GOOD])
    assert len(asked) == 1


@pytest.mark.parametrize("trap", ["folder", "link", "loop"])
def test_what_is_no_file_of_ours_accepts_nothing_and_harms_nothing(
    asked: list[list[Any]], tmp_path: Path, trap: str
) -> None:
    file, target = survey._accepted_model_file(json.dumps(GOOD, sort_keys=True)), tmp_path / "elsewhere"
    if trap == "folder":
        file.mkdir(parents=True)
    elif trap == "link":
        file.parent.mkdir(parents=True)
        file.symlink_to(target)
    else:
        file.parent.parent.symlink_to(file.parent.parent)  # looking into it is an error, as in a closed folder
    for _ in range(2):
        assert not check_models([GOOD])
        new_process()
    assert asked == [[GOOD]] * 2
    assert not target.exists()
