"""The micro-batch: found by trial on a pretended device, remembered, cut evenly, smaller after a failure."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from orchestrator.core.contract import Execution
from orchestrator.core.errors import FailureKind, OutOfMemoryError
from orchestrator.core.job_kinds import JobKind
from tests.memory_images import MemoryImages
from tests.tiny_training import RECIPE
from workloads.models.build import is_out_of_memory
from workloads.runtime.precision import Arithmetic, CompileMode
from workloads.runtime.ranks import Ranks
from workloads.train import warmup_step
from workloads.train.micro_batch import (
    CudaMemory,
    MicroBatchMemory,
    chosen_micro_batch,
    even_micro_batch,
    find_micro_batch,
    halved,
    micro_batch_of,
    out_of_memory_at,
)
from workloads.train.recipe import Recipe
from workloads.train.warmup_step import MicroBatchSearch

USABLE = 0.92


@dataclass
class Device:
    """A device on which a step takes ``fixed + per_sample * size`` bytes; what does not fit raises as torch does."""

    total: int
    fixed: int = 0
    per_sample: int = 1
    peak: int = 0
    tried: list[int] = field(default_factory=list)

    def step(self, size: int) -> None:
        self.tried.append(size)
        self.peak = self.fixed + self.per_sample * size
        if self.peak > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def reset_peak(self) -> None:
        self.peak = 0

    def peak_bytes(self) -> int:
        return self.peak

    def total_bytes(self) -> int:
        return self.total


def _find(device: Device, *, unit: int = 1, limit: int = 4096, **kept_bytes: int) -> int:
    return find_micro_batch(device.step, unit=unit, limit=limit, memory=device, **kept_bytes)


@given(total=st.integers(10, 5000), unit=st.integers(1, 64), limit=st.integers(1, 5000), later=st.integers(0, 200))
def test_find_micro_batch_any_device_gives_the_largest_that_fits(total: int, unit: int, limit: int, later: int) -> None:
    room = int(USABLE * total) - later
    device = Device(total=total)
    if min(unit, limit) > room:
        with pytest.raises(OutOfMemoryError, match=f"{unit} samples, the fewest"):
            _find(device, unit=unit, limit=limit, later_bytes=later)
        return
    found = _find(device, unit=unit, limit=limit, later_bytes=later)
    assert found == limit or found % unit == 0
    assert found <= min(room, limit)
    assert found == limit or min(found + unit, limit) > room


def test_find_micro_batch_needs_few_trials() -> None:
    device = Device(total=10_000, fixed=500, per_sample=7)
    largest = (9200 - 500) // 7
    assert _find(device) == largest
    sizes = Counter(device.tried)
    assert len(sizes) <= 24
    assert max(sizes.values()) == 2
    assert {size for size, times in sizes.items() if times > 1} <= {size for size in sizes if size > largest}


def test_find_micro_batch_counts_the_inputs_of_the_whole_share() -> None:
    """A trial holds those of its own samples; a step holds all, while a part of them goes through the model."""
    device = Device(total=1000, per_sample=10)
    assert _find(device, limit=400, sample_bytes=1) == (920 - 400) // (10 - 1)
    assert _find(device, limit=92, sample_bytes=1) == 92
    with pytest.raises(OutOfMemoryError, match="smaller norm_group, batch, image"):
        _find(device, limit=1000, sample_bytes=1)


def test_memory_of_the_first_pass_of_a_size_is_not_that_of_a_step() -> None:
    """In it cuDNN's benchmark takes the workspace of every kernel it tries."""

    class Benchmarking(Device):
        def step(self, size: int) -> None:
            is_first = size not in self.tried
            super().step(size)
            if is_first:
                self.peak = self.total

    assert _find(Benchmarking(total=1000), unit=8) == 920


def test_find_micro_batch_quotes_why_the_fewest_samples_do_not_fit() -> None:
    def broken(size: int) -> None:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    with pytest.raises(OutOfMemoryError, match=r"8 samples, the fewest.*\(GET was unable to find an engine"):
        find_micro_batch(broken, unit=8, limit=8, memory=Device(total=100))


def test_find_micro_batch_other_error_is_not_swallowed() -> None:
    def broken(size: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        find_micro_batch(broken, unit=1, limit=8, memory=Device(total=100))


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_is_out_of_memory_knows_the_ways_to_say_it(error: Exception, known: bool) -> None:
    assert is_out_of_memory(error) is known


@given(share=st.integers(1, 3000), largest=st.integers(1, 3000), unit=st.integers(1, 64))
def test_even_micro_batch_any_sizes_keep_the_bounds(share: int, largest: int, unit: int) -> None:
    size = even_micro_batch(share, largest, unit)
    assert size % unit == 0 or size == share
    assert size <= max(largest, unit)
    fewest, passes = -(-share // (max(largest // unit, 1) * unit)), -(-share // size)
    assert passes <= 2 * fewest


@pytest.mark.parametrize(
    ("share", "largest", "unit", "size"),
    [(4096, 700, 64, 512), (4096, 4096, 64, 4096), (4096, 5000, 64, 4096), (1000, 300, 1, 250), (6, 4, 2, 2)],
)
def test_even_micro_batch_cuts_into_equal_passes(share: int, largest: int, unit: int, size: int) -> None:
    assert even_micro_batch(share, largest, unit) == size


def test_even_micro_batch_prime_share_is_balanced() -> None:
    assert even_micro_batch(1021, 500, 1) == 341


@pytest.mark.parametrize(("times", "size"), [(0, 512), (1, 256), (3, 64), (9, 64)])
def test_halved_stays_in_whole_units(times: int, size: int) -> None:
    assert halved(512, times, 64) == size
    assert halved(192, 1, 64) == 64


def _chosen(execution: Execution, device: Device, memory: MicroBatchMemory | None = None, share: int = 512) -> int:
    def search() -> int:
        return _find(device, unit=64, limit=share)

    return chosen_micro_batch(execution, unit=64, share=share, search=search, memory=memory)


def test_chosen_micro_batch_on_a_cpu_is_never_searched() -> None:
    assert chosen_micro_batch(Execution(), unit=64, share=512) == 0
    assert chosen_micro_batch(Execution(micro_batch=128), unit=64, share=512) == 128
    assert chosen_micro_batch(Execution(memory_retries=1), unit=64, share=512) == 256


def test_chosen_micro_batch_of_norm_groups_on_a_cpu_is_one_group_also_in_a_retry() -> None:
    assert chosen_micro_batch(Execution(memory_retries=1), unit=64, share=512, has_batchnorm=True) == 0


def test_chosen_micro_batch_execution_goes_first_and_retries_halve_it() -> None:
    device = Device(total=10_000)
    assert _chosen(Execution(micro_batch=256), device) == 256
    assert _chosen(Execution(micro_batch=256, memory_retries=1), device) == 128
    assert _chosen(Execution(micro_batch=4096, memory_retries=1), device, share=512) == 256
    assert device.tried == []


@pytest.mark.parametrize(
    ("shares", "largest", "unit", "sizes"),
    [
        ((342, 341, 341), 1024, 1, (342, 341, 341)),  # the smallest size of all would leave a pass of one sample
        ((683, 682, 682), 344, 1, (342, 341, 341)),
        ((342, 342, 340), 173, 2, (114, 114, 114)),  # equal passes before few
        ((100, 100), 40, 1, (25, 25)),
        ((512, 448), 300, 64, (256, 256)),
    ],
)
def test_ranks_with_uneven_shares_take_equally_many_passes(
    shares: tuple[int, ...], largest: int, unit: int, sizes: tuple[int, ...]
) -> None:
    own = [even_micro_batch(share, largest, unit) for share in shares]
    passes = max(-(-share // size) for share, size in zip(shares, own, strict=True))
    found = tuple(micro_batch_of(share, passes, unit) for share in shares)
    assert found == sizes
    assert all(size <= first for size, first in zip(found, own, strict=True))


def test_chosen_micro_batch_is_searched_once_per_setting(tmp_path: Path) -> None:
    device = Device(total=300)
    setting = {"model": "resnet50", "image_size": 224}
    assert _chosen(Execution(), device, MicroBatchMemory(tmp_path, setting)) == 256
    tried = len(device.tried)
    assert _chosen(Execution(), device, MicroBatchMemory(tmp_path, setting)) == 256
    assert len(device.tried) == tried
    _chosen(Execution(), device, MicroBatchMemory(tmp_path, setting | {"image_size": 448}))
    assert len(device.tried) > tried


def test_size_is_remembered_for_what_takes_the_memory() -> None:
    """A frozen backbone keeps no activations, and an attempt may have a part of its GPU."""

    def setting(share: float = 1.0, frozen: bool = False, world_size: int = 1, **fields: Any) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(not frozen)
        model[1].requires_grad_(True)
        request = SimpleNamespace(kind=JobKind.FINETUNE, execution=Execution())
        recipe = replace(Recipe.from_mapping(RECIPE), **fields)
        spec, context = SimpleNamespace(to_json=dict), SimpleNamespace(gpu_share=share)
        ranks = Ranks(world_size=world_size)
        job: Any = SimpleNamespace(request=request, model=spec, recipe=recipe, context=context, ranks=ranks)
        learner: Any = SimpleNamespace(model=model, average=None)
        task: Any = SimpleNamespace(num_classes=2)
        search = MicroBatchSearch(learner=learner, losses_of=lambda *_: None, task=task, job=job)  # type: ignore[arg-type]
        return json.dumps(search.setting(), sort_keys=True)

    settings = [
        setting(),
        setting(frozen=True),
        setting(share=0.5),
        setting(optimizer="adam"),
        setting(precision="bf16"),
        setting(world_size=2),
        setting(world_size=2, grad_reduction="bf16"),
    ]
    assert len(set(settings)) == len(settings)
    assert setting() == setting(lr=0.7) == setting(grad_reduction="bf16")
    assert setting(world_size=2) == setting(world_size=3)


def _searched(
    monkeypatch: pytest.MonkeyPatch,
    *,
    world_size: int = 1,
    compile_mode: str = "off",
    grad_reduction: str = "fp32",
    average: Any = None,
) -> tuple[dict[str, Any], list[bool]]:
    """What a search for a share of 64 tells, and whether passes of 32 and 64 samples have gradients at their begin."""
    told: dict[str, Any] = {}
    has_gradients: list[bool] = []

    def find(step: Callable[[int], None], **fields: Any) -> int:
        told.update(fields)
        step(32)
        step(64)
        return 8

    def losses_of(inputs: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        has_gradients.append(model.weight.grad is not None)
        return model(inputs.flatten(1)).sum(1), torch.zeros(())

    monkeypatch.setattr(warmup_step, "find_micro_batch", find)
    model = nn.Linear(3 * 16 * 16, 2)
    arithmetic = Arithmetic(torch.device("cpu"), compile_mode=CompileMode(compile_mode))
    learner: Any = SimpleNamespace(model=model, average=average, arithmetic=arithmetic)
    recipe, ranks = SimpleNamespace(grad_reduction=grad_reduction), Ranks(world_size=world_size)
    job: Any = SimpleNamespace(context=SimpleNamespace(gpu_share=1.0), recipe=recipe, ranks=ranks)
    task = MemoryImages(model, batch_size=64, num_samples=64, image_size=16)
    assert MicroBatchSearch(learner=learner, losses_of=losses_of, task=task, job=job)._search(4, 64) == 8
    assert model.weight.grad is None
    return told, has_gradients


def test_search_counts_an_input_in_the_form_that_a_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = _searched(monkeypatch)
    assert (told["unit"], told["limit"], told["sample_bytes"]) == (4, 64, 3 * 16 * 16 * 4)


@pytest.mark.parametrize(
    ("how", "passes"),
    [
        ({}, [True, False]),  # a step of one pass begins without gradients
        ({"world_size": 2}, [True, True]),
        ({"compile_mode": "reduce-overhead"}, [True, True]),
    ],
)
def test_search_holds_gradients_where_a_pass_of_training_does(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], passes: list[bool]
) -> None:
    _, has_gradients = _searched(monkeypatch, **how)
    assert has_gradients == passes


def test_search_adds_what_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def later_bytes(**how: Any) -> int:
        return int(_searched(monkeypatch, **how)[0]["later_bytes"])

    plain, gang = later_bytes(grad_reduction="bf16"), later_bytes(world_size=2)
    rounded = later_bytes(world_size=2, grad_reduction="bf16")
    assert plain == gang
    assert rounded - gang == 2 * (2 * 3 * 16 * 16 + 2)
    assert later_bytes(average=object()) == plain  # averaged weights are there during the search


def test_share_of_a_gpu_limits_what_an_attempt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    found = [CudaMemory(torch.device("cuda"), share).total_bytes() for share in (1.0, 0.5)]
    assert found == [950, 500]


def test_chosen_micro_batch_larger_share_than_was_searched_is_searched_again(tmp_path: Path) -> None:
    device, memory = Device(total=10_000), MicroBatchMemory(tmp_path, {})
    assert _chosen(Execution(), device, memory, share=128) == 128
    assert _chosen(Execution(), device, memory, share=512) == 512
    tried = len(device.tried)
    assert _chosen(Execution(), device, memory, share=256) == 256
    assert len(device.tried) == tried


def test_chosen_micro_batch_share_with_more_inputs_is_searched_again(tmp_path: Path) -> None:
    device, memory = Device(total=300), MicroBatchMemory(tmp_path, {})
    assert _chosen(Execution(), device, memory, share=320) == 192
    tried = len(device.tried)
    assert _chosen(Execution(), device, memory, share=512) == 256
    assert len(device.tried) > tried


def test_chosen_micro_batch_after_a_failure_is_smaller_on_this_node_and_on_others(tmp_path: Path) -> None:
    device, memory = Device(total=300), MicroBatchMemory(tmp_path, {})
    assert _chosen(Execution(), device, memory) == 256
    with pytest.raises(OutOfMemoryError, match="micro-batch of 256") as caught, out_of_memory_at(256, memory.failed):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    assert (caught.value.micro_batch, caught.value.failure_kind) == (256, FailureKind.OUT_OF_MEMORY)
    # The retry counts once, whether the node saw the failure or not.
    assert _chosen(Execution(memory_retries=1), device, memory) == 128
    assert _chosen(Execution(memory_retries=1), device, MicroBatchMemory(tmp_path / "other", {})) == 128
    assert _chosen(Execution(), device, memory) == 128


def test_chosen_micro_batch_of_a_retry_is_halved_where_only_a_larger_size_failed_before(tmp_path: Path) -> None:
    device, memory = Device(total=300), MicroBatchMemory(tmp_path, {})
    memory.failed(512)
    memory.found(256, 512)
    assert _chosen(Execution(), device, memory) == 256
    assert _chosen(Execution(memory_retries=1), device, memory) == 128
    assert device.tried == []


@pytest.mark.parametrize(("total", "size"), [(290, 256), (600, 512), (90, 64)])
def test_size_that_was_found_with_other_memory_is_searched_again(tmp_path: Path, total: int, size: int) -> None:
    """Another process held some of it, then or now."""
    device = Device(total=300)
    memory = MicroBatchMemory(tmp_path, {}, device)
    assert _chosen(Execution(), device, memory) == 256
    tried, device.total = len(device.tried), total
    assert _chosen(Execution(), device, memory) == size
    assert (len(device.tried) > tried) == (size != 256)
    assert _chosen(Execution(), device, memory) == size


def test_whole_share_that_fits_is_not_searched_again_with_more_memory(tmp_path: Path) -> None:
    device = Device(total=600)
    memory = MicroBatchMemory(tmp_path, {}, device)
    assert _chosen(Execution(), device, memory) == 512
    tried, device.total = len(device.tried), 6000
    assert _chosen(Execution(), device, memory) == 512
    assert len(device.tried) == tried


def test_size_that_failed_with_less_memory_is_tried_again(tmp_path: Path) -> None:
    device = Device(total=600)
    memory = MicroBatchMemory(tmp_path, {}, device)
    assert _chosen(Execution(), device, memory) == 512
    device.total = 300  # while it trains
    memory.failed(512)
    assert _chosen(Execution(), device, memory) == 256
    device.total = 600
    assert _chosen(Execution(), device, memory) == 512
    memory.failed(512)
    device.total = 300
    memory.failed(512)  # says no more than the one before
    device.total = 600
    assert _chosen(Execution(), device, memory) == 256


def test_file_of_an_earlier_version_holds_for_any_memory(tmp_path: Path) -> None:
    device = Device(total=6000)
    memory = MicroBatchMemory(tmp_path, {}, device)
    memory.found(256, 512)
    file = next(tmp_path.glob("*.json"))
    file.write_text(json.dumps({"setting": {}, "known": {"fits": 256, "limit": 512, "failed_at": 256}}))
    assert _chosen(Execution(), device, memory) == 128
    assert device.tried == []


def test_memory_of_a_broken_device_hides_no_error(tmp_path: Path) -> None:
    class Broken(Device):
        def total_bytes(self) -> int:
            raise RuntimeError("CUDA error: unspecified launch failure")

    memory = MicroBatchMemory(tmp_path, {}, Broken(total=0))
    with pytest.raises(OutOfMemoryError, match="micro-batch of 64"), out_of_memory_at(64, memory.failed):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert memory.recall().failed_at == 64


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"setting": {}, "known": {"unknown": 1}}', '{"setting": {"a": 1}}']
)
def test_micro_batch_memory_broken_file_is_no_knowledge(tmp_path: Path, content: str) -> None:
    memory = MicroBatchMemory(tmp_path, {})
    memory.found(64, 128)
    next(tmp_path.glob("*.json")).write_text(content)
    assert memory.recall().fits == 0


def test_micro_batch_memory_folder_that_cannot_be_written_costs_only_a_search(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert _chosen(Execution(), Device(total=300), MicroBatchMemory(blocked / "folder", {})) == 256


def test_out_of_memory_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(OutOfMemoryError("does not fit", 64)))  # noqa: S301 - our own bytes
    assert (str(error), error.micro_batch) == ("does not fit", 64)


def test_out_of_memory_at_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), out_of_memory_at(8):
        raise ValueError("other")
