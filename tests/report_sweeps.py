"""Plans with every facet that reports know, what their runs committed, made from a few numbers, and reports as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import product

from rich.console import Console

from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan, Published
from orchestrator.report.inputs import Committed
from orchestrator.report.render.terminal import render_terminal
from orchestrator.report.results import Report
from tests.builders import accept, make_job

__all__ = ["LEVELS", "StudyPlan", "accept", "committed", "printed", "renamed"]

LEVELS = {"levels/depth1": 2, "levels/depth2": 8, "levels/depth3": 32}
REPORT_FILES = frozenset(
    f"{name}.{form}"
    for name, forms in {
        "report": ("md", "json"),
        "results": ("csv", "parquet"),
        "runs": ("csv", "parquet"),
        "comparisons": ("csv",),
        "ablations": ("csv",),
        "curve": ("png", "svg"),
    }.items()
    for form in forms
)
"""All files of a report but the interactive page."""
Metrics = Callable[[Job], Mapping[str, float] | None]


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """What to plan; every combination becomes a transfer job."""

    spaces: Mapping[str, int] = field(default_factory=lambda: dict(LEVELS))
    pretrain_seeds: Iterable[int] = (0, 1, 2)
    transfer_seeds: Iterable[int] = (0,)
    transfers: Iterable[str] = ("main",)
    blocks: Iterable[str] = ("",)
    checkpoints: Iterable[str] = ("",)
    fractions: Iterable[str] = ("",)
    cells: Iterable[str] = ("",)
    target: str = "levels/depth1"
    baseline: str = "levels/depth1"
    sweep: str = "study"
    metric: str = "val_error"
    published: tuple[Published, ...] = ()
    resources: Resources = field(default_factory=lambda: Resources(cpus=2, gpus=4))
    facets: Mapping[str, str] = field(default_factory=dict)
    """More facets of every transfer."""

    def plan(self, store_uri: str = "file:///nowhere") -> Plan:
        """The plan."""
        labels = [
            self._job(f"labels/{space}", {"label_space": space, "granularity": g}) for space, g in self.spaces.items()
        ]
        backbones = [
            self._job(_join("pretrain", block, space, f"seed{seed}"), self._backbone_facets(block, space, seed))
            for block, space, seed in product(self.blocks, self.spaces, self.pretrain_seeds)
        ]
        transfers = [self._transfer(*combination) for combination in self._combinations(backbones)]
        return Plan(
            sweep=self.sweep,
            revision=1,
            store_uri=store_uri,
            jobs=(*labels, *backbones, *transfers),
            baseline=self.baseline,
            metric=self.metric,
            published=self.published,
        )

    def _combinations(self, backbones: list[Job]) -> Iterable[tuple[Job, str, str, str, str, int]]:
        return product(backbones, self.transfers, self.checkpoints, self.fractions, self.cells, self.transfer_seeds)

    def _backbone_facets(self, block: str, space: str, seed: int) -> dict[str, str | int]:
        facets: dict[str, str | int] = {"label_space": space, "pretrain_seed": seed, "granularity": self.spaces[space]}
        return facets | ({"pretrain": block} if block else {})

    def _transfer(self, backbone: Job, transfer: str, checkpoint: str, fraction: str, cell: str, seed: int) -> Job:
        named = {"checkpoint": checkpoint, "fraction": fraction, "cell": cell}
        own: dict[str, str | int] = {name: value for name, value in named.items() if value}
        own |= {"transfer": transfer, "protocol": "finetune", "target": self.target, "transfer_seed": seed}
        place = backbone.name.removeprefix("pretrain/")
        name = _join("finetune", transfer, place, checkpoint, fraction, cell, f"seed{seed}")
        return self._job(name, {**backbone.facets, **own, **self.facets}, needs=(backbone.name,))

    def _job(self, name: str, facets: Mapping[str, str | int], needs: tuple[str, ...] = ()) -> Job:
        parameters = {"space": {"hierarchy": "x"}, "name": name}
        made = make_job(name, *needs, label=name, parameters=parameters, facets=facets)
        return replace(made, resources=self.resources)


def committed(plan: Plan, metrics: Metrics, measured_s: float | None = 1800.0) -> dict[str, Committed]:
    """What is committed; ``metrics`` gives those of a backbone or transfer, None = not committed."""
    found = {}
    for job in plan.jobs:
        values = {"num_classes": float(job.facets["granularity"])} if job.kind is JobKind.LABELS else metrics(job)
        if values is not None:
            found[job.name] = Committed(metrics=values, measured_s=measured_s)
    return found


def renamed(plan: Plan, sweep: str) -> Plan:
    """The same jobs in another sweep."""
    return replace(plan, sweep=sweep)


def printed(report: Report, *, width: int = 200) -> str:
    """What a terminal of so many columns shows."""
    file = StringIO()
    Console(file=file, width=width, color_system=None).print(render_terminal(report))
    return file.getvalue()


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
