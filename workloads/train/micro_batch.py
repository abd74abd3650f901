"""How a global batch is cut into shares of ranks and these into micro-batches, and how large a micro-batch fits.

On a GPU the size is found by trial before the first step and remembered per node. It never changes what is computed,
only its rounding: it is in the numerics fingerprint, and on a CPU, where equal bits are guaranteed, it is never
searched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from orchestrator.core.contract import Execution
from orchestrator.core.errors import OutOfMemoryError, UserError
from orchestrator.storage.files import replaced_file
from workloads.data.order import rank_slice
from workloads.models.batchnorm import batchnorm_layers, resolve_norm_group
from workloads.models.build import is_out_of_memory
from workloads.runtime.ranks import Ranks
from workloads.train.recipe import Recipe

_USABLE_SHARE = 0.92
"""Of the device's memory: the rest is for fragmentation and for what libraries allocate beside torch."""
_CLEARLY_MORE = 1.1
_PAIR = 2
"""Samples that are mixed with each other."""


class DeviceMemory(Protocol):
    """The memory of one device as a search sees it; tests bring their own."""

    def reset_peak(self) -> None:
        """Give cached blocks back and count the peak from here on."""

    def peak_bytes(self) -> int:
        """Largest number of bytes that tensors took since the last ``reset_peak``."""

    def total_bytes(self) -> int:
        """What tensors can take at most."""


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a CUDA device, less what other processes hold of it, and no more than a share of it."""

    device: torch.device
    share: float = 1.0

    def reset_peak(self) -> None:
        """See ``DeviceMemory``."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """See ``DeviceMemory``."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def total_bytes(self) -> int:
        """See ``DeviceMemory``."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        return min(int(free_bytes) + torch.cuda.memory_reserved(self.device), int(self.share * all_bytes))


@contextmanager
def out_of_memory_at(micro_batch: int, failed: Callable[[int], None] | None = None) -> Iterator[None]:
    """Training steps run inside: running out of memory becomes an error that names the size.

    Raises:
        OutOfMemoryError: a step did not fit; ``failed`` was called with the size before.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if failed is not None:
            failed(micro_batch)
        message = f"a step with a micro-batch of {micro_batch} samples does not fit into memory{_quoted(error)}; "
        message += "the next attempt halves it; or set execution.micro_batch"
        raise OutOfMemoryError(message, micro_batch) from error


@contextmanager
def out_of_memory_in(what: str) -> Iterator[None]:
    """Other work of a training runs inside, for which no micro-batch is to blame.

    Raises:
        OutOfMemoryError: it did not fit.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = f"{what} does not fit into memory{_quoted(error)}, although the steps of training do; see what else "
        message += "uses the memory of the accelerator or host, or use a smaller model or image, or a larger GPU"
        raise OutOfMemoryError(message) from error


def _quoted(error: BaseException) -> str:
    """The first line of its text, to stand in a message."""
    return f" ({(str(error).splitlines() or [''])[0]})"


def find_micro_batch(
    step: Callable[[int], None],
    *,
    unit: int,
    limit: int,
    memory: DeviceMemory,
    later_bytes: int = 0,
    sample_bytes: int = 0,
) -> int:
    """The largest multiple of ``unit``, at most ``limit``, with which ``step`` fits into memory; by trial.

    Doubles from one unit until a trial does not fit, then halves the interval. ``later_bytes`` is what the run will
    take beside a step (optimiser state), ``sample_bytes`` an input: a trial holds as many as go through the model at
    once, a step all ``limit`` of its share. ``limit`` need not be a multiple.

    Raises:
        OutOfMemoryError: not even one unit fits.
    """
    room_bytes = int(_USABLE_SHARE * memory.total_bytes()) - later_bytes
    said = ""

    def fits(units: int) -> bool:
        nonlocal said
        size = min(units * unit, limit)
        others_bytes = (limit - size) * sample_bytes
        try:
            # The first pass of a size may try kernels (cuDNN's benchmark), with memory that no later pass takes.
            for _ in range(2):
                memory.reset_peak()
                step(size)
                if memory.peak_bytes() + others_bytes <= room_bytes:
                    return True
            return False
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = _quoted(error)
        # Outside the handler: the exception holds the frames whose tensors the next trial needs the room of.
        memory.reset_peak()
        return False

    most = -(-limit // unit)
    if not fits(1):
        message = f"{unit} samples, the fewest that go through the model at once, do not fit into the accelerator's "
        message += f"memory{said}; use a smaller norm_group, batch, image or model, or a larger GPU"
        raise OutOfMemoryError(message, unit)
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    if high > most and low < most and fits(most):
        return limit
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low * unit, limit)


def even_micro_batch(share: int, largest: int, unit: int) -> int:
    """A size of at most ``largest`` that cuts a share into few and, if that costs little, equal passes.

    Passes of one size need one compilation and one CUDA graph: worth up to twice as many passes as needed.
    """
    largest = max(largest // unit, 1) * unit
    fewest = -(-share // largest)
    for passes in range(fewest, 2 * fewest + 1):
        if share % (passes * unit) == 0:
            return share // passes
    units = -(-share // unit)
    return min(-(-units // fewest) * unit, largest)


def micro_batch_of(share: int, passes: int, unit: int) -> int:
    """The smallest size, in whole units, with which a share takes at most so many passes; 0 for no passes."""
    return -(-share // (unit * passes)) * unit if passes else 0


def halved(micro_batch: int, times: int, unit: int) -> int:
    """A micro-batch after so many failures for want of memory, in whole units."""
    return max(unit, (micro_batch >> times) // unit * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a node remembers of one setting."""

    fits: int = 0
    """Largest size that a search found to fit; 0 = none yet."""
    limit: int = 0
    """The share for which it searched: nothing larger was wanted."""
    total_bytes: int = 0
    """What tensors could take at most during that search; 0 = not known: earlier versions did not write it."""
    failed_at: int = 0
    """Smallest size that failed in training after all; 0 = none."""
    failed_bytes: int = 0
    """What tensors could take at most when it failed; 0 = not known."""

    def with_memory(self, total_bytes: int) -> Known:
        """What of it holds where tensors can take so much; with 0, which is not known, all of it.

        Memory can be short for a moment, because of another process: a size that was found then is too small
        afterwards, and one that was found before is too large then.
        """
        known, is_full = self, self.fits == self.limit
        if _is_more(self.total_bytes, total_bytes) or (_is_more(total_bytes, self.total_bytes) and not is_full):
            known = replace(known, fits=0, limit=0, total_bytes=0)
        if _is_more(total_bytes, self.failed_bytes):
            known = replace(known, failed_at=0, failed_bytes=0)
        return known


def _is_more(one_bytes: int, other_bytes: int) -> bool:
    """Whether one amount of memory is clearly more than another; never where one of them is not known."""
    return 0 < _CLEARLY_MORE * other_bytes <= one_bytes


class MicroBatchMemory:
    """Files of a node, one per setting (model, image size, precision, accelerator, ...).

    ``device`` tells how much memory there is; without it, what is known holds for any amount.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any], device: DeviceMemory | None = None) -> None:
        name = sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]
        self._file, self._setting, self._device = folder / f"{name}.json", dict(setting), device

    def recall(self) -> Known:
        """What is known and holds with the memory that there is; a missing or broken file is nothing."""
        return self._read().with_memory(self._total_bytes())

    def found(self, fits: int, limit: int) -> None:
        """Remember the end of a search. What failed before stays known."""
        self._write(replace(self.recall(), fits=fits, limit=limit, total_bytes=self._total_bytes()))

    def failed(self, micro_batch: int) -> None:
        """Remember that a size did not fit in training."""
        known = self.recall()
        if not known.failed_at or micro_batch < known.failed_at:
            known = replace(known, failed_at=micro_batch, failed_bytes=self._total_bytes())
        self._write(known)

    def _total_bytes(self) -> int:
        if self._device is not None:
            with suppress(RuntimeError):  # of a device that is broken: what was done on it says so better
                return self._device.total_bytes()
        return 0

    def _read(self) -> Known:
        with suppress(OSError, ValueError, TypeError, KeyError):
            document = json.loads(self._file.read_text(encoding="utf-8"))
            return Known(**document["known"]) if document["setting"] == self._setting else Known()
        return Known()

    def _write(self, known: Known) -> None:
        # Losing it costs one more search: no reason to fail a job.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self._file) as file:
                file.write(json.dumps({"setting": self._setting, "known": asdict(known)}).encode())


def chosen_micro_batch(
    execution: Execution,
    *,
    unit: int,
    share: int,
    has_batchnorm: bool = False,
    search: Callable[[], int] | None = None,
    memory: MicroBatchMemory | None = None,
) -> int:
    """The micro-batch of an attempt; 0 = the layout's own rule.

    What the execution says goes first. Without it and with ``search`` (on GPUs) it is what is known or found to fit.
    Every attempt that ran out of memory before halves it, in whole units; so does what this node saw failing.

    Raises:
        OutOfMemoryError: the search finds nothing that fits.
    """
    retries = execution.memory_retries
    if execution.micro_batch:
        # No pass is larger than the share: half of a size above twice the share would be no smaller pass.
        return halved(min(execution.micro_batch, share), retries, unit)
    if search is None:
        # The layout's own rule with BatchNorm is one norm group, of which nothing smaller can be made.
        return halved(share, retries, unit) if retries and not has_batchnorm else 0
    known = memory.recall() if memory is not None else Known()
    largest = known.fits
    # A larger share also holds more inputs during a step than the search counted.
    if not largest or known.limit < share:
        largest = search()
        if memory is not None:
            memory.found(largest, share)
    # A failure that this node saw counts once; one of another node is among the retries alone.
    largest = halved(min(largest, share), retries, unit)
    if known.failed_at:
        largest = min(largest, halved(known.failed_at, 1, unit))
    return even_micro_batch(share, largest, unit)


def unit_of(model: nn.Module, recipe: Recipe) -> int:
    """Consecutive samples of a batch that stay on one rank: norm groups with BatchNorm, and pairs that are mixed.

    Raises:
        UserError: the batch is not a whole number of norm groups.
    """
    group = resolve_norm_group(model, recipe.batch_size, recipe.norm_group)
    return math.lcm(group if batchnorm_layers(model) else 1, _PAIR if recipe.is_mixed else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes in samples. ``unit`` consecutive samples stay on one rank; ``micro_batch`` go through the model at once."""

    batch_size: int
    norm_group: int
    """Samples per BatchNorm statistic; the whole batch without BatchNorm."""
    has_batchnorm: bool
    unit: int
    share: int
    """Of the global batch, on this rank."""
    offset: int
    """Of the share within the global batch."""
    micro_batch: int

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe, *, micro_batch: int = 0, ranks: Ranks) -> Self:
        """The layout of a model's batches; ``micro_batch`` 0 = one norm group with BatchNorm, else the whole share.

        Raises:
            UserError: the batch is not made of whole groups, a micro-batch is not, or there are more ranks than groups.
        """
        group = resolve_norm_group(model, recipe.batch_size, recipe.norm_group)
        has_batchnorm, unit = bool(batchnorm_layers(model)), unit_of(model, recipe)
        start, stop = 0, recipe.batch_size
        if not ranks.is_solo:
            start, stop = rank_slice(start, stop, rank=ranks.rank, world_size=ranks.world_size, group_size=unit)
        if has_batchnorm and micro_batch % group:
            message = f"execution.micro_batch is {micro_batch}, not a multiple of the norm group of {group} samples: "
            raise UserError(message + f"BatchNorm statistics need whole groups; set it to a multiple of {group}")
        return cls(
            batch_size=recipe.batch_size,
            norm_group=group,
            has_batchnorm=has_batchnorm,
            unit=unit,
            share=stop - start,
            offset=start,
            micro_batch=min(micro_batch or (group if has_batchnorm else stop - start), stop - start),
        )

    @property
    def has_groups_at_once(self) -> bool:
        """Whether several norm groups go through the model at once."""
        return self.has_batchnorm and self.micro_batch > self.norm_group

    @property
    def num_groups(self) -> int:
        """Norm groups of the global batch."""
        return self.batch_size // self.norm_group
