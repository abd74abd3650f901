"""`analyze:`: the schema of an entry, and the measures of features that it resolves to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.plugins import MEASURES
from orchestrator.core.suggest import did_you_mean
from orchestrator.storage.dataset_files import level_problem
from orchestrator.sweepfile.fields import Count, Name, OneRule, Seed, Strict, canonical
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.plugin_uses import PluginUses
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import has_several_targets
from orchestrator.sweepfile.transfer import check_epochs, chosen_labels, measured_blocks
from orchestrator.sweepfile.values import AnalysisPlan, Dataset, LabelSpace, Pretrain

SIMILARITY = "cka"


class DistancesSpec(Strict):
    """Mean squared distances between the features of classes."""

    levels: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Levels of the data set's hierarchy for common ancestors; default: all."
    )


class ClpSpec(Strict):
    """Cluster-and-linear-probe: are the original classes there in features that were trained on coarser ones?"""

    reduce: Literal["none", "pca", "tsne"] = Field(
        "tsne", description="What features become, within each trained class, before they are clustered."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(
        [0], description="Of where t-SNE and k-means start; clp_std is the spread over them."
    )
    samples: Count = Field(10_000, description="Most samples of each split.")
    raw_pixels: bool = Field(default=True, description="The same on pixels, as a control.")


class PuritySpec(Strict):
    """Whether the samples that excite a unit most are of one class, by level, beyond chance."""

    top: Annotated[int, Field(ge=2, le=10_000)] = Field(100, description="Samples that excite a unit most.")


class SparsitySpec(Strict):
    """Share of active units, behind each activation function of the backbone too."""

    samples: Count = Field(description="Samples that pass through the backbone, at most.")


class EmbeddingSpec(Strict):
    """A picture: samples in two dimensions."""

    method: Literal["pca", "tsne"] = Field("tsne", description="How features become two numbers.")
    samples: Annotated[int, Field(ge=10, le=5000)] = Field(1000, description="Samples that are drawn, at most.")
    seed: Seed = Field(0, description="Of where t-SNE starts.")


class PluginMeasure(Strict):
    """A measure of another package (entry point group pretraining_orchestrator.measures)."""

    name: str = Field(description="Name of the entry point.")
    arguments: dict[str, Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict, description="Arguments: plain JSON."
    )


class MeasureSpec(OneRule):
    """A measure with parameters: exactly one field."""

    RULES: ClassVar[tuple[str, ...]] = ("distances", "clp", "purity", "sparsity", "embedding", "plugin")

    distances: DistancesSpec | None = Field(None, description="Distances of classes, and MSDR.")
    clp: ClpSpec | None = Field(None, description="Cluster-and-linear-probe, with the probe of original labels.")
    purity: PuritySpec | None = Field(None, description="Purity of units.")
    sparsity: SparsitySpec | None = Field(None, description="Active units, by layer.")
    embedding: EmbeddingSpec | None = Field(None, description="A picture of the samples.")
    plugin: PluginMeasure | None = Field(None, description="A measure of another package.")


MeasureName = Literal["collapse", "distances", "clp", "rank", "purity", "sparsity", "embedding", "cka"]
Measure = Annotated[
    Annotated[MeasureName, Tag("by name")] | Annotated[MeasureSpec, Tag("with parameters")],
    Discriminator(lambda value: "with parameters" if isinstance(value, Mapping | MeasureSpec) else "by name"),
]
_PARAMETERS: Mapping[str, type[Strict]] = {
    "distances": DistancesSpec,
    "clp": ClpSpec,
    "purity": PuritySpec,
    "embedding": EmbeddingSpec,
}


class AnalysisSpec(Strict):
    """Measures of the features of backbones, or of how alike these are."""

    name: Name = Field(description="What tables and job names call it.")
    measures: Annotated[list[Measure], Field(min_length=1)] = Field(
        description="By name, or as a mapping with parameters. With between: cka alone."
    )
    dataset: str | None = Field(
        None, description="Data set whose images are embedded; default: that of the pretraining."
    )
    split: Literal["train", "val"] = Field("val", description="Its split.")
    of: str | None = Field(
        None,
        description="Label space of the original classes, by its path, in addition to those trained on; default: the "
        "leaf classes.",
    )
    pretrain: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Blocks whose backbones are analysed, by name or glob; default: all."
    )
    labels: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Label spaces whose backbones are analysed, by path or glob; default: all."
    )
    from_checkpoints: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None,
        description="Epochs of the pretraining (pretrain.checkpoints.keep.epochs), or its last; default: the final "
        "weights.",
    )
    between: Annotated[list[Literal["labels", "pretrain", "seeds", "checkpoints"]], Field(min_length=1)] | None = Field(
        None,
        description="What the backbones differ in that one job compares with each other; for each combination of the "
        "rest there is a job.",
    )

    @model_validator(mode="after")
    def _compares_or_measures(self) -> AnalysisSpec:
        names = [name for name, _ in named_measures(self)]
        if self.between is not None and names != [SIMILARITY]:
            message = "with between, backbones are compared: write measures: [cka], and other measures in another entry"
            raise PydanticCustomError("refused", message, {"at": ("measures",)})
        if self.between is None and SIMILARITY in names:
            message = "cka compares backbones; say which: between: [labels]"
            raise PydanticCustomError("refused", message, {"at": ("measures", names.index(SIMILARITY))})
        return self


def named_measures(entry: AnalysisSpec) -> Iterator[tuple[str, Strict | None]]:
    """The measures in the order of the file, with their parameters where they have any."""
    for given in entry.measures:
        if isinstance(given, MeasureSpec):
            yield from ((rule, found) for rule in MeasureSpec.RULES if (found := getattr(given, rule)) is not None)
        else:
            yield given, _PARAMETERS[given]() if given in _PARAMETERS else None


def resolve_analysis(
    position: int,
    entry: AnalysisSpec,
    *,
    datasets: Mapping[str, Dataset],
    labels: Mapping[str, LabelSpace],
    pretrains: Sequence[Pretrain],
    plugins: PluginUses,
    complaints: Complaints,
) -> AnalysisPlan:
    """The analysis of the entry at a position of the list; complains of what is wrong and goes on.

    Args:
        position: of the entry.
        entry: as it stands in the file.
        datasets: the sweep's data sets.
        labels: the sweep's label spaces.
        pretrains: the sweep's blocks, resolved.
        plugins: installed measures of other packages; collects those that are used.
        complaints: collects what is wrong.
    """
    path: Path = ("analyze", position)
    blocks = measured_blocks((*path, "pretrain"), entry.pretrain, pretrains, complaints)
    check_epochs((*path, "from_checkpoints"), entry.from_checkpoints or (), blocks, complaints)
    found = AnalysisPlan(
        name=entry.name,
        measures=_measures(path, entry, plugins, complaints),
        dataset=entry.dataset or "",
        split=entry.split,
        of=entry.of or "",
        pretrains=tuple(block.name for block in blocks),
        labels=chosen_labels((*path, "labels"), entry.labels, blocks, complaints),
        checkpoints=tuple(entry.from_checkpoints or ()),
        between=tuple(dict.fromkeys(entry.between or ())),
    )
    _check_between(path, found, blocks, complaints)
    if entry.dataset is not None and entry.dataset not in datasets:
        hint = did_you_mean(entry.dataset, datasets)
        complaints.add((*path, "dataset"), f"'{entry.dataset}' is not a data set of this sweep: {hint}")
        return found
    trained = _trained_datasets(found, blocks, labels)
    names = (found.dataset,) if found.dataset else trained
    analysed = [datasets[name] for name in names if name in datasets]
    _check_data(path, found, analysed, trained, complaints)
    _check_of(path, found, analysed, labels, complaints)
    for level in found.measures.get("distances", {}).get("levels") or ():
        for problem in filter(None, (_level_problem(level, dataset, labels.get(found.of)) for dataset in analysed)):
            place = (*path, "measures", list(found.measures).index("distances"), "distances", "levels")
            complaints.add(place, problem)
    return found


def _measures(
    path: Path, entry: AnalysisSpec, plugins: PluginUses, complaints: Complaints
) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for position, (name, given) in enumerate(named_measures(entry)):
        where = (*path, "measures", position)
        if name in found:
            complaints.add(where, f"'{name}' is given twice; keep one, or make a second entry of analyze")
        parameters = given.model_dump() if given is not None else {}
        if isinstance(given, PluginMeasure):
            if given.name in plugins.known(MEASURES):
                place = (*where, "plugin", "arguments") if given.arguments else (*where, "plugin")
                parameters["name"] = plugins.use(MEASURES, given.name, given.arguments, complaints.tree, place)
            else:
                hint = did_you_mean(given.name, plugins.known(MEASURES))
                message = f"no installed package has a measure '{given.name}': {hint}"
                complaints.add((*where, "plugin", "name"), message)
        found[name] = parameters
    return found


def _trained_datasets(
    found: AnalysisPlan, blocks: Sequence[Pretrain], labels: Mapping[str, LabelSpace]
) -> tuple[str, ...]:
    """Data sets of the label spaces whose backbones are analysed."""
    spaces = (labels[name] for block in blocks for name in found.spaces(block) if name in labels)
    return tuple(dict.fromkeys(space.dataset for space in spaces))


def _check_between(path: Path, found: AnalysisPlan, blocks: Sequence[Pretrain], complaints: Complaints) -> None:
    """Complain where no two backbones differ in what is compared alone: there would be no job."""
    groups = Counter(
        tuple(value for factor, value in factors.items() if factor not in found.between)
        for block in blocks
        for space in found.spaces(block)
        for seed in block.seeds
        for epoch in found.checkpoints or ("",)
        for factors in [{"labels": space, "pretrain": block.name, "seeds": seed, "checkpoints": epoch}]
    )
    if found.between and groups and max(groups.values()) < 2:
        message = f"no two backbones differ in {' and '.join(found.between)} alone, so there is nothing to compare"
        complaints.add((*path, "between"), f"{message}; name something else, or pretrain more")


def _check_data(
    path: Path, found: AnalysisPlan, datasets: Sequence[Dataset], trained: Sequence[str], complaints: Complaints
) -> None:
    place = (*path, "dataset") if found.dataset else path
    for dataset in datasets:
        if "val" in found.splits and not dataset.has_val:
            message = f"data set '{dataset.name}' has no validation samples; write split: train, or give it a split val"
            complaints.add(place, message)
    if found.dataset and "clp" in found.measures and set(trained) != {found.dataset}:
        message = f"clp needs the classes that backbones were trained on, and '{found.dataset}' has none of them"
        complaints.add(place, f"{message}; remove dataset, or move clp into another entry of analyze")
    if found.between and len(datasets) > 1:
        names = ", ".join(dataset.name for dataset in datasets)
        message = f"backbones are compared on the same images, but these were pretrained on several data sets ({names})"
        complaints.add(path, f"{message}; say on which one: dataset: {datasets[0].name}")


def _check_of(
    path: Path,
    found: AnalysisPlan,
    analysed: Sequence[Dataset],
    labels: Mapping[str, LabelSpace],
    complaints: Complaints,
) -> None:
    if found.of and found.of not in labels:
        if not complaints.doubts(("labels", found.of.partition("/")[0])):
            hint = did_you_mean(found.of, labels)
            complaints.add((*path, "of"), f"'{found.of}' is not a label space of this sweep: {hint}")
    elif found.of:
        space = labels[found.of]
        others = [dataset.name for dataset in analysed if dataset.name != space.dataset]
        if others:
            message = f"'{found.of}' is a label space of data set '{labels[found.of].dataset}', but '{others[0]}' is "
            complaints.add((*path, "of"), f"{message}analysed; name a label space of '{others[0]}', or set dataset")
        if any(has_several_targets(space, dataset) for dataset in analysed if dataset.name == space.dataset):
            message = f"samples have several classes in '{found.of}'; choose a label space with one for each"
            complaints.add((*path, "of"), message)
    elif not found.between and (several := [dataset.name for dataset in analysed if dataset.multi_label]):
        message = f"samples of data set '{several[0]}' have several classes; name a label space with one for each"
        complaints.add(path, f"{message}, such as a binary one: of")


def _level_problem(level: str, dataset: Dataset, of: LabelSpace | None) -> str:
    """Why no analysis can use a level for common ancestors, where that is known; empty if it can."""
    if level not in dataset.levels:
        is_known = bool(dataset.levels or dataset.class_table)
        hint = did_you_mean(level, dataset.levels)
        return f"'{level}' is not a level of data set '{dataset.name}': {hint}" if is_known else ""
    if dataset.multi_label:
        return f"samples of data set '{dataset.name}' have several classes, and so no node of '{level}'; remove levels"
    if problem := level_problem(dataset.class_table, level):
        return problem
    num_nodes = dataset.levels[level]
    if num_nodes < 2:
        return f"'{level}' has a single node, which all classes share; remove it"
    # Where samples are left out, whole nodes may be.
    if of is not None and of.dataset == dataset.name and of.num_labelled is None and 0 < of.num_classes < num_nodes:
        message = f"'{level}' has {num_nodes} nodes and '{of.name}' {of.num_classes} classes, so some lie in several"
        return f"{message} nodes; name coarser levels, or finer classes as 'of'"
    return ""
