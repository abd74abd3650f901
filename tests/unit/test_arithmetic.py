"""Precision, loss scaling, switches of the GPU libraries, compilation that falls back, and MFU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from orchestrator.core.contract import Execution
from orchestrator.core.errors import UserError
from workloads.checkpoint.snapshot import HostFile
from workloads.models.spec import ModelSpec
from workloads.runtime import precision as arithmetic_module
from workloads.runtime.enums import Precision
from workloads.runtime.precision import (
    Arithmetic,
    CompiledForward,
    CompileMode,
    blocks_of,
    is_compile_failure,
    keep_compiled_code,
)
from workloads.train.large_head import LossForward
from workloads.train.objective import SoftmaxObjective
from workloads.train.step_metrics import PEAKS, Throughput, gpu_usage, peak_flops, reset_gpu_peak, training_flops
from workloads.train.warmup_step import WarmupStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wanted:
    precision: str = "fp32"
    tf32: bool = False


def _arithmetic(precision: str = "fp32", **execution: Any) -> Arithmetic:
    return Arithmetic.of(Wanted(precision), Execution(**execution), CPU)


def _layer() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_of_a_precision_computes_products_in_it(precision: str, dtype: torch.dtype) -> None:
    layer = _layer()
    with _arithmetic(precision).autocast():
        product = layer(torch.ones(2, 4))
    assert product.dtype == dtype
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(("wanted", "execution"), [("fp8", {}), ("fp32", {"compile": "fastest"})])
def test_arithmetic_unknown_choice_is_a_user_error_with_the_known_ones(wanted: str, execution: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"choose one of (fp32, bf16, fp16|off, default)"):
        _arithmetic(wanted, **execution)


def test_fp32_step_is_the_bare_one_bit_for_bit() -> None:
    ours, theirs = _layer(), _layer()
    for model in (ours, theirs):
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        arithmetic = _arithmetic()
        loss = model(torch.ones(2, 4)).square().sum()
        (arithmetic.scale(loss) if model is ours else loss).backward()
        if model is ours:
            arithmetic.unscale_(optimizer)
            arithmetic.step(optimizer)
        else:
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert _arithmetic().state_dict() == {}


def _fp16_update(model: nn.Module, optimizer: torch.optim.Optimizer, arithmetic: Arithmetic, factor: float) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().square().sum() * factor
    arithmetic.scale(loss).backward()
    arithmetic.unscale_(optimizer)
    arithmetic.step(optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_infinite_gradient_skips_the_update_and_halves_the_scale(fused: bool) -> None:
    model, arithmetic = _layer(), _arithmetic("fp16")
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    before = model.weight.detach().clone()
    _fp16_update(model, optimizer, arithmetic, factor=1e38)
    assert arithmetic.skips_steps
    assert torch.equal(model.weight, before)
    assert arithmetic.state_dict()["scale"] == 32768.0
    _fp16_update(model, optimizer, arithmetic, factor=1.0)
    assert not torch.equal(model.weight, before)


def test_fp16_overflow_of_the_first_update_leaves_no_uninitialised_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused SGD makes its momentum in the update that the overflow skips, and would read it in the next one."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    weights = []
    for factors in ((1e38, 1.0), (1.0,)):
        model, arithmetic = _layer(), _arithmetic("fp16")
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
        torch.use_deterministic_algorithms(True)
        try:
            for factor in factors:
                _fp16_update(model, optimizer, arithmetic, factor)
        finally:
            torch.use_deterministic_algorithms(False)
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])


def test_bf16_on_a_gpu_that_only_emulates_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(UserError, match="bf16, which Tesla T4 does not compute in"):
        Arithmetic.of(Wanted("bf16"), Execution(), torch.device("cuda"))
    with pytest.raises(UserError, match="bf16, which Tesla T4 does not compute in"):  # as jobs without a recipe do
        Arithmetic(torch.device("cuda"), precision=Precision.BF16)


def test_fp16_unscaled_gradients_are_those_of_fp32() -> None:
    scaled, plain = _layer(), _layer()
    arithmetic = _arithmetic("fp16")
    optimizer = SGD(scaled.parameters(), lr=0.1)
    arithmetic.scale(scaled(torch.ones(2, 4)).sum()).backward()
    assert scaled.weight.grad is not None
    assert scaled.weight.grad.abs().max() > 1e4
    arithmetic.unscale_(optimizer)
    plain(torch.ones(2, 4)).sum().backward()
    assert plain.weight.grad is not None
    assert torch.equal(scaled.weight.grad, plain.weight.grad)


def test_fp16_scale_survives_a_checkpoint() -> None:
    first, model = _arithmetic("fp16"), _layer()
    optimizer = Adam(model.parameters(), fused=True)
    for factor in (1e38, 1.0, 1.0):
        _fp16_update(model, optimizer, first, factor)
    resumed = _arithmetic("fp16")
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.state_dict() == first.state_dict()
    assert resumed.state_dict()["_growth_tracker"] == 2
    copy = _layer()
    copy.load_state_dict(model.state_dict())
    again = Adam(copy.parameters(), fused=True)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    _fp16_update(model, optimizer, first, 1.0)
    _fp16_update(copy, again, resumed, 1.0)
    assert torch.equal(model.weight, copy.weight)


def test_fingerprint_of_plain_cpu_arithmetic_adds_nothing() -> None:
    assert _arithmetic(deterministic=True, micro_batch=8).fingerprint() == {}


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"compile": "default"}])
def test_fingerprint_other_arithmetic_is_named(change: dict[str, str]) -> None:
    assert change.items() <= _arithmetic(**change).fingerprint().items()


@pytest.mark.parametrize(("tf32", "name"), [(True, "tf32"), (False, "ieee")])
def test_switches_are_set_and_put_back(tf32: bool, name: str) -> None:
    cudnn = torch.backends.cudnn
    matmul, convolution = torch.backends.cuda.matmul, cudnn.conv  # type: ignore[attr-defined]

    def state() -> list[object]:
        chosen = [matmul.fp32_precision, convolution.fp32_precision, cudnn.benchmark, cudnn.deterministic]
        return [*chosen, torch.are_deterministic_algorithms_enabled()]

    before = state()
    with arithmetic_module._switches(tf32=tf32, deterministic=True):
        assert state() == [name, name, False, True, True]
    with arithmetic_module._switches(tf32=tf32, deterministic=False):
        assert state() == [name, name, True, False, False]
    assert state() == before


def _on_gpu(*, deterministic: bool) -> Arithmetic:
    """Arithmetic of a device that need not be there: only switches are set."""
    gpu = Arithmetic(CPU, deterministic=deterministic)
    gpu.device, gpu._deterministic = torch.device("cuda"), deterministic
    return gpu


def test_deterministic_operation_without_a_kernel_is_a_user_error() -> None:
    refusal = "adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you set ..."
    with (
        pytest.raises(UserError, match=r"adaptive_max_pool2d.*set deterministic: false"),
        _on_gpu(deterministic=True).numerics(),
    ):
        raise RuntimeError(refusal)
    with pytest.raises(RuntimeError, match="unrelated"), _on_gpu(deterministic=True).numerics():
        raise RuntimeError("unrelated")


def test_deterministic_cublas_workspace_is_chosen_and_a_wrong_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with _on_gpu(deterministic=False).numerics():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0"), _on_gpu(deterministic=True).numerics():
        pass


def _traced(calls: list[int]) -> Any:
    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        calls.append(1)
        return graph.forward

    return backend


def test_compiled_module_runs_compiled_code_with_its_own_parameters() -> None:
    calls: list[int] = []
    layer = _layer()
    compiled = CompiledForward(layer, CompileMode.DEFAULT, backend=_traced(calls))
    assert torch.equal(compiled(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    assert calls
    assert compiled.is_compiled
    compiled(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None


def test_compiled_code_gives_way_to_that_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(arithmetic_module, "_MOST_VERSIONS", 1)
    backend = _traced(calls := list[int]())
    with torch._dynamo.config.patch(recompile_limit=1):
        for size, expected in ((2, 1), (2, 1), (3, 2)):
            compiled = CompiledForward(nn.Sequential(_layer(), nn.ReLU()), CompileMode.DEFAULT, backend=backend)
            assert (compiled(torch.ones(size, 4)).shape, len(calls), compiled.note) == ((size, 3), expected, "")
        assert (compiled(torch.ones(4, 4)).shape, len(calls), compiled.note[:15]) == ((4, 3), 2, "blocks beyond 1")


@pytest.mark.parametrize(("mode", "kept"), [(CompileMode.DEFAULT, True), (CompileMode.REDUCE_OVERHEAD, False)])
def test_compiled_code_with_cuda_graphs_is_forgotten_after_the_job(mode: CompileMode, kept: bool) -> None:
    """It outlives its network, and the graphs that it recorded keep a part of the GPU's memory."""
    torch._dynamo.reset()
    calls: list[int] = []
    backend = _traced(calls)
    for _ in range(2):
        arithmetic = _on_gpu(deterministic=True)
        arithmetic.compile_mode = mode
        with arithmetic.numerics():
            compiled = CompiledForward(_layer(), mode, backend=backend)
            arithmetic._compiled.append(compiled)
            compiled(torch.ones(2, 4))
    assert len(calls) == (1 if kept else 2)


def _broken(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
    raise ArithmeticError("no kernel for this")


def test_compile_failure_runs_uncompiled_with_a_note() -> None:
    layer = _layer()
    compiled = CompiledForward(layer, CompileMode.DEFAULT, backend=_broken)
    assert torch.equal(compiled(torch.ones(2, 4)), layer(torch.ones(2, 4)))
    assert not compiled.is_compiled
    assert "running uncompiled" in compiled.note
    assert "no kernel for this" in compiled.note


class _Between(nn.Module):
    """Tells when the gradient of its input is there."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.register_hook(lambda _: self.events.append("between"))
        return inputs


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _layer(), nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.second(self.first(inputs).relu())
        return outputs


def test_compiled_blocks_give_gradients_during_the_backward_pass_and_share_code() -> None:
    torch._dynamo.reset()
    events: list[str] = []
    calls: list[int] = []
    first, last = _Block(), _Block()
    network = nn.Sequential(first, _Between(events), _Block(), last)
    names = list(network.state_dict())
    last.first.weight.register_post_accumulate_grad_hook(lambda _: events.append("last block"))
    first.first.weight.register_post_accumulate_grad_hook(lambda _: events.append("first block"))
    compiled = CompiledForward(network, CompileMode.DEFAULT, backend=_traced(calls))
    compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert events == ["last block", "between", "first block"]
    assert len(calls) == 1
    assert list(network.state_dict()) == names
    compiled(torch.ones(3, 4, requires_grad=True))  # a last batch of another size has code of its own
    compiled(torch.ones(2, 4, requires_grad=True))
    assert len(calls) == 2
    with compiled.paused():
        network(torch.ones(5, 4, requires_grad=True))
    assert len(calls) == 2
    assert compiled.is_compiled
    assert deepcopy(network).state_dict().keys() == network.state_dict().keys()


def test_compile_failure_of_a_later_block_does_not_run_the_first_ones_twice() -> None:
    """A last batch of another size, as in the middle of a training."""
    torch._dynamo.reset()
    network = nn.Sequential(_Noise(), _Block()).train()
    compiled, calls = deepcopy(network), list[int]()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the second block's second size
            raise ArithmeticError("no kernel for this")
        return graph.forward

    forward = CompiledForward(compiled, CompileMode.DEFAULT, backend=backend)
    with torch.random.fork_rng(devices=[]):
        expected = _outputs(network, 8, 6)
        found = _outputs(forward, 8, 6)
    assert len(calls) == 4
    assert "no kernel for this" in forward.note
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(compiled.buffers(), network.buffers(), strict=True))


class _Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.drop(self.norm(self.first(inputs)))
        return outputs


def _outputs(forward: Callable[[Tensor], Tensor], *sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [forward(torch.randn(size, 4)) for size in sizes]


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("test_vit", "Block", 6),
        ("resnet18", "BasicBlock", 8),
        ("convnext_atto", "ConvNeXtBlock", 12),
        ("skresnet18", "SelectiveKernelBasic", 8),
        ("vgg11", "VGG", 1),
    ],
)
def test_blocks_of_a_network_are_those_of_timm(name: str, kind: str, number: int) -> None:
    with torch.device("meta"):
        blocks = blocks_of(timm.create_model(name, num_classes=0))
    assert [type(block).__name__ for block in blocks] == [kind] * number


def test_compile_with_cuda_graphs_keeps_the_network_whole() -> None:
    network = nn.Sequential(_Block(), _Block())
    compiled = CompiledForward(network, CompileMode.REDUCE_OVERHEAD, backend=_traced([]))
    assert compiled._blocks == [network]


@pytest.mark.parametrize("mode", [CompileMode.DEFAULT, CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE])
def test_deterministic_kernels_are_not_chosen_by_their_speed(
    monkeypatch: pytest.MonkeyPatch, mode: CompileMode
) -> None:
    """Another node measures other speeds; on a CPU the first two modes measure none, and keep their fingerprints."""
    told: list[dict[str, bool]] = []

    def compile_fx(graph: torch.fx.GraphModule, *_: object, config_patches: dict[str, bool], **__: object) -> Any:
        told.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    is_timed = mode is CompileMode.MAX_AUTOTUNE
    cases = (_on_gpu(deterministic=False), False), (_on_gpu(deterministic=True), True), (_arithmetic(), is_timed)
    for arithmetic, fixed in cases:
        torch._dynamo.reset()
        arithmetic.compile_mode = mode
        arithmetic.compiled(_layer())(torch.ones(2, 4))
        assert ("deterministic" in told[-1]) == ("compiled_kernels" in arithmetic.fingerprint()) == fixed
        assert told[-1].get("triton.cudagraphs", False) == arithmetic.has_cuda_graphs
    assert len(told) == len(cases)


def test_compile_off_is_the_module_itself() -> None:
    arithmetic = _arithmetic()
    compiled = arithmetic.compiled(_layer())
    assert not compiled.is_compiled
    assert not arithmetic.is_compiled
    assert arithmetic.notes == []


def test_compile_error_of_the_computation_is_no_compile_failure() -> None:
    compiled = CompiledForward(_layer(), CompileMode.DEFAULT, backend=_traced([]))
    compiled.give_up(ArithmeticError("x"))
    with pytest.raises(RuntimeError, match="shape") as caught:
        compiled(torch.ones(2, 5))
    assert not is_compile_failure(caught.value)


def test_compiled_code_folder_of_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    keep_compiled_code(tmp_path / "other")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


def _example(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_samples, 3, 8, 8), torch.zeros(num_samples, dtype=torch.int64)


class _Noisy(nn.Module):
    """Everything a step may leave behind: running statistics, random numbers, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 2)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.backbone(images_BCHW))
        return logits_BK


@pytest.mark.parametrize("fails", [False, True])
def test_rehearsal_leaves_no_trace(fails: bool) -> None:
    model, arithmetic = _Noisy(), _arithmetic()
    losses_of = LossForward(model, SoftmaxObjective(2))

    def failing(inputs: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        losses_of(inputs, targets)
        raise MemoryError

    model(torch.ones(2, 3, 8, 8)).sum().backward()
    warmup_step = WarmupStep(model, failing if fails else losses_of, arithmetic, _example)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    randomness = torch.get_rng_state()
    if fails:
        with pytest.raises(MemoryError):
            warmup_step.step(4)
    else:
        warmup_step.step(4)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    now = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(now)
    assert all(torch.equal(before, after) for before, after in zip(gradients, now, strict=True))
    assert torch.equal(randomness, torch.get_rng_state())
    assert warmup_step.compile(4) == 0.0


def test_rehearsal_compile_failure_in_the_backward_pass_falls_back() -> None:
    model, arithmetic = _Noisy(), _arithmetic()
    arithmetic._compiled.append(CompiledForward(model.backbone, CompileMode.DEFAULT, backend=_traced([])))

    def losses_of(inputs: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        raise torch._dynamo.exc.BackendCompilerFailed(_traced, ArithmeticError("no backward kernel"), None)

    warmup_step = WarmupStep(model, losses_of, arithmetic, _example)
    assert warmup_step.compile(2) > 0
    assert not arithmetic.is_compiled
    assert "no backward kernel" in arithmetic.notes[0]


# 17.6e9 multiply-adds per image in the literature; PaLM's rule makes that 3 x 2 x 17.6e9 operations per step.
def test_training_flops_of_vit_b16_are_those_of_the_literature() -> None:
    spec = ModelSpec(name="vit_base_patch16_224", image_size=224)
    assert training_flops(spec, num_classes=1000) == pytest.approx(6 * 17.58e9, rel=0.003)


def test_training_flops_follow_the_image_size_and_the_head() -> None:
    small, large = (training_flops(ModelSpec(name="test_resnet", image_size=size)) for size in (32, 64))
    assert small is not None
    assert large is not None
    assert large / small == pytest.approx(4, rel=0.1)
    with_head = training_flops(ModelSpec(name="test_resnet", image_size=32), num_classes=10)
    assert with_head is not None
    assert 0 < with_head - small < 6 * 10 * 4096


def test_training_flops_of_a_refused_size_are_unknown() -> None:
    assert training_flops(ModelSpec(name="test_convnext", image_size=8)) is None


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", Precision.BF16, False, 989.4e12),
        ("NVIDIA H100 PCIe", Precision.FP16, False, 756.4e12),
        ("NVIDIA H100 80GB HBM3", Precision.FP32, True, 494.7e12),
        ("NVIDIA H100 80GB HBM3", Precision.FP32, False, 66.9e12),
        ("NVIDIA A100-SXM4-40GB", Precision.BF16, False, 311.8e12),
        ("NVIDIA A10G", Precision.BF16, False, 70e12),
        ("NVIDIA A10", Precision.BF16, False, 125e12),
        ("Tesla T4", Precision.FP16, True, 65.1e12),
        ("NVIDIA GeForce RTX 4090", Precision.FP16, True, 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", Precision.FP16, True, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", Precision.FP16, True, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", Precision.BF16, False, None),
        ("Imagined X1", Precision.BF16, False, None),
    ],
)
def test_peak_flops_of_a_device_name(device: str, precision: Precision, tf32: bool, peak: float | None) -> None:
    assert peak_flops(device, precision, tf32=tf32) == (None if peak is None else pytest.approx(peak))


def test_mfu_is_the_share_of_the_peak() -> None:
    throughput = Throughput(flops_per_image=105.4e9, peak_flops=989.4e12)
    assert throughput.mfu(3750) == pytest.approx(0.40, abs=0.005)
    assert Throughput(flops_per_image=None, peak_flops=1e12).mfu(3750) is None


def test_throughput_on_a_cpu_is_not_counted() -> None:
    spec = ModelSpec(name="test_resnet", image_size=32)
    assert Throughput.of(spec, CPU, Precision.FP32, tf32=False).mfu(100) is None
    assert gpu_usage(CPU) == {}


def test_gpu_whose_utilisation_is_unknown_still_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library raises errors of its own class, for slices of a GPU among others."""

    class NVMLError(Exception):
        pass

    def fail(_: torch.device) -> int:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**32))
    assert gpu_usage(torch.device("cuda")) == {"gpu_memory_gib": 1.0, "gpu_memory": 0.25}


def test_gpu_memory_is_the_peak_of_this_training_and_not_of_what_its_process_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved, peak = 3 * 2**30, [5 * 2**30]  # of the 3 GiB, 2 are free blocks
    calls = []

    def release() -> None:
        nonlocal reserved
        calls.append("empty")
        reserved = 2**30

    monkeypatch.setattr(torch.cuda, "empty_cache", release)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.append(reserved))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: peak[-1])
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**33))
    device = torch.device("cuda")
    reset_gpu_peak(device)
    assert gpu_usage(device)["gpu_memory_gib"] == 1.0
    reset_gpu_peak(CPU)
    assert calls == ["empty"]


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the failure until a launch is checked; that must not be the launch of a training step."""
    launched = []

    def launch(*_: int, device: str) -> Tensor:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch, "ones", launch)
    file = HostFile(64)
    file.pin()
    file.close()
    assert launched == ["cuda"]


def test_peaks_16_bit_is_the_fastest_everywhere() -> None:
    assert all(peak.half >= peak.tf32 >= peak.fp32 for peak in PEAKS.values())
