"""Everything the control plane and the data plane share, and nothing else.

A ``JobRequest`` goes in, a ``JobResult`` comes out or an error of ``core.errors`` is raised; a backend turns the error
into a ``JobFailure`` value. All of them are plain JSON on the wire, so that a restarted controller, another version or
a person with ``jq`` can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.core.activity import RankActivity
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind

if TYPE_CHECKING:
    from orchestrator.storage.protocol import ObjectStore

ENTRY_POINT = "workloads.run:execute"
"""The one function of the data plane that backends call, by name, inside a runner."""
MISSING_DATA: Final = "missing"
"""See ``Execution.data_location``."""


class Outcome(StrEnum):
    """How an attempt that did not fail ended."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already_committed"
    """Another writer committed the key first; this attempt's parts are garbage."""


class Spot(StrEnum):
    """Whether an attempt may run on nodes that the provider may reclaim."""

    ALLOW = "allow"
    REQUIRE = "require"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one attempt, and conditions on its nodes. Execution, never identity."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    min_gpus: float = 0.0
    """Fewest GPUs that it also runs on, one worker each; 0 = it runs on ``gpus`` only."""
    accelerator: str = ""
    """Type of GPU, such as ``A100``; empty = any."""
    spot: Spot = Spot.ALLOW
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that its nodes must have, sorted; a mapping is taken too."""

    def __post_init__(self) -> None:
        pairs = self.labels.items() if isinstance(self.labels, Mapping) else self.labels
        object.__setattr__(self, "labels", tuple(sorted((str(key), str(value)) for key, value in pairs)))
        object.__setattr__(self, "spot", Spot(self.spot))

    @property
    def bare(self) -> Resources:
        """The amounts alone, by which runners are reused."""
        return Resources(cpus=self.cpus, gpus=self.gpus, memory_gib=self.memory_gib)

    def share(self, num_workers: int) -> Resources:
        """The share of each of some equal workers."""
        return self.scaled(1.0 / num_workers)

    def scaled(self, factor: float) -> Resources:
        """A multiple of the amounts, under the same conditions."""
        return replace(
            self, cpus=self.cpus * factor, gpus=self.gpus * factor, memory_gib=self.memory_gib * factor, min_gpus=0.0
        )

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU"]
        parts += [f"{self.gpus:g} GPU"] if self.gpus else []
        parts += [f"of type {self.accelerator}"] if self.accelerator else []
        parts += [f"{round(self.memory_gib, 1) or self.memory_gib:g} GiB"] if self.memory_gib else []
        parts += [f"{key}={value}" for key, value in self.labels]
        parts += {Spot.REQUIRE: ["on spot nodes"], Spot.NEVER: ["not on spot nodes"]}.get(self.spot, [])
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How to run an attempt without changing its result."""

    num_threads: int = 1
    num_workers: int = 1
    """Ranks that train one job together."""
    micro_batch: int = 0
    """Samples per forward pass of a rank, a multiple of norm_group with BatchNorm; 0 = one norm group with BatchNorm,
    else the rank's whole share of the batch, or on a GPU what a search finds to fit."""
    memory_retries: int = 0
    """Attempts at this job that ran out of memory so far: each halves the micro-batch, in whole norm groups."""
    compile: str = "off"
    """``torch.compile``: off, default, reduce-overhead (CUDA graphs) or max-autotune."""
    activation_checkpointing: bool = False
    """Whether blocks of a network compute their activations again in the backward pass instead of keeping them."""
    deterministic: bool = False
    """Whether results on GPUs must be bit-exact, which costs speed; on CPUs they always are."""
    initial_uri: str = ""
    """Where the file of initial weights is whose sha256 the identity names; empty without one."""
    label_files: Mapping[str, str] = field(default_factory=dict)
    """Where the files lie that an identity names by their digest: ``wordnet`` and ``table`` of a label space, which are
    else where packages put them, and ``simulation``, the plain file of a simulation."""
    declared_classes: int = 0
    """Classes that a label space was planned with where nobody could count them; 0 = they were counted."""
    data_location: Mapping[str, Any] = field(default_factory=dict)
    """Where an external data set lies now: ``{"splits": {split: [URI patterns]}, "classes": URI}``, or with
    ``"dataset": URI`` of the folder of a ``dataset.json`` for the splits. Empty: shards are artifacts, or where the
    index found them. ``components``: one of these for each part of a mixture. ``num_samples``: what is declared, by
    split. ``convert``: how a source is listed that shards are made of. With `MISSING_DATA`: why it cannot be read; such
    a job can be planned, not run."""
    target_location: Mapping[str, Any] = field(default_factory=dict)
    """As ``data_location``, of the data set by which a search judges backbones."""
    checkpoint_every_steps: int = 0
    """0 = at the ends of epochs."""
    checkpoint_every_epochs: int = 1
    """Without a number of steps: epochs between checkpoints."""
    checkpoint_keep_last: int = 2
    """Number of newest checkpoints that are kept."""
    checkpoint_mtbf_s: float = 0.0
    """Mean time between failures of an attempt: above 0, and without a number of steps, checkpoints are as far apart as
    loses the least time (Young's formula)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One attempt at one job, complete in itself.

    ``identity`` is the job's canonical identity:
    ``{"kind", "code_version", "parameters": {...}, "inputs": {role: key}}``.
    """

    attempt_id: str
    attempt_number: int
    sweep: str
    job: str
    key: str
    kind: JobKind
    identity: Mapping[str, Any]
    store_uri: str
    execution: Execution = field(default_factory=Execution)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Result of the search job among the inputs: ``{"parameters": {...}, "inputs": {role: key}}`` in place of those
    of the identity, which names the search. Filled in by the data plane; empty without a search."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The identity's parameters, with those that a search chose."""
        parameters: Mapping[str, Any] = self.identity["parameters"]
        return {**parameters, **self.chosen["parameters"]} if self.chosen.get("parameters") else parameters

    @property
    def inputs(self) -> Mapping[str, str]:
        """Artifact keys by role, with those that a search chose."""
        inputs: Mapping[str, str] = self.identity["inputs"]
        return {**inputs, **self.chosen["inputs"]} if self.chosen.get("inputs") else inputs

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        kind, execution = JobKind(document["kind"]), Execution(**document["execution"])
        return cls(**{**document, "kind": kind, "execution": execution})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that one attempt spent, by phase."""

    import_s: float = 0.0
    """Loading the data plane; 0 on a warm runner."""
    setup_s: float = 0.0
    """From the start of ``execute`` to the first training step (0 for kinds that do not train)."""
    work_s: float = 0.0
    """All of ``execute`` except loading the data plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """An attempt that ended with its key committed."""

    attempt_id: str
    key: str
    outcome: Outcome
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final scalars of the committed record; rates are fractions in [0, 1]."""
    timings: Timings = field(default_factory=Timings)
    resumed_from_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        outcome, timings = Outcome(document["outcome"]), Timings(**document["timings"])
        return cls(**{**document, "outcome": outcome, "timings": timings})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """An attempt that ended without a commit, as a value."""

    attempt_id: str
    key: str
    kind: FailureKind
    message: str
    traceback: str = ""
    rank: int | None = None
    """For a gang: the rank at fault; None = one worker, or none can be named."""
    node_id: str = ""
    """The backend's id of the node at fault, of a gang that of ``rank``; empty = none can be named."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the process at fault held."""
    step: int | None = None
    """For a failure of numerics in training: the number of updates before the wrong one."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        kind, gpus = FailureKind(document["kind"]), tuple(document.get("gpus", ()))
        return cls(**{**document, "kind": kind, "gpus": gpus})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a running attempt; only for display, never used as state."""

    phase: str
    """``setup``, ``train``, ``evaluate``, ``write`` or what else the kind does."""
    step: int = 0
    total_steps: int = 0
    done: int = 0
    """Pieces of work of all ranks since the attempt began, see ``RankActivity.num_done``; the runner fills it in."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    images_per_s: float = 0.0
    """Images per second of training alone, over all ranks; 0 = not known."""
    step_s: float = 0.0
    """Seconds per step, averaged over the latest ones; 0 = not known."""
    eta_s: float = 0.0
    """Seconds to the end at this pace; 0 = not known."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Sums since the attempt began, for ``orchestrator.metrics``: images, steps, seconds by purpose."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, ``done`` excepted: it travels beside it, since earlier versions refuse unknown fields."""
        document = asdict(self)
        del document["done"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, done: int = 0) -> Self:
        """Inverse of ``to_json``; fields of later versions are left out."""
        known = {one.name: document[one.name] for one in fields(cls) if one.name in document}
        return cls(**{**known, "done": done})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An intermediate evaluation of a search's trial."""

    step: int
    epoch: float
    metrics: Mapping[str, float]
    """Rates are fractions in [0, 1]."""
    spent_s: float
    """Seconds of this attempt so far, without waits for a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a search follows a running training. It does not change results."""

    rungs: tuple[float, ...]
    """Epochs, ascending: the first evaluation at or after each is reported, and the very last one."""
    tell: Callable[[Evaluation], None]
    """Reports an evaluation; may block until it is decided whether the training continues (``should_stop``)."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """Judge of a backbone in training: ``{"parameters": ..., "inputs": {"index", "labels"}, "location": ...}`` of a
    cached probe of the target, whose metrics are reported, too; empty: only the training's own metrics."""


def _ignore(_: Progress) -> None:
    return None


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionContext:
    """What a backend gives to ``execute``: the store, a scratch directory and two callbacks."""

    store: ObjectStore
    scratch: Path
    """A directory of this attempt, deleted by the backend afterwards."""
    cache: Path
    """A directory of this node, shared by all its attempts and kept between them."""
    rank: int = 0
    """Which of ``world_size`` processes this is; above one, torch.distributed's default group is initialised."""
    world_size: int = 1
    report: Callable[[Progress], None] = _ignore
    should_stop: Callable[[], bool] = _never
    """True once the attempt must save and raise ``PreemptedError``; one True stops all ranks.

    Called per step and rank, and every few seconds of an evaluation.
    """
    watch: Watch | None = None
    """The search that follows the training, if this is a trial."""
    activity: RankActivity = field(default_factory=RankActivity)
    """The present activity of this rank; the rank keeps it up to date."""
    collective_timeout_s: float = 0.0
    """Limit of each collective operation from now on, seconds; 0 = the limit of the process group."""
    gpu_share: float = 1.0
    """Of the memory of this rank's GPU, in (0, 1]: what the attempt was given of it."""
    has_gpu: bool = False
    """Whether the backend gave a GPU to this rank, so that it must not compute on the CPU."""
