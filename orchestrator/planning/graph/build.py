"""Spec -> plan. Jobs are made in the order in which they can run, so plan order is a topological order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from orchestrator.core.contract import Execution
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import TRAINING_KINDS, JobKind
from orchestrator.core.simulation_files import FILE_ROLE
from orchestrator.planning.graph.analyses import analysis_jobs
from orchestrator.planning.graph.features import SPLITS, cluster_job, embed_job
from orchestrator.planning.graph.identity import KeyMaker, make_identity
from orchestrator.planning.graph.plan import Job, Plan, PlannedSimulation, Published
from orchestrator.planning.graph.pretraining import (
    Draft,
    backbone_job,
    dataset_job,
    labels_job,
    listing_job,
    part_jobs,
    pretrain_job,
    whole_job,
)
from orchestrator.planning.graph.transfers import transfer_jobs
from orchestrator.sweepfile.values import (
    Clustering,
    Dataset,
    InitialBackbone,
    LabelSpace,
    Pretrain,
    ResolvedSweep,
    Simulation,
)


def build_plan(sweep: ResolvedSweep, *, store_uri: str) -> Plan:
    """Plan a sweep. Pure; the same sweep gives the same keys everywhere.

    Label spaces that no pretrain and no target uses, and data sets that no label space uses, are left out.
    """
    return Plan(
        sweep=sweep.name,
        revision=0,
        store_uri=store_uri,
        jobs=tuple(_PlanBuilder(sweep).build()),
        baseline=sweep.baseline,
        metric=sweep.metric,
        tracking_uri=sweep.tracking_uri,
        experiment=sweep.experiment,
        register=sweep.register,
        published=tuple(Published(**entry) for entry in sweep.published),
        policy=sweep.policy,
        notify=sweep.notify,
        simulations=tuple(_planned_simulation(simulation) for simulation in sweep.simulations),
        rows=sweep.rows,
        baseline_values=sweep.baseline_values,
    )


class _PlanBuilder:
    """Makes each job once, in time that is linear in their number."""

    def __init__(self, sweep: ResolvedSweep) -> None:
        self._sweep = sweep
        self._blocks = {pretrain.name: pretrain for pretrain in sweep.pretrains}
        self._jobs: dict[str, Job] = {}
        self._names: dict[str, str] = {}
        """The first job of each key."""
        self._keys = KeyMaker()
        self._executions: dict[tuple[JobKind, str], Execution] = {}

    def build(self) -> Iterable[Job]:
        sweep = self._sweep
        pretrained = [name for pretrain in sweep.pretrains for name in pretrain.labels]
        originals = (item.of for item in sweep.analyses if item.of)
        used = dict.fromkeys((*pretrained, *(item.target for item in sweep.transfer), *originals))
        analysed = (item.dataset for item in sweep.analyses if item.dataset)
        for dataset in dict.fromkeys((*(sweep.labels[name].dataset for name in used), *analysed)):
            self._dataset(dataset)
        for name in used:
            self._label_space(sweep.labels[name])
        for pretrain in sweep.pretrains:
            for space in sweep.trained(pretrain):
                for seed in pretrain.seeds:
                    self._pretrain(pretrain, sweep.labels[space], seed)
        for transfer in sweep.transfer:
            for draft in transfer_jobs(sweep, transfer):
                self._add(draft)
        measured = (draft for analysis in sweep.analyses for draft in analysis_jobs(sweep, analysis))
        simulated = (draft for simulation in sweep.simulations for draft in _simulation_jobs(simulation))
        for draft in chain(measured, simulated):
            self._add(draft)
        return self._jobs.values()

    def _add(self, draft: Draft) -> str:
        """Add a job; its name."""
        keys = {role: self._jobs[job].key for role, job in draft.inputs.items()}
        identity = make_identity(draft.kind, draft.parameters, keys)
        key = self._keys.key_of(identity, draft.readable)
        kind = draft.like or draft.kind
        execution = self._execution(kind, draft.inputs.get("index", draft.name))
        if "target_index" in draft.inputs:
            execution = replace(execution, target_location=self._location(draft.inputs["target_index"]))
        resources = self._sweep.resources[kind]
        known = self._jobs.get(draft.name)
        if known is not None and known.key != key:
            message = (
                f"two different jobs of sweep {self._sweep.name!r} have the name {draft.name!r}; rename a label space, "
                "a block of pretrain or a transfer that is in it"
            )
            raise UserError(message)
        self._names.setdefault(key, draft.name)
        self._jobs[draft.name] = Job(
            name=draft.name,
            kind=draft.kind,
            key=key,
            identity=identity,
            needs=tuple(dict.fromkeys((*draft.inputs.values(), *draft.after))),
            resources=resources.scaled(draft.copies) if draft.copies > 1 else resources,
            execution=replace(execution, **draft.execution) if draft.execution else execution,
            facets=draft.facets,
        )
        return draft.name

    def _add_once(self, draft: Draft) -> str:
        """Add a job, unless another entry has the same one; its name."""
        key = self._key_of(draft)
        return self._names[key] if key in self._names else self._add(draft)

    def _key_of(self, draft: Draft) -> str:
        inputs = {role: self._jobs[job].key for role, job in draft.inputs.items()}
        return self._keys.key_of(make_identity(draft.kind, draft.parameters, inputs), draft.readable)

    def _execution(self, kind: JobKind, index: str) -> Execution:
        """Facts that jobs of a kind with the same index share."""
        if (kind, index) not in self._executions:
            num_workers = self._sweep.num_workers[kind]
            num_threads = max(1, int(self._sweep.resources[kind].share(num_workers).cpus))
            location = self._location(index)
            self._executions[kind, index] = Execution(
                num_threads=num_threads, num_workers=num_workers, data_location=location, **self._compute(kind)
            )
        return self._executions[kind, index]

    def _compute(self, kind: JobKind) -> Mapping[str, Any]:
        if kind is JobKind.EMBED:
            return {"deterministic": self._sweep.compute["deterministic"]}
        return self._sweep.compute if kind in TRAINING_KINDS else {}

    def _location(self, job: str) -> Mapping[str, Any]:
        """Where the shards of an ``index`` job's data set lie; nothing for any other job."""
        kind, _, name = job.partition("/")
        if kind != JobKind.INDEX:
            return {}
        dataset = self._sweep.datasets[name]
        components = [self._sweep.datasets[component].location for component in dataset.components]
        return {"components": components} if any(components) else dataset.location

    def _dataset(self, name: str) -> None:
        dataset = self._sweep.datasets[name]
        if f"index/{name}" in self._jobs:
            return
        if dataset.components:
            for component in dataset.components:
                self._dataset(component)
            parts = {f"part{number}": f"index/{part}" for number, part in enumerate(dataset.components)}
            self._add(dataset_job(JobKind.INDEX, dataset, dataset.parameters, parts))
        elif not dataset.is_written:  # the shards exist: to index them is the first job
            self._add(dataset_job(JobKind.INDEX, dataset, dataset.parameters, {}))
        else:
            self._add(dataset_job(JobKind.INDEX, dataset, dataset.scan, {"dataset": self._written(dataset)}))

    def _written(self, dataset: Dataset) -> str:
        """The job whose artifact has the shards of a data set that the sweep writes itself."""
        inputs = {"listing": self._add(listing_job(dataset))} if dataset.listing else {}
        whole = self._key_of(whole_job(dataset, inputs))
        parts = tuple(self._add(draft) for draft in part_jobs(dataset, inputs, whole))
        return self._add(whole_job(dataset, inputs, parts))

    def _label_space(self, space: LabelSpace) -> None:
        if f"labels/{space.name}" in self._jobs:  # already added for an embedding that needs it
            return
        self._add(labels_job(space, self._clusters(space, space.clustering) if space.clustering else {}))

    def _clusters(self, space: LabelSpace, clustering: Clustering) -> dict[str, str]:
        """The jobs that make clusters, after the one whose backbone they use; the input of the label space."""
        sweep, embedding = self._sweep, clustering.embedding
        if embedding.backbone is not None:
            self._label_space(sweep.labels[embedding.backbone])
            self._pretrain(self._blocks[embedding.pretrain], sweep.labels[embedding.backbone], embedding.seed)
        features = {split: self._add_once(embed_job(space, embedding, split, sweep)) for split in SPLITS}
        return {"clusters": self._add_once(cluster_job(space, clustering, features))}

    def _pretrain(self, pretrain: Pretrain, space: LabelSpace, seed: int) -> str:
        name = pretrain_job(pretrain.name, space.name, seed)
        if name in self._jobs:  # already added for another label space
            return name
        origin = pretrain.initial_from
        return self._add(backbone_job(pretrain, space, seed, self._initial(origin, space, seed) if origin else ""))

    def _initial(self, origin: InitialBackbone, space: LabelSpace, seed: int) -> str:
        """The backbone of the sweep that another one starts from, which is planned first."""
        labels = self._sweep.labels[origin.labels or space.name]
        self._label_space(labels)
        return self._pretrain(self._blocks[origin.pretrain], labels, seed if origin.seed is None else origin.seed)


def _simulation_jobs(simulation: Simulation) -> Iterator[Draft]:
    """Blocks are never sized by how long they take: where a block begins and ends is part of its key."""
    end = simulation.first_seed + simulation.num_seeds
    readable = simulation.run.rpartition(":")[2]
    for cell in simulation.cells:
        for first in range(simulation.first_seed, end, simulation.per_job):
            stop = min(first + simulation.per_job, end)
            parts = (JobKind.THEORY.value, simulation.name, cell.name, f"seeds{first}-{stop - 1}")
            yield Draft(
                kind=JobKind.THEORY,
                name="/".join(part for part in parts if part),
                readable=f"{readable}-seeds{first}-{stop - 1}",
                parameters={
                    "simulation": simulation.run,
                    "parameters": cell.parameters,
                    "seeds": {"first": first, "stop": stop},
                },
                inputs={},
                facets={"simulation": simulation.name, "cell": cell.name, "seeds": f"{first}-{stop - 1}"},
                execution={"label_files": {FILE_ROLE: simulation.file}} if simulation.file else {},
            )


def _planned_simulation(simulation: Simulation) -> PlannedSimulation:
    """The parts of a simulation that the report needs."""
    return PlannedSimulation(
        name=simulation.name,
        run=simulation.run,
        factors=simulation.factors,
        first_seed=simulation.first_seed,
        num_seeds=simulation.num_seeds,
        metric=simulation.metric,
        expectations=simulation.expectations,
    )
