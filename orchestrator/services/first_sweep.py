"""The text of a first sweep.yaml for a data set, small enough for this machine. Pure.

Its numbers are a start, not the result of a search: networks, epochs and batches are chosen so that a backbone
takes minutes on two CPU cores, or hours on a GPU.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import yaml

from orchestrator.core.data_plane import LookAnswer
from orchestrator.core.errors import SpecError, UserError
from orchestrator.storage.dataset_files import LEAF_LEVEL
from orchestrator.storage.protocol import is_name
from orchestrator.sweepfile.parse.tree import parse_tree, parse_value

_UNNAMED: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_MIRRORED: Final = frozenset({"mnist", "svhn"})
"""Digits: a mirrored one is another sign, or none."""
_MAX_NAME: Final = 63
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}")
"""Of an entry of ``transfer``."""
_GLOBS: Final = ('"levels/*"', '"control*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """What a machine can do."""

    model: str
    image_size: int
    batch_size: int
    lr: float
    """Of SGD, at this batch size."""
    num_images: int
    """How many a backbone sees, about."""
    max_epochs: int
    resources: str


def first_sweep(found: LookAnswer, place: str, folder: str, file: str, num_cpus: int) -> str:
    """The text.

    Args:
        found: what is at the place.
        place: as somebody named it: a URI, or a path that starts from the working directory.
        folder: where the file will lie, from which its relative places start.
        file: its path, for the commands in its first lines.
        num_cpus: cores of this machine.

    Raises:
        UserError: a sweep of this data set needs more than one can guess.
    """
    if found["num_classes"] < 2:
        raise UserError(f"{place} has a single class; there is nothing to tell apart")
    if found["multi_label"]:
        raise UserError(f"images of {place} have several labels each; begin with `orchestrator init --template shards`")
    name = _name(place)
    size = _size(found, num_cpus)
    epochs = max(2, min(size.max_epochs, size.num_images // found["num_samples"]["train"]))
    levels, control, left_out = _levels(found)
    entry = yaml.safe_dump(
        _moved(found["entry"], folder), default_flow_style=True, sort_keys=False, width=10_000
    ).strip()
    held_out = found["entry"].get("convert", {}).get("val_fraction")
    held = f"; {held_out:.0%} of each class are held out as val" if held_out else ""
    augment = "none" if found["form"] in _MIRRORED else "crop_flip"
    lines = [
        f"# {place} ({found['form']}): {_counts(found)}{held}.",
        "#",
        f"# Next:             orchestrator submit {file}",
        f"# When it has run:  orchestrator report {name}",
        f"# Before:           orchestrator plan {file}          (how long it takes)",
        f"#                   orchestrator labels show {file}   (classes and their sizes)",
        "version: 1",
        f"name: {quoted(name)}",
        "",
        "datasets:",
        f"  {quoted(name)}: {entry}",
        "",
        "labels:",
        *_label_lines(name, levels, control, file, left_out),
        "",
        "pretrain:",
        f"  model: {{name: {size.model}, image_size: {size.image_size}}}",
        f"  labels: [{', '.join(_GLOBS if control else _GLOBS[:1])}]",
        f"  recipe: {{epochs: {epochs}, batch_size: {size.batch_size}, lr: {size.lr:g}, augment: {augment}}}",
        "  seeds: [0, 1, 2]",
        "",
        "transfer: # every backbone is measured on the coarsest labels",
        f"  - name: {quoted(levels[0]) if _NAME.fullmatch(levels[0]) else 'coarsest'}",
        f"    target: {quoted(f'levels/{levels[0]}')}",
        "    protocol: finetune",
        f"    recipe: {{epochs: {max(1, epochs // 3)}, batch_size: {size.batch_size}, lr: {size.lr / 10:g}}}",
        "    seeds: [0]",
        "",
        f"report: {{baseline: {quoted(f'levels/{levels[0]}')}}}",
        f"resources: {{pretrain: {size.resources}, transfer: {size.resources}}} # of one job; changes no result",
    ]
    return "\n".join(lines) + "\n"


def _name(place: str) -> str:
    last = unquote(place if "://" in place else os.path.abspath(place)).rstrip("/").rpartition("/")[2]  # noqa: PTH100
    stem = re.sub(r"\.(?:csv|parquet|tar)$", "", last)
    return _UNNAMED.sub("-", stem).strip("-_.")[:_MAX_NAME] or "images"


def quoted(text: str) -> str:
    """A name or path as a value that YAML reads as this text, also within brackets."""
    is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


_WORDS: Final = frozenset({"null", "true", "false"})


def _counts(found: LookAnswer) -> str:
    splits = ", ".join(f"{number:,} {split}" for split, number in found["num_samples"].items())
    return f"{splits}; {found['num_classes']:,} classes; images of about {found['pixels']} pixels"


def _size(found: LookAnswer, num_cpus: int) -> _Size:
    num_train = found["num_samples"]["train"]
    if not found["gpus"]:
        batch = _batch(64, num_train)
        side = 32 if found["pixels"] <= 48 else 64
        lr = 0.05 * batch / 64
        return _Size(
            model="test_resnet",
            image_size=side,
            batch_size=batch,
            lr=lr,
            num_images=40_000,
            max_epochs=20,
            resources="{cpus: 1}",
        )
    batch = _batch(256, num_train)
    side = next((side for side in (32, 64, 128) if found["pixels"] <= side * 1.25), 224)
    cpus = max(1, min(8, num_cpus // found["gpus"]))
    return _Size(
        model="resnet50" if num_train >= 100_000 and side == 224 else "resnet18",
        image_size=side,
        batch_size=batch,
        lr=0.1 * batch / 256,
        num_images=20_000_000,
        max_epochs=90,
        resources=f"{{gpus: 1, cpus: {cpus}}}",
    )


def _batch(largest: int, num_train: int) -> int:
    """Four steps per epoch at least, where there are images for that; BatchNorm needs two samples."""
    batch = largest
    while batch > 2 and batch > num_train // 4:
        batch //= 2
    return batch


def _levels(found: LookAnswer) -> tuple[list[str], str, dict[str, str]]:
    """Levels from coarse to fine; of a data set that has one level alone, what it is compared with; and which levels
    are left out, and why.
    """
    levels = {name: count for name, count in found["levels"].items() if 2 <= count < found["num_classes"]}
    left_out = {name: "since no job can have this name; rename its column" for name in levels if not is_name(name)}
    lacking = "since some classes have no value at it; complete the class table"
    left_out |= {name: lacking for name in levels if name in found["incomplete"]}
    left_out |= found["left_out"]
    ordered = [*sorted((name for name in levels if name not in left_out), key=levels.__getitem__), LEAF_LEVEL]
    if len(ordered) > 1:
        return ordered, "", left_out
    number = found["num_classes"]
    return ordered, f"merge: {{num_classes: [{number // 2}]}}" if number >= 4 else "split: 2", left_out


def _label_lines(name: str, levels: list[str], control: str, file: str, left_out: dict[str, str]) -> list[str]:
    named = "[" + ", ".join(map(quoted, levels)) + "]"
    lines = [f"  levels: {{dataset: {quoted(name)}, hierarchy: {named}}} # leaf: the classes themselves"]
    if control:
        lines += [
            f"  # The classes have one level. More levels: orchestrator labels hierarchy {file} wordnet --add",
            "  # (or a table of their parents in place of wordnet). Until then they are compared",
            "  # with labels that are made of them at random.",
            f"  control: {{dataset: {quoted(name)}, {control}}}",
        ]
    return [*lines, *(f"  # Left out: level {level!r}, {why}." for level, why in left_out.items())]


def _moved(value: Any, folder: str) -> Any:  # noqa: ANN401 - JSON
    """The entry with its places as a file of another folder names them; absolute ones stay."""
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, item in value.items():
        moved[key] = _moved(item, folder)
        if key in {"from", "source", "classes", "shards"}:
            moved[key] = _relative(item, folder)
    return moved


def _relative(place: Any, folder: str) -> Any:  # noqa: ANN401 - JSON
    if isinstance(place, dict):
        return {split: _relative(item, folder) for split, item in place.items()}
    if isinstance(place, list):
        return [_relative(item, folder) for item in place]
    here = os.getcwd()  # noqa: PTH109 - of texts
    if place.startswith(f"file://{here}/"):
        place = unquote(place.removeprefix(f"file://{here}/"))
    if "://" in place or os.path.isabs(place):  # noqa: PTH117
        return place
    end = "/" if place.endswith("/") else ""
    return os.path.relpath(os.path.join(here, place), folder) + end  # noqa: PTH118


def with_label_entry(text: str, file: str, entry: str) -> str:
    """The text of a sweep.yaml with another entry of ``labels``, whose label spaces are pretrained, too.

    Comments and lay-out stay: two lines change, and the result is read again.

    Args:
        text: of the file.
        file: its name in errors.
        entry: ``name: {...}``.

    Raises:
        SpecError: the text is no sweep.yaml.
        UserError: its blocks are not laid out such that a line can be added, or it has such an entry already.
    """
    tree, (name, added) = parse_tree(text, file), next(iter(parse_value(entry, "entry").items()))
    by_hand = f'add it by hand under labels: {entry}, and to pretrain.labels: "{name}/*"'
    if not isinstance(tree.value.get("labels"), dict) or not isinstance(tree.value.get("pretrain"), dict):
        raise UserError(f"{file} has no labels and pretrain of its own; {by_hand}")
    if name in tree.value["labels"]:
        raise UserError(f"{file} has an entry labels.{name} already; remove it, or change it by hand")
    expected = {
        **tree.value,
        "labels": {name: added, **tree.value["labels"]},
        "pretrain": {**tree.value["pretrain"], "labels": [f"{name}/*", *(tree.value["pretrain"].get("labels") or ())]},
    }
    lines = text.splitlines(keepends=True)
    first = tree.locate(("labels", next(iter(tree.value["labels"]))))
    named = tree.locate(("pretrain", "labels")).line - 1
    lines[named] = re.sub(r"labels:(\s*)\[", rf'labels:\1["{name}/*", ', lines[named], count=1)
    lines.insert(first.line - 1, " " * (first.column - 1) + entry + "\n")
    changed = "".join(lines)
    try:
        is_right = parse_tree(changed, file).value == expected
    except SpecError:
        is_right = False
    if not is_right:
        raise UserError(f"{file} is laid out such that no line can be added; {by_hand}")
    return changed
