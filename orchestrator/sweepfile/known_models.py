"""Facts about timm's models for planning: a table made by ``python -m workloads.models.table``, shipped in this folder.

The data plane builds the models; this module only refuses wrong sweeps before anything is created.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Self

FILE = Path(__file__).with_name("timm_models.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmModel:
    """One architecture; ``None`` = could not be found out when the table was made. Sizes are sides in pixels."""

    name: str
    num_parameters: int | None
    """Of the backbone, without a head."""
    num_features: int | None
    macs: int | None
    """Multiply-adds of one forward pass of one image of ``image_size``; FLOPs are twice as many."""
    image_size: int
    is_fixed_size: bool
    size_step: int | None
    """Accepted sizes differ from ``image_size`` by multiples of this."""
    too_small: int | None
    """A size of which it is known that it and all below are refused; 0 = none."""
    has_batchnorm: bool | None
    accepts: tuple[str, ...]
    """Arguments for size and dropout that the constructor takes."""
    tags: tuple[str, ...]
    """Tags of pretrained weights, the default one first."""

    def size_problem(self, image_size: int) -> str:
        """Why the model refuses a size, and the nearest accepted ones; empty if no refusal is known."""
        step = self.size_step
        if step and (image_size - self.image_size) % step:
            below = image_size - (image_size - self.image_size) % step
            near = [size for size in (below, below + step) if size > (self.too_small or 0)]
            offer = " or ".join(map(str, near))
            message = f"{self.name} takes images whose side differs from {self.image_size} by a multiple of {step}"
            return f"{message}; use {offer}"
        if self.too_small and image_size <= self.too_small:
            return f"{self.name} needs images larger than {self.too_small} pixels; it is made for {self.image_size}"
        return ""

    @property
    def has_dropout(self) -> bool:
        """Whether a recipe's ``dropout`` can be given to it. Some drop before timm's own classifier alone, which is cut
        off.
        """
        if self.name.startswith(_DROPS_IN_CLASSIFIER):
            return False
        return "drop_rate" in self.accepts or {"proj_drop_rate", "pos_drop_rate"} <= set(self.accepts)

    @property
    def has_drop_path(self) -> bool:
        """Whether a recipe's ``drop_path`` can be given to it."""
        return "drop_path_rate" in self.accepts


_DROPS_IN_CLASSIFIER = ("levit", "efficientvit_m")


@dataclass(frozen=True, slots=True)
class ModelTable:
    """All architectures of one version of timm."""

    timm_version: str
    columns: tuple[str, ...]
    rows: Mapping[str, list[Any]]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the file's text."""
        document = json.loads(text)
        return cls(document["timm"], tuple(document["columns"]), document["models"])

    def find(self, name: str) -> TimmModel | None:
        """An architecture by its name, with or without a tag; None if there is no such architecture."""
        row = self.rows.get(name.partition(".")[0])
        if row is None:
            return None
        facts: dict[str, Any] = dict(zip(self.columns, row, strict=True))
        lists = {column: tuple(facts[column]) for column in ("accepts", "tags")}
        return TimmModel(name=name.partition(".")[0], **(facts | lists))

    def name_problem(self, name: str) -> str:
        """The error in a model's name, and the nearest names; empty if there is none."""
        model, tag = self.find(name), name.partition(".")[2]
        if model is None:
            near = get_close_matches(name.partition(".")[0].lower(), self.rows, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see timm.list_models()"
            return f"{name!r} is not a model of timm {self.timm_version}: {hint}"
        if tag and tag not in model.tags:
            return f"timm {self.timm_version} knows no weights {tag!r} of {model.name}: {self._tag_hint(model, tag)}"
        return ""

    def tag_problem(self, name: str, tag: str) -> str:
        """The error in the tag of pretrained weights of an architecture; empty if there is none."""
        return self.name_problem(f"{name.partition('.')[0]}.{tag}")

    @staticmethod
    def _tag_hint(model: TimmModel, tag: str) -> str:
        near = get_close_matches(tag, model.tags, n=1, cutoff=0.3)
        known = ", ".join(model.tags[:12]) + (", ..." if len(model.tags) > 12 else "")
        guess = f"did you mean {near[0]!r}? " if near else ""
        return f"{guess}known: {known}" if model.tags else "there are none"


@cache
def shipped_models() -> ModelTable:
    """The table of the package: a constant like its code, read when first asked for."""
    return ModelTable.parse(FILE.read_text(encoding="utf-8"))
