"""The features that cached probes and nearest neighbours read: jobs that all of them share.

An ``embed`` job is the same one, by its key, for every transfer, label fraction, seed, grid cell and sweep that sees
the same images under the same backbone; so its name says what is embedded, never for whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import Draft, model_parameters
from orchestrator.sweepfile.values import Pretrain

CENTER = "center"
# The recipe language's defaults: features are those of images as the backbone saw them in pretraining.
PRETRAINED_LOOK: Mapping[str, Any] = {
    "resize": None,
    "interpolation": "bilinear",
    "decoder": "pillow",
    "mean": None,
    "std": None,
}


def is_cached(protocol: JobKind, recipe: Mapping[str, Any]) -> bool:
    """Whether a transfer reads features instead of images."""
    return protocol is JobKind.KNN or recipe.get("features") == "cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a recipe reads: both splits, and more views of the training split if it asks for them."""

    pretrain: Pretrain
    """The block of the backbone."""
    backbone: str
    """Name of the job that pretrains it."""
    role: str = "backbone"
    """What that job is to those that read it: ``backbone``, or the ``search`` which found one."""
    checkpoint: Mapping[str, int]
    """``{"checkpoint": epoch}`` of the backbone; empty = its final weights."""
    dataset: str
    """Whose images are embedded."""
    recipe: Mapping[str, Any]

    def jobs(self) -> Iterator[Draft]:
        """The embed jobs."""
        model = self.pretrain.model
        for split, view in self._views().values():
            look = {"view": view, **self.look()}
            yield Draft(
                kind=JobKind.EMBED,
                name=self._name(split, view),
                readable=f"{model.name}-{split}",
                parameters={"split": split, **look, "model": model_parameters(model), **self.checkpoint},
                inputs={"index": f"index/{self.dataset}", self.role: self.backbone},
                facets={"dataset": self.dataset},
            )

    def inputs(self) -> dict[str, str]:
        """Names of the jobs by role: ``train``, ``val``, and ``train_<view>`` of other views."""
        return {role: self._name(split, view) for role, (split, view) in self._views().items()}

    def _views(self) -> dict[str, tuple[str, str]]:
        """Role -> split and view."""
        views = self.recipe.get("views", [CENTER])
        trained = {"train" if view == CENTER else f"train_{view}": ("train", view) for view in views}
        return {**trained, "val": ("val", CENTER)}

    def look(self) -> dict[str, Any]:
        """How images are seen: as the recipe says; where it is silent, as in pretraining.

        A recipe of an optimiser says all, by its own defaults, as it does for probes that are trained on images.
        """
        recipe, pretrained = self.recipe, _pretrained_look(self.pretrain)
        silent = PRETRAINED_LOOK if "lr" in recipe else pretrained
        look = {name: silent[name] if recipe.get(name) is None else recipe[name] for name in PRETRAINED_LOOK}
        return {**look, "precision": recipe.get("precision", "fp32")}

    def _name(self, split: str, view: str) -> str:
        """Its last part tells looks apart that are not those of the pretraining."""
        usual, look = {**_pretrained_look(self.pretrain), "precision": "fp32"}, self.look()
        unusual = [f"{name}={_text(look[name])}" for name in look if look[name] != usual[name]]
        parts = (
            "embed",
            self.backbone.partition("/")[2],
            *(f"epoch{epoch}" for epoch in self.checkpoint.values()),
            self.dataset,
            split,
            "" if view == CENTER else view,
            ",".join(unusual),
        )
        return "/".join(part for part in parts if part)


def _pretrained_look(pretrain: Pretrain) -> dict[str, Any]:
    return {name: pretrain.recipe.get(name, default) for name, default in PRETRAINED_LOOK.items()}


def _text(value: object) -> str:
    return ";".join(f"{item:g}" for item in value) if isinstance(value, list | tuple) else str(value)
