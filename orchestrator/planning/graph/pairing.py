"""What two backbones of one seed share, from the difference of their identities. Pure.

Random streams are keyed by seed, stage and purpose (docs/design.md), so backbones of one seed have the same initial
weights if their architectures are equal, the same order of images if they train on the same samples, and the same crops
if they augment alike. Label spaces that leave different classes out make different samples of one data set. If they
share any of these, their results are a pair; otherwise they are independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Flag, auto
from typing import Any, Final

from orchestrator.core.hyper_parameters import MIXES
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.sweepfile.label_counts import left_out

_ORDER_FIELDS: Final = ("shuffle_block_shards", "shuffle_chunk_samples", "data_groups", "select_holdout")
_BATCH_FIELDS: Final = ("batch_size", "norm_group")
"""Of a recipe; data groups are cut from batches, at the borders of norm groups and of pairs that are mixed."""
_CROP_FIELDS: Final = ("augment", "crop_scale", "crop_ratio", "color_jitter", "resize", "interpolation")


class Sharing(Flag):
    """Parts that two backbones of one seed have in common."""

    NOTHING = 0
    WEIGHTS = auto()
    """Their initial weights."""
    ORDER = auto()
    """The samples and their order."""
    CROPS = auto()
    """The crops and colours of each sample; only where the order is common."""

    @classmethod
    def all_of_it(cls) -> Sharing:
        """As between two label spaces."""
        return cls.WEIGHTS | cls.ORDER | cls.CROPS

    def __str__(self) -> str:
        """In words: ``initial weights, order, crops``."""
        names = {Sharing.WEIGHTS: "initial weights", Sharing.ORDER: "order", Sharing.CROPS: "crops"}
        return ", ".join(name for part, name in names.items() if part in self) or "the number of the seed only"


def backbone_of(job: Job, jobs: Mapping[str, Job]) -> Job | None:
    """The pretraining behind a transfer, or the search that found its backbone; None without either.

    The search for the recipe of a transfer is not on the way: it measures the first backbone of the block alone.
    """
    waiting = [job]
    while waiting:
        found = waiting.pop()
        if makes_backbone(found):
            return found
        if found.kind is not JobKind.SEARCH:
            waiting += [jobs[need] for need in found.needs if jobs[need].kind not in {JobKind.LABELS, JobKind.INDEX}]
    return None


def backbone_identity(job: Job, jobs: Mapping[str, Job]) -> Mapping[str, Any] | None:
    """What `sharing_of` reads of ``backbone_of``; of one that a search finds, what its trials have in common."""
    found = backbone_of(job, jobs)
    return None if found is None else _with_spaces(found, jobs)


def _with_spaces(backbone: Job, jobs: Mapping[str, Job]) -> Mapping[str, Any]:
    identity, inputs = backbone.identity, backbone.identity["inputs"]
    # A search among label spaces has one input ``labels:<name>`` for each.
    keys = {key for role, key in inputs.items() if role.partition(":")[0] == "labels"}
    return {
        "parameters": (identity["parameters"]["trial"] if backbone.kind is JobKind.SEARCH else identity)["parameters"],
        "inputs": inputs,
        "spaces": [jobs[need].identity["parameters"]["space"] for need in backbone.needs if jobs[need].key in keys],
    }


def pretraining_of(job: Job, jobs: Mapping[str, Job]) -> Job | None:
    """The pretraining behind a transfer; None where a search found its backbone.

    It is asked of each transfer, since another one, or an analysis, may pretrain the same cell without a search.
    """
    found = backbone_of(job, jobs)
    return None if found is None or found.kind is JobKind.SEARCH else found


def makes_backbone(job: Job) -> bool:
    """Whether it is a pretraining, or a search whose trials are pretrainings."""
    if job.kind is not JobKind.SEARCH:
        return job.kind is JobKind.PRETRAIN
    trial: Mapping[str, Any] = job.identity["parameters"].get("trial", {})
    return bool(trial.get("kind") == JobKind.PRETRAIN.value)


def sharing_between(first: Job | None, second: Job | None, jobs: Mapping[str, Job]) -> Sharing:
    """What two ``pretraining_of`` share; nothing where a search found one: searches may end with different recipes."""
    if first is None or second is None:
        return Sharing.NOTHING
    return sharing_of(_with_spaces(first, jobs), _with_spaces(second, jobs))


def sharing_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> Sharing:
    """What backbones of these identities share if their seeds are equal.

    Each has ``spaces``, definitions of the label spaces that it may be trained on, beside its parameters and inputs.
    """
    one, other = first["parameters"], second["parameters"]
    inputs, other_inputs = first["inputs"], second["inputs"]
    found = Sharing.NOTHING
    is_alike = _equal(one, other, ("model", "initial")) and inputs.get("initial") == other_inputs.get("initial")
    if is_alike:
        found |= Sharing.WEIGHTS
    recipe, other_recipe = one.get("recipe", {}), other.get("recipe", {})
    parts = [left_out(space) for space in (*first["spaces"], *second["spaces"])]
    is_same_data = (
        inputs.get("index") == other_inputs.get("index")
        and _equal(one, other, ("subset",))
        and all(part == parts[0] for part in parts)
    )
    if is_same_data and _is_same_order(recipe, other_recipe, is_same_model=_equal(one, other, ("model",))):
        found |= Sharing.ORDER
        sizes = [parameters.get("model", {}).get("image_size") for parameters in (one, other)]
        if sizes[0] == sizes[1] and _equal(recipe, other_recipe, _CROP_FIELDS):
            found |= Sharing.CROPS
    return found


def _is_same_order(recipe: Mapping[str, Any], other: Mapping[str, Any], *, is_same_model: bool) -> bool:
    if not _equal(recipe, other, _ORDER_FIELDS):
        return False
    groups = recipe.get("data_groups", 1)
    if groups == 1:
        return True
    if not _equal(recipe, other, _BATCH_FIELDS):
        return False
    # Whether a network has BatchNorm, and whether images are mixed, decides what the borders of groups do not cut. It
    # does not matter where every group has a whole number of norm groups and pairs anyway.
    unit = math.lcm(recipe.get("norm_group") or 64, MIXES)
    is_same_unit = is_same_model and _is_mixed(recipe) == _is_mixed(other)
    return is_same_unit or recipe["batch_size"] % (groups * unit) == 0


def _is_mixed(recipe: Mapping[str, Any]) -> bool:
    return bool(recipe.get("mixup") or recipe.get("cutmix"))


def _equal(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(first.get(name) == second.get(name) for name in names)
