"""From the schema of clusters to label spaces, and what ties them to the backbones of the sweep. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Clustering, Dataset, Embedding, LabelSpace, Model, Pretrain
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.resolve_model import check_model, check_resize
from orchestrator.sweepfile.schema_clusters import ClustersSpec, EmbedSpec
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweepfile.timm_table import shipped_models

WHOLE_SET = "dataset"


def resolve_clusters(
    name: str,
    spec: ClustersSpec,
    dataset: Dataset,
    within: LabelSpace | None,
    complaints: Complaints,
    *,
    auto_library: str,
    only_block: str = "",
) -> list[LabelSpace]:
    """The label spaces of one entry.

    Args:
        name: of the entry.
        spec: what the file says.
        dataset: its samples are clustered.
        within: whose classes are clustered each by itself; None = the whole set.
        complaints: takes what is wrong.
        auto_library: what ``library: auto`` means here.
        only_block: name of the pretrain block where the sweep has a single one.
    """
    path: Path = ("labels", name, "clusters")
    complaints.refuse_repeats((*path, "k"), [str(k) for k in spec.k or ()])
    embedding = _embedding((*path, "embed"), spec.embed, only_block, complaints)
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


def check_embeddings(labels: Mapping[str, LabelSpace], pretrains: Sequence[Pretrain], complaints: Complaints) -> None:
    """Complain about embeddings of backbones that this sweep does not pretrain."""
    seen: set[str] = set()
    for space in labels.values():
        if space.clustering is None or space.clustering.embedding.backbone is None or space.entry in seen:
            continue
        seen.add(space.entry)
        path: Path = ("labels", space.entry, "clusters", "embed", "backbone")
        _check_swept(path, space.clustering.embedding, labels, pretrains, complaints)


def _check_swept(
    path: Path,
    embedding: Embedding,
    labels: Mapping[str, LabelSpace],
    pretrains: Sequence[Pretrain],
    complaints: Complaints,
) -> None:
    origin = embedding.backbone or ""
    blocks = {pretrain.name: pretrain for pretrain in pretrains}
    pretrain = blocks.get(embedding.pretrain)
    if pretrain is None and not embedding.pretrain:
        message = f"'pretrain' is missing: which block's backbone is it? the blocks are {', '.join(blocks)}"
        complaints.add(path, message)
    elif pretrain is None:
        named = did_you_mean(embedding.pretrain, blocks)
        hint = "the only block has no name; remove this" if "" in blocks else named
        complaints.add((*path, "pretrain"), f"'{embedding.pretrain}' is not a block of pretrain: {hint}")
    elif origin not in labels or (pretrain.labels and origin not in pretrain.labels):
        hint = did_you_mean(origin, pretrain.labels or labels)
        where = f"by block '{pretrain.name}'" if pretrain.name else "in this sweep"
        message = f"'{origin}' is not pretrained {where}, so there is no such backbone: {hint}"
        complaints.add((*path, "labels"), message)
    elif embedding.seed not in pretrain.seeds:
        message = f"no backbone is pretrained with seed {embedding.seed}; pretrain.seeds are {list(pretrain.seeds)}"
        complaints.add((*path, "seed"), message)
    else:
        check_resize(path[:-1], embedding.look, (pretrain.model,), complaints)


def _embedding(path: Path, spec: EmbedSpec, only_block: str, complaints: Complaints) -> Embedding:
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
    look = spec.model_dump(include={"view", "resize", "interpolation", "decoder", "mean", "std", "precision"})
    check_resize(path, look, () if model is None else (model,), complaints)
    if spec.output == "projection" and not initial.keys() & {"timm", "uri"}:
        message = "only weights of init.timm or init.uri bring a projection along; use output: features"
        complaints.add((*path, "output"), message)
    block = only_block if spec.backbone is None or spec.backbone.pretrain is None else spec.backbone.pretrain
    return Embedding(
        pretrain=block,
        backbone=spec.backbone.labels if spec.backbone is not None else None,
        seed=spec.backbone.seed if spec.backbone is not None else 0,
        model=model,
        initial=initial,
        look=look if spec.output == "features" else {**look, "output": spec.output},  # former sweeps keep their keys
    )
