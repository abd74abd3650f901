"""What people read when something is refused: what they typed, and the whole message, as files.

``golden/refusals/GROUP.yaml`` holds cases that differ from one sweep by a line, or are lines of a shell:

``sweep``  ``sweep.yaml`` of every case; ``store``: the store of every case, one of ``STORES``
``run``    the line without the name of the program; ``validate sweep.yaml`` where it is left out
``change`` what is replaced in ``sweep.yaml``, once each, and by what
``files``  further files and their text; ``env``: environment variables
``code``   the exit code, 2 where it is left out; ``says``: all of stderr (``HERE``: the folder, ``STORE``: the store,
           ``CHECKOUT``: this checkout)

A changed message is put into place by ``python -m tests.golden_refusals``, and read before it is committed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from orchestrator.core.plugins import LABEL_SPACES, OBJECTIVES
from orchestrator.sweepfile.label_counts import Counted
from orchestrator.sweepfile.survey import table_of
from tests.commands import Ended, run_captured
from tests.scripted_sweep import World, diamond
from workloads.commands.labels import count
from workloads.commands.models import check as check_models
from workloads.commands.simulations import check as check_simulations

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "tests" / "golden" / "refusals"
PLUGINS = {LABEL_SPACES: {"letters": "letters==1.2:letters"}, OBJECTIVES: {"focal": "focal-losses==1.2:focal"}}
"""Installed plug-ins, by their group: those of this machine would stand in messages."""
_FOREIGN = ("ORCHESTRATOR_", "RAY_", "MLFLOW_", "AWS_", "XDG_CONFIG", "GOLDEN_", "DATA", "RATE", "MY_API")
_CALM = {"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that is refused; see above."""

    group: str
    number: int
    says: str = ""
    run: str = "validate sweep.yaml"
    code: int = 2
    sweep: str = ""
    store: str = ""
    change: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.group}-{self.number}"

    def text(self) -> str:
        """Its ``sweep.yaml``."""
        text = self.sweep
        for old, new in self.change.items():
            assert old in text, f"{self}: {old!r} does not stand in its sweep"
            text = text.replace(old, new, 1)
        return text


def read_group(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def cases_of(path: Path) -> list[Case]:
    """The cases of a group."""
    document = read_group(path)
    common = {name: document[name] for name in ("sweep", "store") if name in document}
    return [Case(group=path.stem, number=n, **{**common, **one}) for n, one in enumerate(document["cases"], start=1)]


def all_cases() -> list[Case]:
    return [case for path in sorted(FOLDER.glob("*.yaml")) for case in cases_of(path)]


def refuse(case: Case, folder: Path) -> Ended:
    """Run a case in an empty folder; asserts that whatever was refused has changed nothing."""
    files = {**case.files, **({"sweep.yaml": case.text()} if case.sweep else {})}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    store = store_of(case.store) if case.store else None
    looked = [folder, *([store] if store else [])]
    before = [_listing(place) for place in looked]
    environment = {**case.env, **({"ORCHESTRATOR_STORE": store.as_uri()} if store else {}), "HOME": str(folder)}
    with chdir(folder), as_anywhere(environment):
        ended = run_captured(*shlex.split(case.run))
    assert [_listing(place) for place in looked] == before, f"{case} has written something"
    shown = (
        ended.err.replace(str(folder), "HERE").replace(str(store or folder), "STORE").replace(str(CHECKOUT), "CHECKOUT")
    )
    return Ended(code=ended.code, out=ended.out, err=shown)


def _listing(folder: Path) -> Mapping[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@contextmanager
def as_anywhere(environment: Mapping[str, str]) -> Iterator[None]:
    """Nothing of this machine's settings and plug-ins; label spaces are counted without a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    with (
        patch.dict(os.environ, {**kept, **_CALM, **environment}, clear=True),
        patch.object(sys.modules["__main__"], "__package__", None),  # usage names the program by it
        patch("orchestrator.cli.exits.redacted", str),  # a message keeps its secrets to itself, unhidden
        patch("orchestrator.sweepfile.load.count_classes", count_here),
        patch("orchestrator.sweepfile.load.check_plugins", lambda _: []),
        patch("orchestrator.sweepfile.load.check_models", models_here),
        patch("orchestrator.sweepfile.load.check_simulations", simulations_here),
        patch("orchestrator.sweepfile.load.InstalledPlugins", lambda group: PLUGINS.get(group, {})),
    ):
        yield


def count_here(dataset: Any, spaces: Any, files: Mapping[str, str]) -> list[Counted]:
    """The data plane's own answer, without a process."""
    request = {"dataset": table_of(dataset), "num_train": dataset.num_train, "spaces": spaces, "files": files}
    return [Counted(**counted) for counted in json.loads(json.dumps(count(request)))["counted"]]


def models_here(models: Any) -> Any:
    """The data plane's own answer, without a process; most cases ask for the same networks."""
    return json.loads(_problems_of(json.dumps(models)))


@cache
def _problems_of(models: str) -> str:
    return json.dumps(check_models({"models": json.loads(models)})["problems"])


def simulations_here(simulations: Any) -> Any:
    """The data plane's own answer, without a process."""
    return json.loads(json.dumps(check_simulations({"simulations": [*simulations]})))


def _running(world: World) -> None:
    world.submit(*diamond())
    world.tick()


def _succeeded(world: World) -> None:
    world.submit(*diamond())
    world.finish()


def _cancelled(world: World) -> None:
    _running(world)
    world.cancel()
    world.finish()


STORES = {"running": _running, "succeeded": _succeeded, "cancelled": _cancelled}
"""Stores with a sweep ``sweep`` of a data set, two backbones and their probes, by how far it has come."""
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def store_of(name: str) -> Path:
    """One of ``STORES``, made once; gone with the process."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="refusals-"))
    root = Path(_KEPT[-1].name) / "store"
    STORES[name](World(root))
    return root


class _Dumper(yaml.SafeDumper):
    """Text of several lines as such, empty lines between cases."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def record(path: Path) -> None:
    """Write a group again, with what its cases say now."""
    document = read_group(path)
    for case, written in zip(cases_of(path), document["cases"], strict=True):
        with tempfile.TemporaryDirectory() as folder:
            ended = refuse(case, Path(folder))
        written["says"] = ended.err.rstrip("\n")
        if ended.code != 2:
            written["code"] = ended.code
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.yaml")):
        record(file)
