"""Measurements of a run's steps: sums, times, throughput, sources of samples, and the lines of metrics.

None of it influences a result. On CUDA the sums of a step are copied to pinned memory behind the step, and read when
the next step is already enqueued: the device never idles for it, and the host is never more than one step ahead. On CPU
they are there at once. Lines are gathered in memory and written as immutable JSONL segments at every checkpoint.

MFU is the share of the device's peak that the model's own arithmetic makes up ("PaLM", arXiv:2204.02311, appendix B). A
training step counts as three forward passes (a backward pass takes the products of inputs and of weights), a
multiply-add as two operations. What is computed twice (chunked heads) does not count twice.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeVar

import torch
from torch import Tensor

from orchestrator.core.activity import Activity, RankActivity
from orchestrator.core.contract import JobRequest
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import once
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.seals import seal
from workloads.models.refusals import REFUSALS
from workloads.models.spec import ModelSpec
from workloads.runtime.device import part_of
from workloads.runtime.enums import Precision
from workloads.runtime.ranks import Ranks
from workloads.train.safety import Reading

_REPORT_EVERY_S: Final = 0.3
_SHORTEST_S: Final = 1e-9
Item = TypeVar("Item")
_COUNTS: Final = ("cache_hits", "cache_misses", "bytes_from_store")
_GIB: Final = 1024**3
_FORWARD_PASSES_PER_STEP = 3
_OPERATIONS_PER_MAC = 2


class StepMetrics:
    """A queue of steps whose sums are under way; at most one, once ``put`` has returned."""

    def __init__(self, device: torch.device, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self._is_cuda = device.type == "cuda"
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, step: int, sums: Tensor) -> list[Reading]:
        """Take the sums of an update, float64 on the device; returns the readings that are ready.

        Loss, number of wrong predictions, gradient norm, votes to stop, votes to save; and in a gang the times of its
        ranks (``stragglers``).
        """
        if not self._is_cuda:
            return [_reading(step, sums)]
        host = torch.empty(len(sums), dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting.append((step, host, event))
        return [self._next() for _ in range(len(self._waiting) - 1)]

    def drain(self) -> list[Reading]:
        """All readings that are left; waits for the device."""
        return [self._next() for _ in range(len(self._waiting))]

    def clear(self) -> None:
        """Forget what is under way."""
        self._waiting.clear()

    def _next(self) -> Reading:
        step, host, event = self._waiting.popleft()
        if event is not None:
            with self._activity.during(Activity.PEERS):  # the sums are a collective operation on the device
                event.synchronize()
        return _reading(step, host)


def _reading(step: int, sums: Tensor) -> Reading:
    loss, num_wrong, grad_norm, stops, saves, *rank_times = sums.tolist()
    return Reading(
        step=step,
        loss=loss,
        num_wrong=int(num_wrong),  # sums of integers below 2^53 are exact in float64
        grad_norm=grad_norm,
        wants_stop=stops > 0,
        wants_save=saves > 0,
        rank_times=tuple(rank_times),
    )


@dataclass(slots=True)
class Tally:
    """Sums over training samples; ``loss`` and ``errors`` are sums, not means."""

    loss: float = 0.0
    errors: int = 0
    num_samples: int = 0

    def add(self, loss: float, errors: int, num_samples: int) -> None:
        """Add one batch."""
        self.loss += loss
        self.errors += errors
        self.num_samples += num_samples

    def means(self, prefix: str) -> dict[str, float]:
        """``<prefix>_loss`` and ``<prefix>_error`` per sample; nothing if there is none."""
        if not self.num_samples:
            return {}
        return {f"{prefix}_loss": self.loss / self.num_samples, f"{prefix}_error": self.errors / self.num_samples}


class MetricsLog:
    """The segments of one attempt. A segment covers ``from_step < step <= to_step``; segments follow each other."""

    def __init__(self, store: ObjectStore, request: JobRequest, from_step: int) -> None:
        self._store = store
        self._request = request
        self._from_step = from_step
        self._lines: list[tuple[int, str]] = []

    def add(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Add a line, stamped with the present time; a step that a sealed segment covers keeps the line it has."""
        if step <= self._from_step:
            return
        line = {"step": step, "epoch": epoch, "at_s": time.time(), "metrics": dict(metrics)}
        self._lines.append((step, json.dumps(line, allow_nan=False)))

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps that are not sealed yet: the run repeats them."""
        self._lines = [(line_step, line) for line_step, line in self._lines if line_step <= step]

    def seal(self, step: int) -> dict[str, bytes]:
        """Take the lines so far out of the log: name and content of the segment that the caller makes durable.

        Without any lines there is no segment, and the next one starts where this one would have.
        """
        if not self._lines:
            return {}
        name = metrics_segment(self._request.key, self._request.attempt_number, self._from_step, step)
        content = "".join(f"{line}\n" for _, line in self._lines).encode()
        self._lines, self._from_step = [], step
        return {name: seal(name, content)}

    def close_segment(self, step: int, persist: Callable[[Callable[[], object]], object] = once) -> None:
        """Write the lines so far. ``persist`` makes the write; it may repeat it."""
        for name, content in self.seal(step).items():
            persist(partial(self._store.put, name, content))


class Clock:
    """Measures images and waiting, since the last lap and in all."""

    def __init__(self, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self.started_s = 0.0
        """Value of ``time.perf_counter`` when the first update began, or the evaluation with which a run goes on."""
        self._phase, self._report_s = "", -math.inf
        self._lap_s = 0.0
        self._lap_images = 0
        self._lap_steps = 0
        self._lap_wait_s = 0.0
        self.wait_s = 0.0
        """How long the latest batch was waited for; not known of the first one."""
        self._all_images = 0
        self._all_steps = 0

    def begin(self) -> None:
        """The work begins now, unless it has begun."""
        if not self.started_s:
            self.started_s = self._lap_s = time.perf_counter()

    def timed(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the time until each is there counts as waiting, from the second one on."""
        asked_s = 0.0
        for item in self._activity.each(items):
            self.begin()
            if asked_s:
                self.wait_s = time.perf_counter() - asked_s
                self._lap_wait_s += self.wait_s
            yield item
            asked_s = time.perf_counter()

    def count(self, num_images: int) -> None:
        """Count the images of one update."""
        self._lap_images += num_images
        self._lap_steps += 1
        self._all_images += num_images
        self._all_steps += 1
        self._activity.stage = "train"

    def lap(self) -> dict[str, float]:
        """Since the last call: ``images_per_s``, evaluation and checkpoints included; ``data_wait``, the share of the
        time that was spent waiting for batches; ``data_wait_ms``, this time per step. Nothing without a step.
        """
        if not self._lap_steps:
            return {}
        now_s = time.perf_counter()
        elapsed_s = max(now_s - self._lap_s, _SHORTEST_S)
        metrics = {
            "images_per_s": self._lap_images / elapsed_s,
            "data_wait": min(1.0, self._lap_wait_s / elapsed_s),
            "data_wait_ms": 1e3 * self._lap_wait_s / self._lap_steps,
        }
        self._lap_s, self._lap_images, self._lap_steps, self._lap_wait_s = now_s, 0, 0, 0.0
        return metrics

    def counters(self) -> dict[str, float]:
        """Sums of the whole attempt so far: ``images``, ``steps`` and ``train_s``, seconds since the first update."""
        train_s = time.perf_counter() - self.started_s if self.started_s else 0.0
        return {"images": float(self._all_images), "steps": float(self._all_steps), "train_s": train_s}

    def images_per_s(self) -> float:
        """Training throughput of the whole attempt so far."""
        return self._all_images / max(time.perf_counter() - self.started_s, _SHORTEST_S)

    def step_s(self) -> float:
        """Seconds per update of the whole attempt so far, evaluation and checkpoints included; 0 before the first."""
        return (time.perf_counter() - self.started_s) / self._all_steps if self._all_steps else 0.0

    def is_report_due(self, phase: str) -> bool:
        """Whether the last report is old enough for the next, or of another phase; if so, the next is made now."""
        now_s = time.perf_counter()
        if phase == self._phase and now_s - self._report_s < _REPORT_EVERY_S:
            return False
        self._phase, self._report_s = phase, now_s
        return True


class ReadStats:
    """Differences of a loader's sums between lines of metrics; what validation reads is not among them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seen = torch.zeros(len(_COUNTS), dtype=torch.float64)
        self._epoch_bytes = 0.0
        self.of_last_epoch: dict[str, float] = {}
        """``store_gib_per_epoch`` once an epoch has ended."""

    def lap(self, stats: Mapping[str, float], *, ends_epoch: bool) -> dict[str, float]:
        """What was read since the last call. A collective.

        ``cache_hit_rate``: share in [0, 1] of the samples whose shard was on the node; not where nothing was read,
        because all pixels are in memory. ``store_gib_per_epoch``: GiB that this attempt has read from the store since
        the epoch began; at its end alone. Nothing for a task that tells no sums.

        Args:
            stats: sums since the attempt began, see ``LoaderStats.snapshot``.
            ends_epoch: whether an epoch ends with this line.
        """
        sums = torch.tensor([stats.get(name, 0.0) for name in _COUNTS], dtype=torch.float64)
        new, self._seen = sums - self._seen, sums
        hits, misses, num_bytes = self._ranks.sum_(new).tolist()
        self._epoch_bytes += num_bytes
        found = {"cache_hit_rate": hits / (hits + misses)} if hits + misses > 0 else {}
        if ends_epoch and "bytes_from_store" in stats:
            self.of_last_epoch = {"store_gib_per_epoch": self._epoch_bytes / _GIB}
            self._epoch_bytes = 0.0
            found |= self.of_last_epoch
        return found


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peaks of an accelerator in 10^12 operations/s: 16-bit with float32 accumulation, TF32, float32."""

    half: float
    tf32: float
    fp32: float


# Data sheets, dense (without sparsity), boost clock. A name is a part of torch.cuda.get_device_name(); of several that
# fit the longest counts.
PEAKS: Mapping[str, Peak] = {
    # NVIDIA Blackwell B200 data sheet (HGX B200, per GPU)
    "B200": Peak(half=2250, tf32=1100, fp32=75),
    # NVIDIA H200 and H100 Tensor Core GPU data sheets; SXM unless the name says otherwise
    "H200": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H200 NVL": Peak(half=835.5, tf32=417.7, fp32=60.3),
    "GH200": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H100": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H100 PCIe": Peak(half=756.4, tf32=378.2, fp32=51.2),
    "H100 NVL": Peak(half=835.5, tf32=417.7, fp32=60.3),
    # NVIDIA A100 data sheet
    "A100": Peak(half=311.8, tf32=155.9, fp32=19.5),
    # NVIDIA A10, A40, L4 and L40S data sheets; A10G: AWS' variant, NVIDIA Ampere GA102 whitepaper's rates at its clock
    "A10": Peak(half=125.0, tf32=62.5, fp32=31.2),
    "A10G": Peak(half=70.0, tf32=35.0, fp32=31.5),
    "A40": Peak(half=149.7, tf32=74.8, fp32=37.4),
    "L4": Peak(half=121.0, tf32=60.0, fp32=30.3),
    "L40S": Peak(half=362.1, tf32=183.2, fp32=91.6),
    # NVIDIA V100 and T4 data sheets: no bf16 and no TF32, which then run as float32
    "V100": Peak(half=125.0, tf32=15.7, fp32=15.7),
    "T4": Peak(half=65.1, tf32=8.1, fp32=8.1),
    # NVIDIA Ada and Ampere GA102 whitepapers, GeForce rates with float32 accumulation
    "RTX 4090": Peak(half=165.2, tf32=82.6, fp32=82.6),
    "RTX 3090": Peak(half=71.2, tf32=35.6, fp32=35.6),
}


_SLOWER = ("MIG", "Laptop", "D")
"""Words in names of slices and of slower variants (RTX 4090 D) of devices in the table."""


def peak_flops(device_name: str, precision: Precision, *, tf32: bool) -> float | None:
    """Operations/s at the peak of a device in this arithmetic; ``None`` for a device that is not in the table."""
    words = f" {device_name.replace('-', ' ')} "
    fitting = [name for name in PEAKS if f" {name} " in words]
    if not fitting or any(f" {word} " in words for word in _SLOWER):
        return None
    peak = PEAKS[max(fitting, key=len)]
    if precision is Precision.FP32:
        return 1e12 * (peak.tf32 if tf32 else peak.fp32)
    return 1e12 * peak.half


def training_flops(spec: ModelSpec, num_classes: int = 0) -> float | None:
    """Operations of forward and backward pass of one image; ``None`` where torch cannot count them."""
    from workloads.models.table import count_macs, meta_backbone

    try:
        macs, features = count_macs(meta_backbone(spec), spec.image_size)
        head = num_classes * int(features.shape[1])
    except REFUSALS:
        return None
    return float(_OPERATIONS_PER_MAC * _FORWARD_PASSES_PER_STEP * (macs + head))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What turns images/s into MFU; ``None`` = not known for this model or device."""

    flops_per_image: float | None
    peak_flops: float | None

    @classmethod
    def of(
        cls, spec: ModelSpec, device: torch.device, precision: Precision, *, tf32: bool, num_classes: int = 0
    ) -> Self:
        """For a model that is trained on a device. On a CPU or a part of a GPU nothing is known or counted."""
        if device.type != "cuda" or part_of(device) < 1.0:
            return cls(flops_per_image=None, peak_flops=None)
        peak = peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
        return cls(flops_per_image=training_flops(spec, num_classes), peak_flops=peak)

    def mfu(self, images_per_s: float) -> float | None:
        """Share of the peak in [0, 1], given the images/s of one device."""
        if not self.flops_per_image or not self.peak_flops:
            return None
        return images_per_s * self.flops_per_image / self.peak_flops


def reset_gpu_peak(device: torch.device) -> None:
    """Count the peak of ``gpu_usage`` from here on: a process may have run other jobs, and tried larger batches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # free blocks of what ran before count as reserved
        torch.cuda.reset_peak_memory_stats(device)


def gpu_usage(device: torch.device) -> dict[str, float]:
    """Memory of a GPU at its peak since ``reset_gpu_peak`` (GiB, and share of all), and its utilisation in [0, 1] where
    it is known.
    """
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    peak = torch.cuda.max_memory_reserved(device)
    measured = {"gpu_memory_gib": peak / 2**30, "gpu_memory": peak / total}
    try:
        measured["gpu_utilization"] = torch.cuda.utilization(device) / 100
    except Exception:  # noqa: BLE001 - no such library, no right to ask it, or a device (MIG) that it cannot tell
        return measured
    return measured


def host_usage() -> dict[str, float]:
    """CPU seconds of this process so far, over all its threads, and its memory at the peak in GiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    kibibytes = usage.ru_maxrss  # getrusage(2)
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "memory_gib": kibibytes / 2**20}


def usage(throughput: Throughput | None, device: torch.device, images_per_s: float) -> dict[str, float]:
    """MFU where it is known, given the images/s of this device, and what the machine and the device are used."""
    mfu = None if throughput is None else throughput.mfu(images_per_s)
    return ({} if mfu is None else {"mfu": mfu}) | host_usage() | gpu_usage(device)
