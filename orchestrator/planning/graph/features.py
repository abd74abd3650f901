"""The jobs that compute features (``embed``), and those that cluster them.

An ``embed`` job of a transfer is the same one, by its key, for every transfer, label fraction, seed, grid cell and
sweep that sees the same images under the same backbone; so its name does not contain a transfer. Label spaces of
clusters have their own embed jobs, and k-means on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.identity import readable_rule
from orchestrator.planning.graph.pretraining import Draft, model_parameters, pretrain_job
from orchestrator.sweepfile.values import Clustering, Embedding, LabelSpace, Pretrain, ResolvedSweep

CENTER = "center"
# The recipe language's defaults: features are those of images as the backbone saw them in pretraining.
DEFAULT_PREPROCESSING: Mapping[str, Any] = {
    "resize": None,
    "interpolation": "bilinear",
    "decoder": "pillow",
    "mean": None,
    "std": None,
}
SPLITS = ("train", "val")


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
    """Role of that job for its readers: ``backbone``, or the ``search`` that found one."""
    checkpoint: Mapping[str, int]
    """``{"checkpoint": epoch}`` of the backbone; empty = its final weights."""
    dataset: str
    """Whose images are embedded."""
    recipe: Mapping[str, Any]
    splits: tuple[str, ...] = SPLITS
    """Those that are read."""

    def jobs(self) -> Iterator[Draft]:
        """The embed jobs."""
        for split, view in self._views().values():
            yield Draft(
                kind=JobKind.EMBED,
                name=self._name(split, view),
                readable=f"{self.pretrain.model.name}-{split}",
                parameters={"split": split, **self.network(view)},
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
        views_of = {**trained, "val": ("val", CENTER)}
        return {role: (split, view) for role, (split, view) in views_of.items() if split in self.splits}

    def network(self, view: str = CENTER) -> dict[str, Any]:
        """Parameters of a job that runs the backbone: how it sees images, its architecture, and whose weights."""
        model = model_parameters(self.pretrain.model)
        return {"view": view, **self.preprocessing(), "model": model, **self.checkpoint}

    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing of images: by the recipe, and where it has no value, as in pretraining.

        A recipe with an optimizer has all values, by its own defaults, as for probes that are trained on images.
        """
        recipe, defaults = self.recipe, DEFAULT_PREPROCESSING
        silent = defaults if has_optimizer(recipe) else _preprocessing_of_pretraining(self.pretrain)
        found = {name: silent[name] if recipe.get(name) is None else recipe[name] for name in defaults}
        return {**found, "precision": recipe.get("precision", "fp32")}

    def _name(self, split: str, view: str) -> str:
        """Its last part names the preprocessing that differs from the pretraining."""
        usual, mine = {**_preprocessing_of_pretraining(self.pretrain), "precision": "fp32"}, self.preprocessing()
        unusual = [f"{name}={_text(mine[name])}" for name in mine if mine[name] != usual[name]]
        # With `search` before it: a transfer that searches may have the name of a label space.
        backbone = self.backbone if self.role == JobKind.SEARCH.value else self.backbone.partition("/")[2]
        parts = (
            "embed",
            backbone,
            *(f"epoch{epoch}" for epoch in self.checkpoint.values()),
            self.dataset,
            split,
            "" if view == CENTER else view,
            ",".join(unusual),
        )
        return "/".join(part for part in parts if part)


def has_optimizer(recipe: Mapping[str, Any]) -> bool:
    """Whether a resolved recipe for cached features has an optimizer; a search may hold its ``lr``."""
    return bool(recipe.get("solver") == "sgd")


def _preprocessing_of_pretraining(pretrain: Pretrain) -> dict[str, Any]:
    return {name: pretrain.recipe.get(name, default) for name, default in DEFAULT_PREPROCESSING.items()}


def _text(value: object) -> str:
    return "_".join(f"{item:g}" for item in value) if isinstance(value, list | tuple) else str(value)


def embed_job(space: LabelSpace, embedding: Embedding, split: str, sweep: ResolvedSweep) -> Draft:
    """The features of a split; a backbone of the sweep must be planned already."""
    inputs = {"index": f"index/{space.dataset}"}
    parameters: dict[str, Any] = {"split": split, **_preprocessing_of_embedding(embedding, sweep)}
    model = embedding.model or sweep.pretrain(embedding.pretrain).model
    parameters["model"] = model_parameters(model)
    if embedding.backbone is None:
        # A file's place is execution, its sha256 identity.
        parameters["initial"] = {name: value for name, value in embedding.initial.items() if name != "uri"}
    else:
        inputs["backbone"] = pretrain_job(embedding.pretrain, embedding.backbone, embedding.seed)
    return Draft(
        kind=JobKind.EMBED,
        name=f"embed/{space.entry}/{split}",
        readable=f"{model.name}-{split}",
        parameters=parameters,
        inputs=inputs,
        facets={"dataset": space.dataset},
        execution={"initial_uri": embedding.initial.get("uri", ""), "label_files": space.files},
    )


def cluster_job(space: LabelSpace, clustering: Clustering, features: Mapping[str, str]) -> Draft:
    """k-means on features, by split the names of their jobs."""
    return Draft(
        kind=JobKind.CLUSTER,
        name=f"cluster/{space.name}",
        readable=readable_rule(space.space),
        parameters=clustering.parameters,
        inputs={"index": f"index/{space.dataset}", **features},
        facets={"dataset": space.dataset},
        execution={"label_files": space.files},
    )


def _preprocessing_of_embedding(embedding: Embedding, sweep: ResolvedSweep) -> dict[str, Any]:
    if embedding.backbone is None:
        return {**embedding.look, "decoder": embedding.look["decoder"] or "pillow"}
    recipe = sweep.pretrain(embedding.pretrain).recipe
    trained = {name: recipe.get(name, default) for name, default in DEFAULT_PREPROCESSING.items()}
    return {name: trained.get(name) if value is None else value for name, value in embedding.look.items()}
