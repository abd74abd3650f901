"""Plans and records for the tests of estimates, schedules and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import Execution, JobKind, Resources
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.sweepfile import parse_sweep
from orchestrator.sweepfile.load import shipped_recipes

TEXT = """\
version: 1
name: small
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: resnet18, image_size: 64}
  labels: ["levels/*"]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
transfer:
  - {name: top, target: levels/depth1, protocol: finetune, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}
  - {name: linear, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}
report: {baseline: levels/depth1}
"""


def plan_of(text: str = TEXT, store_uri: str = "file:///nowhere") -> Plan:
    """The plan of a sweep.yaml's text."""
    return build_plan(parse_sweep(text, "sweep.yaml", shipped_recipes()), store_uri=store_uri)


def job_of(
    name: str,
    *needs: str,
    gpus: float = 0.0,
    cpus: float = 1.0,
    workers: int = 1,
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    key: str = "",
) -> Job:
    """A job of a made-up plan; its kind is the first part of its name."""
    kind = JobKind(name.partition("/")[0])
    identity = {
        "kind": kind.value,
        "code_version": 1,
        "parameters": dict(parameters or {"name": name}),
        "inputs": dict(inputs or {}),
    }
    return Job(
        name=name,
        kind=kind,
        key=key or f"{kind.value}-{name.replace('/', '-')}",
        identity=identity,
        needs=needs,
        resources=Resources(cpus=cpus, gpus=gpus),
        execution=Execution(num_workers=workers),
    )


def made_plan(*jobs: Job, sweep: str = "made") -> Plan:
    """A plan of these jobs."""
    return Plan(sweep=sweep, revision=0, store_uri="file:///nowhere", jobs=jobs, baseline="")
