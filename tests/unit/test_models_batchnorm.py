"""Norm groups: own statistics per group, running statistics that move once per step."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d, EvoNorm2dB0, FrozenBatchNormAct2d  # type: ignore[attr-defined]
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from orchestrator.core.contract import Execution
from orchestrator.core.errors import PreemptedError, UserError
from orchestrator.storage.local import LocalStore
from tests.memory_images import MemoryImages, memory_loop, network
from tests.tiny_training import RECIPE
from workloads.models.batchnorm import RunningStatistics, ghost_batchnorm, resolve_norm_group
from workloads.runtime.precision import Arithmetic, CompileMode
from workloads.runtime.ranks import Ranks
from workloads.train import warmup_step
from workloads.train.large_head import LossForward
from workloads.train.learner import Learner
from workloads.train.loop import TrainingLoop
from workloads.train.micro_batch import Layout
from workloads.train.objective import SoftmaxObjective
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar
from workloads.train.step import GradientSum, Update
from workloads.train.task import TrainInputs

PLAIN = Recipe.from_mapping({**RECIPE, "momentum": 0.0, "weight_decay": 0.0})


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, 3))


def _batch(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_samples, 4), torch.randint(0, 3, (num_samples,))


@pytest.mark.parametrize("mode", [CompileMode.OFF, CompileMode.REDUCE_OVERHEAD])
def test_gradients_lie_in_memory_of_their_own_where_passes_are_cuda_graphs(mode: CompileMode) -> None:
    """The next pass of a graph writes where the gradients of the last one were; the sums are the same either way."""
    network, plain = _network(), _network()
    arithmetic = Arithmetic(torch.device("cpu"), compile_mode=mode)
    sums, expected = (
        GradientSum(one.parameters(), Ranks(), in_buckets=in_buckets)
        for one, in_buckets in ((network, arithmetic.has_cuda_graphs), (plain, False))
    )
    for _ in range(2):
        places = []
        for one, gradients in ((network, sums), (plain, expected)):
            gradients.begin()
            for part in _batch(12)[0].split(4):
                one(part).square().sum().backward()
            places.append([parameter.grad for parameter in one.parameters()])
        assert all(torch.equal(*pair) for pair in zip(sums.finish(), expected.finish(), strict=True))
        bases = {gradient.untyped_storage().data_ptr() for gradient in places[0] if gradient is not None}
        assert len(bases) == (1 if arithmetic.has_cuda_graphs else len(places[0]))


def test_gradients_in_buckets_are_freed_with_their_network() -> None:
    """A process runs many jobs: what one leaves on the device is missing for the next."""
    network = _network()
    sums = GradientSum(network.parameters(), Ranks(), in_buckets=True)
    sums.begin()
    sums.last_pass()
    network(_batch(12)[0]).sum().backward()
    sums.finish()
    left = [weakref.ref(one) for one in (sums, network[0].weight, sums._buckets[0].flat)]
    del network, sums
    gc.collect()
    assert [one() for one in left] == [None] * len(left)


def _updated(
    network: nn.Sequential,
    group_size: int,
    micro_batch: int = 0,
    num_samples: int = 12,
    groups: Callable[[nn.Module, int], AbstractContextManager[None]] = ghost_batchnorm,
) -> tuple[float, int]:
    """Sum of losses and number of wrong predictions of one update."""
    recipe = replace(PLAIN, batch_size=num_samples, norm_group=group_size)
    calendar = Calendar.of(recipe, num_samples)
    learner = Learner(network, recipe, calendar, Arithmetic(torch.device("cpu")))
    layout = Layout.of(network, recipe, micro_batch=micro_batch, ranks=Ranks())
    update = Update(learner, LossForward(network, SoftmaxObjective(3)), layout)
    inputs, targets = _batch(num_samples)
    with groups(network, group_size):
        loss, num_wrong, *_ = update(TrainInputs(inputs=inputs, targets=targets), 0.1).tolist()
    return loss, int(num_wrong)


@pytest.mark.parametrize("micro_batch", [4, 8, 12])
def test_update_of_groups_moves_running_statistics_once_by_their_mean(micro_batch: int) -> None:
    network = _network()
    inputs, _ = _batch(12)
    hidden = network[0](inputs).detach().split(4)
    mean = torch.stack([group.mean(0) for group in hidden]).mean(0)
    variance = torch.stack([group.var(0, unbiased=True) for group in hidden]).mean(0)
    _updated(network, 4, micro_batch)
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    torch.testing.assert_close(norm.running_mean, 0.3 * mean)
    torch.testing.assert_close(norm.running_var, 0.7 + 0.3 * variance)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("micro_batch", [4, 8, 12])
def test_update_of_groups_equals_the_gradient_of_their_mean_loss(micro_batch: int) -> None:
    network = _network()
    reference = copy.deepcopy(network)
    inputs, targets = _batch(12)
    losses = [functional.cross_entropy(reference(x), y) for x, y in zip(inputs.split(4), targets.split(4), strict=True)]
    torch.stack(losses).mean().backward()
    _updated(network, 4, micro_batch)
    for updated, expected in zip(network.parameters(), reference.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(updated, expected - 0.1 * expected.grad)


def _network_of_tokens() -> nn.Sequential:
    """Its BatchNorm sees two rows of each sample, as LeViT's does, whose tokens are folded into the batch."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=0.3)
    tokens = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 8), nn.Flatten(0, 1), norm, nn.ReLU())
    return nn.Sequential(tokens, nn.Unflatten(0, (-1, 2)), nn.Flatten(1), nn.Linear(16, 3))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("micro_batch", [8, 12])
def test_groups_at_once_hold_all_rows_of_their_samples(micro_batch: int, one_by_one: bool) -> None:
    """A pass of one group has no groups to tell apart: it is what passes of several groups must equal."""
    alone, together = _network_of_tokens(), _network_of_tokens()
    _updated(alone, 4, 4, groups=lambda *_: nullcontext())
    _updated(together, 4, micro_batch, groups=partial(ghost_batchnorm, one_by_one=one_by_one))
    torch.testing.assert_close(dict(together.state_dict()), dict(alone.state_dict()))


def test_update_of_one_group_equals_plain_torch() -> None:
    network = _network()
    reference = copy.deepcopy(network)
    inputs, targets = _batch(12)
    loss = functional.cross_entropy(reference(inputs), targets)
    total, errors = _updated(network, group_size=12)
    assert total == pytest.approx(12 * float(loss.detach()), rel=1e-6)
    assert errors == int((_network()(inputs).argmax(1) != targets).sum())
    torch.testing.assert_close(dict(network.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize(("batch_size", "wanted", "group"), [(32, None, 32), (128, None, 64), (128, 16, 16)])
def test_norm_group_with_batchnorm_is_resolved(batch_size: int, wanted: int | None, group: int) -> None:
    assert resolve_norm_group(_network(), batch_size, wanted) == group


def test_norm_group_without_batchnorm_is_the_whole_batch() -> None:
    assert resolve_norm_group(nn.Linear(2, 2), 100, None) == 100


@pytest.mark.parametrize(
    "layer",
    [EvoNorm2dB0(3), nn.BatchNorm2d(3, track_running_stats=False), nn.InstanceNorm2d(3, track_running_stats=True)],
)
def test_layer_with_statistics_of_a_batch_that_no_norm_group_keeps_is_a_user_error(layer: nn.Module) -> None:
    with pytest.raises(UserError, match=f"layer 1 of the model is {type(layer).__name__}, .* use BatchNorm with runn"):
        resolve_norm_group(nn.Sequential(nn.Conv2d(3, 3, 1), layer), 64, None)


def test_frozen_layers_and_norms_of_single_samples_need_no_norm_groups() -> None:
    tracking = nn.Sequential(nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, track_running_stats=True), EvoNorm2dB0(3))
    tracking.requires_grad_(requires_grad=False)
    network = nn.Sequential(tracking, FrozenBatchNormAct2d(3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3))
    assert resolve_norm_group(network, 64, None) == 64
    frozen = nn.BatchNorm2d(3, track_running_stats=False).requires_grad_(requires_grad=False)
    with pytest.raises(UserError, match="BatchNorm2d"):  # it uses the batch in evaluation mode, too
        resolve_norm_group(nn.Sequential(frozen, nn.Linear(2, 2)), 64, None)


@pytest.mark.parametrize(("batch_size", "norm_group"), [(100, None), (32, 12), (32, 64)])
def test_norm_group_that_does_not_divide_the_batch_is_a_user_error(batch_size: int, norm_group: int | None) -> None:
    with pytest.raises(UserError, match=f"batch_size {batch_size} is not a multiple"):
        resolve_norm_group(_network(), batch_size, norm_group)


def test_ghost_batchnorm_leaves_frozen_layers_and_evaluation_alone() -> None:
    network, (inputs, _) = _network(), _batch(12)
    network[1].eval()
    before = copy.deepcopy(network.state_dict())
    expected = network(inputs)
    with ghost_batchnorm(network, 4):
        assert torch.equal(network(inputs), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_update_with_a_frozen_batchnorm_keeps_its_statistics_bit_for_bit() -> None:
    network = _network()
    norm = network[1].eval()
    with torch.no_grad():
        next(norm.buffers()).fill_(0.1)  # three times this, divided by three, is another number
    before = copy.deepcopy(network[1].state_dict())
    _updated(network, 4)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(network[1].state_dict()[name], before[name])


def test_micro_batch_that_cuts_a_norm_group_is_a_user_error() -> None:
    with pytest.raises(UserError, match="micro_batch is 6, not a multiple of the norm group of 4"):
        _updated(_network(), 4, 6)


class _OwnForward(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input) + 1


def _images(*shape: int, memory: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).contiguous(memory_format=memory)


_CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "rows": (lambda: nn.BatchNorm1d(8), _images(12, 8)),
    "sequences": (lambda: nn.BatchNorm1d(8), _images(12, 8, 5)),
    "images": (lambda: nn.BatchNorm2d(8), _images(12, 8, 5, 3)),
    "channels last": (lambda: nn.BatchNorm2d(8), _images(12, 8, 5, 3, memory=torch.channels_last)),
    "volumes": (lambda: nn.BatchNorm3d(8), _images(12, 8, 3, 2, 2)),
    "smaller last group": (lambda: nn.BatchNorm2d(8), _images(10, 8, 5, 3)),
    "cumulative average": (lambda: nn.BatchNorm2d(8, momentum=None), _images(12, 8, 5, 3)),
    "not affine": (lambda: nn.BatchNorm2d(8, affine=False), _images(12, 8, 5, 3)),
    "with activation": (lambda: BatchNormAct2d(8), _images(12, 8, 5, 3)),
    "unknown layer": (lambda: _OwnForward(8), _images(12, 8, 5, 3)),
}


def _passed(layer: nn.Module, inputs: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Outputs and gradients of two passes of groups of 4."""
    inputs = inputs.clone().requires_grad_()
    with (
        ghost_batchnorm(layer, 4, **options),
        torch.autocast("cpu", torch.bfloat16, enabled=inputs.dtype is not torch.float32),
    ):
        outputs = [layer(inputs), layer(2 * inputs)]
    sum((output.float() * output.detach().float().cos()).sum() for output in outputs).backward()
    assert inputs.grad is not None
    return [*outputs, inputs.grad, *(weight.grad for weight in layer.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _CASES)
def test_groups_at_once_equal_groups_one_by_one(case: str, dtype: torch.dtype) -> None:
    make, inputs = _CASES[case]
    layer, reference = make().train(), make().train()
    inputs = inputs.to(dtype)
    ours, theirs = _passed(layer, inputs), _passed(reference, inputs, one_by_one=True)
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))
    assert ours[0].stride() == theirs[0].stride() or inputs.ndim == 2  # the layout of images stays
    for found, expected in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()))
    assert type(layer) is type(reference)
    assert vars(layer).keys() == vars(reference).keys()
    assert torch.equal(layer.eval()(inputs.float()), layer(inputs.float()))


def test_groups_at_once_with_frozen_weights_pass_gradients_on() -> None:
    layer = nn.BatchNorm2d(8).train().requires_grad_(requires_grad=False)
    reference = copy.deepcopy(layer)
    ours, theirs = (_passed(one, _images(12, 8, 5, 3), one_by_one=one is reference) for one in (layer, reference))
    assert len(ours) == 3
    torch.testing.assert_close(ours, theirs)


class _Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not operation.is_view
        return operation(*args, **(kwargs or {}))


def test_groups_at_once_take_few_operations() -> None:
    numbers = {}
    for one_by_one in (False, True):
        with _Operations() as operations:
            _passed(nn.BatchNorm2d(8), _images(32, 8, 5, 3), one_by_one=one_by_one)
        numbers[one_by_one] = operations.number
    assert numbers[False] < 0.5 * numbers[True]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("weights", "dtype"), [("learned", torch.bfloat16), ("frozen", torch.float32), ("none", torch.float32)]
)
def test_groups_at_once_compiled_equal_uncompiled_to_rounding(weights: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Without a bias, whose gradient is nothing but rounding.
    convolution = nn.Conv2d(8, 8, 1, bias=False)
    norm = nn.BatchNorm2d(8, affine=weights != "none").requires_grad_(weights != "frozen")
    layer = nn.Sequential(convolution, norm, nn.ReLU(inplace=True)).train()
    inputs = _images(12, 8, 5, 3, memory=torch.channels_last).to(dtype)
    compiled, reference = copy.deepcopy(layer), copy.deepcopy(layer)
    compiled.compile(backend="aot_eager", fullgraph=True)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (0.05, 0.05)
    for found, expected in zip(_passed(compiled, inputs), _passed(reference, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    buffers, expected_buffers = dict(compiled.named_buffers()), dict(reference.named_buffers())
    torch.testing.assert_close(buffers, expected_buffers, rtol=rtol, atol=atol)


@pytest.mark.ci
@pytest.mark.parametrize(("affine", "dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)])
def test_groups_at_once_compiled_keep_the_memory_format_of_gradients(affine: bool, dtype: torch.dtype) -> None:
    """Each layer before them would have to copy what it gets: on a GPU a fifth of a step."""
    layer = nn.Sequential(nn.BatchNorm2d(8, affine=affine), nn.ReLU(inplace=True)).train()
    layer.compile(backend="aot_eager", fullgraph=True)
    inputs = _images(12, 8, 5, 3, memory=torch.channels_last).to(dtype).requires_grad_()
    with ghost_batchnorm(layer, 4):
        outputs = layer(inputs)
    (grad,) = torch.autograd.grad(outputs, inputs, torch.ones_like(outputs))
    for tensor in (outputs, grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_groups_in_a_block_that_is_computed_again_move_the_statistics_once(one_by_one: bool) -> None:
    """BatchNorm is the last operation that saves a tensor: torch ends the second pass within it."""
    layer, inputs = nn.BatchNorm2d(3), _images(12, 3, 5, 3).requires_grad_()
    own, expected = dict(layer.named_buffers()), copy.deepcopy(layer)
    statistics = RunningStatistics(layer)
    with ghost_batchnorm(layer, 4, one_by_one=one_by_one):
        outputs = checkpoint(lambda x: layer(2 * x) + x, inputs, use_reentrant=False)
        with statistics.held():
            outputs.square().sum().backward()
    with ghost_batchnorm(expected, 4, one_by_one=one_by_one):
        expected(2 * inputs)
    assert all(tensor is own[name] for name, tensor in layer.named_buffers())
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.named_buffers())


class _Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._foreach_copy_.default:
            self.types.append({tensor.dtype for tensor in args[0]})
        return operation(*args, **(kwargs or {}))


def test_statistics_are_copied_by_few_kernels() -> None:
    """On a GPU a list of tensors of several types takes a kernel per tensor: three per BatchNorm layer."""
    statistics = RunningStatistics(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)))
    with _Copies() as copies:
        statistics.begin_step()
        statistics.end_groups()
        with statistics.held():
            pass
    assert len(copies.types) == 8
    assert all(len(types) == 1 for types in copies.types)


def _groups_loop(folder: Path, *, micro_batch: int, compile_mode: str = "off", **callbacks: Any) -> TrainingLoop:
    task = MemoryImages(network("test_resnet"), batch_size=8, num_samples=16)
    recipe = {"epochs": 2, "batch_size": 8, "norm_group": 4, "lr": 0.1}
    execution = Execution(micro_batch=micro_batch, checkpoint_every_steps=1, compile=compile_mode)
    return memory_loop(task, LocalStore(folder), recipe, execution=execution, **callbacks)


def test_run_that_began_with_groups_one_by_one_ends_so(tmp_path: Path) -> None:
    """Its checkpoints have the fingerprint of the time before; then a resumed run has the bits of one undisturbed."""

    def loop(folder: str, **callbacks: Any) -> Any:
        return _groups_loop(tmp_path / folder, micro_batch=8, **callbacks)

    def before(folder: str, **callbacks: Any) -> Any:
        made = loop(folder, **callbacks)
        made._fingerprint.pop("norm_groups", None)  # what an earlier version writes, and does
        return made

    whole = before("whole")
    whole.run()
    stops = iter([False, False, True])
    with pytest.raises(PreemptedError):
        before("cut", should_stop=lambda: next(stops)).run()
    resumed = loop("cut")
    state = resumed.run()
    assert state.resumed_steps == [2]
    assert state.fingerprint_changes == []
    assert "norm_groups" not in state.fingerprint
    assert loop("new").state.fingerprint["norm_groups"] == "at once"
    weights = [dict(one.learner.model.state_dict()) for one in (whole, resumed)]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.parametrize(("micro_batch", "compile_mode"), [(8, "default"), (8, "off"), (4, "default")])
def test_fingerprint_names_the_backward_pass_of_compiled_groups(
    tmp_path: Path, micro_batch: int, compile_mode: str
) -> None:
    fingerprint = _groups_loop(tmp_path, micro_batch=micro_batch, compile_mode=compile_mode).state.fingerprint
    is_own = micro_batch == 8 and compile_mode != "off"
    assert fingerprint.get("norm_groups_backward") == ("written out" if is_own else None)


def test_run_that_began_with_one_group_in_a_pass_ends_with_groups_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a rank whose share is one group, beside ranks that have several: rank 0's fingerprint is kept for all."""
    stops = iter([False, False, True])
    with pytest.raises(PreemptedError):
        _groups_loop(tmp_path, micro_batch=4, should_stop=lambda: next(stops)).run()
    resumed = _groups_loop(tmp_path, micro_batch=8)
    asked: list[bool] = []

    @contextmanager
    def watched(model: nn.Module, group_size: int, *, one_by_one: bool = False) -> Iterator[None]:
        asked.append(one_by_one)
        with ghost_batchnorm(model, group_size, one_by_one=one_by_one):
            yield

    monkeypatch.setattr(warmup_step, "ghost_batchnorm", watched)
    assert resumed.run().fingerprint_changes == ["micro_batch: 4 -> 8"]
    assert asked == [False]
