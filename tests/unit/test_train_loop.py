"""The loop on a task in memory: randomness per step, questions per step, messages."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest, Progress
from orchestrator.core.errors import NumericsError, OutOfMemoryError, PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.local import LocalStore
from tests.checkpoint_cases import save_at_once
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from tests.tiny_training import RECIPE
from workloads.models.build import Classifier
from workloads.models.spec import ModelSpec
from workloads.runtime import precision
from workloads.runtime.precision import CompiledForward
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.learner import RunState
from workloads.train.loop import TrainingLoop
from workloads.train.micro_batch import MicroBatchMemory
from workloads.train.recipe import Recipe
from workloads.train.step_metrics import Throughput
from workloads.train.task import JobContext, TrainInputs
from workloads.train.warmup_step import MicroBatchSearch

NUM_SAMPLES = 40
STEPS = 10
KEY = "pretrain-0123456789abcdef"


class NoisyModel(nn.Module):
    """A linear model that remembers the random numbers it saw in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.draws: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.draws.append(float(torch.rand(1)))
        logits: Tensor = self.linear(inputs)
        return logits


class MemoryTask:
    """Random points of two classes; ``poisoned_step`` has a NaN among them."""

    subset_names: Sequence[str] = ()
    levels: Sequence[EvalLevel] = ()
    num_train = NUM_SAMPLES
    num_classes = 2
    is_multi_label = False
    is_backbone_trained = True

    def __init__(self, poisoned_step: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = NoisyModel()
        self._inputs = torch.randn(NUM_SAMPLES, 3, generator=generator)
        self._targets = (self._inputs[:, 0] > 0).long()
        self._poisoned_step = poisoned_step

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        for batch in range(first, stop):
            ordinals = self.batch_ordinals(batch)
            inputs = self._inputs[ordinals]
            if batch == self._poisoned_step:
                inputs[3, 1] = torch.nan
            yield TrainInputs(inputs=inputs, targets=self._targets[ordinals])

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        return (np.arange(8, dtype=np.int64) + 8 * batch) % NUM_SAMPLES

    def trial_batch(self, num_samples: int) -> TrainInputs:
        return TrainInputs(inputs=self._inputs[:num_samples], targets=self._targets[:num_samples])

    def eval_batches(self) -> Iterable[EvalInputs]:
        subsets = np.full(NUM_SAMPLES, -1, dtype=np.int16)
        yield EvalInputs(inputs=self._inputs, targets_B=self._targets, subsets_B=subsets)

    def stats(self) -> Mapping[str, float]:
        return {}

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        return [f"sample{ordinal}" for ordinal in ordinals]

    def bad_samples(self) -> dict[str, Any]:
        return {}

    def recall_bad_samples(self, document: Mapping[str, Any]) -> None:
        assert not document


@pytest.fixture
def make_loop(tmp_path: Path) -> Callable[..., TrainingLoop]:
    store = LocalStore(tmp_path)

    def make(
        task: MemoryTask,
        *,
        seed: int = 0,
        stage: Stage = Stage.PRETRAIN,
        freeze: Sequence[str] = (),
        **callbacks: Any,
    ) -> TrainingLoop:
        recipe = Recipe.from_mapping({**RECIPE, "epochs": 2, "batch_size": 8, "freeze": list(freeze)})
        request = JobRequest(
            attempt_id=f"{KEY}.1",
            attempt_number=1,
            sweep="s",
            job="pretrain/x",
            key=KEY,
            kind=JobKind.PRETRAIN,
            identity={"parameters": {}},
            store_uri=store.uri,
            execution=Execution(checkpoint_every_steps=3),
        )
        job = JobContext(
            request=request,
            context=ExecutionContext(store=store, scratch=tmp_path, cache=tmp_path, **callbacks),
            stage=stage,
            model=ModelSpec(name="linear", image_size=1),
            recipe=recipe,
            seed=seed,
            device=torch.device("cpu"),
            ranks=Ranks(),
        )
        return TrainingLoop(task, job)

    return make


def _draws(make_loop: Callable[..., TrainingLoop], **identity: Any) -> list[float]:
    task = MemoryTask()
    loop = make_loop(task, **identity)
    loop.run()
    loop.discard_checkpoints()
    return task.model.draws


def test_loop_random_numbers_differ_by_step_seed_and_stage(make_loop: Callable[..., TrainingLoop]) -> None:
    streams = [_draws(make_loop), _draws(make_loop, seed=1), _draws(make_loop, stage=Stage.FINETUNE)]
    assert len({draw for stream in streams for draw in stream}) == 3 * STEPS


def test_loop_random_numbers_do_not_follow_the_global_state(make_loop: Callable[..., TrainingLoop]) -> None:
    torch.manual_seed(1)
    first = _draws(make_loop)
    torch.manual_seed(2)
    assert _draws(make_loop) == first


def test_loop_asks_once_per_step_whether_to_stop(make_loop: Callable[..., TrainingLoop]) -> None:
    questions: list[None] = []

    def should_stop() -> bool:
        questions.append(None)
        return False

    make_loop(MemoryTask(), should_stop=should_stop).run()
    assert len(questions) == STEPS


def test_loop_stopped_before_its_first_step_writes_nothing(
    make_loop: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    with pytest.raises(PreemptedError, match="step 0"):
        make_loop(MemoryTask(), should_stop=lambda: True).run()
    assert list(LocalStore(tmp_path).list_objects(f"{checkpoints_folder(KEY)}/")) == []


def test_loop_counts_the_peak_of_the_gpus_memory_from_its_own_begin(
    make_loop: Callable[..., TrainingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    loop = make_loop(MemoryTask())
    monkeypatch.setattr("workloads.train.loop.reset_gpu_peak", lambda _: steps.append(loop.state.step))
    loop.run()
    assert steps == [0]


def test_loop_reports_less_often_than_it_steps(make_loop: Callable[..., TrainingLoop]) -> None:
    reports: list[Progress] = []
    make_loop(MemoryTask(), report=reports.append).run()
    assert 1 <= len(reports) < STEPS


def test_loop_not_finite_loss_names_step_and_samples(make_loop: Callable[..., TrainingLoop]) -> None:
    with pytest.raises(NumericsError, match=r"loss is nan at step 4 .*sample32, sample33"):
        make_loop(MemoryTask(poisoned_step=4)).run()


@pytest.mark.parametrize(
    ("place", "message", "failed_at"),
    [
        ("step", "a step with a micro-batch of 8 samples does not fit", 8),
        ("evaluation", "the evaluation at step 5 does not fit", 0),
        ("trial", "what a search measures in the evaluation at step 5 does not fit", 0),
    ],
)
def test_memory_that_something_else_than_a_step_lacks_blames_no_micro_batch(
    make_loop: Callable[..., TrainingLoop],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    message: str,
    failed_at: int,
) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    task, memory = MemoryTask(), MicroBatchMemory(tmp_path / "micro-batches", {})
    loop = make_loop(task)
    monkeypatch.setattr(MicroBatchSearch, "_memory", lambda _: memory)
    if place == "step":
        monkeypatch.setattr(loop._update, "_backward", no_memory)
    elif place == "evaluation":
        monkeypatch.setattr(task, "eval_batches", no_memory)
    else:
        loop.on_evaluation = no_memory
    with pytest.raises(OutOfMemoryError, match=message):
        loop.run()
    assert memory.recall().failed_at == failed_at


def test_loop_resumed_under_other_numerics_says_so(make_loop: Callable[..., TrainingLoop]) -> None:
    with pytest.raises(NumericsError):
        make_loop(MemoryTask(poisoned_step=4)).run()
    task = MemoryTask()
    loop = make_loop(task)
    assert loop.resumed_from_step == 3
    assert loop.state.fingerprint_changes == []
    save_at_once(loop._saver.folder, _with_other_torch(loop))
    changed = make_loop(MemoryTask()).state
    assert changed.fingerprint_changes == [f"torch: 0.0 -> {torch.__version__}"]


def _with_other_torch(loop: TrainingLoop) -> Any:
    checkpoint = loop._saver.folder.load_newest()
    assert checkpoint is not None
    fingerprint = {**checkpoint.state["fingerprint"], "torch": "0.0"}
    return type(checkpoint)(
        step=4,
        model=checkpoint.model,
        optimizer=checkpoint.optimizer,
        state={**checkpoint.state, "fingerprint": fingerprint},
    )


def test_run_whose_compilation_fails_in_some_attempts_notes_it_in_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numerics are then those of an uncompiled run, which the record must say of earlier attempts, too."""

    def eager(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        return graph.forward

    def broken(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        raise ArithmeticError("no kernel for this")

    def attempt(number: int, backend: Any) -> RunState:
        monkeypatch.setattr(precision, "CompiledForward", partial(CompiledForward, backend=backend))
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
        task = MemoryImages(Classifier(backbone, nn.Linear(4, NUM_CLASSES)), batch_size=8, num_samples=16)
        stops = iter([False, number < 4])
        loop = memory_loop(
            task,
            LocalStore(tmp_path),
            {"epochs": 4, "batch_size": 8},
            execution=Execution(compile="default"),
            attempt=number,
            should_stop=lambda: next(stops, False),
        )
        with nullcontext() if number == 4 else pytest.raises(PreemptedError):
            loop.run()
        return loop.state

    assert attempt(1, eager).fingerprint["compiled"] == "blocks"
    torch._dynamo.reset()
    second = attempt(2, broken)
    assert (second.fingerprint["compiled"], second.fingerprint_changes) == ("nothing", ["compiled: blocks -> nothing"])
    assert attempt(3, broken).fingerprint_changes == ["compiled: blocks -> nothing"]
    last = attempt(4, eager)
    assert last.fingerprint_changes == ["compiled: blocks -> nothing", "compiled: nothing -> blocks"]


@pytest.mark.parametrize(
    ("trained", "freeze", "known"), [(True, (), True), (False, (), False), (True, ["*.bias"], False)]
)
def test_mfu_is_told_where_the_whole_network_learns(
    make_loop: Callable[..., TrainingLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trained: bool,
    freeze: Sequence[str],
    known: bool,
) -> None:
    """An image of a probe is not three forward passes of its backbone."""
    on_gpu = Throughput(flops_per_image=1.0, peak_flops=1.0)
    monkeypatch.setattr(Throughput, "of", lambda *_, **__: on_gpu)
    task = MemoryTask()
    task.is_backbone_trained = trained
    with caplog.at_level("INFO", logger="workloads.train.loop"):
        make_loop(task, freeze=freeze).run()
    assert ("  mfu " in caplog.text) == known


def test_loop_first_line_tells_the_recipe_as_a_sweep_would(
    make_loop: Callable[..., TrainingLoop], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="workloads.train.loop"):
        make_loop(MemoryTask()).run()
    first = caplog.records[0].getMessage()
    assert "optimizer=sgd" in first
    assert "Recipe(" not in first
    assert "<" not in first
