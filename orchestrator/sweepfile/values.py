"""The resolved sweep: frozen values with all defaults, without globs and names of recipes.

Readers of stored plans need them, so nothing here imports the schema, which takes a tenth of a second. Invariants:

- Values are immutable and plain: a plan is made of them alone, and equal values make equal keys.
- `Policy` and `Channel` change no result, and a channel holds references to secrets, never secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Self, TypeAlias

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind

BLOCK_FACTOR = "block"
"""The factor whose values are the named blocks of ``pretrain:``."""
LABELS_FACTOR = "labels"
"""The factor whose values are the label spaces of the pretraining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set; ``parameters`` are its whole identity. ``levels`` maps levels to their number of classes."""

    name: str
    readable: str
    parameters: Mapping[str, Any]
    levels: Mapping[str, int]
    num_classes: int
    num_train: int
    location: Mapping[str, Any] = field(default_factory=dict)
    """Location and declared sizes of its external shards (``Execution.data_location``)."""
    jobs: int = 1
    """Jobs that share the writing of its shards."""
    listing: Mapping[str, Any] = field(default_factory=dict)
    """Identity of the listing of the source that it is converted from; empty without one."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where that source lies (``Execution.data_location``)."""
    scan: Mapping[str, Any] = field(default_factory=dict)
    """Identity of the scan of shards that jobs of the sweep write; empty = nothing out of the ordinary."""
    class_table: tuple[Mapping[str, Any], ...] = ()
    """Rows of an external data set's class table."""
    class_counts: tuple[int, ...] = ()
    """Training samples of each leaf class, where they are known."""
    multi_label: bool = False
    has_val: bool = True
    """Whether a validation split is known to be there, or may be."""
    components: tuple[str, ...] = ()
    """Data sets that this one mixes; empty otherwise."""
    missing: str = ""
    """Why it cannot be read, if only its declaration is known; empty if it exists."""
    notes: tuple[str, ...] = ()
    """What people should know of its source, such as files that are left out."""

    @property
    def is_written(self) -> bool:
        """Whether jobs of the sweep write its shards."""
        return bool(self.listing) or not (self.location or self.components)

    @property
    def uncounted(self) -> str:
        """Why classes cannot be counted by its class table; empty if they can."""
        unlisted = "its source is not listed where 'convert.listing' is declared"
        return self.missing or (unlisted if self.listing and not self.class_table else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A timm architecture; ``kwargs`` go to ``timm.create_model`` as they are."""

    name: str
    image_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Whose features are clustered: the pretrained ``backbone`` (a label space) of ``seed``, or ``model``."""

    pretrain: str = ""
    """Name of the block that pretrains the backbone."""
    backbone: str | None
    seed: int
    model: Model | None
    initial: Mapping[str, str]
    """Weights of ``model``: one of ``artifact``, ``uri`` with ``sha256``, ``timm``."""
    look: Mapping[str, Any]
    """Preprocessing of images; None = as in the training of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """Clusters of features; ``parameters`` are the identity of the job that makes them, apart from the features."""

    embedding: Embedding
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpace:
    """A label space, by its path ``<entry>/<level>``, ``<entry>/<num_classes>`` or ``<entry>``."""

    name: str
    entry: str
    level: str
    dataset: str
    space: Mapping[str, Any]
    num_classes: int
    """0 = not known before it is made."""
    multi_label: bool = False
    """A leaf class has several targets."""
    is_declared: bool = False
    """Nobody could count its classes: their number is what the file says."""
    num_labelled: int | None = None
    """Training samples with a target, about, where not all have one; 0 = not known. For estimates and checks."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where the files lie that ``space`` names by their digest; never identity."""
    clustering: Clustering | None = None
    """How it is made, if it is made of clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """How often a run is saved; see the fields of ``Execution``. Never changes a result."""

    every_steps: int = 0
    every_epochs: int = 1
    mtbf_s: float = 0.0
    keep_last: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBackbone:
    """A backbone of this sweep that others start from."""

    pretrain: str
    """Name of its block."""
    labels: str = ""
    """Its label space; empty: the same as that of the backbone that starts from it."""
    seed: int | None = None
    """Its seed; None: the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Backbones to make: ``labels`` (names of label spaces, in order) x ``seeds``."""

    name: str = ""
    """Name of the block; empty for a sweep's only, unnamed one."""
    model: Model
    labels: tuple[str, ...]
    recipe: Mapping[str, Any]
    seeds: tuple[int, ...]
    subset: Mapping[str, Any] = field(default_factory=dict)
    """Part of the training split; empty = all of it."""
    subset_seed: int | None = None
    """The seed that its ``subset`` gives, also where that limits nothing; never identity."""
    initial: Mapping[str, str] = field(default_factory=dict)
    """Where the backbone's weights start: one of ``artifact``, ``uri`` with ``sha256``, ``timm``; empty = random."""
    initial_from: InitialBackbone | None = None
    """The backbone of this sweep that it starts from, in place of ``initial``."""
    keep: Mapping[str, Any] = field(default_factory=dict)
    """Checkpoints that become part of the artifact, and so of its identity; empty = none."""
    baselines: tuple[str, ...] = ()
    """Label spaces that are pretrained for baselines alone: its own, or those of blocks that start from this one."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    written_recipe: str | Mapping[str, Any] = field(default_factory=dict)
    """The recipe as the file has it, with fields that this block does not read: a search may vary what reads them."""
    factors: Mapping[str, str] = field(default_factory=dict)
    """By factor the value that this block is; never identity."""
    cell_of: str = ""
    """Name of the block of the file whose cell it is; empty for a block that the file has, and for cells of an unnamed
    one. Never identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of a grid's values; without a grid the only one, with an empty name."""

    recipe: Mapping[str, Any]
    name: str = ""
    """Such as ``lr=0.4,batch_size=512``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Trials in place of a grid."""

    over: str
    """``recipe``, ``pretrain`` or ``labels``."""
    algorithm: Mapping[str, Mapping[str, Any]]
    """Its name, with the options of the file."""
    space: Mapping[str, Mapping[str, Any]]
    """Recipe fields: ``{"values": [...]}`` or a range; empty over label spaces."""
    trials: int | None
    """None: one for each label space."""
    concurrent: int
    seed: int
    probe: Mapping[str, Any] = field(default_factory=dict)
    """Recipe of the cached probe that judges pretrainings."""
    holds_out: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only recipes of trials get, with which they are evaluated."""
    more_read: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Over ``pretrain``, by block: fields that its own recipe does not read, and that of some trial does."""

    def num_at_a_time(self, trials: int | None) -> int:
        """The number of trials that run at once: at most as many as there are trials."""
        return min(self.concurrent, trials or self.concurrent)

    def algorithm_for(self, recipe: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """The algorithm for trainings by a recipe: without a given first rung, it lies at their first validation."""
        options = self.algorithm.get("asha")
        if options is None or options["grace_epochs"] is not None or not ("epochs" in recipe or "epochs" in self.space):
            return self.algorithm
        return {"asha": {**options, "grace_epochs": int(recipe.get("eval_every_epochs", 1))}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One way to measure every backbone on one target."""

    name: str
    target: str
    protocol: JobKind
    cells: tuple[Cell, ...]
    """Recipes to run: one, or those of a grid."""
    seeds: tuple[int, ...]
    subset: Mapping[str, Any] = field(default_factory=dict)
    """As in `Pretrain`."""
    fractions: tuple[float, ...] = ()
    """Parts of the training split, one job each; empty = ``subset`` alone."""
    subset_seed: int | None = None
    """Seed that draws the fractions; None: each transfer seed draws its own ones."""
    checkpoints: tuple[int, ...] = ()
    """Epochs of the pretraining to measure; empty = its final weights."""
    select_on: str = ""
    """Where a grid's cell is chosen: ``train``, ``val``; empty without a grid."""
    baselines: tuple[str, ...] = ()
    """``one_pass``, ``retrain``."""
    pretrains: tuple[str, ...] = ("",)
    """Names of the blocks whose backbones are measured."""
    labels: tuple[str, ...] | None = None
    """Label spaces whose backbones are measured; None = all that a block pretrains."""
    search: Search | None = None

    def measures(self, space: str) -> bool:
        """Whether backbones of a label space are measured; those of its own baselines always are."""
        return self.labels is None or space in self.labels

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Of the first cell."""
        return self.cells[0].recipe

    @property
    def recipes(self) -> tuple[Mapping[str, Any], ...]:
        """Those to check: of all cells, or a search's at each listed value and each end of a range."""
        if self.search is None or self.searches_backbones:
            return tuple(cell.recipe for cell in self.cells)
        ends = {name: [*next(iter(values.values()))] for name, values in self.search.space.items()}
        first = {name: values[0] for name, values in ends.items()}
        tried = [{**first, name: value} for name, values in ends.items() for value in values]
        return tuple({**self.recipe, **self.search.holds_out, **chosen} for chosen in tried if self.recipe)

    @property
    def searches_backbones(self) -> bool:
        """Whether its backbones are those that its search pretrains."""
        return self.search is not None and self.search.over != "recipe"


Level: TypeAlias = bool | int | float | str
"""One value of a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a paper claims of a simulation: some numbers that follow from means, each between ``low`` and ``high``."""

    rule: str
    """``mean`` of each cell, ``slope``, ``ratio``, ``ordering``, ``monotone`` over a factor, or ``closed_form``."""
    of: str = ""
    """The factor; empty for ``mean`` and ``closed_form``."""
    log: bool = False
    """Of a slope: logarithms of the factor and of the metric."""
    levels: tuple[Level, ...] = ()
    """Of a ratio: numerator and denominator; of an ordering: from the lowest mean to the highest."""
    other_metric: str = ""
    """Of a closed form: what the mean is divided by."""
    low: float | None = None
    high: float | None = None
    where: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    """Levels by factor that it is about; a factor that is missing: all."""
    metric: str = ""
    """Empty = the simulation's."""
    paper: float | None = None
    source: str = ""

    def covers(self, factors: Mapping[str, Level]) -> bool:
        """Whether it is about the cell with these levels."""
        return all(factors[name] in levels for name, levels in self.where.items())

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        where = {name: tuple(levels) for name, levels in document["where"].items()}
        return cls(**{**document, "levels": tuple(document["levels"]), "where": where})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCell:
    """One combination of levels."""

    factors: Mapping[str, Level]
    parameters: Mapping[str, Any]
    """Complete: those of all cells, the levels, and defaults."""

    @property
    def name(self) -> str:
        """Such as ``k=2,labels=coarse``; empty without factors."""
        return cell_name(self.factors)


def cell_name(factors: Mapping[str, Level]) -> str:
    """Name of a combination of levels, whatever the order in which a sweep file gives its factors."""
    return ",".join(f"{factor}={factors[factor]}" for factor in sorted(factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every combination of factors, over the same seeds."""

    name: str
    run: str
    """Name of a shipped one, the reference of a plug-in, or digest and function of a plain file."""
    factors: Mapping[str, tuple[Level, ...]]
    cells: tuple[SimulatedCell, ...]
    first_seed: int
    num_seeds: int
    per_job: int
    metric: str
    expectations: tuple[Expectation, ...] = ()
    file: str = ""
    """Where the plain file lies; empty for any other. Never identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisPlan:
    """An analysis of the features of backbones."""

    name: str
    measures: Mapping[str, Mapping[str, Any]]
    """Parameters by measure, with every default filled in."""
    dataset: str = ""
    """Whose images are embedded; empty = those that a backbone was pretrained on."""
    split: str = "val"
    of: str = ""
    """Label space of the original classes; empty = the leaf classes."""
    pretrains: tuple[str, ...] = ("",)
    """Names of the blocks whose backbones are analysed."""
    labels: tuple[str, ...] | None = None
    """Label spaces whose backbones are analysed; None = all that a block pretrains."""
    checkpoints: tuple[int, ...] = ()
    """Epochs of the pretraining; empty = its final weights."""
    between: tuple[str, ...] = ()
    """What the backbones that one job compares differ in; empty = one job for each backbone."""

    def spaces(self, pretrain: Pretrain) -> tuple[str, ...]:
        """Label spaces of a block whose backbones are analysed."""
        return tuple(name for name in pretrain.labels if self.labels is None or name in self.labels)

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits whose features it reads."""
        return ("train", "val") if "clp" in self.measures else (self.split,)

    @property
    def runs_backbone(self) -> bool:
        """Whether samples pass through the backbone again: the layers before its features are asked for."""
        return "samples" in self.measures.get("sparsity", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSweep:
    """A whole sweep.yaml, resolved. ``store`` and ``tracking_uri`` are empty when the project's defaults apply."""

    name: str
    datasets: Mapping[str, Dataset]
    labels: Mapping[str, LabelSpace]
    pretrains: tuple[Pretrain, ...]
    """With different names, or a single one without."""
    transfer: tuple[Transfer, ...]
    baseline: str
    metric: str
    resources: Mapping[JobKind, Resources]
    num_workers: Mapping[JobKind, int]
    """Processes that work on one job of a kind together."""
    compute: Mapping[str, Any]
    """Fields of ``Execution`` that say how training computes."""
    store: str
    tracking_uri: str
    experiment: str
    policy: Policy
    register: str = ""
    """``best``: MLflow's model registry gets the best backbone; empty: it gets none."""
    published: tuple[Mapping[str, Any], ...] = ()
    """Printed numbers for the report (fields of ``Published``)."""
    rows: tuple[str, ...] = ()
    """Factors whose combinations are the rows of the report's tables; empty: its default."""
    baseline_values: Mapping[str, str] = field(default_factory=dict)
    """By factor the value that others are compared with; that of label spaces is ``baseline``."""
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Recipes that it names, by name, with the fields of their bases."""
    notify: tuple[Channel, ...] = ()
    simulations: tuple[Simulation, ...] = ()
    analyses: tuple[AnalysisPlan, ...] = ()

    def pretrain(self, name: str) -> Pretrain:
        """The block of a name. Raises ``KeyError``."""
        return {block.name: block for block in self.pretrains}[name]

    def trained(self, pretrain: Pretrain) -> tuple[str, ...]:
        """The label spaces whose backbones are pretrained by jobs of their own, with every seed.

        Not those that trials of a search alone train, nor baselines of other blocks: these need some seeds alone.
        """
        measuring = [item for item in self.transfer if pretrain.name in item.pretrains]
        searched = {
            name for item in measuring for name in pretrain.labels if item.searches_backbones and item.measures(name)
        }
        needed = {
            name
            for item in measuring
            for name in pretrain.labels
            if (not item.searches_backbones and item.measures(name)) or (item.baselines and name == item.target)
        }
        needed |= {name for item in self.analyses if pretrain.name in item.pretrains for name in item.spaces(pretrain)}
        # Where every transfer searches, what none of them searches has no user.
        is_usual = not measuring or not all(item.searches_backbones for item in measuring)
        own = [name for name in pretrain.labels if name in needed or (is_usual and name not in searched)]
        asked = dict.fromkeys(item.target for item in measuring if item.baselines)
        return (*own, *(name for name in asked if name in pretrain.baselines))


# --------------------------------------------------------------------------------------------------------------- policy


class PriorityClass(IntEnum):
    """Named priorities; numbers between and beyond them are fine too."""

    LOW = -10
    NORMAL = 0
    HIGH = 10
    URGENT = 100
    """Above every priority that has risen by waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """See the fields of ``policy:``; ``None`` = no bound."""

    priority: int = int(PriorityClass.NORMAL)
    weight: float = 1.0
    """Share of a busy cluster, relative to other sweeps of this priority."""
    max_gpus: float | None = None
    """GPUs that all live attempts hold together."""
    max_concurrent: int | None = None
    """Live attempts."""
    max_failures: int = 3
    """Failed attempts per job before the job fails; preemptions, lost nodes and failures of storage do not count."""
    max_preemptions: int = 3
    """A job whose attempts have ended as ``preempted`` so many times is preempted for no other sweep any more."""
    breaker: int = 5
    """Jobs that fail in the same way, with none of their kind done, before the sweep stops; 0 = never."""
    gpu_hours: float | None = None
    cost: float | None = None
    gpu_hour_price: float = 0.0
    """Cost of one GPU-hour, in the currency of ``cost``."""
    deadline_s: float | None = None
    """Unix seconds from which on no job is started."""
    time_limit_s: float | None = None
    """Seconds after submission from which on no job is started."""
    users: tuple[str, ...] = ()
    """Users besides the owner who may control the sweep."""
    fails_on_expectations: bool = False
    """Whether a submit ends with an error where an expectation of a simulation does not hold."""

    @property
    def gpu_hour_budget(self) -> float | None:
        """GPU-hours that all attempts together may use: the smaller of both bounds."""
        bounds = [self.gpu_hours] if self.gpu_hours is not None else []
        bounds += [self.cost / self.gpu_hour_price] if self.cost is not None and self.gpu_hour_price else []
        return min(bounds, default=None)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**document, "users": tuple(document.get("users", ()))})


# --------------------------------------------------------------------------------------------------------------- notify


class Occasion(StrEnum):
    """Events about which notifications are sent."""

    FINISHED = "finished"
    """The sweep has ended with a result for every job, or was cancelled."""
    FAILED = "failed"
    """The sweep has ended without some results, or the circuit breaker stopped it."""
    STALLED = "stalled"
    """Nothing has happened for long although the sweep is not paused."""
    BUDGET = "budget"
    """A budget is nearly or wholly spent, or a deadline has passed."""


class Security(StrEnum):
    """How a connection to a mail server is protected."""

    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """A mail server, the sender and the recipients."""

    to: tuple[str, ...]
    sender: str
    server: str
    """``host:port``"""
    user: str = ""
    password: str = ""
    """Reference to a secret; empty = none."""
    security: Security = Security.STARTTLS

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**document, "to": tuple(document["to"]), "security": Security(document["security"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One channel of notifications; exactly one of ``webhook``, ``slack`` and ``email`` is set."""

    on: tuple[Occasion, ...] = tuple(Occasion)
    webhook: str = ""
    """URL, or a reference to it."""
    secret: str = ""
    """Reference to the key that signs what a webhook gets; empty = not signed."""
    slack: str = ""
    """Reference to an incoming webhook of Slack or of a compatible service."""
    email: Email | None = None
    stalled_after_s: float = 1800.0

    @property
    def kind(self) -> str:
        """``webhook``, ``slack`` or ``email``."""
        return "email" if self.email else "slack" if self.slack else "webhook"

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Channel:
        """Inverse of ``dataclasses.asdict``."""
        email = document.get("email")
        occasions = tuple(Occasion(name) for name in document["on"])
        made = ClusterChannel if "apprise" in document else Channel
        return made(**{**document, "on": occasions, "email": Email.from_json(email) if email else None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChannel(Channel):
    """A channel of the cluster's own file that Apprise sends to; sweeps have none, so plans do not hold the field."""

    apprise: str
    """Reference to a URL of Apprise."""

    @property
    def kind(self) -> str:
        """``apprise``."""
        return "apprise"
