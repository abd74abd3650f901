"""From the schema of clusters to label spaces, and what ties them to the backbones of the sweep. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import Clustering, Dataset, Embedding, LabelSpace, Model, Pretrain
from orchestrator.spec.resolve_model import check_model
from orchestrator.spec.schema_clusters import ClustersSpec, EmbedSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.timm_table import shipped_models
from orchestrator.spec.tree import Path

WHOLE_SET = "dataset"


def resolve_clusters(
    name: str,
    spec: ClustersSpec,
    dataset: Dataset,
    within: LabelSpace | None,
    complaints: Complaints,
    *,
    auto_library: str,
) -> list[LabelSpace]:
    """The label spaces of one entry.

    Args:
        name: of the entry.
        spec: what the file says.
        dataset: its samples are clustered.
        within: whose classes are clustered each by itself; None = the whole set.
        complaints: takes what is wrong.
        auto_library: what ``library: auto`` means here.
    """
    path: Path = ("labels", name, "clusters")
    complaints.refuse_repeats((*path, "k"), [str(k) for k in spec.k or ()])
    embedding = _embedding((*path, "embed"), spec.embed, complaints)
    common = {
        "within": within.space if within is not None else None,
        "seed": spec.seed,
        "iterations": spec.iterations,
        "num_init": spec.num_init,
        "library": auto_library if spec.library == "auto" else spec.library,
    }
    num_groups = within.num_classes if within is not None else 1

    def space(path_part: str, level: str, rule: Mapping[str, Any], num_classes: int) -> LabelSpace:
        clustering = Clustering(embedding=embedding, parameters={**rule, **common})
        return LabelSpace(
            name=f"{name}{path_part}",
            entry=name,
            level=level,
            dataset=dataset.name,
            space={"clusters": clustering.parameters},
            num_classes=num_classes,
            files=within.files if within is not None else {},
            clustering=clustering,
        )

    if spec.rebalanced is not None:
        rule = {"rebalanced": {"min_samples": spec.rebalanced.min_samples}}
        return [space("", "rebalanced", rule, 0)]
    for position, k in enumerate(spec.k or ()):
        if k * num_groups > dataset.num_train:
            message = f"{k * num_groups} clusters for {dataset.num_train} training samples; use fewer clusters"
            complaints.add((*path, "k", position), message)
    return [space(f"/{k}", str(k), {"k": k}, k * num_groups) for k in spec.k or ()]


def check_embeddings(labels: Mapping[str, LabelSpace], pretrain: Pretrain, complaints: Complaints) -> None:
    """Complain about embeddings of backbones that this sweep does not pretrain, or that wait for themselves."""
    seen: set[str] = set()
    for space in labels.values():
        origin = space.clustering.embedding.backbone if space.clustering else None
        if origin is None or space.entry in seen:
            continue
        seen.add(space.entry)
        path: Path = ("labels", space.entry, "clusters", "embed", "backbone")
        if origin not in labels or (pretrain.labels and origin not in pretrain.labels):
            hint = did_you_mean(origin, pretrain.labels or labels)
            message = f"'{origin}' is not pretrained in this sweep, so there is no such backbone: {hint}"
            complaints.add((*path, "labels"), message)
            continue
        seed = space.clustering.embedding.seed if space.clustering else 0
        if seed not in pretrain.seeds:
            message = f"no backbone is pretrained with seed {seed}; pretrain.seeds are {list(pretrain.seeds)}"
            complaints.add((*path, "seed"), message)
        chain = list(_chain(space.name, labels))
        if space.name in chain[1:]:
            circle = " -> ".join(f"pretrain/{name}" for name in chain)
            message = f"these clusters need a backbone that needs these clusters ({circle}); embed another backbone"
            complaints.add((*path, "labels"), message)


def _chain(name: str, labels: Mapping[str, LabelSpace]) -> Iterator[str]:
    """A space, the one that the backbone of its embedding is pretrained on, and so on; ends after a repetition."""
    passed: set[str] = set()
    current: str | None = name
    while current is not None and current in labels:
        yield current
        if current in passed:
            return
        passed.add(current)
        clustering = labels[current].clustering
        current = clustering.embedding.backbone if clustering is not None else None


def _embedding(path: Path, spec: EmbedSpec, complaints: Complaints) -> Embedding:
    model, initial = None, {}
    if spec.model is not None:
        model = Model(name=spec.model.name, image_size=spec.model.image_size, kwargs=spec.model.kwargs)
        check_model((*path, "model"), model, shipped_models(), complaints)
        initial = spec.init.model_dump(exclude_none=True) if spec.init is not None else {}
    if (spec.model is None) != (spec.init is None):
        message = "init are the weights of model: give both, or neither and a backbone of this sweep"
        complaints.add((*path, "init") if spec.init is not None else (*path, "model"), message)
    problem = shipped_models().tag_problem(model.name, initial["timm"]) if model and "timm" in initial else ""
    if problem:
        complaints.add((*path, "init", "timm"), problem)
    return Embedding(
        backbone=spec.backbone.labels if spec.backbone is not None else None,
        seed=spec.backbone.seed if spec.backbone is not None else 0,
        model=model,
        initial=initial,
        look=spec.model_dump(include={"view", "resize", "interpolation", "decoder", "mean", "std", "precision"}),
    )
