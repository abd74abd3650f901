"""Spec -> plan. Jobs are made in the order in which they can run, so plan order is a topological order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.contract import Execution, JobKind
from orchestrator.plan.clusters import SPLITS, cluster_job, embed_job
from orchestrator.plan.draft import (
    Draft,
    model_parameters,
    pretrain_facets,
    pretrain_job,
    space_facets,
    subset_parameters,
)
from orchestrator.plan.graph import Job, Plan
from orchestrator.plan.identity import key_of, make_identity
from orchestrator.plan.readable import readable_rule
from orchestrator.plan.transfers import transfer_jobs
from orchestrator.spec.model import Checkpoints, Clustering, LabelSpace, Pretrain, Sweep


def build_plan(sweep: Sweep, *, store_uri: str, revision: int = 0) -> Plan:
    """Plan a sweep. Pure; the same sweep gives the same keys everywhere.

    Label spaces that no pretrain and no target uses, and data sets that no label space uses, are left out.
    """
    return Plan(
        sweep=sweep.name,
        revision=revision,
        store_uri=store_uri,
        jobs=tuple(_Builder(sweep).build()),
        baseline=sweep.baseline,
        metric=sweep.metric,
        tracking_uri=sweep.tracking_uri,
        experiment=sweep.experiment,
        max_failures=sweep.max_failures,
    )


class _Builder:
    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._jobs: dict[str, Job] = {}

    def build(self) -> Iterable[Job]:
        sweep = self._sweep
        pretrained = [name for pretrain in sweep.pretrains for name in pretrain.labels]
        used = dict.fromkeys((*pretrained, *(item.target for item in sweep.transfer)))
        for dataset in dict.fromkeys(sweep.labels[name].dataset for name in used):
            self._dataset(dataset)
        for name in used:
            self._label_space(sweep.labels[name])
        for pretrain in sweep.pretrains:
            for space in pretrain.labels:
                for seed in pretrain.seeds:
                    self._pretrain(pretrain, sweep.labels[space], seed)
        for transfer in sweep.transfer:
            for draft in transfer_jobs(sweep, transfer):
                self._add_draft(draft)
        return self._jobs.values()

    def _add(
        self,
        kind: JobKind,
        name: str,
        readable: str,
        *,
        parameters: Mapping[str, Any],
        inputs: Mapping[str, str],
        facets: Mapping[str, str | int],
    ) -> None:
        """Add a job; ``inputs`` maps roles to job names."""
        keys = {role: self._jobs[job].key for role, job in inputs.items()}
        identity = make_identity(kind, parameters, keys)
        self._jobs[name] = Job(
            name=name,
            kind=kind,
            key=key_of(identity, readable),
            identity=identity,
            needs=tuple(inputs.values()),
            resources=self._sweep.resources[kind],
            execution=replace(self._execution(kind), data_location=self._location(inputs.get("index", name))),
            facets=facets,
        )

    def _add_draft(self, draft: Draft) -> None:
        self._add(
            draft.kind,
            draft.name,
            draft.readable,
            parameters=draft.parameters,
            inputs=draft.inputs,
            facets=draft.facets,
        )

    def _execution(self, kind: JobKind) -> Execution:
        num_workers = self._sweep.num_workers[kind]
        num_threads = max(1, int(self._sweep.resources[kind].share(num_workers).cpus))
        compute = self._sweep.compute if kind in {JobKind.PRETRAIN, JobKind.FINETUNE, JobKind.PROBE} else {}
        if kind is JobKind.EMBED:
            compute = {"deterministic": self._sweep.compute["deterministic"]}
        return Execution(num_threads=num_threads, num_workers=num_workers, **compute)

    def _location(self, job: str) -> Mapping[str, Any]:
        """Where the shards of an ``index`` job's data set lie; nothing for any other job."""
        kind, _, dataset = job.partition("/")
        return self._sweep.datasets[dataset].location if kind == JobKind.INDEX else {}

    def _dataset(self, name: str) -> None:
        dataset, facets = self._sweep.datasets[name], {"dataset": name}
        index = f"index/{name}"
        if index in self._jobs:
            return
        if dataset.components:
            for component in dataset.components:
                self._dataset(component)
            parts = {f"part{number}": f"index/{part}" for number, part in enumerate(dataset.components)}
            parameters = dataset.parameters
            self._add(JobKind.INDEX, index, dataset.readable, parameters=parameters, inputs=parts, facets=facets)
            return
        if dataset.location:  # the shards exist: to index them is the first job
            parameters = dataset.parameters
            self._add(JobKind.INDEX, index, dataset.readable, parameters=parameters, inputs={}, facets=facets)
            return
        self._add(
            JobKind.DATASET,
            f"dataset/{name}",
            dataset.readable,
            parameters=dataset.parameters,
            inputs={},
            facets=facets,
        )
        inputs = {"dataset": f"dataset/{name}"}
        self._add(JobKind.INDEX, index, dataset.readable, parameters={}, inputs=inputs, facets=facets)

    def _label_space(self, space: LabelSpace) -> None:
        if f"labels/{space.name}" in self._jobs:  # a backbone that an embedding needs came first
            return
        clusters = self._clusters(space, space.clustering) if space.clustering is not None else {}
        self._add(
            JobKind.LABELS,
            f"labels/{space.name}",
            readable_rule(space.space),
            parameters={"space": space.space},
            inputs={"index": f"index/{space.dataset}", **clusters},
            facets=space_facets(space),
        )
        if space.files:
            job = self._jobs[f"labels/{space.name}"]
            execution = replace(job.execution, label_files=space.files)
            self._jobs[job.name] = replace(job, execution=execution)

    def _clusters(self, space: LabelSpace, clustering: Clustering) -> dict[str, str]:
        """The jobs that make clusters, after the one whose backbone they use; the input of the label space."""
        sweep, embedding = self._sweep, clustering.embedding
        if embedding.backbone is not None:
            self._label_space(sweep.labels[embedding.backbone])
            self._pretrain(sweep.pretrain(embedding.pretrain), sweep.labels[embedding.backbone], embedding.seed)
        features = {split: self._draft(space, embed_job(space, embedding, split, sweep)) for split in SPLITS}
        return {"clusters": self._draft(space, cluster_job(space, clustering, features))}

    def _draft(self, space: LabelSpace, draft: Draft) -> str:
        """Add a job, unless another entry has the same one; its name."""
        inputs = {role: self._jobs[job].key for role, job in draft.inputs.items()}
        key = key_of(make_identity(draft.kind, draft.parameters, inputs), draft.readable)
        if same := next((job.name for job in self._jobs.values() if job.key == key), None):
            return same
        self._add_draft(draft)
        job = self._jobs[draft.name]
        execution = replace(job.execution, label_files=space.files, initial_uri=draft.initial_uri)
        self._jobs[draft.name] = replace(job, execution=execution)
        return draft.name

    def _pretrain(self, pretrain: Pretrain, space: LabelSpace, seed: int) -> None:
        name = pretrain_job(pretrain.name, space.name, seed)
        # Identity only where something is kept: backbones of which nothing is stay shared with sweeps that never asked.
        keep = {"keep": pretrain.keep} if pretrain.keep else {}
        # A file's place is execution, its sha256 identity; random initial weights follow from the seed alone.
        initial = {field: value for field, value in pretrain.initial.items() if field != "uri"}
        chosen = keep | ({"initial": initial} if initial else {}) | subset_parameters(pretrain.subset)
        self._add(
            JobKind.PRETRAIN,
            name,
            f"{pretrain.model.name}-{readable_rule(space.space)}-seed{seed}",
            parameters={"model": model_parameters(pretrain.model), "recipe": pretrain.recipe, "seed": seed, **chosen},
            inputs={"index": f"index/{space.dataset}", "labels": f"labels/{space.name}"},
            facets=pretrain_facets(pretrain, space, seed),
        )
        job = _saved_as_asked(self._jobs[name], pretrain.checkpoints)
        execution = replace(job.execution, initial_uri=pretrain.initial.get("uri", ""))
        self._jobs[name] = replace(job, execution=execution)


def _saved_as_asked(job: Job, asked: Checkpoints) -> Job:
    execution = replace(
        job.execution,
        checkpoint_every_steps=asked.every_steps,
        checkpoint_every_epochs=asked.every_epochs,
        checkpoint_mtbf_s=asked.mtbf_s,
        checkpoint_keep_last=asked.keep_last,
    )
    return replace(job, execution=execution)
