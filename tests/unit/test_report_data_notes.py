"""What a report says of its data sets, and of runs that did not see the very samples that others saw."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import compute_report, notes_on
from orchestrator.report.inputs import Committed
from orchestrator.report.render.numbers import not_in_intervals
from orchestrator.report.render.study import study_facts
from orchestrator.report.tables import PublishedIndex
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.local import LocalStore
from tests.sweep_fields import plan_of
from tests.tiny_training import TinyTraining
from workloads.train.safety import Rewind

REWIND = Rewind(failed_step=7, to_step=4, first_batch=4, num_batches=4, reason="loss is nan", samples=("a.tar:k",))


def notes(**committed: Committed) -> list[str]:
    plan = Plan(sweep="s", revision=0, store_uri="", jobs=(), baseline="")
    return list(notes_on(plan, committed, {}, PublishedIndex(())))


def test_notes_name_the_first_run_that_left_batches_out() -> None:
    (found,) = notes(
        a=Committed(metrics={}), b=Committed(metrics={}, num_rewinds=2), c=Committed(metrics={}, num_rewinds=1)
    )
    assert found == (
        "2 runs were rewound after a NaN, an infinity or a spike, and skipped the batches before it, 3 times in all "
        "(first: b); their records name the samples, and their curves may show, between the two steps of a rewind, "
        "values from before it"
    )


def test_notes_name_the_first_run_that_replaced_samples() -> None:
    (found,) = notes(a=Committed(metrics={}, num_bad_samples=5), b=Committed(metrics={}, num_bad_samples=9))
    assert found == (
        "2 runs found samples that cannot be decoded, up to 9 per run; training replaced them and validation left them "
        "out (first: a); their records name them"
    )


def test_notes_of_runs_without_incidents_are_none() -> None:
    assert notes(a=Committed(metrics={})) == []


TWO_DATASETS = """\
version: 1
name: study
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}
  scans: {builtin: digits}
labels: {levels: {dataset: tree, hierarchy: [depth2]}, digit: {dataset: scans, hierarchy: [digit]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: [levels/depth2]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0]
transfer: [{name: knn, target: digit/digit, protocol: knn}]
"""


def test_only_data_sets_of_targets_are_said_to_judge_results() -> None:
    plan = plan_of(text=TWO_DATASETS)
    found = {job.name: Committed(metrics={"val_error": 0.1}, num_val=360) for job in plan.jobs}
    data = dict(study_facts(compute_report(plan, found), plan))["Data"]
    tree = "tree (synthetic-hierarchy, 512 training, 256 validation images)"
    assert data == f"{tree}; scans (digits, judged on 360 images)"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Of a real run, as the data plane commits it."""
    tiny = TinyTraining(LocalStore(tmp_path / "store"), tmp_path)
    return read_record(tiny.store, tiny.run(tiny.training(JobKind.PRETRAIN, recipe={"epochs": 0.5})).key)


def test_committed_of_a_record_counts_what_the_data_plane_tells(record: Record) -> None:
    assert (Committed.of(record).num_rewinds, Committed.of(record).num_bad_samples) == (0, 0)
    told = {
        "rewinds": [asdict(REWIND)],
        "bad_samples": {
            "train": {"truncated": {"count": 3, "first": []}, "empty": {"count": 1, "first": []}},
            "val": {"truncated": {"count": 2, "first": []}},
        },
    }
    found = Committed.of(replace(record, summary={**record.summary, **told}))
    assert (found.num_rewinds, found.num_bad_samples) == (1, 6)


CHAINED = """\
version: 1
name: study
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  fine:
    model: {name: test_vit, image_size: 32}
    labels: [levels/depth2]
    recipe: {epochs: 1, batch_size: 32, lr: 0.1}
    seeds: [0, 1]
  coarse:
    model: {name: test_vit, image_size: 32}
    labels: [levels/depth1]
    init: {pretrain: fine, labels: levels/depth2, seed: same}
    recipe: {epochs: 1, batch_size: 32, lr: 0.1}
    seeds: [0, 1]
transfer:
  - name: few
    protocol: finetune
    target: levels/depth2
    subset: {max_per_class: 5}
    recipe: {epochs: 1, batch_size: 32, lr: 0.1}
    seeds: [1, 2]
"""
ONE_DRAW = "all transfer seeds train on the same drawn samples"
ONE_SEARCH = "the transfers of all seeds of a row have the recipe that one search found"
SEARCH = "search: {%srandom: {}, trials: 2, space: {weight_decay: [0.0, 1e-4]}}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", ONE_DRAW),
        ("seed: same", "seed: 0", f"{ONE_DRAW}, and the pretrainings of all seeds of a row continue one backbone"),
        (
            "{pretrain: fine, labels: levels/depth2, seed: same}",
            "{timm: r160_in1k}",
            f"{ONE_DRAW}, and the pretrainings of all seeds of a row continue one backbone",
        ),
        ("subset: {max_per_class: 5}", "fractions: [0.5]", ""),
        ("seeds: [1, 2]", "seeds: [1]", ""),
        ("subset: {max_per_class: 5}", SEARCH % "", ONE_SEARCH),
    ],
)
def test_table_says_what_its_seeds_have_in_common(old: str, new: str, expected: str) -> None:
    plan = plan_of(text=CHAINED.replace(old, new) if old else CHAINED)
    results = {job.name: Committed(metrics={"val_error": 0.1}) for job in plan.jobs}
    found = [note for table in compute_report(plan, results).tables for note in not_in_intervals(table)]
    told = [note for note in found if "do not cover the choice of these" in note]
    assert max(told, key=len, default="") == (f"{expected}: intervals do not cover the choice of these" if told else "")
    assert bool(told) is bool(expected)


def test_backbones_that_a_search_found_for_each_seed_have_no_choice_in_common() -> None:
    text = CHAINED[: CHAINED.index("  coarse:")] + CHAINED[CHAINED.index("transfer:") :]
    plan = plan_of(text=text.replace("subset: {max_per_class: 5}", SEARCH % "over: pretrain, "))
    results = {job.name: Committed(metrics={"val_error": 0.1}) for job in plan.jobs}
    assert not any(table.has_one_search for table in compute_report(plan, results).tables)
