"""`clusters:` of a label entry: label spaces made of clusters of a backbone's features. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import Count, OneRule, Seed, Strict
from orchestrator.sweepfile.known_models import shipped_models
from orchestrator.sweepfile.model import InitialSpec, ModelSpec, check_model, check_resize
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.pretrain import is_in_doubt
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import Decoder, Deviations, Interpolation, Mean, Precision
from orchestrator.sweepfile.values import Clustering, Dataset, Embedding, LabelSpace, Model, Pretrain

WHOLE_SET = "dataset"


class SweptBackbone(Strict):
    """A backbone that this sweep pretrains."""

    pretrain: str | None = Field(None, description="Its block; needed where the sweep has several.")
    labels: str = Field(description="Label space that it is pretrained on, by its path (levels/depth4).")
    seed: Seed = Field(0, description="Pretraining seed.")


class EmbedSpec(OneRule):
    """The network whose features are clustered: a backbone of this sweep, or another one with its weights (init)."""

    RULES: ClassVar[tuple[str, ...]] = ("backbone", "model")

    backbone: SweptBackbone | None = Field(None, description="A backbone that this sweep pretrains.")
    model: ModelSpec | None = Field(None, description="Another network, by its timm name; needs init.")
    init: InitialSpec | None = Field(None, description="The weights of model.")
    output: Literal["features", "projection"] = Field(
        "features",
        description="projection: of model, with the last layer that its weights bring along, as CLIP embeds images.",
    )
    view: Literal["center", "mirrored"] = Field("center", description="The centre square, or its mirror image.")
    resize: Count | None = Field(
        None,
        description="Shorter side before the centre square is cut out, pixels; default: as the weights were used; of "
        "an artifact, image_size.",
    )
    interpolation: Interpolation | None = Field(
        None, description="Filter of resizing; default: as the weights were trained; of an artifact, bilinear."
    )
    decoder: Decoder | None = Field(
        None, description="Decoder and resizer; default: as the sweep pretrains, or pillow."
    )
    mean: Mean | None = Field(None, description="Per channel, of pixels in [0, 1]; default: that of the weights.")
    std: Deviations | None = Field(None, description="Per channel, of pixels in [0, 1]; default: that of the weights.")
    precision: Precision = Field("fp32", description="Arithmetic; features are stored in float16.")


class Rebalanced(Strict):
    """Clusters per class that follow from its size: the finest of 2, 8, 32, 64, 128, 256, 512 and 1024."""

    min_samples: Count = Field(description="Training samples that the smallest cluster must still hold.")


class ClustersSpec(OneRule):
    """k-means on features. A validation sample gets the nearest centroid, of its own class where within is given."""

    RULES: ClassVar[tuple[str, ...]] = ("k", "rebalanced")

    k: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] | None = Field(
        None, description="Clusters, of each class of within or of the whole set; one label space per number."
    )
    rebalanced: Rebalanced | None = Field(None, description="As many clusters per class as its size allows.")
    within: str = Field(
        "dataset", description="Label space whose classes are clustered each by itself; dataset: the whole set."
    )
    embed: EmbedSpec = Field(description="Whose features are clustered, and how images are seen.")
    seed: Seed = Field(0, description="Seed of the first centroids; never follows the pretrain seed.")
    iterations: Count = Field(25, description="Steps of Lloyd's algorithm at most.")
    num_init: Count = Field(1, description="Starts, of which the one with the smallest inertia is kept.")
    library: Literal["auto", "faiss", "scikit-learn"] = Field(
        "auto", description="Part of the identity; auto: faiss if it is installed where the sweep is planned."
    )


# ------------------------------------------------------------------------------------------------- what they resolve to


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
        within: the label space each of whose classes is clustered separately; None = the whole set.
        complaints: takes what is wrong.
        auto_library: the library for ``library: auto``.
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
            num_labelled=within.num_labelled if within is not None else None,
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
        if is_in_doubt(origin, [pretrain], complaints):
            return
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
        look=look if spec.output == "features" else {**look, "output": spec.output},  # earlier sweeps keep their keys
    )
