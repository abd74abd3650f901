"""Small sweeps of real jobs and the plan of one, for the tests of estimates, differences and commands."""

from __future__ import annotations

from textwrap import indent

from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
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
TINY_RECIPE = "{epochs: 1, batch_size: 32, lr: 0.05}"
TINY = f"""\
version: 1
name: tiny
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], num_train: 64, num_val: 32}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["levels/*"]
  recipe: {TINY_RECIPE}
transfer:
  - {{name: top, target: levels/depth1, protocol: finetune, recipe: {TINY_RECIPE}}}
report: {{baseline: levels/depth1}}
"""
"""A smaller one, for commands."""


def named_blocks(*names: str) -> str:
    """``TEXT`` with blocks that are equal but for their names; the first one is probed, the last one finetuned."""
    head, _, rest = TEXT.partition("pretrain:\n")
    block, _, tail = rest.partition("transfer:\n")
    blocks = "".join(f"  {name}:\n{indent(block, '  ')}" for name in names)
    for protocol, name in (("probe", names[0]), ("finetune", names[-1])):
        tail = tail.replace(f"protocol: {protocol}", f"protocol: {protocol}, pretrain: [{name}]")
    return f"{head}pretrain:\n{blocks}transfer:\n{tail}"


def plan_of(text: str = TEXT, store_uri: str = "file:///nowhere") -> Plan:
    """The plan of a sweep.yaml's text."""
    return build_plan(parse_sweep(text, "sweep.yaml", shipped_recipes()), store_uri=store_uri)
