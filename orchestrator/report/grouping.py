"""The transfer jobs of a plan, sorted into tables, rows and cells by their facets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.core.job_kinds import TRANSFER_KINDS
from orchestrator.planning.graph.plan import Job
from orchestrator.report.results import Place
from orchestrator.report.statistics import SeedPair

Cells = dict[str, list[Job]]
"""Jobs by grid cell, in plan order; without a grid the only cell is ``""``."""
Grouped = dict[Place, dict[str, Cells]]
"""Cells by place and label space, in plan order."""


def group_transfers(jobs: Iterable[Job]) -> Grouped:
    """Every transfer job in its table, row and cell."""
    grouped: Grouped = {}
    for job in jobs:
        if job.kind in TRANSFER_KINDS:
            spaces = grouped.setdefault(place_of(job), {})
            cells = spaces.setdefault(str(job.facets["label_space"]), {})
            cells.setdefault(str(job.facets.get("cell", "")), []).append(job)
    return grouped


def place_of(job: Job) -> Place:
    """The table that a transfer job belongs to."""
    return Place(
        transfer=str(job.facets["transfer"]),
        protocol=str(job.facets["protocol"]),
        target=str(job.facets["target"]),
        pretrain=str(job.facets.get("pretrain", "")),
        checkpoint=str(job.facets.get("checkpoint", "")),
        fraction=str(job.facets.get("fraction", "")),
    )


def seeds_of(job: Job) -> SeedPair:
    """What pairs a transfer with those of other label spaces; what has no seed of its own counts as seed 0."""
    return SeedPair(pretrain=int(job.facets.get("pretrain_seed", 0)), transfer=int(job.facets.get("transfer_seed", 0)))


def headline_places(places: Iterable[Place]) -> frozenset[Place]:
    """Of every transfer and pretrain block: the last checkpoint on the largest fraction of the labels."""
    by_transfer: dict[Place, list[Place]] = {}
    for place in places:
        by_transfer.setdefault(replace(place, checkpoint="", fraction=""), []).append(place)
    return frozenset(
        max(alike, key=lambda place: (facet_rank(place.fraction), facet_rank(place.checkpoint)))
        for alike in by_transfer.values()
    )


def facet_rank(value: str) -> float:
    """Order of checkpoints and fractions by the number in their name; no name stands for the end and for all."""
    if not value:
        return float("inf")
    number = re.search(r"\d+(\.\d+)?(e-?\d+)?", value)
    return float(number[0]) if number else -1.0


def backbones_of(job: Job, jobs: Mapping[str, Job]) -> set[str]:
    """Names of the jobs between a transfer and its backbone, the backbone included and the transfer not."""
    found: set[str] = set()
    for name in job.needs:
        need = jobs.get(name)
        if need is not None and need.kind.value in {"pretrain", "embed", "search"} and name not in found:
            found.add(name)
            if need.kind.value == "embed":
                found |= backbones_of(need, jobs)
    return found
