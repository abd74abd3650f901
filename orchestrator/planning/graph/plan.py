"""The plan of a sweep: jobs with keys, and how it is read and written.

Invariants:

- Every job comes after the jobs that it needs.
- Names are unique. Several names may have one key: the first of them runs, the others take its result.
- Resources, execution and facets are in no key.
- The JSON form is stored; older versions are read, and a plan without new features is written as older versions did.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Self, TypeAlias

from orchestrator.core.contract import Execution, Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.simulation_files import FILE_ROLE, file_identity
from orchestrator.planning.graph.identity import subject_of
from orchestrator.sweepfile.values import Channel, Expectation, Level, Policy

PLAN_VERSION = 1
FACTOR_PREFIX = "factor."
"""Of the facets that say the values of a backbone's factors: ``factor.optimizer``."""
LABELLED = "num_labelled"
"""The facet of a label space that says how many training samples have a target, about, where not all have; 0 = not
known."""

DurationClass: TypeAlias = tuple[JobKind, str]
"""Jobs of one duration class have similar errors of estimates, so measured durations of some correct the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One printed result. It names the place in the report that it belongs to, as the facets of jobs do."""

    transfer: str
    label_space: str
    """Path of the label space; empty for direct training on the target."""
    value: float
    """In the unit of the report's metric: a fraction for errors and accuracies."""
    std: float | None = None
    """As printed; None where none is."""
    source: str = ""
    """Where it is printed: paper and table."""
    pretrain: str = ""
    """Name of the pretrain block; empty for the unnamed one."""
    checkpoint: str = ""
    """``epoch50``; empty for the final weights."""
    fraction: str = ""
    """Fraction of the labels as text; empty for all."""
    cell: str = ""
    """Cell of a grid (``lr=0.4``); empty for the selected one."""
    num_runs: int | None = None
    """Number of runs on which it is based, if stated."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One node of the plan.

    ``facets`` describe the job for people and comparisons, and are never part of the key: ``dataset``,
    ``label_space``, ``level``, ``granularity``, ``pretrain_seed``, ``transfer``, ``protocol``, ``target``,
    ``transfer_seed`` (where they apply).
    """

    name: str
    kind: JobKind
    key: str
    identity: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    """Names of the jobs whose artifacts this one reads."""
    resources: Resources = field(default_factory=Resources)
    execution: Execution = field(default_factory=Execution)
    facets: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def duration_class(self) -> DurationClass:
        """Kind and model."""
        return self.kind, subject_of(self.identity)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], made: dict[int, Any] | None = None) -> Self:
        """Inverse of ``dataclasses.asdict``. ``made``, by the ids of their JSON, are parts that jobs may share."""
        made = {} if made is None else made
        resources, execution = document["resources"], document["execution"]
        return cls(
            **{
                **document,
                "kind": JobKind(document["kind"]),
                "needs": tuple(document["needs"]),
                "resources": made.get(id(resources)) or made.setdefault(id(resources), Resources(**resources)),
                "execution": made.get(id(execution)) or made.setdefault(id(execution), Execution(**execution)),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSimulation:
    """What the report of a simulation needs besides its jobs, which name it in the facets ``simulation``, ``cell``."""

    name: str
    run: str
    factors: Mapping[str, tuple[Level, ...]]
    first_seed: int
    num_seeds: int
    metric: str
    expectations: tuple[Expectation, ...] = ()

    @property
    def cells(self) -> tuple[Mapping[str, Level], ...]:
        """Every combination of levels, the last factor fastest."""
        return tuple(dict(zip(self.factors, levels, strict=True)) for levels in product(*self.factors.values()))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        factors = {name: tuple(levels) for name, levels in document["factors"].items()}
        expectations = tuple(Expectation.from_json(entry) for entry in document["expectations"])
        return cls(**{**document, "factors": factors, "expectations": expectations})


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers ``by_name``
class Plan:
    """All jobs of one revision of a sweep, and what its report and tracking need."""

    sweep: str
    revision: int
    store_uri: str
    jobs: tuple[Job, ...]
    baseline: str
    """Label space that the report compares with; empty for none."""
    metric: str = "val_error"
    tracking_uri: str = ""
    """MLflow tracking URI; empty for the stack's own."""
    experiment: str = ""
    """MLflow experiment; empty for the sweep's name."""
    policy: Policy = field(default_factory=Policy)
    owner: str = ""
    """User who submitted the sweep; requests of others are refused unless forced. Empty = no owner."""
    register: str = ""
    """``best``: MLflow's model registry gets the best backbone."""
    published: tuple[Published, ...] = ()
    """Printed numbers to show beside those of the report."""
    notify: tuple[Channel, ...] = ()
    """Notification channels, in addition to those of the cluster's own file."""
    simulations: tuple[PlannedSimulation, ...] = ()
    rows: tuple[str, ...] = ()
    """Factors whose combinations are the rows of the report's tables; empty: its default."""
    baseline_values: Mapping[str, str] = field(default_factory=dict)
    """By factor the value that the report compares with; that of label spaces is ``baseline``."""
    version: int = PLAN_VERSION

    def by_name(self) -> Mapping[str, Job]:
        """Jobs by name, in plan order; computed once."""
        return self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, Job]:
        return {job.name: job for job in self.jobs}

    @property
    def simulation_files(self) -> Mapping[str, str]:
        """Of simulations in plain files: by the digest of the sources, where the file lay when it was planned."""
        theories = [job for job in self.jobs if job.kind is JobKind.THEORY and FILE_ROLE in job.execution.label_files]
        named = [(file_identity(str(job.identity["parameters"].get("simulation"))), job) for job in theories]
        return {found[0]: job.execution.label_files[FILE_ROLE] for found, job in named if found is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form. Where nothing uses them, it has no fields that earlier versions do not know."""
        document = asdict(self)
        for name in ("notify", "simulations", "rows", "baseline_values"):
            if not document[name]:
                del document[name]
        for job in document["jobs"]:
            for name in ("activation_checkpointing", "declared_classes"):
                if not job["execution"][name]:
                    del job["execution"][name]
        if not self.policy.fails_on_expectations:
            del document["policy"]["fails_on_expectations"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        made: dict[int, Any] = {}
        jobs = tuple(Job.from_json(job, made) for job in document["jobs"])
        published = tuple(Published.from_json(entry) for entry in document.get("published", ()))
        former = {"max_failures": document["max_failures"]} if "max_failures" in document else {}
        policy = Policy.from_json(document.get("policy", former))
        known = {name: value for name, value in document.items() if name != "max_failures"}
        known["rows"] = tuple(document.get("rows", ()))
        notify = tuple(Channel.from_json(entry) for entry in document.get("notify", ()))
        simulations = tuple(PlannedSimulation.from_json(entry) for entry in document.get("simulations", ()))
        parts = {"jobs": jobs, "published": published, "policy": policy, "notify": notify, "simulations": simulations}
        return cls(**{**known, **parts})


def load_shared(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """As ``json.loads``, but objects that are equal are the same object: what is returned must not be changed.

    The jobs of a large sweep differ in a few values of their identities. 100,000 jobs as JSON are 140 MB; read as they
    stand they take 540 MiB of memory, shared 270.

    Raises:
        ValueError: the text is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_Sharing().share_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_SHARED = frozenset({dict, list, str})


class _Sharing:
    """Remembers every part that it has seen."""

    def __init__(self) -> None:
        self._objects: dict[Hashable, dict[str, Any]] = {}
        self._lists: dict[Hashable, list[Any]] = {}
        self._strings: dict[str, str] = {}

    def share_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The first equal object that was seen, else this one. Its inner objects have come here before."""
        found = dict(pairs)  # of a name that is there twice JSON means the last
        names, values = tuple(found), list(found.values())
        return self._objects.setdefault((names, self._share(values)), dict(zip(names, values, strict=True)))

    def _share(self, parts: list[Any]) -> tuple[Hashable, ...]:
        """Replace parts, also those in inner lists, by the first equal ones. Returns a token of each part.

        Tokens are equal only if the parts are. Shared parts are equal exactly if they are the same object, as all
        that were seen are kept. ``1``, ``1.0`` and ``true``, which Python takes for equal, have different tokens.
        """
        tokens: list[Hashable] = []
        for place, part in enumerate(parts):
            kind = type(part)
            if kind is str:
                parts[place] = self._strings.setdefault(part, part)
            elif kind is list:
                parts[place] = self._lists.setdefault(self._share(part), part)
            tokens.append(id(parts[place]) if kind in _SHARED else (kind, repr(part)))
        return tuple(tokens)
