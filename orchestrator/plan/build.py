"""Spec -> plan. Jobs are made in the order in which they can run, so plan order is a topological order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.contract import Execution, JobKind
from orchestrator.plan.graph import Job, Plan
from orchestrator.plan.identity import key_of, make_identity
from orchestrator.spec.model import LabelSpace, Sweep, Transfer


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
        used = dict.fromkeys((*sweep.pretrain.labels, *(item.target for item in sweep.transfer)))
        for dataset in dict.fromkeys(sweep.labels[name].dataset for name in used):
            self._dataset(dataset)
        for name in used:
            self._label_space(sweep.labels[name])
        for space in sweep.pretrain.labels:
            for seed in sweep.pretrain.seeds:
                self._pretrain(sweep.labels[space], seed)
        for transfer in sweep.transfer:
            for space in sweep.pretrain.labels:
                for seed in sweep.pretrain.seeds:
                    for transfer_seed in transfer.seeds:
                        self._transfer(transfer, sweep.labels[space], seed, transfer_seed)
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
            resources=(resources := self._sweep.resources[kind]),
            execution=Execution(num_threads=max(1, int(resources.cpus))),
            facets=facets,
        )

    def _dataset(self, name: str) -> None:
        dataset = self._sweep.datasets[name]
        facets = {"dataset": name}
        self._add(
            JobKind.DATASET,
            f"dataset/{name}",
            dataset.readable,
            parameters=dataset.parameters,
            inputs={},
            facets=facets,
        )
        inputs = {"dataset": f"dataset/{name}"}
        self._add(JobKind.INDEX, f"index/{name}", dataset.readable, parameters={}, inputs=inputs, facets=facets)

    def _label_space(self, space: LabelSpace) -> None:
        self._add(
            JobKind.LABELS,
            f"labels/{space.name}",
            _readable_space(space),
            parameters={"space": space.space},
            inputs={"index": f"index/{space.dataset}"},
            facets={
                "dataset": space.dataset,
                "label_space": space.name,
                "level": space.level,
                "granularity": space.num_classes,
            },
        )

    def _pretrain(self, space: LabelSpace, seed: int) -> None:
        pretrain = self._sweep.pretrain
        self._add(
            JobKind.PRETRAIN,
            f"pretrain/{space.name}/seed{seed}",
            f"{pretrain.model.name}-{_readable_space(space)}-seed{seed}",
            parameters={"model": self._model(), "recipe": pretrain.recipe, "seed": seed},
            inputs={"index": f"index/{space.dataset}", "labels": f"labels/{space.name}"},
            facets=_pretrain_facets(space, seed),
        )

    def _transfer(self, transfer: Transfer, space: LabelSpace, seed: int, transfer_seed: int) -> None:
        pretrain, target = self._sweep.pretrain, self._sweep.labels[transfer.target]
        self._add(
            transfer.protocol,
            f"{transfer.protocol.value}/{transfer.name}/{space.name}/seed{seed}/seed{transfer_seed}",
            f"{pretrain.model.name}-{_readable_space(target)}-seed{transfer_seed}",
            parameters={"model": self._model(), "recipe": transfer.recipe, "seed": transfer_seed},
            inputs={
                "index": f"index/{target.dataset}",
                "labels": f"labels/{target.name}",
                "backbone": f"pretrain/{space.name}/seed{seed}",
            },
            facets={
                **_pretrain_facets(space, seed),
                "transfer": transfer.name,
                "protocol": transfer.protocol.value,
                "target": transfer.target,
                "transfer_seed": transfer_seed,
            },
        )

    def _model(self) -> dict[str, Any]:
        model = self._sweep.pretrain.model
        return {"name": model.name, "image_size": model.image_size, "kwargs": dict(model.kwargs)}


def _pretrain_facets(space: LabelSpace, seed: int) -> dict[str, str | int]:
    return {
        "dataset": space.dataset,
        "label_space": space.name,
        "level": space.level,
        "granularity": space.num_classes,
        "pretrain_seed": seed,
    }


def _readable_space(space: LabelSpace) -> str:
    """Made of the rule alone: the name of a label space is not identity."""
    rule = space.space
    if "hierarchy" in rule:
        return str(rule["hierarchy"])
    if "random" in rule:
        return f"random{rule['random']['num_classes']}"
    return f"mod{rule['modulo']}"
