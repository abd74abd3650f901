"""The part of a sweep.yaml that defines label spaces, and which samples are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Count, OneRule, Seed, Strict, canonical, refuse_unread
from orchestrator.sweepfile.schema_clusters import ClustersSpec

AtLeastTwo = Annotated[int, Field(ge=2)]
ClassName = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]
Synset = Annotated[str, Field(pattern=r"^n\d{8}$")]


class RandomIds(Strict):
    """Random label ids, balanced: a keyed permutation of the samples modulo ``num_classes``."""

    num_classes: Annotated[list[AtLeastTwo], Field(min_length=1)] = Field(description="One label space per number.")
    seed: Seed = Field(0, description="Seed of the permutation; never follows the pretrain seed.")
    independent: bool = Field(
        default=False, description="Draw each sample's id on its own, so that sizes scatter and classes may be empty."
    )
    within: str | None = Field(
        None, description="Label space whose classes each get num_classes ids; default: ids over the whole set."
    )


class RandomSplit(Strict):
    """Random sub-classes of each class."""

    num: AtLeastTwo = Field(description="Sub-classes per class.")
    seed: Seed = Field(0, description="Seed of the choice; never follows the pretrain seed.")
    balanced: bool = Field(default=False, description="Make sub-classes equal in size, in place of a keyed hash.")


class Merge(OneRule):
    """Classes merged into groups, listed or random."""

    RULES: ClassVar[tuple[str, ...]] = ("groups", "num_classes")
    OF_RULE: ClassVar[Mapping[str, str]] = {"others": "groups", "seed": "num_classes"}

    groups: dict[str, Annotated[list[ClassName], Field(min_length=1)]] | None = Field(
        None, description="Classes of each group, by name or number."
    )
    others: Literal["keep", "drop"] = Field(
        "keep", description="Unlisted classes: targets of their own, or not part of the data."
    )
    num_classes: Annotated[list[AtLeastTwo], Field(min_length=1)] | None = Field(
        None, description="Random groups whose sizes differ by one class at most; one label space per number."
    )
    seed: Seed = Field(0, description="Seed of random groups; never follows the pretrain seed.")


class WordNetLevels(OneRule):
    """Levels of WordNet's noun hierarchy, or what lies below one synset."""

    RULES: ClassVar[tuple[str, ...]] = ("levels", "contains")
    OF_RULE: ClassVar[Mapping[str, str]] = {"paths": "levels", "seed": "levels"}

    levels: Annotated[list[Annotated[int, Field(ge=0, le=32)]], Field(min_length=1)] | None = Field(
        None, description="Steps upwards from the classes; a class has every end point as a label."
    )
    contains: Synset | None = Field(None, description="1 for classes with this synset on any path upwards, else 0.")
    paths: Literal["all", "first", "random"] = Field("all", description="Hypernyms that are followed.")
    seed: Seed = Field(0, description="Seed of random paths.")
    key: str = Field("synset", description="Column of the class table that names synsets (n01440764).")
    file: str = Field("", description="Path or URI of WordNet's data.noun; default: where packages put it.")

    @model_validator(mode="after")
    def _seed_is_used(self) -> Self:
        if self.paths != "random":
            refuse_unread(self, ("seed",), "without paths: random")
        return self


class Taxonomy(OneRule):
    """Levels that the class table does not hold: from another table, or from the class names themselves."""

    RULES: ClassVar[tuple[str, ...]] = ("table", "folders")
    OF_RULE: ClassVar[Mapping[str, str]] = {"key": "table", "class_key": "table", "separator": "folders"}

    levels: Annotated[list[str], Field(min_length=1)] = Field(description="One label space per level.")
    table: str | None = Field(None, description="Path or URI of a csv, json or parquet file with a row per class.")
    key: str = Field("name", description="Column of the table that names classes.")
    class_key: str = Field("name", description="Column of the data set's class table with the same names.")
    folders: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Levels in the parts of class names, in their order."
    )
    separator: Annotated[str, Field(min_length=1)] = Field("/", description="Between the parts of class names.")
    nested: bool = Field(default=True, description="Refuse a level that is not a function of the next finer one.")


class Plugin(Strict):
    """A label space of another package (entry point group pretraining_orchestrator.label_spaces)."""

    name: str = Field(description="Name of the entry point.")
    arguments: dict[str, Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict, description="Arguments: plain JSON."
    )


class ClassChoice(OneRule):
    """Leaf classes that are part of the label space; samples of others are not part of the data."""

    RULES: ClassVar[tuple[str, ...]] = ("names", "under", "num")
    OF_RULE: ClassVar[Mapping[str, str]] = {"seed": "num", "key": "under", "file": "under"}

    names: Annotated[list[ClassName], Field(min_length=1)] | None = Field(None, description="By name or number.")
    under: Synset | None = Field(None, description="Those with this synset on any path upwards.")
    num: Count | None = Field(None, description="So many at random; more of them contain fewer.")
    seed: Seed = Field(0, description="Seed of the random choice.")
    key: str = Field("synset", description="Column of the class table that names synsets.")
    file: str = Field("", description="Path or URI of WordNet's data.noun; default: where packages put it.")


class LabelEntry(OneRule):
    """One entry of ``labels``: a data set and exactly one rule."""

    RULES: ClassVar[tuple[str, ...]] = (
        "hierarchy",
        "random",
        "modulo",
        "split",
        "merge",
        "binary",
        "wordnet",
        "taxonomy",
        "plugin",
        "clusters",
    )
    BASED: ClassVar[tuple[str, ...]] = ("modulo", "split", "merge", "binary")

    dataset: str = Field(description="Name of an entry of datasets.")
    hierarchy: Annotated[list[str], Field(min_length=1)] | None = Field(None, description="Levels of the hierarchy.")
    random: RandomIds | None = Field(None, description="Random ids.")
    modulo: int | None = Field(None, ge=2, description="Leaf class modulo this number.")
    split: AtLeastTwo | RandomSplit | None = Field(None, description="Random sub-classes of each class.")
    merge: Merge | None = Field(None, description="Classes merged into groups.")
    binary: Annotated[list[ClassName], Field(min_length=1)] | None = Field(
        None, description="1 for these classes, 0 for all others."
    )
    wordnet: WordNetLevels | None = Field(None, description="WordNet's hierarchy.")
    taxonomy: Taxonomy | None = Field(None, description="Another taxonomy.")
    plugin: Plugin | None = Field(None, description="A label space of another package.")
    clusters: ClustersSpec | None = Field(None, description="Clusters of embeddings.")
    base: str | None = Field(
        None, description="Label space that modulo, split, merge and binary start from; default: the leaf classes."
    )
    classes: ClassChoice | None = Field(None, description="Leaf classes that are part of it; default: all.")
    num_classes: Annotated[list[AtLeastTwo], Field(min_length=1)] | None = Field(
        None,
        description="How many classes its label spaces have, in their order: another number is refused, and the sweep "
        "can be planned with these where the data set is not there.",
    )

    @model_validator(mode="after")
    def _base_is_used(self) -> Self:
        if self.base is not None and all(getattr(self, rule) is None for rule in self.BASED):
            context = {"rules": ", ".join(self.BASED)}
            raise PydanticCustomError("unused_base", "only {rules} start from another space; remove base", context)
        return self


class SubsetSpec(Strict):
    """A seeded part of the training split, stratified by leaf class; smaller ones are contained in larger ones."""

    fraction: float = Field(1.0, gt=0, le=1, description="Share of each class; at least one sample.")
    max_per_class: Count | None = Field(None, description="Most samples of a class.")
    num_samples: Count | None = Field(None, description="Samples in total, as equal over the classes as possible.")
    seed: Seed = Field(0, description="Seed of the choice; never follows the other seeds.")

    def resolved(self) -> dict[str, Any]:
        """What identities hold: the fields that limit something, and the seed; nothing if nothing does."""
        given = self.model_dump(exclude_none=True, exclude={"fraction", "seed"})
        limits = given | ({"fraction": self.fraction} if self.fraction < 1 else {})
        return limits | {"seed": self.seed} if limits else {}
