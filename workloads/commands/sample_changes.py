"""Where two networks differ on the validation images: by class, level and subset, and which images these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from orchestrator.storage.dataset_files import node_of
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore
from workloads.data.images import FORMATS, IMAGE_ERRORS
from workloads.data.index import SampleIndex, SplitIndex, store_of
from workloads.data.split_targets import NO_LABEL
from workloads.labels.inputs import named_labels
from workloads.labels.label_map import LabelMap
from workloads.labels.taxonomy import level_names, read_parents

TARGET: Final = "class"
SUBSET: Final = "subset"
_TILE, _CAPTION, _GAP, _COLUMNS, _HEADING = 112, 30, 10, 8, 34  # pixels, but for the number of columns
_TEXT_WIDTH = 18
_INK, _SOFT, _PAPER = (28, 36, 48), (90, 102, 117), (255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """Of each of N samples, by ordinal: in how many pairs of networks it was fixed or broken."""

    fixed_N: NDArray[np.int64]
    """The first network is wrong, the second right."""
    broken_N: NDArray[np.int64]
    counted_N: NDArray[np.bool_]

    @classmethod
    def of(cls, request: Mapping[str, Any], num_samples: int) -> Changes:
        """From ``fixed`` and ``broken``, lists of ``[ordinal, number of pairs]``, and ``left_out``, of ordinals."""

        def counts(pairs: Sequence[Sequence[int]]) -> NDArray[np.int64]:
            counts_N = np.zeros(num_samples, dtype=np.int64)
            for ordinal, number in pairs:
                counts_N[ordinal] = number
            return counts_N

        counted_N = np.ones(num_samples, dtype=np.bool_)
        counted_N[np.array(request["left_out"], dtype=np.int64)] = False
        return cls(fixed_N=counts(request["fixed"]), broken_N=counts(request["broken"]), counted_N=counted_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouping:
    """One way to sort samples: groups (N,) or (N, M) by ordinal, ``NO_LABEL`` = in none."""

    kind: str
    names: Sequence[str]
    groups: NDArray[np.int64]

    def named(self) -> NDArray[np.str_]:
        """Names in place of numbers: levels and label spaces may count the same classes in another order."""
        return np.array([*self.names, ""])[self.groups]


def show_changes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Samples, fixed and broken ones of every group, and with ``sheet`` a picture of the images that changed most.

    Args:
        request: ``store``, ``cache``, ``index`` and ``labels`` (keys), ``location`` (of the data set now), ``first``
            and ``second`` (names, for the picture), ``num_pairs``, ``num_images`` (of each kind), ``sheet`` (a file,
            or empty) and what `Changes.of` reads.

    Raises:
        NotFoundError: the index or the label map is not committed.
    """
    store = open_store(request["store"])
    index = SampleIndex.open(store, request["index"], Path(request["cache"]), request["location"])
    split, labels = index.split("val"), LabelMap.open(store, request["labels"])
    changes = Changes.of(request, split.num_samples)
    groupings = list(_groupings(store, request["labels"], index, split, labels))
    images = list(_chosen(changes, split, groupings[0], request["num_images"]))
    if request["sheet"]:
        _draw_sheet(request, store, split, images)
    groups = [group for grouping in groupings for group in _counted(grouping, changes)]
    return {"groups": groups, "images": images}


def _groupings(
    store: ObjectStore, labels_key: str, index: SampleIndex, split: SplitIndex, labels: LabelMap
) -> Iterator[Grouping]:
    """By class of the target; by every level of the hierarchy, coarser or finer than it; by subset."""
    ordinals = np.arange(split.num_samples)
    target = Grouping(kind=TARGET, names=labels.class_names, groups=labels.resolve_targets(split).take(ordinals))
    yield target
    levels = level_names(index.classes)
    for column in levels:
        if any(isinstance(row.get(column), (dict, list)) for row in index.classes):
            continue
        nodes = (node_of(row, column) for row in index.classes)
        level = named_labels([[] if node is None else [node] for node in nodes])
        found = Grouping(kind=column, names=level.class_names, groups=level.resolve_targets(split).take(ordinals))
        if not np.array_equal(found.named(), target.named()):
            yield found
    for parents in read_parents(store, labels_key) or ():
        if parents.name not in levels and parents.is_tree and target.groups.ndim == 1:
            above_K1 = np.append(parents.parents_KP[:, 0], NO_LABEL)  # NO_LABEL finds the last
            yield Grouping(kind=parents.name, names=parents.class_names, groups=above_K1[target.groups])
    if split.subset_names:
        subsets = np.asarray(split.subset_ids[ordinals], dtype=np.int64)
        yield Grouping(kind=SUBSET, names=split.subset_names, groups=subsets)


def _counted(grouping: Grouping, changes: Changes) -> Iterator[dict[str, Any]]:
    """A line for each group that has samples; a sample of several groups counts in each."""
    groups_NM = grouping.groups.reshape(len(grouping.groups), -1)
    rows, groups = np.repeat(np.arange(len(groups_NM)), groups_NM.shape[1]), groups_NM.ravel()
    is_in = (groups != NO_LABEL) & changes.counted_N[rows]
    rows, groups = rows[is_in], groups[is_in]

    def sums(values_N: NDArray[Any]) -> list[int]:
        totals: list[int] = np.bincount(groups, weights=values_N[rows], minlength=num).astype(np.int64).tolist()
        return totals

    num, net_N = len(grouping.names), changes.fixed_N - changes.broken_N
    columns = {
        "num_samples": sums(np.ones(len(net_N))),
        "num_fixed": sums(changes.fixed_N),
        "num_broken": sums(changes.broken_N),
        "num_better": sums(net_N > 0),
        "num_worse": sums(net_N < 0),
    }
    for number, name in enumerate(grouping.names):
        if columns["num_samples"][number]:
            yield {"kind": grouping.kind, "name": name} | {column: found[number] for column, found in columns.items()}


def _chosen(changes: Changes, split: SplitIndex, target: Grouping, num_images: int) -> Iterator[dict[str, Any]]:
    """Images that were fixed, then those that were broken: in the most pairs first, spread over the data set."""
    net_N = np.where(changes.counted_N, changes.fixed_N - changes.broken_N, 0)
    spread_N = np.random.default_rng(0).permutation(len(net_N))
    for what, sign in (("fixed", 1), ("broken", -1)):
        order = np.lexsort((spread_N, -sign * net_N))
        for ordinal in order[sign * net_N[order] > 0][:num_images].tolist():
            classes = np.atleast_1d(target.groups[ordinal])
            yield {
                "change": what,
                "ordinal": ordinal,
                "sample": split.place(ordinal),
                "classes": [target.names[group] for group in classes.tolist() if group != NO_LABEL],
                "num_pairs": int(abs(net_N[ordinal])),
            }


def _draw_sheet(
    request: Mapping[str, Any], store: ObjectStore, split: SplitIndex, images: Sequence[Mapping[str, Any]]
) -> None:
    """A contact sheet: the images that were fixed above those that were broken, with class and key."""
    first, second = request["first"], request["second"]
    headings = {
        "fixed": f"fixed: wrong with {first}, right with {second}",
        "broken": f"broken: right with {first}, wrong with {second}",
    }
    sections = [(text, [image for image in images if image["change"] == what]) for what, text in headings.items()]
    heights = [_HEADING + max(1, -(-len(some) // _COLUMNS)) * (_TILE + _CAPTION + _GAP) for _, some in sections]
    size = (_COLUMNS * (_TILE + _GAP) + _GAP, sum(heights) + _GAP)
    sheet, top = Image.new("RGB", size, _PAPER), 0
    for (text, some), height in zip(sections, heights, strict=True):
        ImageDraw.Draw(sheet).text((_GAP, top + 10), text, _INK, ImageFont.load_default(15))
        if not some:
            ImageDraw.Draw(sheet).text((_GAP, top + _HEADING), "none", _SOFT, ImageFont.load_default(12))
        for number, image in enumerate(some):
            row, column = divmod(number, _COLUMNS)
            place = (_GAP + column * (_TILE + _GAP), top + _HEADING + row * (_TILE + _CAPTION + _GAP))
            _draw_tile(sheet, place, _read(store, split, image["ordinal"]), image, request["num_pairs"])
        top += height
    sheet.save(request["sheet"], format="PNG")


def _draw_tile(
    sheet: Image.Image, place: tuple[int, int], picture: Image.Image, image: Mapping[str, Any], num_pairs: int
) -> None:
    sheet.paste(picture, (place[0] + (_TILE - picture.width) // 2, place[1] + (_TILE - picture.height) // 2))
    share = f" ({image['num_pairs']} of {num_pairs})" if num_pairs > 1 else ""
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for line, (text, color) in enumerate(((", ".join(image["classes"]), _INK), (image["sample"], _SOFT))):
        room = _TEXT_WIDTH - (0 if line else len(share))
        shown = text if len(text) <= room else "…" + text[-(room - 1) :]
        draw.text((place[0], place[1] + _TILE + 2 + 13 * line), shown + ("" if line else share), color, font)


def _read(store: ObjectStore, split: SplitIndex, ordinal: int) -> Image.Image:
    """The image of a sample, fitted into a tile; small ones are enlarged without smoothing."""
    shard = split.shards[int(split.shard_of(np.array([ordinal]))[0])]
    offset, length = int(split.offsets[ordinal]), int(split.lengths[ordinal])
    encoded = store_of(shard, store).get_range(shard.object_name, offset, length)
    try:
        picture = Image.open(BytesIO(encoded), formats=FORMATS).convert("RGB")
    except IMAGE_ERRORS:  # what a decoder of training reads, this one may not
        return Image.new("RGB", (_TILE, _TILE), (216, 222, 230))
    scale = _TILE / max(picture.size)
    size = (max(1, round(scale * picture.width)), max(1, round(scale * picture.height)))
    return picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
