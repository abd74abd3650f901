"""The jobs behind a label space of clusters: features of both splits, and k-means on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.contract import JobKind
from orchestrator.plan.readable import readable_rule
from orchestrator.spec.model import Clustering, Embedding, LabelSpace, Sweep

SPLITS = ("train", "val")
# Of the pretraining's recipe, with the recipe language's defaults: features are those of images as it saw them.
_RECIPE_LOOK: Mapping[str, Any] = {
    "resize": None,
    "interpolation": "bilinear",
    "decoder": "pillow",
    "mean": None,
    "std": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job without its key; ``inputs`` maps roles to job names."""

    kind: JobKind
    name: str
    readable: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    facets: Mapping[str, str | int]
    initial_uri: str = ""


def embed_job(space: LabelSpace, embedding: Embedding, split: str, sweep: Sweep) -> Draft:
    """The features of a split; a backbone of the sweep must be planned already."""
    inputs = {"index": f"index/{space.dataset}"}
    parameters: dict[str, Any] = {"split": split, **_look(embedding, sweep)}
    model = embedding.model or sweep.pretrain.model
    parameters["model"] = {"name": model.name, "image_size": model.image_size, "kwargs": dict(model.kwargs)}
    if embedding.backbone is None:
        # A file's place is execution, its sha256 identity.
        parameters["initial"] = {name: value for name, value in embedding.initial.items() if name != "uri"}
    else:
        inputs["backbone"] = f"pretrain/{embedding.backbone}/seed{embedding.seed}"
    return Draft(
        kind=JobKind.EMBED,
        name=f"embed/{space.entry}/{split}",
        readable=f"{model.name}-{split}",
        parameters=parameters,
        inputs=inputs,
        facets={"dataset": space.dataset},
        initial_uri=embedding.initial.get("uri", ""),
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
    )


def _look(embedding: Embedding, sweep: Sweep) -> dict[str, Any]:
    if embedding.backbone is None:
        return {**embedding.look, "decoder": embedding.look["decoder"] or "pillow"}
    recipe = sweep.pretrain.recipe
    trained = {name: recipe.get(name, default) for name, default in _RECIPE_LOOK.items()}
    return {name: trained.get(name) if value is None else value for name, value in embedding.look.items()}
