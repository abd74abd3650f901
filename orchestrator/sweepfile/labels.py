"""`labels:`: the schema of an entry, and the label spaces that it resolves to. Pure.

A rule is a field of `LabelEntry`, its name in ``RULES`` and the method of that name in `_LabelResolver`. A new one also
has its computation in ``workloads.labels.rules`` and a short name in ``orchestrator.planning.graph.identity``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.plugins import LABEL_SPACES
from orchestrator.core.suggest import did_you_mean
from orchestrator.storage.dataset_files import LEAF_LEVEL, TAXONOMIC_CLASS, level_problem
from orchestrator.storage.protocol import is_name
from orchestrator.sweepfile.clusters import WHOLE_SET, ClustersSpec, resolve_clusters
from orchestrator.sweepfile.datasets import ReadClassTable
from orchestrator.sweepfile.fields import SYNSET, Count, OneRule, Seed, Strict, canonical, refuse_unread
from orchestrator.sweepfile.label_counts import (
    CountClasses,
    Counted,
    Definition,
    check_declared,
    counted_as_declared,
    may_drop,
    num_labelled,
)
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.plugin_uses import PluginSources, PluginUses
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import has_several_targets
from orchestrator.sweepfile.values import Dataset, LabelSpace

AtLeastTwo = Annotated[int, Field(ge=2)]
ClassName = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]
Synset = Annotated[str, Field(pattern=SYNSET)]


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
        "keep", description="Unlisted classes: each its own target, or not part of the data."
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
            context = {"rules": ", ".join(self.BASED), "at": ("base",)}
            raise PydanticCustomError("refused", "only {rules} start from another label space; remove it", context)
        return self


# ------------------------------------------------------------------------------------------------- what they resolve to


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSources:
    """Sources of information about label spaces besides the file."""

    count: CountClasses | None = None
    """Counts classes whose number does not follow from the file; None: such spaces are refused."""
    read_table: ReadClassTable | None = None
    """Reads the class table of a built-in data set; None: it cannot be mixed with others."""
    kmeans: str = "scikit-learn"
    """The library for ``library: auto`` of clusters."""
    only_block: str = ""
    """Name of the pretrain block where the sweep has a single one; empty also where it has no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A label space before its classes are counted; ``path`` is where its entry's list names it."""

    name: str
    level: str
    space: Definition
    path: Path
    num_classes: int = 0
    """0 = not known without the class table."""
    base: LabelSpace | None = None
    num_within: int = 0
    """The number of classes if all classes of ``base`` have samples enough; 0 = not known without the class table."""


def _is_drawn(space: LabelSpace) -> bool:
    """Whether its targets are drawn for each sample: then no class of the data set has one target."""
    return "random" in space.space or "split" in space.space


def resolve_label_spaces(
    entries: Mapping[str, LabelEntry],
    datasets: Mapping[str, Dataset],
    complaints: Complaints,
    sources: LabelSources | None = None,
    plugins: PluginUses | None = None,
) -> dict[str, LabelSpace]:
    """All label spaces by their paths, in the order of the file.

    Args:
        entries: by name.
        datasets: all data sets.
        complaints: takes what is wrong.
        sources: the data plane.
        plugins: label spaces of other packages.
    """
    found = plugins or PluginUses(PluginSources(), complaints)
    for name, entry in entries.items():
        given = entry.plugin
        if given is not None and given.name in found.known(LABEL_SPACES):
            path: Path = ("labels", name, "plugin", "arguments")
            found.use(LABEL_SPACES, given.name, given.arguments, complaints.tree, path)
    found.check()  # before classes are counted, which would fail for the same reason, without a place
    resolver = _LabelResolver(entries, datasets, complaints, sources or LabelSources(), found.known(LABEL_SPACES))
    return {space.name: space for name in entries for space in resolver.entry(name)}


class _LabelResolver:
    def __init__(
        self,
        entries: Mapping[str, LabelEntry],
        datasets: Mapping[str, Dataset],
        complaints: Complaints,
        sources: LabelSources,
        plugins: Mapping[str, str],
    ) -> None:
        self._entries, self._datasets, self._complaints = entries, datasets, complaints
        self._count, self._plugins = sources.count, plugins
        self._sources = sources
        self._resolved: dict[str, list[LabelSpace]] = {}
        self._bases: dict[str, LabelSpace | None] = {}
        self._open: list[str] = []

    def entry(self, name: str) -> list[LabelSpace]:
        """The label spaces of one entry; none if something is wrong with it."""
        if name not in self._resolved:
            self._open.append(name)
            self._resolved[name] = self._resolve(name, self._entries[name])
            self._open.pop()
        return self._resolved[name]

    def _resolve(self, name: str, entry: LabelEntry) -> list[LabelSpace]:
        dataset = self._datasets.get(entry.dataset)
        if dataset is None:
            hint = did_you_mean(entry.dataset, self._datasets)
            message = f"'{entry.dataset}' is not a data set of this sweep: {hint}"
            self._complaints.add(("labels", name, "dataset"), message)
            return []
        if entry.clusters is not None:
            spaces = self._clusters(name, entry, entry.clusters, dataset)
            check_declared(name, entry.num_classes, spaces, self._complaints)
            return spaces
        if problem := _two_wordnets(entry):
            self._complaints.add(("labels", name, "classes", "file"), problem)
            return []
        if dataset.multi_label and (place := _drawn_in_classes(entry)):
            message = f"samples of '{dataset.name}' have several classes each, so ids within classes are not defined"
            self._complaints.add(("labels", name, *place), f"{message}; draw them over the whole set, by random alone")
            return []
        drafts = list(_RULES[_rule_of(entry)](self, name, entry, dataset))
        modifiers: dict[str, Any] = {} if entry.classes is None else {"classes": _choice(entry.classes)}
        found = self._counted(name, entry, dataset, drafts, modifiers)
        check_declared(name, entry.num_classes, found, self._complaints)
        return found

    def _counted(
        self, name: str, entry: LabelEntry, dataset: Dataset, drafts: Sequence[_Draft], modifiers: Definition
    ) -> list[LabelSpace]:
        spaces = [{**draft.space, **modifiers} for draft in drafts]
        files = {name: uri for draft in drafts if draft.base for name, uri in draft.base.files.items()} | _files(entry)
        if all(draft.num_classes for draft in drafts) and not modifiers:
            pairs = zip(drafts, spaces, strict=True)
            found = [Counted(num_classes=draft.num_classes, space=space) for draft, space in pairs]
        elif dataset.missing:  # such a sweep is not run: its keys are not those of the real data
            found = [Counted(space=space) for space in spaces]
        elif self._count is None:
            self._complaints.add(("labels", name), "its classes can only be counted where the data set can be read")
            return []
        else:
            found = list(self._count(dataset, spaces, files))
        is_declared = bool(dataset.uncounted and any(not one.num_classes for one in found))
        if is_declared:
            numbers = [draft.num_classes or draft.num_within for draft in drafts]
            given = entry.num_classes or ()
            found = counted_as_declared(self._complaints, name, given, dataset=dataset, known=numbers, read=found)
            for draft in drafts:  # of other data sets the data plane says so, which reads their classes
                if draft.base is not None and _is_drawn(draft.base):
                    message = "needs a base in which each class has one target: a level, modulo, merge or binary"
                    self._complaints.add(draft.path, f"{_rule_of(entry)} {message}")
        for draft, counted in zip(drafts, found, strict=True):
            if counted.problem:
                self._complaints.add(draft.path, counted.problem)
        return [
            LabelSpace(
                name=draft.name,
                entry=name,
                level=draft.level,
                dataset=dataset.name,
                space=counted.space,
                num_classes=counted.num_classes,
                multi_label=counted.multi_label,
                files=counted.files or files,
                # What `classes`, here or in the base, leaves is known to nobody who does not write it.
                is_declared=is_declared and (entry.num_classes is not None or not _drops(draft, modifiers)),
                num_labelled=num_labelled(counted, dataset, draft.base),
            )
            for draft, counted in zip(drafts, found, strict=True)
            if not counted.problem
        ]

    def _other(self, reference: str, path: Path, dataset: Dataset) -> LabelSpace | None:
        """The label space that a rule starts from, if it is one of this data set."""
        entry = reference.partition("/")[0]
        if entry in self._open:
            chain = " -> ".join([*self._open[self._open.index(entry) :], entry])
            self._complaints.add(path, f"'{reference}' starts from itself ({chain}); break the circle")
            return None
        known = {space.name: space for space in self.entry(entry)} if entry in self._entries else {}
        if not known and self._complaints.doubts(("labels", entry)):
            self._complaints.doubt(path)
            return None
        if reference not in known:
            hint = did_you_mean(reference, known or self._entries)
            self._complaints.add(path, f"'{reference}' is not a label space of this sweep: {hint}")
            return None
        if known[reference].dataset != dataset.name:
            message = f"'{reference}' is a label space of data set '{known[reference].dataset}', not '{dataset.name}'"
            self._complaints.add(path, f"{message}; start from one of the same data set")
            return None
        if known[reference].clustering is not None:
            message = f"'{reference}' are clusters of samples, not of classes: no other space can start from them"
            self._complaints.add(path, message)
            return None
        return known[reference]

    def _clusters(self, name: str, entry: LabelEntry, spec: ClustersSpec, dataset: Dataset) -> list[LabelSpace]:
        if entry.classes is not None:
            self._complaints.add(("labels", name, "classes"), "clusters take their classes from within; remove this")
        within = None
        if spec.within != WHOLE_SET:
            within = self._other(spec.within, ("labels", name, "clusters", "within"), dataset)
            if within is None:
                return []
            if has_several_targets(within, dataset) or _is_drawn(within):
                message = f"'{spec.within}' gives a class no single target; use a level, modulo, merge or binary"
                self._complaints.add(("labels", name, "clusters", "within"), message)
        library, block = self._sources.kmeans, self._sources.only_block
        return resolve_clusters(name, spec, dataset, within, self._complaints, auto_library=library, only_block=block)

    def _check_name(self, level: str, path: Path, remedy: str) -> None:
        """Complain about a level of which a job cannot have its name, since its objects in the store have it, too."""
        if not is_name(level):
            message = f"'{level}' cannot be in the name of a job: use letters, digits and ._=@+,#~- (no leading dot)"
            self._complaints.add(path, f"{message}; {remedy}")

    def _on_base(self, entry: LabelEntry, dataset: Dataset, draft: _Draft) -> Iterator[_Draft]:
        """The draft started from the entry's base; nothing if the space it names is wrong."""
        name = self._open[-1]
        if entry.base is None:
            yield draft
            return
        if name not in self._bases:
            self._bases[name] = self._other(entry.base, ("labels", name, "base"), dataset)
        if (base := self._bases[name]) is not None:
            yield replace(draft, space={**draft.space, "base": base.space}, base=base, num_classes=0)

    # ------------------------------------------------------------------------------------------------------ rules

    def hierarchy(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        levels = entry.hierarchy or []
        known = {LEAF_LEVEL: dataset.num_classes, **dataset.levels}
        self._complaints.refuse_repeats(("labels", name, "hierarchy"), levels)
        for position, given in enumerate(levels):
            level = _level_name(given, dataset)
            path: Path = ("labels", name, "hierarchy", position)
            if level not in known:
                hint = did_you_mean(given, [*filter(is_name, dataset.levels), LEAF_LEVEL])
                message = f"'{given}' is not a level of data set '{dataset.name}': {hint}"
                unnamed = ", ".join(f"'{level}'" for level in dataset.levels if not is_name(level))
                more = f"; columns to rename before they can be levels: {unnamed}" if unnamed else ""
                self._complaints.add(path, f"{message} ('{LEAF_LEVEL}': its classes themselves){more}")
                continue
            if problem := _level_problem(level, dataset):
                self._complaints.add(path, problem)
                continue
            self._check_name(given, path, "rename the column")
            yield _Draft(
                name=f"{name}/{given}",
                level=given,
                space={"hierarchy": level},
                path=path,
                num_classes=known[level],
            )

    def random(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        random = entry.random
        assert random is not None  # noqa: S101 - for the type checker
        path: Path = ("labels", name, "random")
        self._complaints.refuse_repeats((*path, "num_classes"), [str(number) for number in random.num_classes])
        rule: dict[str, Any] = {"seed": random.seed} | ({"draw": "independent"} if random.independent else {})
        base = None
        if random.within is not None:
            base = self._other(random.within, (*path, "within"), dataset)
            if base is None:
                return
            rule["within"] = base.space
        for position, number in enumerate(random.num_classes):
            total = number * (base.num_classes if base else 1)
            if total > dataset.num_train:
                message = f"{total} classes for {dataset.num_train} training samples; at most one class per sample"
                self._complaints.add((*path, "num_classes", position), message)
            yield _Draft(
                name=f"{name}/{number}",
                level=str(number),
                space={"random": {"num_classes": number, **rule}},
                path=(*path, "num_classes", position),
                num_classes=0 if base else number,
                num_within=total if base else 0,
                base=base,
            )

    def modulo(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        divisor = entry.modulo or 0
        path: Path = ("labels", name, "modulo")
        if entry.base is None and divisor > dataset.num_classes:
            message = f"{divisor} is more than the {dataset.num_classes} classes of data set '{dataset.name}'"
            self._complaints.add(path, message + f"; use 2 to {dataset.num_classes}")
        draft = _Draft(name=name, level=f"mod{divisor}", space={"modulo": divisor}, path=path, num_classes=divisor)
        yield from self._on_base(entry, dataset, draft)

    def split(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        given = entry.split if isinstance(entry.split, RandomSplit) else RandomSplit(num=entry.split or 2)
        draw = "balanced" if given.balanced else "independent"
        space = {"split": {"num": given.num, "seed": given.seed, "draw": draw}}
        draft = _Draft(name=name, level=f"split{given.num}", space=space, path=("labels", name, "split"))
        yield from self._on_base(entry, dataset, draft)

    def merge(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        given = entry.merge or Merge(num_classes=[2])
        path: Path = ("labels", name, "merge")
        if given.groups is not None:
            groups = [{"name": group, "classes": members} for group, members in given.groups.items()]
            space: Definition = {"merge": {"groups": groups, "others": given.others}}
            yield from self._on_base(entry, dataset, _Draft(name=name, level="merged", space=space, path=path))
        for position, number in enumerate(given.num_classes or ()):
            space = {"merge": {"num_classes": number, "seed": given.seed}}
            where = (*path, "num_classes", position)
            draft = _Draft(name=f"{name}/{number}", level=f"merged{number}", space=space, path=where)
            yield from self._on_base(entry, dataset, draft)

    def binary(self, name: str, entry: LabelEntry, dataset: Dataset) -> Iterator[_Draft]:
        draft = _Draft(name=name, level="binary", space={"binary": entry.binary}, path=("labels", name, "binary"))
        yield from self._on_base(entry, dataset, draft)

    def wordnet(self, name: str, entry: LabelEntry, _: Dataset) -> Iterator[_Draft]:
        given = entry.wordnet or WordNetLevels(levels=[0])
        path: Path = ("labels", name, "wordnet")
        named = {"key": given.key, "digest": ""}
        if given.contains is not None:
            space: Definition = {"wordnet": {"contains": given.contains, **named}}
            yield _Draft(name=name, level=given.contains, space=space, path=(*path, "contains"))
            return
        levels = given.levels or []
        self._complaints.refuse_repeats((*path, "levels"), [str(level) for level in levels])
        seed = {"seed": given.seed} if given.paths == "random" else {}
        for position, level in enumerate(levels):
            rule: dict[str, Any] = {"level": level, "paths": given.paths}
            space = {"wordnet": rule | seed | named}
            yield _Draft(name=f"{name}/{level}", level=str(level), space=space, path=(*path, "levels", position))

    def taxonomy(self, name: str, entry: LabelEntry, _: Dataset) -> Iterator[_Draft]:
        given = entry.taxonomy
        assert given is not None  # noqa: S101 - for the type checker
        path: Path = ("labels", name, "taxonomy", "levels")
        self._complaints.refuse_repeats(path, given.levels)
        source: dict[str, Any] = (
            {"folders": given.folders, "separator": given.separator}
            if given.folders is not None
            else {"digest": "", "key": given.key, "class_key": given.class_key}
        )
        chain = {"chain": given.levels} if given.nested and len(given.levels) > 1 else {}
        remedy = "rename the column" if given.folders is None else "rename it here and in folders"
        for position, level in enumerate(given.levels):
            self._check_name(level, (*path, position), remedy)
            space = {"taxonomy": {"level": level, **source, **chain}}
            yield _Draft(name=f"{name}/{level}", level=level, space=space, path=(*path, position))

    def plugin(self, name: str, entry: LabelEntry, _: Dataset) -> Iterator[_Draft]:
        given = entry.plugin
        assert given is not None  # noqa: S101 - for the type checker
        path: Path = ("labels", name, "plugin", "name")
        if given.name not in self._plugins:
            hint = did_you_mean(given.name, self._plugins)
            self._complaints.add(path, f"no installed package has a label space '{given.name}': {hint}")
            return
        if self._complaints.doubts(("labels", name, "plugin")):
            return
        space = {"plugin": {"name": self._plugins[given.name], "arguments": given.arguments}}
        yield _Draft(name=name, level=given.name, space=space, path=path)


_RULES: Mapping[str, Callable[[_LabelResolver, str, LabelEntry, Dataset], Iterator[_Draft]]] = {
    rule: getattr(_LabelResolver, rule) for rule in LabelEntry.RULES if rule != "clusters"
}


def _rule_of(entry: LabelEntry) -> str:
    return next(rule for rule in LabelEntry.RULES if getattr(entry, rule) is not None)


def _level_problem(level: str, dataset: Dataset) -> str:
    """Why the labels job will refuse a column of the class table, if that is known; empty if it will not."""
    rows = dataset.class_table
    if level not in dataset.levels or not rows:
        return ""
    problem = level_problem(rows, level)
    if problem and dataset.listing and any(level not in row for row in rows):
        problem += " (no image has this class: labels that are numbers count from 0, without gaps)"
    return problem


def _level_name(given: str, dataset: Dataset) -> str:
    return TAXONOMIC_CLASS if given == "class" and TAXONOMIC_CLASS in dataset.levels else given


def _choice(given: ClassChoice) -> dict[str, Any]:
    if given.names is not None:
        return {"names": given.names}
    if given.under is not None:
        return {"under": given.under, "key": given.key, "digest": ""}
    return {"num": given.num, "seed": given.seed}


def _drops(draft: _Draft, modifiers: Definition) -> bool:
    """Whether classes of the space, or of the one that it is made from, may be left out."""
    return bool(modifiers) or (draft.base is not None and may_drop(draft.base.space))


def _drawn_in_classes(entry: LabelEntry) -> Path:
    """What asks for ids that are drawn in each class, or in some classes; empty if nothing does."""
    if entry.split is not None:
        return ("split",)
    if entry.random is None:
        return ()
    return ("random", "within") if entry.random.within is not None else ("classes",) * (entry.classes is not None)


def _two_wordnets(entry: LabelEntry) -> str:
    """What to do where levels and classes name different files; empty if they do not. A definition has one WordNet."""
    levels, classes = entry.wordnet, entry.classes
    if levels is None or classes is None or classes.under is None or levels.file == classes.file:
        return ""
    one, other = (f"'{file}'" if file else "the default" for file in (levels.file, classes.file))
    return f"this is {other}, and wordnet.file is {one}: a label space has one WordNet; write the same file at both"


def _files(entry: LabelEntry) -> dict[str, str]:
    """Where the files lie that an entry names; a missing one is where packages put it."""
    wordnet = (entry.wordnet.file if entry.wordnet else "") or (entry.classes.file if entry.classes else "")
    table = entry.taxonomy.table if entry.taxonomy else None
    return {name: uri for name, uri in (("wordnet", wordnet), ("table", table)) if uri}
