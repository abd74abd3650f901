"""The arithmetic of a training job: precision, TF32, loss scaling, determinism, and compilation.

Precision and TF32 are identity: they are fields of the recipe. Compilation and determinism are execution: they change
results only by rounding, and are part of the numerics fingerprint.

``torch.compile`` never stops a job: what it cannot compile runs as it is, with a note. Compiled code is kept by torch
in one folder per node (``keep_compiled_code``), so that the jobs of one architecture compile once: in the process by
the guards of the compiled code, between processes by the folder.

Each block of a network is compiled by itself, in place. The backward pass of a network that is compiled as a whole
hands over all gradients at its end, so that no rank can send one before; with blocks they come as in eager mode. Blocks
that are alike share their code. ``DistributedDataParallel`` reaches the first by cutting the graph at its buckets
(torch's DDPOptimizer); that needs its wrapper, and compiles each piece anew.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.core.contract import Execution
from orchestrator.core.errors import UserError
from workloads.runtime.device import REPRODUCIBLE_WORKSPACES, WORKSPACE, choose_workspace
from workloads.runtime.enums import Precision

_LOG = logging.getLogger(__name__)
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MAX_NOTE = 300
_NCCL_ALGORITHM = "NCCL_ALGO"
# As in Megatron-LM's deterministic mode; sums in NVLink switches (NVLS) are not reproducible. The first one serves all
# collective operations.
_REPRODUCIBLE_SUMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
Member = TypeVar("Member", bound=StrEnum)
_NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
_AUTOCAST_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


class CompileMode(StrEnum):
    """Modes of ``torch.compile``."""

    OFF = "off"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    """CUDA graphs."""
    MAX_AUTOTUNE = "max-autotune"


_CUDA_GRAPHS = (CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE)
"""These modes record whole passes: the network stays one piece."""
_MOST_VERSIONS = 64
"""Compiled versions of one class of blocks in a process, for other shapes and settings. The next one drops those that
other jobs of the process have left; if a network has more by itself, those beyond run uncompiled.
"""
_MOST_OVERFLOWS = 2
"""Of versions in one network: the first shows what others have left, the second that it has too many itself."""
_IN_BLOCKS, _IN_INNER_BLOCKS = 0.5, 0.75
_LEAST_PATCH = 8
"""Pixels. Smaller patches (4 in a Swin) are not measured."""
_MOST_CHANNELS = 4
"""Of an image."""


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that a network is made of, in order; the network itself where they hold less than half of its weights.

    A block stands in a list or sequence (``blocks`` of a ViT, ``layer1`` to ``layer4`` of a ResNet) and has several
    layers. A stage that consists of blocks is no block.
    """
    blocks = list(_blocks(network))
    return blocks if len(blocks) > 1 and _share(blocks, network) >= _IN_BLOCKS else [network]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for child in module.children():
        inner = list(_blocks(child))
        num_layers = sum(1 for layer in child.modules() if next(layer.parameters(recurse=False), None) is not None)
        if is_list and num_layers > 1 and not isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from inner if inner and _share(inner, child) >= _IN_INNER_BLOCKS else [child]
        else:
            yield from inner


def _share(parts: Sequence[nn.Module], whole: nn.Module) -> float:
    """Share of the weights of a module that are in some of its parts."""
    held = sum(weight.numel() for part in parts for weight in part.parameters())
    return held / max(1, sum(weight.numel() for weight in whole.parameters()))


class PatchEmbedding(nn.Conv2d):
    """The convolution that embeds the patches of an image, as the matrix product that it is.

    Patches do not overlap, and cuDNN has no fast kernel for them: as a product, a step of a ViT-B/16 takes 3 % less
    time on an H200. Results differ by rounding.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, D, rows, columns); rows and columns of pixels that fill no patch are left out, as a convolution does."""
        high, wide = self.kernel_size
        num, channels, height, width = x_BCHW.shape
        rows, columns = height // high, width // wide
        whole_BCHW = x_BCHW[:, :, : rows * high, : columns * wide]
        patches = whole_BCHW.reshape(num, channels, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
        patches_BNP = patches.reshape(num, rows * columns, channels * high * wide)
        embedded_BND = nn.functional.linear(patches_BNP, self.weight.flatten(1), self.bias)
        return embedded_BND.transpose(1, 2).reshape(num, self.out_channels, rows, columns)


def embed_patches_by_products(network: nn.Module) -> int:
    """Make the convolutions that embed patches of images ``PatchEmbedding``; returns how many the network has.

    Parameters stay what they are. Other convolutions without overlap, such as those inside of blocks, stay, too.
    """
    for layer in network.modules():
        if type(layer) is not nn.Conv2d or layer.groups > 1 or layer.padding not in {(0, 0), "valid"}:
            continue
        is_large = min(layer.kernel_size) >= _LEAST_PATCH and layer.in_channels <= _MOST_CHANNELS
        if is_large and layer.stride == layer.kernel_size and layer.dilation == (1, 1):
            layer.__class__ = PatchEmbedding
    return sum(isinstance(layer, PatchEmbedding) for layer in network.modules())


class CompiledForward:
    """Calls a module, compiled if it can be, block by block; its parameters and their names stay what they are.

    ``note`` says why a module runs uncompiled. ``fixed``: no kernel is chosen by its speed if that changes results.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: CompileMode,
        *,
        fixed: bool = False,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.module, self.note = module, ""
        self._blocks: list[nn.Module] = []
        self._cases: set[tuple[Any, ...]] = set()
        self._num_overflows = 0
        if mode is CompileMode.OFF:
            return
        self._blocks = [module] if mode in _CUDA_GRAPHS else blocks_of(module)
        settings = torch._dynamo.config  # noqa: SLF001 - torch has no other name for it
        settings.recompile_limit = max(settings.recompile_limit, _MOST_VERSIONS)
        options = _options(mode, fixed=fixed) if backend == "inductor" else {}
        for block in self._blocks:
            # Batches have one size, or two where the last is smaller: code for any size would be slower.
            block.compile(backend=backend, dynamic=False, **options)

    @property
    def is_compiled(self) -> bool:
        """Whether calls go through compiled code."""
        return any(block._compiled_call_impl is not None for block in self._blocks)  # noqa: SLF001 - see ``paused``

    def __call__(self, *inputs: Any) -> Any:  # noqa: ANN401 - as the module's own forward
        """The module's result."""
        if not self.is_compiled:
            return self.module(*inputs)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        case = (self.module.training, torch.is_grad_enabled(), *(tensor.shape for tensor in tensors))
        # What compiles a block may fail after blocks before it ran: these moved statistics and drew random numbers.
        is_known = case in self._cases
        put_back = _done if is_known else kept_state(self.module, {tensor.device for tensor in tensors})
        try:
            with nullcontext() if is_known or self._num_overflows == _MOST_OVERFLOWS else _failing_on_overflow():
                result = self.module(*inputs)
        except _failures() as error:
            if _is_overflow(error) and self._num_overflows < _MOST_OVERFLOWS:
                self._take_overflow()
                put_back()
                return self(*inputs)
            self.give_up(error)
            put_back()
            return self.module(*inputs)
        self._cases.add(case)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the body without compiled code, also where the module itself is called."""
        # Where nn.Module.compile puts it; torch has no way to take it out again.
        kept = [block._compiled_call_impl for block in self._blocks]  # noqa: SLF001
        self._remove()
        try:
            yield
        finally:
            for block, call in zip(self._blocks, kept, strict=True):
                block._compiled_call_impl = call  # noqa: SLF001

    def give_up(self, error: BaseException) -> None:
        """Run uncompiled from now on."""
        # The cause stands in the second line; after an empty one come hints for the compiler's developers.
        reason = " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
        self.note = f"torch.compile failed, running uncompiled: {reason}"[:_MAX_NOTE]
        self._remove()
        _LOG.warning(self.note)

    def _take_overflow(self) -> None:
        """Make room for the versions of this network; what does not fit even then runs uncompiled."""
        self._num_overflows += 1
        if self._num_overflows == 1:
            torch.compiler.reset()
            self._cases.clear()
            return
        self.note = f"blocks beyond {_MOST_VERSIONS} versions of their class run uncompiled"
        _LOG.warning(self.note)

    def _remove(self) -> None:
        for block in self._blocks:
            block._compiled_call_impl = None  # noqa: SLF001 - see ``paused``


def _options(mode: CompileMode, *, fixed: bool) -> dict[str, Any]:
    """What ``torch.compile`` is told of a mode; it takes either a mode or options."""
    if not fixed:
        return {"mode": None if mode is CompileMode.DEFAULT else mode.value}
    from torch._inductor import list_mode_options

    # As an option it also holds for backward passes: these compile in threads of autograd, and what is set in torch's
    # configuration holds for the thread that sets it.
    return {"options": {**list_mode_options(mode.value), "deterministic": True}}


def kept_state(module: nn.Module, devices: Iterable[torch.device]) -> Callable[[], None]:
    """Keep the buffers of a module and the states of the random generators; the result puts them back."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    host = torch.get_rng_state()
    generators = [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]

    def put_back() -> None:
        torch.set_rng_state(host)
        for device, state in generators:
            torch.cuda.set_rng_state(state, device)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return put_back


def _done() -> None:
    """Nothing to put back."""


def keep_compiled_code(folder: Path) -> None:
    """Keep compiled code in a folder of the node, unless the environment names one."""
    if _CACHE_VARIABLE not in os.environ:
        os.environ[_CACHE_VARIABLE] = str(folder)


def is_compile_failure(error: BaseException) -> bool:
    """Whether compilation, not the computation, failed: true also of backward passes, which compile when first run."""
    return isinstance(error, _failures())


def _failures() -> tuple[type[Exception], ...]:
    """What compilation raises. Imported late: the compiler takes a second to load."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return (TorchDynamoException, CppCompileError, FailOnRecompileLimitHit)


def _failing_on_overflow() -> AbstractContextManager[None]:
    """Let a block with too many versions raise; else it runs uncompiled without a word."""
    found: AbstractContextManager[None] = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # noqa: SLF001
    return found


def _is_overflow(error: BaseException) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def _computes_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16 by itself; emulated, it is slower than fp32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _fill_momentum(optimizer: Optimizer) -> None:
    """Let the momentum of fused SGD begin at 0, as an update would leave it.

    The first update makes it without values and writes them, unless a gradient is infinite: the scaler does not skip a
    fused update, which then writes nothing, and the next one would read what the memory held before.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class ArithmeticRecipe(Protocol):
    """The fields of a recipe that this module reads."""

    @property
    def precision(self) -> str:
        """A member of ``Precision``."""

    @property
    def tf32(self) -> bool:
        """Whether float32 products on GPUs may round their inputs to TF32 (10 bits of mantissa)."""


class Arithmetic:
    """How one job computes on its device.

    The order of a step: ``with autocast()``: forward and losses; ``scale(loss).backward()`` for every micro-batch;
    the gradients' reduction over ranks; ``unscale_``; norms and clipping; ``step``.

    Raises:
        UserError: the device cannot compute in the precision.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        precision: Precision = Precision.FP32,
        tf32: bool = False,
        compile_mode: CompileMode = CompileMode.OFF,
        deterministic: bool = True,
    ) -> None:
        if precision is Precision.BF16 and not _computes_bf16(device):
            name = torch.cuda.get_device_name(device)
            raise UserError(f"precision is bf16, which {name} does not compute in; use fp16 or fp32")
        self.device, self.precision, self.compile_mode = device, precision, compile_mode
        self._tf32, self._deterministic = tf32, deterministic or device.type == "cpu"
        self._compiled: list[CompiledForward] = []
        self._embeds_by_products = False
        enabled = precision is Precision.FP16
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)

    @classmethod
    def of(cls, recipe: ArithmeticRecipe, execution: Execution, device: torch.device) -> Self:
        """The arithmetic that a recipe and the execution ask for.

        Raises:
            UserError: an unknown precision or way to compile, or a precision that the device cannot compute in.
        """
        return cls(
            device,
            precision=_member(Precision, "recipe.precision", recipe.precision),
            tf32=recipe.tf32,
            compile_mode=_member(CompileMode, "execution.compile", execution.compile),
            deterministic=execution.deterministic,
        )

    @property
    def notes(self) -> list[str]:
        """What could not be done as asked (compilation that fell back)."""
        return [compiled.note for compiled in self._compiled if compiled.note]

    @property
    def is_compiled(self) -> bool:
        """Whether anything runs compiled."""
        return any(compiled.is_compiled for compiled in self._compiled)

    @property
    def has_cuda_graphs(self) -> bool:
        """Whether compiled code may run as CUDA graphs, which use the memory of their results again."""
        return self.compile_mode in _CUDA_GRAPHS

    @property
    def _fixes_kernels(self) -> bool:
        """Whether the compiler must not choose kernels by their speed, which it measures; on CPUs one mode does so."""
        on_cpu = self.device.type == "cpu"
        timed = [CompileMode.MAX_AUTOTUNE] if on_cpu else [mode for mode in CompileMode if mode is not CompileMode.OFF]
        return self._deterministic and self.compile_mode in timed

    @property
    def _fixes_sums(self) -> bool:
        """Whether NCCL must not choose how it sums, which it does by size and topology."""
        is_gang = dist.is_initialized() and dist.get_world_size() > 1
        return self._deterministic and self.device.type == "cuda" and is_gang

    def give_up(self, error: BaseException) -> None:
        """Run everything uncompiled from now on, because of an error of the compiler."""
        for compiled in self._compiled:
            compiled.give_up(error)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run the body without compiled code."""
        with ExitStack() as stack:
            for compiled in self._compiled:
                stack.enter_context(compiled.paused())
            yield

    @property
    def skips_steps(self) -> bool:
        """Whether infinite gradients skip an update instead of being an error: so finds fp16 its loss scale."""
        return self._scaler.is_enabled()

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Set the process-wide switches of the GPU libraries until the body ends; nothing on a CPU.

        In the end the memory of CUDA graphs is free again, for the next job of the process.

        Raises:
            UserError: ``deterministic`` is asked for and an operation of the model has no deterministic kernel, or the
                environment asks cuBLAS for a workspace, or NCCL for sums, that are not reproducible.
        """
        if self.device.type != "cuda":
            yield
            return
        self._choose_workspace()
        if self._fixes_sums:
            _choose_sums()
        with _switches(tf32=self._tf32, deterministic=self._deterministic):
            try:
                yield
            except RuntimeError as error:
                if self._deterministic and _NO_DETERMINISTIC_KERNEL in str(error):
                    message = f"execution asks for deterministic results, but {str(error).splitlines()[0]}; "
                    raise UserError(message + "set deterministic: false or choose another model") from error
                raise
            finally:
                if self._compiled and self.has_cuda_graphs:
                    _free_graphs()

    def autocast(self) -> AbstractContextManager[None]:
        """Forward passes and losses run inside; backward passes and updates outside."""
        dtype = _AUTOCAST_DTYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on: in fp16 times the loss scale, so that small gradients do not vanish."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale. Without host-device synchronisation."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights; in fp16 not if a gradient is infinite or NaN, and adapt the loss scale.

        Fused optimisers decide on the device; others synchronise once per step in fp16.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            return
        _fill_momentum(optimizer)
        self._scaler.step(optimizer)
        self._scaler.update()

    def compiled(self, module: nn.Module) -> CompiledForward:
        """A callable with the module's own parameters, compiled where the execution asks for it."""
        if self.compile_mode is not CompileMode.OFF and self.device.type == "cuda":
            # Also with ``default``, which leaves the stem uncompiled. Jobs that compile nothing keep their bits.
            self._embeds_by_products |= embed_patches_by_products(module) > 0
        forward = CompiledForward(module, self.compile_mode, fixed=self._fixes_kernels)
        self._compiled.append(forward)
        return forward

    def state_dict(self) -> dict[str, float]:
        """The loss scale as plain JSON; empty unless fp16."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Inverse of ``state_dict``; an empty state leaves the scale as it is."""
        if self._scaler.is_enabled() and state:
            self._scaler.load_state_dict(dict(state))

    def fingerprint(self) -> dict[str, str | int]:
        """What this adds to the numerics fingerprint, once all is ``compiled``; empty for plain float32 on a CPU.

        Call it again after the first step, with which compilation may fail.
        """
        if self.device.type == "cpu" and self.precision is Precision.FP32 and self.compile_mode is CompileMode.OFF:
            return {}
        mine: dict[str, str | int] = {"precision": self.precision.value, "compile": self.compile_mode.value}
        if self.notes and not self.is_compiled:
            mine["compiled"] = "nothing"  # it failed
        elif self.compile_mode is CompileMode.DEFAULT:
            mine["compiled"] = "blocks"
        if self._embeds_by_products:
            mine["patches"] = "products"
        if self._fixes_kernels:
            mine["compiled_kernels"] = "fixed"
        if self.device.type == "cuda":
            mine |= {"tf32": int(self._tf32), "deterministic": int(self._deterministic)}
            mine |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        if self._fixes_sums:
            mine["nccl_algo"] = os.environ.get(_NCCL_ALGORITHM, "")
        return mine

    def _choose_workspace(self) -> None:
        chosen = choose_workspace()
        if self._deterministic and chosen not in REPRODUCIBLE_WORKSPACES:
            wanted = " or ".join(REPRODUCIBLE_WORKSPACES)
            message = f"execution asks for deterministic results, but the environment sets {WORKSPACE}={chosen}: "
            raise UserError(f"{message}cuBLAS is reproducible with {wanted} only; set one of them or unset it")


def _choose_sums() -> None:
    # NCCL reads this when it makes a communicator: in a gang's process with the first operation on a device.
    chosen = os.environ.setdefault(_NCCL_ALGORITHM, _REPRODUCIBLE_SUMS[0])
    if chosen.lower() not in {name.lower() for name in _REPRODUCIBLE_SUMS}:
        message = f"execution asks for deterministic results, but the environment sets {_NCCL_ALGORITHM}={chosen}: "
        message += f"NCCL's sums are reproducible with one of {', '.join(_REPRODUCIBLE_SUMS)} only; set one of them "
        raise UserError(f"{message}on all nodes or unset it")


@contextmanager
def _switches(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    matmul, convolution = torch.backends.cuda.matmul, cudnn.conv  # type: ignore[attr-defined]
    before = (matmul.fp32_precision, convolution.fp32_precision, cudnn.benchmark, cudnn.deterministic)
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Convolutions use TF32 unless told otherwise, products do not: both follow the recipe, none a default.
    matmul.fp32_precision = convolution.fp32_precision = "tf32" if tf32 else "ieee"
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        matmul.fp32_precision, convolution.fp32_precision, cudnn.benchmark, cudnn.deterministic = before
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])


def _free_graphs() -> None:
    """Forget compiled code, which outlives its network, and with it the CUDA graphs that it recorded.

    Their memory lies in a pool of its own, which is kept while one of them is there. The next job of the architecture
    reads its code from the folder again.
    """
    with suppress(RuntimeError):  # of a device that is broken: what was done on it says so better
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _member(names: type[Member], field: str, value: str) -> Member:
    try:
        return names(value)
    except ValueError as error:
        raise UserError(f"{field} is {value!r}; choose one of {', '.join(names)}") from error
