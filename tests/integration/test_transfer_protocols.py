"""Every protocol on a tiny sweep, from the sweep.yaml to records: what is shared, what is measured, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load

from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import (
    Evaluation,
    Execution,
    ExecutionContext,
    JobRequest,
    JobResult,
    Progress,
    Watch,
)
from orchestrator.core.errors import BadDataError, PreemptedError, UserError
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import build_report
from orchestrator.report.render.columns import run_records
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.sample_outcomes import SampleOutcomes
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from tests.builders import request_of
from tests.rank_processes import RankPool, raise_errors
from workloads.data.index import SampleIndex
from workloads.data.split_targets import SplitTargets, unseen_notes
from workloads.features.artifact import FeatureTable
from workloads.jobs import knn, probe
from workloads.jobs.target_probe import judge_committed
from workloads.labels.label_map import LabelMap
from workloads.run import execute
from workloads.runtime import ranks
from workloads.train import samples

pytestmark = pytest.mark.xdist_group("ranks")  # one process has loaded for all what ranks begin with

SWEEP = """\
version: 1
name: protocols
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 3], image_size: 16, patch_size: 4, num_train: 240, num_val: 96}
  other: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
  else: {dataset: other, hierarchy: [depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: [levels/depth2]
  recipe: {epochs: 3, batch_size: 32, lr: 0.05}
  checkpoints: {keep: {epochs: [1]}}
transfer:
  - {name: tuned, target: levels/depth1, protocol: finetune, recipe: &short {epochs: 1, batch_size: 16, lr: 0.01},
     from_checkpoints: [1, 3], baselines: [one_pass, retrain]}
  - {name: frozen, target: levels/depth1, protocol: finetune, recipe: {epochs: 1, batch_size: 16, lr: 0.01,
     freeze: ["backbone.blocks.0.*"]}}
  - {name: grid, target: levels/depth1, protocol: finetune, recipe: {epochs: 1, batch_size: 16},
     grid: {lr: [0.01, 0.1]}}
  - {name: online, target: levels/depth2, protocol: probe, recipe: *short}
  - {name: moved, target: levels/depth2, protocol: probe, recipe: {epochs: 1, batch_size: 16, lr: 0.01, augment: flip}}
  - {name: sgd, target: levels/depth2, protocol: probe, recipe: {epochs: 1, batch_size: 16, lr: 0.01,
     features: cached, solver: sgd}}
  - {name: logistic, target: levels/depth2, protocol: probe, recipe: cached-probe, fractions: [0.25, 1], seeds: [0, 1]}
  - {name: both, target: levels/depth2, protocol: probe, recipe: {base: cached-probe, views: [center, mirrored]}}
  - {name: early, target: levels/depth2, protocol: probe, recipe: cached-probe, from_checkpoints: [1]}
  - {name: near, target: levels/depth2, protocol: knn, fractions: [0.25, 1.0]}
  - {name: elsewhere, target: else/depth2, protocol: finetune, recipe: *short}
  - {name: far, target: else/depth2, protocol: probe, recipe: cached-probe}
  - {name: far-near, target: else/depth2, protocol: knn}
"""


class Ran:
    """A sweep of which every job is done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "store")
        sweep = parse_sweep(SWEEP, "sweep.yaml", shipped_recipes())
        self.plan: Plan = build_plan(sweep, store_uri=self.store.uri)
        for job in self.plan.jobs:
            self.run(self.request(job))

    def request(self, job: Job, **changes: Any) -> JobRequest:
        identity = {**job.identity, "parameters": {**job.identity["parameters"], **changes}}
        key = make_key(job.kind, "", identity) if changes else job.key
        execution = replace(job.execution, num_threads=1, deterministic=True)  # as CPUs always are
        made = replace(job, key=key, identity=identity)
        return request_of(made, self.store.uri, sweep=self.plan.sweep, execution=execution)

    def run(self, request: JobRequest, **context: Any) -> JobResult:
        scratch = self.folder / "scratch" / request.attempt_id
        scratch.mkdir(parents=True, exist_ok=True)
        return execute(
            request, ExecutionContext(store=self.store, scratch=scratch, cache=self.folder / "cache", **context)
        )

    def job(self, name: str) -> Job:
        return self.plan.by_name()[name]

    def record(self, name: str) -> Record:
        return read_record(self.store, self.job(name).key)

    def metrics(self, name: str) -> Mapping[str, float]:
        return self.record(name).metrics

    def table(self, name: str) -> FeatureTable:
        return FeatureTable.open(self.store, self.job(name).key, self.folder / "cache")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("protocols"))


PROBE = "probe/logistic/levels/depth2/seed0/fraction1/seed0"
BOTH = "probe/both/levels/depth2/seed0/seed0"
NEAR = "knn/near/levels/depth2/seed0/fraction1/seed0"
ONLINE = "probe/online/levels/depth2/seed0/seed0"


def test_every_protocol_measures_the_same_things(ran: Ran) -> None:
    transfers = [job for job in ran.plan.jobs if "transfer" in job.facets]
    assert len(transfers) == 2 * 2 + 1 + 2 + 3 + 4 + 2 + 2 + 3
    for job in transfers:
        metrics = ran.metrics(job.name)
        assert {"val_error", "val_loss", "best_val_error", "val_error_hard", "val_class_error"} <= metrics.keys()
        assert all(0 <= value <= 1 for name, value in metrics.items() if name.endswith("_error"))
        held_out = job.kind is JobKind.KNN or job.facets["transfer"] in {"grid", "logistic", "both", "early", "far"}
        assert ("select_error" in metrics) is held_out, job.name


def test_every_protocol_keeps_the_outcome_of_each_validation_image(ran: Ran) -> None:
    orders: dict[str, set[str]] = {}
    for job in (job for job in ran.plan.jobs if "transfer" in job.facets):
        record = ran.record(job.name)
        found = SampleOutcomes.read(ran.store, record)
        assert found is not None, job.name
        assert found.num_wrong / found.num_counted == pytest.approx(record.metrics["val_error"], abs=1e-12), job.name
        assert found.counted_N.all()
        orders.setdefault(str(job.facets["target"]).partition("/")[0], set()).add(found.order_sha256)
    assert {name: len(digests) for name, digests in orders.items()} == {"levels": 1, "else": 1}


def test_kept_outcome_is_that_of_the_image_with_this_ordinal(ran: Ran) -> None:
    """By hand: the committed head on the features of the validation images."""
    record, table = ran.record(PROBE), ran.table("embed/levels/depth2/seed0/tree/val")
    head = load(read_part(ran.store, record, "head.safetensors"))
    split = SampleIndex.open(ran.store, ran.job("index/tree").key, ran.folder / "cache").split("val")
    targets_N = LabelMap.open(ran.store, ran.job("labels/levels/depth2").key).resolve_targets(split).targets_N()
    features_ND = torch.from_numpy(table.take(np.arange(split.num_samples))).float()
    guesses_N = (features_ND @ head["weight"].T + head["bias"]).argmax(1).numpy()
    found = SampleOutcomes.read(ran.store, record)
    assert found is not None
    assert found.right_N.tolist() == (guesses_N == targets_N).tolist()
    assert 0 < found.num_wrong < found.num_counted


def test_report_reads_every_row(ran: Ran) -> None:
    rows = run_records(build_report(ran.store, ran.plan)).rows
    measured = {job.facets["transfer"] for job in ran.plan.jobs if "transfer" in job.facets}
    assert measured <= {value for row in rows for value in row}


def test_features_are_embedded_once_for_all_that_read_them(ran: Ran) -> None:
    embeds = [job.name for job in ran.plan.jobs if job.kind is JobKind.EMBED]
    assert len(embeds) == len(set(embeds)) == 2 + 1 + 2 + 2  # tree, its mirror image, of epoch 1, the other data set


def test_logistic_probe_beats_chance_and_its_head_gives_its_error(ran: Ran) -> None:
    record = ran.record(PROBE)
    assert record.metrics["val_error"] < 0.75 < 5 / 6
    head = load(read_part(ran.store, record, "head.safetensors"))
    table = ran.table("embed/levels/depth2/seed0/tree/val")
    features = torch.from_numpy(table.take(np.arange(table.num_samples))).float()
    predicted = (features @ head["weight"].T + head["bias"]).argmax(1).numpy()
    assert (predicted != targets(ran, "val")).mean() == pytest.approx(record.metrics["val_error"])


def targets(ran: Ran, split: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    index = SampleIndex.open(ran.store, ran.job("index/tree").key, ran.folder / "cache")
    label_map = LabelMap.open(ran.store, ran.job("labels/levels/depth2").key)
    return label_map.resolve_targets(index.split(split)).targets_N()


def test_logistic_probe_chose_what_its_record_says_was_best(ran: Ran) -> None:
    record = ran.record(PROBE)
    selection = record.summary["selection"]
    best = min(selection, key=lambda row: (row["select_error"], row["select_loss"]))
    assert (record.metrics["selected_l2"], record.metrics["select_error"]) == (best["l2"], best["select_error"])
    assert [row["l2"] for row in selection] == sorted((row["l2"] for row in selection), reverse=True)


def test_search_is_judged_by_what_the_cached_probe_of_its_transfer_finds(ran: Ran) -> None:
    """It saw the centre alone, whatever ``views`` the transfer's probe has."""
    job, look = ran.job(BOTH), ran.job("embed/levels/depth2/seed0/tree/val").identity["parameters"]
    inputs = {role: job.identity["inputs"][role] for role in ("index", "labels")}
    parameters = {**job.identity["parameters"], "look": look, "has_all_views": True}
    judge = {"parameters": parameters, "inputs": inputs, "location": {}}
    told: list[Evaluation] = []
    watch = Watch(rungs=(), tell=told.append, probe=judge)
    context = ExecutionContext(store=ran.store, scratch=ran.folder / "scratch", cache=ran.folder / "cache", watch=watch)
    judge_committed(ran.request(ran.job("pretrain/levels/depth2/seed0")), context)
    names = ("val_error", "val_loss", "select_error", "select_loss", "train_loss")
    (found,), metrics = told, ran.metrics(BOTH)
    assert {name: found.metrics[f"target_{name}"] for name in names} == {name: metrics[name] for name in names}
    assert metrics["train_loss"] != ran.metrics(PROBE)["train_loss"]


def test_neighbours_chose_what_their_record_says_was_best(ran: Ran) -> None:
    record = ran.record(NEAR)
    best = min(record.summary["selection"], key=lambda row: (row["select_error"], row["select_loss"], row["k"]))
    assert record.metrics["selected_k"] == best["k"]
    assert record.metrics["val_error"] == record.metrics[f"val_k{best['k']}_error"]


def test_fractions_train_on_so_many_samples_each(ran: Ran) -> None:
    small, whole = (ran.metrics(f"knn/near/levels/depth2/seed0/fraction{part}/seed0") for part in ("0.25", "1"))
    assert (small["num_train"], whole["num_train"]) == (60, 240)


def test_sgd_on_cached_features_is_the_online_probe_up_to_float16(ran: Ran) -> None:
    online, cached = (ran.record(f"probe/{name}/levels/depth2/seed0/seed0") for name in ("online", "sgd"))
    first, second = (load(read_part(ran.store, record, "head.safetensors"))["weight"] for record in (online, cached))
    assert second.numpy() == pytest.approx(first.numpy(), abs=5e-3)
    assert not torch.equal(first, second)
    assert cached.metrics["val_loss"] == pytest.approx(online.metrics["val_loss"], abs=1e-3)


def test_checkpoint_features_are_those_of_its_weights(ran: Ran) -> None:
    early, late = (ran.table(f"embed/levels/depth2/seed0/{part}tree/val") for part in ("epoch1/", ""))
    rows = np.arange(10)
    assert np.abs(early.take(rows) - late.take(rows)).max() > 0.01
    record = ran.record("pretrain/levels/depth2/seed0")
    tuned = [ran.record(f"finetune/tuned/levels/depth2/seed0/epoch{epoch}/seed0") for epoch in (1, 3)]
    assert tuned[0].summary["init_weights_sha256"] != tuned[1].summary["init_weights_sha256"]
    assert tuned[1].summary["init_weights_sha256"] == record.summary["backbone_sha256"]


def test_grid_cells_train_on_nine_tenths(ran: Ran) -> None:
    cells = [ran.metrics(f"finetune/grid/levels/depth2/seed0/lr={lr}/seed0") for lr in ("0.01", "0.1")]
    assert [cell["num_steps"] for cell in cells] == [14, 14]  # 216 of 240 samples in batches of 16: 13.5
    assert cells[0]["select_loss"] != cells[1]["select_loss"]


def test_cached_measurements_are_the_same_to_the_last_bit_again(ran: Ran, tmp_path: Path) -> None:
    again = Ran.__new__(Ran)
    again.folder, again.store, again.plan = tmp_path, ran.store, ran.plan
    for name in (PROBE, NEAR):
        request = ran.request(ran.job(name))
        other = replace(request, key=request.key + "0", attempt_id=f"{request.key}0.1")
        again.run(other)
        first, second = ran.record(name), read_record(ran.store, other.key)
        assert first.metrics == second.metrics
        assert first.summary.get("weights_sha256") == second.summary.get("weights_sha256")


def test_logistic_probe_that_is_asked_to_stop_stops_and_can_begin_anew(ran: Ran) -> None:
    request = ran.request(ran.job(PROBE), seed=5)
    answers = iter([False] * 7)
    with pytest.raises(PreemptedError, match="begins anew"):
        ran.run(request, should_stop=lambda: next(answers, True))
    assert "val_error" in ran.run(request).metrics


def test_transfer_from_an_epoch_that_was_not_kept_names_those_that_were(ran: Ran) -> None:
    tuned = ran.job("finetune/tuned/levels/depth2/seed0/epoch1/seed0")
    with pytest.raises(UserError, match=r"no weights of epoch 2; it has those of epochs \[1\]: list the epoch"):
        ran.run(ran.request(tuned, checkpoint=2))
    with pytest.raises(UserError, match="no weights of epoch 2"):
        ran.run(ran.request(ran.job("embed/levels/depth2/seed0/epoch1/tree/val"), checkpoint=2))


def test_probe_on_too_few_samples_notes_the_classes_that_it_never_saw(ran: Ran) -> None:
    few = ran.request(ran.job(PROBE), subset={"num_samples": 4, "seed": 0})
    ran.run(few)
    (note, *_) = read_record(ran.store, few.key).summary["notes"]
    assert "2 of 6 classes of the validation split have no training sample: 32 of 96 validation samples" in note
    online = ran.request(ran.job("probe/online/levels/depth2/seed0/seed0"), subset={"num_samples": 16, "seed": 0})
    ran.run(online)
    assert "notes" not in read_record(ran.store, online.key).summary


def test_targets_that_no_training_sample_shows_are_refused() -> None:
    train, val = SplitTargets.of(np.array([0, 0, 1]), 4), SplitTargets.of(np.array([2, 3, 2]), 4)
    with pytest.raises(UserError, match="none of the 2 classes of the 3 validation samples has a training sample"):
        unseen_notes(train, np.arange(3), val, np.arange(3))
    assert unseen_notes(train, np.arange(3), train, np.arange(2)) == []


def test_features_with_nan_are_refused_by_name(ran: Ran) -> None:
    near = ran.job(NEAR)
    spoilt = _spoilt(ran, near.identity["inputs"]["train"])
    for name in (NEAR, PROBE):
        job = ran.job(name)
        identity = {**job.identity, "inputs": {**job.identity["inputs"], "train": spoilt}}
        request = replace(ran.request(job), identity=identity, key=make_key(job.kind, "spoilt", identity))
        with pytest.raises(BadDataError, match=r"not finite at ordinal 7: .*embed again"):
            ran.run(request)


def _spoilt(ran: Ran, key: str) -> str:
    """The key of the same features with a NaN."""
    record = read_record(ran.store, key)
    request = ran.request(ran.job("embed/levels/depth2/seed0/tree/train"), precision="spoilt")
    writer = ArtifactWriter(ran.store, request)
    document = json.loads(read_part(ran.store, record, "features.json"))
    for part in document["parts"]:
        content = bytearray(read_part(ran.store, record, part["features"]))
        if part["start"] == 0:
            # A header of 128 bytes, two bytes per number.
            content[128 + 7 * document["dim"] * 2 : 130 + 7 * document["dim"] * 2] = np.float16("nan").tobytes()
        writer.add(part["features"], bytes(content))
        writer.add(part["missing"], read_part(ran.store, record, part["missing"]))
    writer.add("features.json", json.dumps(document).encode())
    writer.commit(now=0.0, metrics={}, summary={}, package_digest="")
    return request.key


def test_features_of_another_split_are_refused(ran: Ran) -> None:
    job = ran.job(PROBE)
    inputs = {**job.identity["inputs"], "train": job.identity["inputs"]["val"]}
    identity = {**job.identity, "inputs": inputs}
    request = replace(ran.request(job), identity=identity, key=make_key(job.kind, "swapped", identity))
    with pytest.raises(UserError, match="are of split 'val'"):
        ran.run(request)


def measure_in_gang(rank: int, world_size: int, folder: Path, request: JobRequest) -> tuple[float, float]:
    """With six batches of validation samples: four ranks do not have the same number of them."""
    for module in (probe, samples):
        vars(module)["EVAL_BATCH_SIZE"] = 16  # in a process of this test
    store = LocalStore(folder / "store")
    scratch = folder / f"scratch{rank}"
    scratch.mkdir(exist_ok=True)
    context = ExecutionContext(store=store, scratch=scratch, cache=folder / "cache", rank=rank, world_size=world_size)
    metrics = execute(request, context).metrics
    return metrics["val_error"], metrics["val_loss"]


LONG_WORK: Mapping[str, tuple[Any, str]] = {NEAR: (knn, "measure"), ONLINE: (probe.ProbeTask, "_features_of")}
"""Of the first rank, by job: the place and name of the function that does it."""


def beyond_the_limit(rank: int, world_size: int, folder: Path, request: JobRequest, name: str) -> Mapping[str, float]:
    """The first rank works for longer than a collective operation of the gang may take."""
    place, function = LONG_WORK[name]
    work, pauses = getattr(place, function), iter([4.0] if rank == 0 else [])

    def slow(*arguments: Any) -> Any:
        time.sleep(next(pauses, 0.0))
        return work(*arguments)

    scratch = folder / f"scratch{rank}"
    scratch.mkdir(exist_ok=True)
    context = ExecutionContext(
        store=LocalStore(folder / "store"),
        scratch=scratch,
        cache=folder / "cache",
        rank=rank,
        world_size=world_size,
        collective_timeout_s=3.0,
    )
    with mock.patch.object(place, function, slow), mock.patch.object(ranks, "VOTE_EVERY_S", 0.1):
        return execute(request, context).metrics


@pytest.mark.ci
@pytest.mark.parametrize("name", LONG_WORK)
def test_first_rank_of_a_gang_works_for_longer_than_the_others_may_wait_in_one_operation(ran: Ran, name: str) -> None:
    pool, request = RankPool(2), ran.request(ran.job(name))
    key = f"{request.key}8"
    gang = replace(request, key=key, attempt_id=f"{key}.1", execution=Execution(num_workers=2, num_threads=1))
    try:
        raise_errors(pool.run(ran.folder, 2, beyond_the_limit, ran.folder, gang, name))
    finally:
        pool.close()
    assert read_record(ran.store, key).metrics == pytest.approx(ran.metrics(name))


def test_online_probe_counts_the_features_that_it_computes_before_its_first_step(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take hours: a controller that saw nothing of them would take the probe for one that hangs."""
    monkeypatch.setattr(samples, "EVAL_BATCH_SIZE", 16)
    activity, done = RankActivity(), dict[str, int]()

    def report(progress: Progress) -> None:
        done.setdefault(progress.phase, activity.num_done)

    request = ran.request(ran.job(ONLINE))
    key = f"{request.key}7"
    ran.run(replace(request, key=key, attempt_id=f"{key}.1"), report=report, activity=activity)
    assert done["setup"] == 0
    assert done["train"] >= 240 / 16


@pytest.mark.slow
def test_gang_measures_what_one_process_does(ran: Ran) -> None:
    pool = RankPool(4)
    try:
        for name in (PROBE, "probe/sgd/levels/depth2/seed0/seed0"):
            request = ran.request(ran.job(name))
            key = f"{request.key}9"
            gang = replace(request, key=key, attempt_id=f"{key}.1", execution=Execution(num_workers=4, num_threads=1))
            answers = raise_errors(pool.run(ran.folder, 4, measure_in_gang, ran.folder, gang))
            assert len(set(answers)) == 1
            assert answers[0] == pytest.approx(
                (ran.metrics(name)["val_error"], ran.metrics(name)["val_loss"]), rel=1e-5
            )
            alone, together = (SampleOutcomes.read(ran.store, read_record(ran.store, k)) for k in (request.key, key))
            assert alone and together  # noqa: PT018 - both are there
            assert alone.right_N.tolist() == together.right_N.tolist()
    finally:
        pool.close()
