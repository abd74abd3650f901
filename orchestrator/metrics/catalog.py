"""Every metric that this project exports: name, unit, labels and meaning. Pure.

Ray puts ``ray_`` before each name, and adds its own labels (``NodeAddress``, ``SessionName``, ``Version``).
Labels take few values: sweeps, kinds of jobs, states and causes. Never jobs, attempts or keys, of which there are tens
of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "ray_"
"""What Ray adds: Prometheus has the metric ``orchestrator_jobs`` as ``ray_orchestrator_jobs``."""


class MetricType(StrEnum):
    """How a value changes."""

    GAUGE = "gauge"
    """The latest value. It vanishes 20 s after its process has set it last."""
    COUNTER = "counter"
    """It only grows; ``rate()`` and ``increase()`` see through restarts. Its name ends in ``_total``."""


class MetricSource(StrEnum):
    """Which process exports a metric."""

    CONTROLLER = "controller"
    RUNNER = "runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; ``unit`` is empty for plain numbers."""

    name: str
    type: MetricType
    source: MetricSource
    unit: str = ""
    labels: tuple[str, ...] = ()
    meaning: str

    @property
    def exported_name(self) -> str:
        """As Prometheus has it."""
        return f"{PREFIX}{self.name}"


def _of_sweep(name: str, meaning: str, *labels: str, unit: str = "") -> Metric:
    return Metric(
        name=f"orchestrator_{name}",
        type=MetricType.COUNTER if name.endswith("_total") else MetricType.GAUGE,
        source=MetricSource.CONTROLLER,
        unit=unit,
        labels=("sweep", *labels),
        meaning=meaning,
    )


def _of_controller(name: str, meaning: str, *labels: str, unit: str = "") -> Metric:
    return Metric(
        name=f"orchestrator_controller_{name}",
        type=MetricType.COUNTER if name.endswith("_total") else MetricType.GAUGE,
        source=MetricSource.CONTROLLER,
        unit=unit,
        labels=("namespace", *labels),
        meaning=meaning,
    )


def _of_attempts(name: str, meaning: str, *labels: str, unit: str = "") -> Metric:
    return Metric(
        name=f"orchestrator_{name}_total",
        type=MetricType.COUNTER,
        source=MetricSource.CONTROLLER,
        unit=unit,
        labels=labels or ("sweep", "kind"),
        meaning=meaning,
    )


def _of_runner(name: str, meaning: str) -> Metric:
    return Metric(
        name=f"orchestrator_runner_{name}",
        type=MetricType.GAUGE,
        source=MetricSource.RUNNER,
        labels=("sweep", "kind"),
        meaning=meaning,
    )


JOBS: Final = _of_sweep("jobs", "Jobs of the sweep's plan, by state.", "state")
READY_JOBS: Final = _of_sweep("ready_jobs", "Jobs that wait only for resources.")
QUEUE_AGE: Final = _of_sweep(
    "queue_age_seconds",
    "How long the first job of the queue has been ready without running; of several shapes, the longest. Attempts that "
    "wait for nodes are in the queue.",
    unit="s",
)
PROGRESS_AGE: Final = _of_sweep(
    "progress_age_seconds",
    "Time since an attempt of the sweep began, ended or made a step. 0 while the sweep is paused or has ended, or all "
    "of its attempts wait for nodes.",
    unit="s",
)
LIVE: Final = _of_sweep("live", "1 while the sweep has a plan that has not ended, else 0.")
LIVE_ATTEMPTS: Final = _of_sweep("live_attempts", "Attempts that run now; those that wait for nodes do not.")
GPUS: Final = _of_sweep("gpus", "GPUs that its running attempts hold.")
CPUS: Final = _of_sweep("cpus", "CPUs that its running attempts hold.")
GPU_HOURS: Final = _of_sweep("gpu_hours", "GPU-hours that its attempts used, running ones included.", unit="h")
BUDGET: Final = _of_sweep("budget_gpu_hours", "GPU-hours that it may use; absent without policy.budget.", unit="h")
GOODPUT: Final = _of_sweep(
    "goodput_ratio",
    "Share in [0, 1] of the attempts' GPU time (CPU time without GPUs) that made progress which was kept.",
)
SLOWDOWN: Final = _of_sweep(
    "slow_rank_slowdown_ratio",
    "Of all gangs that run, the slowest rank and its node: own time per step (computing, waiting for its batch) by the "
    "median of the other ranks'.",
    "rank",
    "node",
)
ATTEMPTS: Final = _of_sweep(
    "attempts_total", "Attempts that ended, by outcome: succeeded, or the kind of failure.", "outcome"
)
CAPACITY: Final = _of_controller("capacity", "CPUs and GPUs of the cluster.", "resource")
EPOCH: Final = _of_controller("epoch", "Epoch of the controller's lease; present as long as the controller runs.")
ROUND: Final = _of_controller("round_seconds", "Longest round since the last export.", unit="s")
ERRORS: Final = _of_controller("errors_total", "Rounds that failed, by type of error.", "error")

RUNNER_IMAGES: Final = _of_runner(
    "images_per_second", "Images trained on per second, during the last seconds; reported by rank 0 for all ranks."
)
RUNNER_DATA_WAIT: Final = _of_runner(
    "data_wait_ratio", "Share in [0, 1] of the last seconds in which training waited for batches (rank 0)."
)
IMAGES: Final = _of_attempts("images", "Images trained on, over all ranks.")
STEPS: Final = _of_attempts("steps", "Training steps.")
TRAIN_SECONDS: Final = _of_attempts(
    "train_seconds", "Time since the first step: steps, waiting, evaluation and checkpoints.", unit="s"
)
DATA_WAIT: Final = _of_attempts("data_wait_seconds", "Part of it that training waited for batches (rank 0).", unit="s")
STALL: Final = _of_attempts(
    "checkpoint_stall_seconds", "Part of it that training waited for checkpoints (rank 0).", unit="s"
)
CACHE_HITS: Final = _of_attempts("cache_hits", "Samples whose shard was on the node when it was needed (rank 0).")
CACHE_MISSES: Final = _of_attempts("cache_misses", "Samples whose shard was not on the node (rank 0).")
READ_BYTES: Final = _of_attempts("store_read_bytes", "Bytes of samples read from the store (rank 0).", unit="bytes")
BAD_SAMPLES: Final = _of_attempts(
    "bad_samples",
    "Distinct training samples that could not be decoded: rank 0's, and at each evaluation and checkpoint those of all "
    "ranks.",
)
STORE_ERRORS: Final = _of_attempts(
    "store_errors",
    "Requests to the object store that failed, including those that succeeded when retried; by type of error.",
    "source",
    "error",
)

EXPORTED_METRICS: Final = (
    JOBS,
    READY_JOBS,
    QUEUE_AGE,
    PROGRESS_AGE,
    LIVE,
    LIVE_ATTEMPTS,
    GPUS,
    CPUS,
    GPU_HOURS,
    BUDGET,
    GOODPUT,
    SLOWDOWN,
    ATTEMPTS,
    CAPACITY,
    EPOCH,
    ROUND,
    ERRORS,
    RUNNER_IMAGES,
    RUNNER_DATA_WAIT,
    IMAGES,
    STEPS,
    TRAIN_SECONDS,
    DATA_WAIT,
    STALL,
    CACHE_HITS,
    CACHE_MISSES,
    READ_BYTES,
    BAD_SAMPLES,
    STORE_ERRORS,
)
"""In the order of the documentation."""


def reference() -> str:
    """The metrics as a table in Markdown, for the documentation."""
    head = "| metric in Prometheus | from | labels | unit | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{metric.exported_name}` | {metric.source} | {', '.join(metric.labels)} | {metric.unit} | "
        f"{metric.meaning} |\n"
        for metric in EXPORTED_METRICS
    )
