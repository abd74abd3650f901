"""Every field of the language, what changing it does to keys, and a sweep that uses them all.

A new field of the schema fails ``tests/property/test_sweep_fields.py`` until it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, lru_cache
from typing import Any
from unittest.mock import patch

import yaml

from orchestrator.core.plugins import AUGMENTATIONS, LABEL_SPACES, MEASURES, OBJECTIVES
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.dataset_files import DatasetFile, ShardEntry
from orchestrator.sweepfile.datasets import Survey
from orchestrator.sweepfile.label_counts import Counted, Definition
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.load import canonical_text, shipped_recipes
from orchestrator.sweepfile.parse.document import Changes, Document, read_document
from orchestrator.sweepfile.parse.tree import _compose
from orchestrator.sweepfile.plugin_uses import PluginSources
from orchestrator.sweepfile.problems import validate
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep
from orchestrator.sweepfile.values import Dataset, ResolvedSweep

TREE = "{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}"
RECIPE = "{epochs: 2, batch_size: 64, lr: 1e-3}"
VIT = "{name: test_vit, image_size: 32}"
TEXT = f"""\
version: 1
name: fields
datasets:
  tree: {TREE}
  scans: {{builtin: digits}}
  photos: {{shards: {{train: "file:///p/", val: "file:///v/"}}, classes: file:///c.json, num_train: 512}}
  counted: {{shards: {{train: "file:///p/", val: "file:///v/"}}, num_classes: 4, num_train: 512}}
  described: {{from: file:///d}}
  both: {{mixture: [photos, described]}}
  told: {{convert: {{format: csv, source: /lists}}, jobs: 2}}
  synsets: {{convert: {{format: imagenet1k, source: /ilsvrc}}}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
  rnd: {{dataset: tree, random: {{num_classes: [16]}}}}
  mod: {{dataset: tree, modulo: 2}}
  split: {{dataset: tree, split: 2}}
  splits: {{dataset: tree, split: {{num: 2}}}}
  groups: {{dataset: tree, merge: {{groups: {{one: [0, 1]}}}}}}
  merges: {{dataset: tree, merge: {{num_classes: [3]}}}}
  parity: {{dataset: tree, binary: [0]}}
  scan: {{dataset: scans, hierarchy: [digit]}}
  plain: {{dataset: counted, hierarchy: [leaf]}}
  joined: {{dataset: both, hierarchy: [leaf]}}
  rows: {{dataset: told, hierarchy: [leaf]}}
  wnids: {{dataset: synsets, hierarchy: [leaf]}}
  wn: {{dataset: photos, wordnet: {{levels: [1], paths: random}}}}
  below: {{dataset: photos, wordnet: {{contains: n00000001}}}}
  tax: {{dataset: photos, taxonomy: {{levels: [a, b], table: /t.csv}}}}
  folders: {{dataset: photos, taxonomy: {{levels: [a, b], folders: [a, b]}}}}
  plug: {{dataset: tree, plugin: {{name: mine}}}}
  some: {{dataset: tree, hierarchy: [leaf], classes: {{num: 3}}}}
  under: {{dataset: photos, hierarchy: [leaf], classes: {{under: n00000001}}}}
  named: {{dataset: tree, hierarchy: [leaf], classes: {{names: [0, 1]}}}}
  k:
    dataset: tree
    clusters: {{k: [4], embed: {{backbone: {{pretrain: first, labels: levels/depth2}}}}, library: faiss}}
  even:
    dataset: tree
    clusters: {{rebalanced: {{min_samples: 4}}, embed: {{model: {VIT}, init: {{timm: r160_in1k}}}}}}
  file:
    dataset: tree
    clusters: {{k: [2], embed: {{model: {VIT}, init: {{uri: file:///w/x.safetensors, sha256: {"a" * 64}}}}}}}
  kept: {{dataset: tree, clusters: {{k: [2], embed: {{model: {VIT}, init: {{artifact: pretrain-x-0}}}}}}}}
recipes: {{short: {{epochs: 3, batch_size: 64, lr: 1e-3}}}}
pretrain:
  first: {{model: {VIT}, labels: ["*"], recipe: {RECIPE}, seeds: [0, 1]}}
  second: {{model: {VIT}, init: {{pretrain: first}}, labels: [levels/depth1], recipe: short, seeds: [0]}}
  third:
    model: {VIT}
    init: {{uri: file:///w/x.safetensors, sha256: {"b" * 64}}}
    labels: [levels/depth1]
    recipe: short
  fourth: {{model: {VIT}, init: {{timm: r160_in1k}}, labels: [levels/depth1], recipe: short, subset: {{fraction: 0.5}}}}
  fifth:
    model: {VIT}
    init: {{artifact: pretrain-x-0}}
    labels: [levels/depth1]
    recipe: short
    checkpoints: {{every: auto, keep: {{epochs: [1, 3], best: {{k: 2}}}}}}
transfer:
  - {{name: tune, target: levels/depth1, protocol: finetune, recipe: {RECIPE}, pretrain: [fifth]}}
  - name: line
    target: scan/digit
    protocol: probe
    recipe: {RECIPE}
    pretrain: [fifth]
    subset: {{num_samples: 300}}
  - {{name: opti, target: levels/depth1, protocol: probe, recipe: cached-probe, pretrain: [fifth], fractions: [0.5]}}
  - {{name: sgd, target: levels/depth1, protocol: probe, recipe: cached-probe-sgd, pretrain: [fifth]}}
  - {{name: near, target: levels/depth1, protocol: knn, pretrain: [fifth]}}
  - name: grid
    target: levels/depth1
    protocol: finetune
    recipe: {RECIPE}
    grid: {{momentum: [0.8, 0.9]}}
    pretrain: [fifth]
  - name: seek
    target: levels/depth1
    protocol: finetune
    recipe: {{epochs: 2, batch_size: 64}}
    search: {{asha: {{}}, space: {{lr: {{log: [1e-3, 0.1]}}, weight_decay: [0.0, 0.1]}}, trials: 4}}
    pretrain: [fifth]
simulate:
  sim:
    run: two-layer-granularity
    parameters: {{steps: 3}}
    factors: {{k: [2, 4], labels: [coarse, fine]}}
    seeds: {{count: 4, per_job: 2}}
    metric: sub_to_common
    expect:
      - {{slope: {{of: k, log: true}}, where: {{labels: coarse}}, between: [-1.1, -0.8]}}
      - {{ratio: {{of: labels, numerator: fine, denominator: coarse}}, between: [2, 9]}}
      - {{ordering: {{of: labels, ascending: [coarse, fine]}}}}
      - {{monotone: {{of: k}}}}
      - {{threshold: {{above: 2}}, where: {{labels: fine}}}}
      - {{closed_form: {{metric: other, within: 0.1}}}}
      - {{threshold: {{below: 3}}}}
analyze:
  - name: look
    pretrain: [fifth]
    of: levels/depth2
    from_checkpoints: [3]
    measures:
      - collapse
      - {{distances: {{levels: [depth1]}}}}
      - {{clp: {{}}}}
      - {{purity: {{}}}}
      - {{embedding: {{}}}}
      - {{plugin: {{name: mine}}}}
  - {{name: alike, pretrain: [second, fifth], between: [pretrain], measures: [cka]}}
  - {{name: layers, pretrain: [third], measures: [{{sparsity: {{samples: 100}}}}]}}
report:
  baseline: levels/depth1
  published: [{{transfer: tune, pretrain: fifth, label_space: levels/depth1, value: 0.1}}]
resources: {{embed: {{gpus: 1}}, pretrain: {{gpus: 2}}, transfer: {{gpus: 1}}}}
policy: {{budget: {{gpu_hours: 5}}}}
notify:
  - {{webhook: "https://hooks.example.org/x", secret: "${{env:HOOK}}"}}
  - {{slack: "${{env:SLACK}}"}}
  - {{email: {{to: [a@b.org], sender: c@d.org, server: "smtp.d.org:587", user: c, password: "${{env:MAIL}}"}}}}
"""
_ROWS = tuple({"class": number, "name": f"c{number}", "a": f"a{number // 2}"} for number in range(4))


class Role(Enum):
    """What changing a field does."""

    EXECUTION = auto()
    """No key changes, and no job comes or goes."""
    IDENTITY = auto()
    """Jobs of ``kinds`` change, and with them exactly those that need them."""
    SHARING = auto()
    """Jobs come or go that share the work of others; no keys but theirs change."""
    SELECTION = auto()
    """Jobs come or go; those that stay keep their keys, or change as for an identity."""


@dataclass(frozen=True, slots=True)
class Change:
    """How to change a field, as arguments of ``--set``, and what that does."""

    role: Role
    overrides: tuple[str, ...]
    kinds: frozenset[str] = frozenset()
    given: tuple[str, ...] = ()
    """What is changed before and after alike."""


def identity(*overrides: str, of: str, given: tuple[str, ...] = ()) -> Change:
    """The overrides change jobs of the kinds `of`, and what needs them."""
    return Change(Role.IDENTITY, overrides, frozenset(of.split()), given)


def runs(*overrides: str, given: tuple[str, ...] = ()) -> Change:
    """The overrides change no key."""
    return Change(Role.EXECUTION, overrides, frozenset(), given)


def picks(*overrides: str, of: str = "", given: tuple[str, ...] = ()) -> Change:
    """The overrides make jobs come or go."""
    return Change(Role.SELECTION, overrides, frozenset(of.split()), given)


def shares(*overrides: str) -> Change:
    """The overrides make jobs come that share the work of others."""
    return Change(Role.SHARING, overrides)


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """The recipes that the sweep names."""
    return shipped_recipes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """A sweep's document and its canonical form."""

    portable: Mapping[str, Any]
    canonical: str


def plan_of(*overrides: str, text: str = TEXT) -> Plan:
    """The plan of the sweep with overrides; nothing is read but recipes."""
    return build_plan(_resolved(_read(overrides, text)), store_uri="file:///store")


def portable_of(*overrides: str, text: str = TEXT) -> Portable:
    """The sweep's forms that others can plan from."""
    document = _read(overrides, text)
    return Portable(
        portable=document.portable, canonical=canonical_text(document.portable, _resolved(document).recipes)
    )


def _read(overrides: Sequence[str], text: str) -> Document:
    with patch("orchestrator.sweepfile.parse.tree._compose", _composed):  # half of the time of a plan
        return read_document(text, "fields.yaml", changes=Changes(overrides=overrides))


@lru_cache(maxsize=8)
def _composed(text: str, file: str) -> yaml.Node | None:
    return _compose(text, file)


def _resolved(document: Document) -> ResolvedSweep:
    spec = validate(SweepSpec, document.tree.value, document.tree)
    sources = LabelSources(count=_count, kmeans="faiss")
    surveys = _surveys(document.tree.value)
    return resolve_sweep(spec, document.tree, shipped(), surveys, plugins=_PLUGINS, labels=sources)


_PLUGINS = PluginSources(
    installed={
        group: {name: f"pkg==1:{name}" for name in ("mine", "other")}
        for group in (LABEL_SPACES, OBJECTIVES, AUGMENTATIONS, MEASURES)
    }
)


def _surveys(document: Mapping[str, Any]) -> Mapping[str, Survey]:
    splits = {"train": ("file:///p/0.tar",), "val": ("file:///v/0.tar",)}
    shards = {split: (_shard(f"{split}-0.tar"),) for split in ("train", "val")}
    found = DatasetFile(splits=shards, num_classes=4, levels={"a": 2}, classes_sha256="c" * 64, digest="d" * 64)
    classes: dict[str, Any] = {"class_table": _ROWS, "classes_uri": "file:///c.json", "classes_sha256": "c" * 64}
    surveys = {
        "photos": Survey(listing="1" * 64, splits=splits, **classes),
        "counted": Survey(listing="2" * 64, splits=splits),
        "described": Survey(described=found, **classes),
        "told": Survey(listed=_listed("3" * 64)),
        "synsets": Survey(listed=_listed("4" * 64)),
    }
    return {name: survey for name, survey in surveys.items() if name in document["datasets"]}


def _listed(digest: str) -> dict[str, Any]:
    samples = {"train": 512, "val": 256}
    found = {"listing": digest, "num_samples": samples, "num_classes": 4, "levels": {"a": 2}, "multi_label": False}
    return {**found, "classes": _ROWS}


def _shard(name: str) -> ShardEntry:
    return ShardEntry(name=name, size_bytes=1, sha256="0" * 64, num_samples=512)


def _count(dataset: Dataset, spaces: Sequence[Definition], files: Mapping[str, str]) -> Sequence[Counted]:
    return [Counted(num_classes=4, space=space, files=files) for space in spaces]
