"""The jobs behind a label space of clusters: features of both splits, and k-means on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import Draft, model_parameters, pretrain_job
from orchestrator.planning.graph.features import PRETRAINED_LOOK
from orchestrator.planning.graph.readable import readable_rule
from orchestrator.sweepfile.model import Clustering, Embedding, LabelSpace, Sweep
from orchestrator.sweepfile.timm_table import shipped_models

SPLITS = ("train", "val")
_LADDER = (2, 8, 32, 64, 128, 256, 512, 1024)  # as in workloads.jobs.cluster, which a test compares
_WORTH_SAYING = 1e13
"""Operations: minutes on a core or two."""
_TERA = 1e12


def embed_job(space: LabelSpace, embedding: Embedding, split: str, sweep: Sweep) -> Draft:
    """The features of a split; a backbone of the sweep must be planned already."""
    inputs = {"index": f"index/{space.dataset}"}
    parameters: dict[str, Any] = {"split": split, **_look(embedding, sweep)}
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


def kmeans_operations(space: LabelSpace, clustering: Clustering, sweep: Sweep) -> float:
    """Floating-point operations of a k-means at most; 0 if the number of features is not known.

    Per iteration, and once more at the end, 2 N k D, whether the N samples are clustered together or class by class.
    """
    model = clustering.embedding.model or sweep.pretrain(clustering.embedding.pretrain).model
    known, rule = shipped_models().find(model.name), clustering.parameters
    dim = 0 if known is None or model.kwargs else known.num_features or 0
    num_clusters: int = rule["k"] if "k" in rule else sum(_LADDER)
    passes: int = (rule["iterations"] + 1) * rule["num_init"]
    return 2.0 * sweep.datasets[space.dataset].num_train * num_clusters * dim * passes


def long_clusterings(sweep: Sweep) -> list[str]:
    """One line for each k-means that takes more than minutes on a few cores."""
    lines = []
    for space in sweep.labels.values():
        found = kmeans_operations(space, space.clustering, sweep) if space.clustering is not None else 0.0
        if found >= _WORTH_SAYING:
            num_train, hours = sweep.datasets[space.dataset].num_train, found / _TERA / 3600
            line = f"cluster/{space.name}: k-means of {num_train:,} samples takes at most {found:.1e} operations, "
            lines.append(f"{line}{hours:.2g} h at 1 TFLOP/s (resources.cluster: some 30 cores, or less than one GPU)")
    return lines


def _look(embedding: Embedding, sweep: Sweep) -> dict[str, Any]:
    if embedding.backbone is None:
        return {**embedding.look, "decoder": embedding.look["decoder"] or "pillow"}
    recipe = sweep.pretrain(embedding.pretrain).recipe
    trained = {name: recipe.get(name, default) for name, default in PRETRAINED_LOOK.items()}
    return {name: trained.get(name) if value is None else value for name, value in embedding.look.items()}
