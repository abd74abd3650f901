"""Plug-ins: what an identity says of one, also of a package whose sources change, and how their arguments are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import LABEL_SPACES, OBJECTIVES, InstalledPlugins, load_plugin
from workloads.data.augment import Augmenter, AugmentSpec
from workloads.runtime import plugin_arguments
from workloads.runtime.plugin_arguments import PluginArgumentsError, open_plugin
from workloads.runtime.streams import Stage


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as pip leaves it; ``direct_url.json`` makes it an editable one."""
    (tmp_path / "changing").mkdir()
    (tmp_path / "changing" / "__init__.py").write_text("def value():\n    return 1\n")
    folder = tmp_path / "changing-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: changing\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text(f"[{OBJECTIVES}]\nvalue = changing:value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "changing", raising=False)
    return tmp_path


def planned() -> str:
    return InstalledPlugins(OBJECTIVES)["value"]


def make_editable(package: Path) -> None:
    told = {"url": package.as_uri(), "dir_info": {"editable": True}}
    (package / "changing-1.5.dist-info" / "direct_url.json").write_text(json.dumps(told))


def test_plugin_of_an_ordinary_installation_is_its_version_whatever_its_sources(package: Path) -> None:
    assert planned() == "changing==1.5:value"
    (package / "changing" / "more.py").write_text("")
    assert planned() == "changing==1.5:value"
    told = {"url": package.as_uri(), "dir_info": {}}
    (package / "changing-1.5.dist-info" / "direct_url.json").write_text(json.dumps(told))
    assert planned() == "changing==1.5:value"


def test_plugin_of_an_editable_installation_has_the_digest_of_its_sources(package: Path) -> None:
    make_editable(package)
    first = planned()
    assert first.startswith("changing==1.5+src.")
    assert load_plugin(first, OBJECTIVES)() == 1
    assert planned() == first, "what Python compiled does not count"
    (package / "changing" / "__init__.py").write_text("def value():\n    return 1_000\n")
    second = planned()
    assert second != first
    with pytest.raises(UserError, match=r"was planned with changing 1\.5\+src\..*; 1\.5\+src\..* is installed here"):
        load_plugin(first, OBJECTIVES)
    assert load_plugin(second, OBJECTIVES)() == 1_000, "a warm process runs the sources that were planned"
    (package / "changing" / "data.json").write_text("{}")
    assert planned() not in {first, second}


class Size(BaseModel):
    side: int = Field(ge=1)
    shares: list[float] = Field(default_factory=list)


def open_with(function: Callable[..., Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plugin_arguments, "load_plugin", lambda *_: function)
    return open_plugin("pkg==1:it", OBJECTIVES, arguments)[1]


def with_model(arguments: Size) -> None: ...


class Rate(BaseModel):
    rate: float = Field(0.1, alias="lr")


def with_alias(arguments: Rate) -> None: ...


def with_mapping(arguments: dict[str, Any]) -> None: ...


def without() -> None: ...


def test_arguments_of_a_label_rule_are_its_second_argument_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(classes: list[dict[str, Any]], options: Size) -> None: ...

    monkeypatch.setattr(plugin_arguments, "load_plugin", lambda *_: rule)
    monkeypatch.setattr(plugin_arguments, "get_type_hints", lambda _: {"options": Size})
    assert open_plugin("pkg==1:it", LABEL_SPACES, {"side": 2})[1] == Size(side=2)
    with pytest.raises(PluginArgumentsError, match="it has no parameters"):
        open_plugin("pkg==1:it", OBJECTIVES, {"side": 2})


def test_arguments_are_read_by_the_type_that_the_plugin_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_with(with_model, {"side": 3}, monkeypatch) == Size(side=3)
    assert open_with(with_mapping, {"x": [1]}, monkeypatch) == {"x": [1]}
    assert open_with(without, {}, monkeypatch) == {}


@pytest.mark.parametrize(
    ("function", "arguments", "problems"),
    [
        (with_model, {}, [((), "'side' is missing; add 'side: ...' here")]),
        (with_model, {"side": 0}, [(("side",), "0 is refused: it must be at least 1")]),
        (with_model, {"side": 1, "shares": [0.5, "x"]}, [(("shares", 1), "'x' is refused: it must be a number")]),
        (
            with_model,
            {"side": 1, "sid": 2},
            [(("sid",), "there is no parameter 'sid': did you mean 'side'? known: side")],
        ),
        (with_alias, {"rate": 0.3}, [(("rate",), "there is no parameter 'rate': known: lr")]),
        (without, {"x": 1}, [((), "it has no parameters; remove them")]),
    ],
)
def test_wrong_arguments_are_told_with_their_path(
    function: Callable[..., Any], arguments: dict[str, Any], problems: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginArgumentsError) as caught:
        open_with(function, arguments, monkeypatch)
    assert [(path, why.partition(",")[0]) for path, why in caught.value.problems] == [
        (path, why.partition(",")[0]) for path, why in problems
    ]


def test_augmentation_of_a_package_draws_by_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise() -> Callable[[np.ndarray[Any, Any], np.random.Generator], np.ndarray[Any, Any]]:
        return lambda image, random: random.integers(0, 256, image.shape).astype(np.uint8)

    monkeypatch.setattr(plugin_arguments, "load_plugin", lambda *_: noise)
    augmenter = Augmenter(AugmentSpec(plugin="pkg==1:noise"), seed=0, stage=Stage.PRETRAIN)
    whole, part = np.zeros((6, 4, 4, 3), np.uint8), np.zeros((2, 4, 4, 3), np.uint8)
    augmenter.change(whole, 10)
    augmenter.change(part, 13)
    assert (whole[3:5] == part).all()
    assert len({image.tobytes() for image in whole}) == len(whole)
    monkeypatch.setattr(plugin_arguments, "load_plugin", lambda *_: lambda: lambda image, _: image[:2])
    with pytest.raises(UserError, match=r"gave uint8 \[2, 4, 3\] in place of an image uint8 \[4, 4, 3\]"):
        Augmenter(AugmentSpec(plugin="pkg==1:cut"), seed=0, stage=Stage.PRETRAIN).change(part, 0)
