"""What a trial tells a search while it trains, and that telling changes nothing of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.core.contract import Evaluation, ExecutionContext, Watch
from orchestrator.core.errors import PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.recipe import LogisticSpec
from tests.tiny_training import BATCHNORM, RECIPE, TinyTraining
from workloads.jobs.target_probe import TargetProbe
from workloads.jobs.training import Judge, Subject
from workloads.run import execute
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar

SHORT = {"epochs": 3, "batch_size": 16, "norm_group": 16, "warmup_epochs": 0, "average": "ema", "average_decay": 0.9}
LOOK = {"resize": None, "interpolation": "bilinear", "decoder": "pillow", "mean": None, "std": None, "view": "center"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    return TinyTraining(LocalStore(folder / "store"), folder)


def watched(tiny, request, rungs, *, probe=None, stop_at=None):
    """Run a request under a watch; what it told, and its result or None if it was stopped."""
    told: list[Evaluation] = []
    context = ExecutionContext(
        store=tiny.store,
        scratch=tiny.folder / "scratch",
        cache=tiny.folder / "cache",
        should_stop=lambda: bool(told) and told[-1].epoch == stop_at,
        watch=Watch(rungs=rungs, tell=told.append, probe=probe or {}),
    )
    context.scratch.mkdir(exist_ok=True)
    try:
        return told, execute(request, context)
    except PreemptedError:
        return told, None


def probe_of(tiny, **subset):
    parameters = {
        "model": BATCHNORM,
        "recipe": LogisticSpec().resolved(),
        "look": {**LOOK, "model": BATCHNORM},
        "seed": 0,
        **({"subset": subset} if subset else {}),
    }
    inputs = {"index": tiny.index, "labels": tiny.labels({"hierarchy": "depth1"})}
    return {"parameters": parameters, "inputs": inputs, "location": {}}


def forget(store, key):
    for stat in list(store.list_objects(f"artifacts/pretrain/{key}/")):
        store.delete(stat.name)


def test_pretraining_judged_by_a_probe_has_the_same_bits_as_one_that_is_not(tiny):
    request = tiny.training(model=BATCHNORM, recipe=SHORT)
    tiny.run(request)
    alone = read_record(tiny.store, request.key).summary["weights_sha256"]
    forget(tiny.store, request.key)
    told, result = watched(tiny, request, (1.0, 3.0), probe=probe_of(tiny))
    assert result is not None
    assert read_record(tiny.store, request.key).summary["weights_sha256"] == alone
    assert [one.epoch for one in told] == [1.0, 3.0]
    for one in told:
        assert 0 <= one.metrics["target_select_error"] <= 1
        assert 0 <= one.metrics["target_val_error"] <= 1
        assert one.metrics["val_error"] <= 1
        assert one.spent_s > 0
    again, result = watched(tiny, request, (3.0,), probe=probe_of(tiny))
    assert [one.epoch for one in again] == [3.0]
    assert again[0].metrics["target_val_error"] == told[-1].metrics["target_val_error"]
    assert again[0].metrics["target_select_error"] == told[-1].metrics["target_select_error"]


def test_probe_computes_as_its_transfer_says_and_not_as_the_pretraining(tiny):
    request = tiny.training(model=BATCHNORM, recipe={**SHORT, "precision": "bf16", "tf32": True})
    probe = probe_of(tiny)
    context: Any = SimpleNamespace()
    options: dict[str, Any] = {"document": {"mean": [0.5] * 3, "std": [0.5] * 3}, "device": torch.device("cpu")}
    found = TargetProbe(request, context, probe, **options)
    assert (found._arithmetic.precision, found._arithmetic._tf32) == ("fp32", False)
    probe["parameters"]["look"]["precision"] = "bf16"
    assert TargetProbe(request, context, probe, **options)._arithmetic.precision == "bf16"


def test_trial_tells_the_first_evaluation_after_each_rung_and_the_last_one(tiny):
    request = tiny.training(recipe={"epochs": 5, "eval_every_epochs": 2, "select_holdout": 0.25}, seed=1)
    told, _ = watched(tiny, request, (1.0, 3.0))
    assert [one.epoch for one in told] == [2.0, 4.0, 5.0]
    assert told[-1].metrics["select_error"] == read_record(tiny.store, request.key).metrics["select_error"]
    assert all(0 <= one.metrics["select_error"] <= 1 for one in told)


def test_rung_counts_epochs_that_are_smaller_than_a_batch():
    """Two of them end with each step here, and a step was taken for an epoch."""
    told: list[Evaluation] = []
    calendar = Calendar.of(Recipe.from_mapping({**RECIPE, "epochs": 9, "batch_size": 192}), 96)
    subject = Subject(calendar=calendar, epochs=9, backbone=torch.nn.Identity(), averaged=nullcontext, select=dict)
    judge = Judge(Watch(rungs=(4.0,), tell=told.append), subject, None)
    for step in range(1, 6):
        judge(step, {})
    assert [(one.step, one.epoch) for one in told] == [(2, 4.0), (5, 9)]


def test_trial_that_is_stopped_at_a_rung_resumes_from_there(tiny):
    request = tiny.training(recipe={"epochs": 3}, seed=2)
    told, result = watched(tiny, request, (1.0, 2.0), stop_at=2.0)
    assert result is None
    assert [one.epoch for one in told] == [1.0, 2.0]
    told, result = watched(tiny, request, (3.0,))
    assert result is not None
    assert result.resumed_from_step == 12
    assert [one.epoch for one in told] == [3.0]


def stopped(probe, backbone):
    raise PreemptedError("asked to stop while it was judged")


def test_trial_that_is_stopped_while_it_is_judged_at_its_end_begins_with_this_and_has_the_same_bits(tiny, monkeypatch):
    request = tiny.training(model=BATCHNORM, recipe=SHORT, seed=5)
    keep = {"best": {"metric": "val_loss", "k": 2}}
    request = replace(request, identity={**request.identity, "parameters": {**request.parameters, "keep": keep}})
    alone, _ = watched(tiny, request, (), probe=probe_of(tiny))
    undisturbed = read_record(tiny.store, request.key)
    forget(tiny.store, request.key)
    monkeypatch.setattr(TargetProbe, "__call__", stopped)
    for _ in range(2):
        assert watched(tiny, request, (), probe=probe_of(tiny)) == ([], None)
    monkeypatch.undo()
    told, result = watched(tiny, request, (), probe=probe_of(tiny))
    assert result is not None
    assert result.resumed_from_step == told[0].step == alone[0].step
    assert [(one.epoch, one.metrics) for one in told] == [(one.epoch, one.metrics) for one in alone]
    record = read_record(tiny.store, request.key)
    assert record.metrics == undisturbed.metrics
    assert {name: part.sha256 for name, part in record.parts.items()} == {
        name: part.sha256 for name, part in undisturbed.parts.items()
    }


def test_trial_that_is_stopped_while_it_is_judged_keeps_its_training(tiny, monkeypatch):
    request = tiny.training(recipe={"epochs": 3}, seed=4)
    monkeypatch.setattr(TargetProbe, "__call__", stopped)
    assert watched(tiny, request, (1.0,), probe=probe_of(tiny)) == ([], None)
    monkeypatch.undo()
    told, result = watched(tiny, request, (1.0, 3.0), probe=probe_of(tiny))
    assert result is not None
    assert result.resumed_from_step == 6
    assert [one.epoch for one in told] == [2.0, 3.0]


def test_probe_in_training_sees_only_its_subset_and_counts_its_work(tiny, monkeypatch):
    """A controller sees no step of it, and must not take it for a hang."""
    call, counted = TargetProbe.__call__, []

    def judge(probe, backbone):
        activity = probe._context.activity
        before, found = activity.num_done, call(probe, backbone)
        counted.append(activity.num_done - before)
        return found

    monkeypatch.setattr(TargetProbe, "__call__", judge)
    request = tiny.training(model=BATCHNORM, recipe=SHORT, seed=3)
    told, _ = watched(tiny, request, (3.0,), probe=probe_of(tiny, fraction=0.25, seed=0))
    assert 0 <= told[0].metrics["target_select_error"] <= 1
    assert counted[0] > 2, "batches of both splits, and passes of the fit"


def test_job_that_uses_a_search_takes_what_it_chose(tiny):
    """The recipe of the best trial; its identity goes on naming the search alone."""
    from orchestrator.storage.artifacts import ArtifactWriter

    search = tiny.request(JobKind.SEARCH, {"fixed": 1}, {})
    writer = ArtifactWriter(tiny.store, search)
    chosen = {"parameters": {"recipe": {**RECIPE, "epochs": 1, "lr": 0.125}}}
    writer.commit(now=0.0, summary={"chosen": chosen})
    plain = tiny.training(seed=4)
    request = tiny.request(
        JobKind.PRETRAIN,
        {**plain.identity["parameters"], "recipe": {"epochs": 9, "batch_size": 16}},
        {**plain.identity["inputs"], "search": search.key},
    )
    result = tiny.run(request)
    record = read_record(tiny.store, request.key, identity=request.identity)
    assert result.metrics["num_steps"] == 6
    assert record.summary["chosen"] == chosen
    assert record.identity["parameters"]["recipe"] == {"epochs": 9, "batch_size": 16}
