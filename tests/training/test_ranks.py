"""What ranks do together: sums, votes, errors that reach everybody, parameters that no loss depends on."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from orchestrator.backends.classify import classify
from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import Execution, ExecutionContext
from orchestrator.core.errors import FailureKind, NumericsError, PreemptedError, UserError
from orchestrator.storage.local import LocalStore
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop, network
from tests.rank_processes import COLLECTIVE_TIMEOUT_S, RankPool, in_gang, raise_errors
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.runtime import fingerprint
from workloads.runtime import ranks as ranks_module
from workloads.runtime.enums import Precision
from workloads.runtime.ranks import PeerLostError, Ranks, flight_record
from workloads.train.step import GradientSum

POISONED = {"epochs": 5, "batch_size": 8, "lr": 0.01}


def test_ranks_alone_change_nothing() -> None:
    ranks, tensor = Ranks(), torch.arange(3.0)
    assert torch.equal(ranks.sum_(tensor.clone()), tensor)
    assert (ranks.broadcast_text("a"), ranks.any_(flag=True), ranks.any_(flag=False)) == ("a", True, False)
    ranks.barrier()


def test_ranks_that_no_launcher_joined_are_refused(tmp_path: Path) -> None:
    context = ExecutionContext(store=LocalStore(tmp_path), scratch=tmp_path, cache=tmp_path, rank=1, world_size=2)
    with pytest.raises(UserError, match=r"must be rank 1 of 2, but torch\.distributed has None"):
        Ranks.of(context)
    with pytest.raises(UserError, match="rank 2 of 2 does not exist"):
        Ranks(rank=2, world_size=2)


def test_ranks_together_sum_broadcast_and_vote(pool: RankPool, tmp_path: Path) -> None:
    results = raise_errors(pool.run(tmp_path, 3, _collectives))
    assert results == [(3, "from 0", "", True, False)] * 3


def _collectives(rank: int, world_size: int) -> tuple[int, str, str, bool, bool]:
    ranks = Ranks(rank=rank, world_size=world_size)
    total = int(ranks.sum_(torch.tensor(rank)))
    texts = ranks.broadcast_text(f"from {rank}"), ranks.broadcast_text("" if rank == 0 else "x")
    return total, *texts, ranks.any_(rank == 1), ranks.any_(flag=False)


def test_rank_that_fails_ends_the_others_at_once(pool: RankPool, tmp_path: Path) -> None:
    started_s = time.monotonic()
    errors = pool.run(tmp_path, 3, _fails_on_rank_1, tmp_path / "noticed")
    assert time.monotonic() - started_s < COLLECTIVE_TIMEOUT_S
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLostError)
        assert errors[rank].failure_kind is FailureKind.NODE_LOST


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_is_killed_or_stands_still_is_a_lost_peer_to_the_others(
    tmp_path: Path, number: signal.Signals
) -> None:
    own = RankPool(3)
    try:
        for rank, one in enumerate(own.ranks):
            one.begin(in_gang, tmp_path / "gang", rank, 3, _signals_rank_1, number)
        errors = [own.ranks[rank].result() for rank in (0, 2)]
    finally:
        own.close()
    assert [type(error) for error in errors] == [PeerLostError, PeerLostError]


def _signals_rank_1(rank: int, world_size: int, number: signal.Signals) -> None:
    ranks = Ranks(rank=rank, world_size=world_size)
    ranks.barrier()
    if rank == 1:
        os.kill(os.getpid(), number)
    while True:
        ranks.sum_(torch.ones(100_000))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FailureKind.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), FailureKind.NODE_LOST),
        (RuntimeError("Tensors must be CUDA and dense"), FailureKind.UNKNOWN),
    ],
)
def test_rank_whose_collective_fails_by_its_own_fault_says_so_and_the_others_lose_it(
    pool: RankPool, tmp_path: Path, error: Exception, kind: FailureKind
) -> None:
    errors = pool.run(tmp_path, 2, _sum_fails_on_rank_1, error)
    assert isinstance(errors[0], PeerLostError)
    assert type(errors[1]) is type(error)
    assert classify(errors[1]) is kind


def _sum_fails_on_rank_1(rank: int, world_size: int, error: Exception) -> None:
    """The error comes out of the collective itself, as one of an earlier kernel or of NCCL's buffers does."""
    ranks = Ranks(rank=rank, world_size=world_size)
    with ranks.aborted_on_error():
        ranks.barrier()
        if rank == 1:
            with mock.patch.object(torch.distributed, "all_reduce", partial(_raise, error)):
                ranks.barrier()
        ranks.barrier()


def _raise(error: Exception, *_: object, **__: object) -> None:
    raise error


def _fails_on_rank_1(rank: int, world_size: int, noticed: Path) -> None:
    """Rank 1 fails and lives on, as in a launcher that reports the error, until the others have noticed."""
    ranks = Ranks(rank=rank, world_size=world_size)
    if rank == 0:
        os.mkfifo(noticed)
    try:
        with ranks.aborted_on_error():
            ranks.barrier()
            if rank == 1:
                raise ZeroDivisionError
            ranks.barrier()
    finally:
        with noticed.open("r" if rank == 1 else "w") as fifo:
            _ = fifo.read() if rank == 1 else fifo.write("yes")


def _train(rank: int, world_size: int, folder: Path, recipe: dict[str, Any], num_passes: int) -> Any:
    ranks = Ranks(rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = _WithSpare()
    task = MemoryImages(model, batch_size=8, num_samples=40, image_size=4, ranks=ranks, poisoned=(7,) * num_passes)
    state = memory_loop(task, LocalStore(folder), POISONED | recipe, ranks=ranks).run()
    return state.rewinds, dict(model.state_dict())


def _rounded_gradients(rank: int, world_size: int, folder: Path, *, stops: bool, names_reduction: bool = True) -> Any:
    """Changes of numerics that a gang notes which sums gradients in bf16; it may stop after its first updates."""
    ranks = Ranks(rank=rank, world_size=world_size)
    task = MemoryImages(_WithSpare(), batch_size=8, num_samples=40, image_size=4, ranks=ranks)
    recipe = {"epochs": 2, "batch_size": 8, "grad_reduction": "bf16"}
    loop = memory_loop(task, LocalStore(folder), recipe, ranks=ranks, should_stop=lambda: stops)
    if not names_reduction:
        del loop._fingerprint["grad_reduction"]
    with pytest.raises(PreemptedError) if stops else nullcontext():
        loop.run()
    return loop.state.fingerprint_changes


def _uneven_groups(rank: int, world_size: int, folder: Path, stop_after: int) -> dict[str, Tensor]:
    """Weights of a gang in which one rank has two norm groups of a batch, and the other one."""
    ranks = Ranks(rank=rank, world_size=world_size)
    task = MemoryImages(network("test_resnet"), batch_size=12, num_samples=24, ranks=ranks)
    recipe = {"epochs": 2, "batch_size": 12, "norm_group": 4, "lr": 0.1}
    asked = iter(range(100))
    execution, stop = Execution(micro_batch=8), lambda: next(asked) == stop_after
    loop = memory_loop(task, LocalStore(folder), recipe, execution=execution, ranks=ranks, should_stop=stop)
    with nullcontext() if stop_after < 0 else pytest.raises(PreemptedError):
        loop.run()
    return dict(task.model.state_dict())


class _WithSpare(nn.Module):
    """A linear model, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, NUM_CLASSES)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def test_gang_with_uneven_norm_groups_resumes_to_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    whole = raise_errors(pool.run(tmp_path, 2, _uneven_groups, tmp_path / "whole", -1))
    raise_errors(pool.run(tmp_path, 2, _uneven_groups, tmp_path / "cut", 1))
    resumed = raise_errors(pool.run(tmp_path, 2, _uneven_groups, tmp_path / "cut", -1))
    for expected, found in zip(whole, resumed, strict=True):
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("names_reduction", [True, False])
def test_gang_that_rounds_gradients_notes_another_number_of_workers(
    pool: RankPool, tmp_path: Path, names_reduction: bool
) -> None:
    """Also where an earlier version wrote the checkpoint, which did not name the reduction."""
    first = partial(_rounded_gradients, stops=True, names_reduction=names_reduction)
    raise_errors(pool.run(tmp_path, 2, first, tmp_path / "store"))
    again = partial(_rounded_gradients, stops=True)
    assert raise_errors(pool.run(tmp_path, 2, again, tmp_path / "store")) == [[], []]
    last = partial(_rounded_gradients, stops=False)
    for changes in raise_errors(pool.run(tmp_path, 4, last, tmp_path / "store")):
        assert "world_size: 2 -> 4" in changes
        assert "grad_reduction: bf16 of 2 workers -> bf16 of 4 workers" in changes


def test_gang_notes_the_numerics_of_every_rank(pool: RankPool, tmp_path: Path) -> None:
    """A gang in which another rank than the first goes on with another processor is not bit-exact any more."""
    mixed, other = "device: a -> a x 1, b x 1", "device: a x 1, b x 1 -> b"
    for devices, changes in (("aa", []), ("ab", [mixed]), ("ab", [mixed]), ("bb", [mixed, other])):
        found = raise_errors(pool.run(tmp_path, 2, _on_devices, tmp_path / "store", devices))
        assert found == [changes, changes], devices


def _on_devices(rank: int, world_size: int, folder: Path, devices: str) -> Any:
    """Changes of numerics that a gang notes whose ranks have these processors; it stops after its first update."""
    with mock.patch.object(fingerprint, "cpu_model", return_value=devices[rank]):
        return _rounded_gradients(rank, world_size, folder, stops=True)


def test_gang_with_a_poisoned_sample_on_one_rank_fails_on_all_and_names_it(pool: RankPool, tmp_path: Path) -> None:
    for error in pool.run(tmp_path, 2, _train, tmp_path, {}, 1):
        assert isinstance(error, NumericsError)
        # Sample number 3 of batch 7: position 59 of 40 samples.
        assert "loss is nan at step 7" in str(error)
        assert "finite loss first: sample19, sample16" in str(error)
        assert (error.step, error.rank) == (7, 0)  # it was in the share of rank 0


def test_gang_rewinds_together_like_one_process(pool: RankPool, tmp_path: Path) -> None:
    rewind = {"on_numerics": {"rewind": 3}}
    (alone,) = raise_errors(pool.run(tmp_path, 1, _train, tmp_path / "1", rewind, 1))
    for rewinds, weights in raise_errors(pool.run(tmp_path, 2, _train, tmp_path / "2", rewind, 1)):
        assert rewinds == alone[0]
        torch.testing.assert_close(weights, alone[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameter_without_gradient_stays_as_it_is(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    decay = {"weight_decay": 0.5}
    results = raise_errors(pool.run(tmp_path, world_size, _train, tmp_path, decay, 0))
    assert torch.equal(results[0][1]["spare"], torch.ones(3))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_parameter_that_one_rank_leaves_out_has_the_gradient_of_the_others(
    pool: RankPool, tmp_path: Path, precision: Precision
) -> None:
    """As where a network skips layers at random; a parameter that all leave out has none."""
    for skipped, silent, spare in raise_errors(pool.run(tmp_path, 3, _skips_on_rank_1, precision)):
        assert torch.equal(skipped, torch.tensor([-2.0, 4.0]))
        assert torch.equal(silent, torch.zeros(2))
        assert spare is None


def _skips_on_rank_1(rank: int, world_size: int, precision: Precision) -> list[Tensor | None]:
    """Gradients of a parameter that rank 1 skips, of one whose gradient is -0.0 besides, and of one that all skip."""
    parameters = skipped, silent, _ = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    gradients = GradientSum(parameters, Ranks(rank=rank, world_size=world_size), precision=precision)
    gradients.begin()
    gradients.last_pass()
    if rank != 1:
        (skipped * torch.tensor([-1.0, 2.0]) + silent * torch.tensor([-0.0, -0.0])).sum().backward()
    gradients.finish()
    return [parameter.grad for parameter in parameters]


def test_gang_with_batchnorm_whose_ranks_skip_other_layers_keeps_one_model(pool: RankPool, tmp_path: Path) -> None:
    """Its ranks complete their gradients at different times, and take part in the same sums in one order."""
    first, second = raise_errors(pool.run(tmp_path, 2, _skips_experts, tmp_path))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert not torch.equal(first["experts.0.weight"], first["experts.1.weight"])


class _Experts(nn.Module):
    """BatchNorm, and a layer for each rank, which the others skip."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.experts = nn.ModuleList([nn.Linear(48, NUM_CLASSES) for _ in range(2)])
        self._rank = rank

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.experts[self._rank](self.norm(images).flatten(1))
        return logits


def _skips_experts(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    ranks = Ranks(rank=rank, world_size=world_size)
    torch.manual_seed(0)
    task = MemoryImages(_Experts(rank), batch_size=8, num_samples=16, image_size=4, ranks=ranks)
    recipe = {"epochs": 2, "batch_size": 8, "norm_group": 2, "lr": 0.1, "optimizer": "adamw"}
    memory_loop(task, LocalStore(folder), recipe, ranks=ranks).run()
    return dict(task.model.state_dict())


def test_gradients_that_are_summed_in_bf16_are_rounded_before(pool: RankPool, tmp_path: Path) -> None:
    results = raise_errors(pool.run(tmp_path, 2, _summed_in_bf16))
    expected = sum((rank + 1) * torch.linspace(0.1, 1, 6).bfloat16() for rank in range(2))
    for gradient, dtype in results:
        assert dtype is torch.float32
        assert torch.equal(gradient, expected.float())  # type: ignore[union-attr]
    (alone,) = raise_errors(pool.run(tmp_path, 1, _summed_in_bf16))
    assert torch.equal(alone[0], torch.linspace(0.1, 1, 6))


def _summed_in_bf16(rank: int, world_size: int) -> tuple[Tensor, torch.dtype]:
    weight = nn.Parameter(torch.zeros(6))
    ranks = Ranks(rank=rank, world_size=world_size)
    gradients = GradientSum([weight], ranks, precision=Precision.BF16)
    gradients.begin()
    gradients.last_pass()
    ((rank + 1) * torch.linspace(0.1, 1, 6) * weight).sum().backward()
    (gradient,) = gradients.finish()
    return gradient, gradient.dtype


def test_ranks_tell_where_they_are_and_torch_remembers_their_operations(pool: RankPool, tmp_path: Path) -> None:
    told = raise_errors(pool.run(tmp_path, 2, _told_beside_a_late_rank, tmp_path / "late"))
    (waiting, record), (late, _) = told
    assert (waiting["doing"], waiting["operation"], late["doing"]) == ("peers", "sum", "work")
    assert waiting["entered"] == late["entered"] + 1
    # What torch 2.15 keeps of gloo: names and numbers of operations, but not when the device began them.
    names = [entry["profiling_name"] for entry in record["entries"][-2:]]
    assert names == ["gloo:all_reduce", "gloo:all_reduce"]
    status = record["pg_status"][max(record["pg_status"], key=int)]  # this process has been in other gangs
    # One at least is not complete; torch notes the end of earlier ones later than their results are there.
    assert int(status["last_enqueued_collective"]) > int(status["last_completed_collective"])


def _told_beside_a_late_rank(rank: int, world_size: int, late: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rank 0 looks from another thread while it waits for rank 1, which goes on once rank 0 has looked."""
    activity = RankActivity()
    ranks = Ranks(rank=rank, world_size=world_size, activity=activity)
    if rank == 0:
        os.mkfifo(late)
    ranks.barrier()
    if rank == 1:
        mine = activity.to_json()
        late.read_text()
        ranks.barrier()
        return mine, {}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def look() -> None:
        while activity.to_json()["doing"] != "peers" or activity.num_entered < 2:
            time.sleep(0.001)
        while (record := dict(flight_record())) and len(record["entries"]) < 3:
            time.sleep(0.001)
        found.append((activity.to_json(), record))
        late.write_text("go on")

    looker = threading.Thread(target=look)
    looker.start()
    ranks.barrier()
    looker.join()
    return found[0]


def test_limit_of_collective_operations_is_that_of_the_context(pool: RankPool, tmp_path: Path) -> None:
    started_s = time.monotonic()
    first, _ = pool.run(tmp_path, 2, _waits_for_the_other, tmp_path / "released")
    assert isinstance(first, PeerLostError)
    assert time.monotonic() - started_s < COLLECTIVE_TIMEOUT_S


def _ranks_of(rank: int, world_size: int, folder: Path, *, limit_s: float) -> Ranks:
    context = ExecutionContext(
        store=LocalStore(folder),
        scratch=folder,
        cache=folder,
        rank=rank,
        world_size=world_size,
        collective_timeout_s=limit_s,
    )
    return Ranks.of(context)


def _waits_for_the_other(rank: int, world_size: int, released: Path) -> None:
    """Rank 0 gives up after a second, not after the 20 s that the gang was joined with; rank 1 never comes."""
    ranks = _ranks_of(rank, world_size, released.parent, limit_s=1.0)
    if rank == 0:
        os.mkfifo(released)
    torch.distributed.barrier()
    if rank == 1:
        released.read_text()
        return
    try:
        ranks.barrier()
    finally:
        released.write_text("go on")


def test_rank_works_longer_than_the_limit_while_the_others_wait(pool: RankPool, tmp_path: Path) -> None:
    """All leave together, although rank 0 takes longer than any collective operation may."""
    told = raise_errors(pool.run(tmp_path, 3, _works_on_rank_0, tmp_path, LONGER_S, None))
    assert told == [f"rank {rank} of 3 was told {last} at last" for rank, last in enumerate(([], [3], [3]))]


def test_rank_that_is_asked_to_stop_at_its_own_pace_stops_all(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.run(tmp_path, 3, _works_on_rank_0, tmp_path, 60.0, PreemptedError("rank 1 was asked"))
    assert [type(error) for error in errors] == [PreemptedError] * 3
    assert str(errors[1]) == "rank 1 was asked"


def test_rank_that_fails_at_its_own_pace_ends_those_that_wait(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.run(tmp_path, 3, _works_on_rank_0, tmp_path, 0.0, ZeroDivisionError())
    assert [type(error) for error in errors] == [PeerLostError, ZeroDivisionError, PeerLostError]


LIMIT_S, LONGER_S = 2.0, 3.0


def test_ranks_read_a_checkpoint_for_longer_than_the_limit(pool: RankPool, tmp_path: Path) -> None:
    """The first rank chooses it while the others wait; then it waits for the others, which read it, too."""
    raise_errors(pool.run(tmp_path, 2, partial(_rounded_gradients, stops=True), tmp_path / "store"))
    resumed = raise_errors(pool.run(tmp_path, 2, _resumes_slowly, tmp_path / "store"))
    assert [step for step, _ in resumed] == [1, 1]
    assert sum(num_done for _, num_done in resumed) > 0, "reading counts as work"


def _resumes_slowly(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """The step at which a rank begins, and how much it has done until then."""
    ranks = _ranks_of(rank, world_size, folder, limit_s=LIMIT_S)
    task = MemoryImages(_WithSpare(), batch_size=8, num_samples=40, image_size=4, ranks=ranks)
    load = CheckpointFolder._load

    def load_slowly(checkpoints: CheckpointFolder, name: str) -> Checkpoint:
        time.sleep(LONGER_S)
        return load(checkpoints, name)

    with (
        mock.patch.object(CheckpointFolder, "_load", load_slowly),
        mock.patch.object(ranks_module, "VOTE_EVERY_S", 0.1),
    ):
        recipe = {"epochs": 2, "batch_size": 8, "grad_reduction": "bf16"}
        loop = memory_loop(task, LocalStore(folder), recipe, ranks=ranks)
    return loop.state.step, loop._ranks.activity.num_done


def _works_on_rank_0(rank: int, world_size: int, folder: Path, longest_s: float, error: Exception | None) -> str:
    """Rank 0 works so long, unless it should stop; rank 1 may raise an error."""
    ranks = _ranks_of(rank, world_size, folder, limit_s=LIMIT_S)
    ends_s, told = time.monotonic() + longest_s, list[int]()
    with mock.patch.object(ranks_module, "VOTE_EVERY_S", 0.1), ranks.aborted_on_error():
        with ranks.at_own_pace(told.append) as pace:
            pace.done = 1
            if rank == 1 and error is not None:
                raise error
            while rank == 0 and time.monotonic() < ends_s and not pace.is_stopping:
                time.sleep(0.01)
        # Votes go on beside a rank that hangs: counted, they would hide it from those who watch the gang.
        assert ranks.activity.num_entered == 0
        ranks.barrier()
    return f"rank {rank} of {world_size} was told {told[-1:]} at last"
