"""The panels of the Grafana dashboard: what each asks Prometheus. Pure.

Queries name metrics through the catalogue, so that none can ask for one that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from orchestrator.metrics import catalog
from orchestrator.metrics.catalog import Metric

_CHOSEN: Final = 'sweep=~"$sweep"'
_WINDOW: Final = "[$__rate_interval]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """An expression of PromQL, and how its series are called."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; ``kind`` and ``unit`` are Grafana's."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    is_stacked: bool = False
    top: float | None = None
    """Upper end of the axis."""
    warn_above: float | None = None
    warn_below: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def _of(metric: Metric, *matchers: str) -> str:
    """The metric for the chosen sweeps."""
    return f"{metric.exported_name}{{{', '.join([_CHOSEN, *matchers])}}}"


def _total(metric: Metric) -> str:
    """A gauge's sum over the chosen sweeps; an old controller's last values may stand beside a new one's."""
    return f"sum(max by (sweep) ({_of(metric)}))"


def _rate(metric: Metric, by: str = "sweep, kind") -> str:
    return f"sum by ({by}) (rate({_of(metric)}{_WINDOW}))"


def _share(part: Metric, whole: Metric) -> tuple[Query, ...]:
    return (Query(expression=f"{_rate(part)} / {_rate(whole)}", legend="{{sweep}} {{kind}}"),)


def _by_sweep(metric: Metric) -> tuple[Query, ...]:
    return (Query(expression=f"max by (sweep) ({_of(metric)})", legend="{{sweep}}"),)


def _single(expression: str) -> tuple[Query, ...]:
    return (Query(expression=expression),)


_ENDED_WELL = _of(catalog.JOBS, 'state=~"succeeded|reused"')
_BY_STATE = "sum by (sweep) (max by (sweep, state) ({}))"
_DONE = f"{_BY_STATE.format(_ENDED_WELL)} / {_BY_STATE.format(_of(catalog.JOBS))}"
_FAILED = _of(catalog.ATTEMPTS, 'outcome!="succeeded"')
_HITS, _MISSES = _rate(catalog.CACHE_HITS), _rate(catalog.CACHE_MISSES)

NOW: Final = Section(
    title="Now",
    panels=(
        Panel(
            title="Sweeps",
            meaning="Sweeps that have not ended.",
            kind="stat",
            queries=_single(_total(catalog.LIVE)),
        ),
        Panel(
            title="Running attempts",
            meaning=catalog.LIVE_ATTEMPTS.meaning,
            kind="stat",
            queries=_single(_total(catalog.LIVE_ATTEMPTS)),
        ),
        Panel(title="GPUs held", meaning=catalog.GPUS.meaning, kind="stat", queries=_single(_total(catalog.GPUS))),
        Panel(
            title="Images/s",
            meaning="Images that training takes per second, over all sweeps chosen.",
            kind="stat",
            queries=_single(f"sum(rate({_of(catalog.IMAGES)}{_WINDOW}))"),
        ),
        Panel(
            title="Goodput",
            meaning=catalog.GOODPUT.meaning,
            kind="stat",
            unit="percentunit",
            warn_below=0.9,
            queries=_single(f"avg({_of(catalog.GOODPUT)})"),
        ),
        Panel(
            title="Controller last seen",
            meaning="Since the controller exported anything. It does so every 15 s at most.",
            kind="stat",
            unit="s",
            warn_above=60,
            queries=_single(f"time() - max(timestamp({catalog.EPOCH.exported_name}))"),
        ),
    ),
)
SWEEPS: Final = Section(
    title="Sweeps",
    panels=(
        Panel(
            title="Jobs by state",
            meaning=catalog.JOBS.meaning,
            is_stacked=True,
            queries=(
                Query(expression=f"sum by (state) (max by (sweep, state) ({_of(catalog.JOBS)}))", legend="{{state}}"),
            ),
        ),
        Panel(
            title="Share of jobs done",
            meaning="Succeeded or reused, of all jobs of the plan.",
            unit="percentunit",
            top=1,
            queries=(Query(expression=_DONE, legend="{{sweep}}"),),
        ),
        Panel(
            title="Jobs that wait for room", meaning=catalog.READY_JOBS.meaning, queries=_by_sweep(catalog.READY_JOBS)
        ),
        Panel(title="Queue age", meaning=catalog.QUEUE_AGE.meaning, unit="s", queries=_by_sweep(catalog.QUEUE_AGE)),
        Panel(
            title="Since anything moved",
            meaning=catalog.PROGRESS_AGE.meaning,
            unit="s",
            warn_above=1800,
            queries=_by_sweep(catalog.PROGRESS_AGE),
        ),
        Panel(title="GPU-hours", meaning=catalog.GPU_HOURS.meaning, unit="h", queries=_by_sweep(catalog.GPU_HOURS)),
        Panel(
            title="Share of the budget used",
            meaning="GPU-hours of those in policy.budget; sweeps without a budget are not shown.",
            unit="percentunit",
            warn_above=0.8,
            queries=(
                Query(
                    expression=f"max by (sweep) ({_of(catalog.GPU_HOURS)}) / max by (sweep) ({_of(catalog.BUDGET)})",
                    legend="{{sweep}}",
                ),
            ),
        ),
    ),
)
CLUSTER: Final = Section(
    title="Use of the cluster",
    panels=(
        Panel(
            title="Goodput by sweep",
            meaning=catalog.GOODPUT.meaning,
            unit="percentunit",
            top=1,
            warn_below=0.9,
            queries=_by_sweep(catalog.GOODPUT),
        ),
        Panel(
            title="Held and there",
            meaning="What running attempts hold, beside what the cluster has.",
            queries=(
                Query(expression=f"sum(max by (sweep) ({catalog.GPUS.exported_name}))", legend="GPUs held"),
                Query(expression=f"sum(max by (sweep) ({catalog.CPUS.exported_name}))", legend="CPUs held"),
                Query(expression=f"max by (resource) ({catalog.CAPACITY.exported_name})", legend="{{resource}} there"),
            ),
        ),
        Panel(
            title="GPUs at work",
            meaning="Utilisation of each GPU as its driver tells, by node; 0 where there are none.",
            unit="percent",
            top=100,
            queries=(
                Query(expression="avg by (instance) (ray_node_gpus_utilization) or vector(0)", legend="{{instance}}"),
            ),
        ),
        Panel(
            title="CPUs at work",
            meaning="Utilisation of each node.",
            unit="percent",
            top=100,
            queries=(Query(expression="avg by (instance) (ray_node_cpu_utilization)", legend="{{instance}}"),),
        ),
        Panel(
            title="Memory",
            meaning="Share of each node's memory that is in use.",
            unit="percentunit",
            top=1,
            warn_above=0.95,
            queries=(
                Query(
                    expression="max by (instance) (ray_node_mem_used) / max by (instance) (ray_node_mem_total)",
                    legend="{{instance}}",
                ),
            ),
        ),
    ),
)
TRAINING: Final = Section(
    title="Training",
    panels=(
        Panel(
            title="Images/s by sweep and kind",
            meaning=catalog.IMAGES.meaning,
            queries=(Query(expression=_rate(catalog.IMAGES), legend="{{sweep}} {{kind}}"),),
        ),
        Panel(
            title="Images/s by node",
            meaning=catalog.RUNNER_IMAGES.meaning,
            queries=(
                Query(
                    expression=f"sum by (instance) ({_of(catalog.RUNNER_IMAGES)})",
                    legend="{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Share of time that training waits for data, by node",
            meaning=catalog.RUNNER_DATA_WAIT.meaning,
            unit="percentunit",
            warn_above=0.1,
            queries=(Query(expression=f"max by (instance) ({_of(catalog.RUNNER_DATA_WAIT)})", legend="{{instance}}"),),
        ),
        Panel(
            title="Share of time that training waits for data",
            meaning=catalog.DATA_WAIT.meaning,
            unit="percentunit",
            warn_above=0.1,
            queries=_share(catalog.DATA_WAIT, catalog.TRAIN_SECONDS),
        ),
        Panel(
            title="Slowest rank, by node",
            meaning=catalog.SLOWDOWN.meaning,
            warn_above=1.5,
            queries=(
                Query(
                    expression=f"max by (sweep, rank, node) ({_of(catalog.SLOWDOWN)})",
                    legend="{{sweep}}: rank {{rank}} on {{node}}",
                ),
            ),
        ),
        Panel(
            title="Share of time that checkpoints take",
            meaning=catalog.STALL.meaning,
            unit="percentunit",
            warn_above=0.05,
            queries=_share(catalog.STALL, catalog.TRAIN_SECONDS),
        ),
        Panel(
            title="Share of samples from the node's cache",
            meaning=catalog.CACHE_HITS.meaning,
            unit="percentunit",
            top=1,
            queries=(Query(expression=f"{_HITS} / ({_HITS} + {_MISSES})", legend="{{sweep}} {{kind}}"),),
        ),
        Panel(
            title="Bytes/s from the store",
            meaning=catalog.READ_BYTES.meaning,
            unit="Bps",
            queries=(Query(expression=_rate(catalog.READ_BYTES), legend="{{sweep}} {{kind}}"),),
        ),
        Panel(
            title="Bad samples/s",
            meaning=catalog.BAD_SAMPLES.meaning,
            queries=(Query(expression=_rate(catalog.BAD_SAMPLES), legend="{{sweep}} {{kind}}"),),
        ),
    ),
)
TROUBLE: Final = Section(
    title="Trouble",
    panels=(
        Panel(
            title="Attempts that failed, by cause",
            meaning="Each is tried again as its cause's budget allows. Preemptions eat no budget.",
            is_stacked=True,
            queries=(
                Query(
                    expression=f"sum by (outcome) (increase({_FAILED}{_WINDOW}))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Store errors/s",
            meaning=catalog.STORE_ERRORS.meaning,
            queries=(
                Query(
                    expression=f"sum by (source, error) (rate({catalog.STORE_ERRORS.exported_name}{_WINDOW}))",
                    legend="{{source}} {{error}}",
                ),
            ),
        ),
        Panel(
            title="Controller: rounds that failed",
            meaning=catalog.ERRORS.meaning,
            queries=(
                Query(
                    expression=f"sum by (error) (increase({catalog.ERRORS.exported_name}{_WINDOW}))", legend="{{error}}"
                ),
            ),
        ),
        Panel(
            title="Controller: longest round",
            meaning=catalog.ROUND.meaning,
            unit="s",
            queries=(Query(expression=f"max by (namespace) ({catalog.ROUND.exported_name})", legend="{{namespace}}"),),
        ),
    ),
)
SECTIONS: Final = (NOW, SWEEPS, CLUSTER, TRAINING, TROUBLE)
