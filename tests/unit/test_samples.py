"""Comparisons image by image: against statsmodels and known distributions, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar  # type: ignore[import-untyped]

from orchestrator.cli.commands.compare import SampleOptions, show_sample_comparison
from orchestrator.core.errors import CorruptObjectError, NotFoundError, UsageError, UserError
from orchestrator.report.compare_samples import (
    NetworkPair,
    compare_samples,
    draw_groups,
    groups_of,
    render_samples_page,
    sample_records,
    sample_sentences,
    sign_test,
)
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.sample_outcomes import COUNTED_PART, RIGHT_PART, SampleOutcomes
from tests.report_sweeps import accept
from tests.sample_sweep import commit, sample_plan

ORDER = "0" * 64


def outcomes(right, counted=None, order=ORDER):
    right_N = np.array(right, dtype=np.bool_)
    counted_N = np.ones(len(right_N), dtype=np.bool_) if counted is None else np.array(counted, dtype=np.bool_)
    return SampleOutcomes(right_N=right_N & counted_N, counted_N=counted_N, order_sha256=order)


def pair(first, second, pretrain=0, transfer=0):
    seeds = SeedPair(pretrain=pretrain, transfer=transfer)
    return NetworkPair(seeds=seeds, first="a", second="b", first_outcomes=first, second_outcomes=second)


def drawn(random, num, num_pairs, *, error=0.2, effect=0.0, seed_std=0.0):
    """Pairs of networks whose errors on images are independent draws; the effect varies over pretrain seeds."""
    pairs = []
    for seed in range(num_pairs):
        other = error + effect + seed_std * random.standard_normal()
        pairs.append(pair(outcomes(random.random(num) >= error), outcomes(random.random(num) >= other), pretrain=seed))
    return pairs


def compared(pairs, **changes):
    return compare_samples(pairs, first="A", second="B", **changes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_pair_of_networks_has_the_exact_test_of_mcnemar(rows):
    first, second = (outcomes([row[side] for row in rows]) for side in (0, 1))
    test = compared([pair(first, second)]).tests[0]
    table = [[sum(row == (a, b) for row in rows) for b in (True, False)] for a in (True, False)]
    assert test.p_value == pytest.approx(mcnemar(table, exact=True).pvalue, rel=1e-9)
    assert (test.num_broken, test.num_fixed) == (table[0][1], table[1][0])
    errors = [1 - np.mean([row[side] for row in rows]) for side in (0, 1)]
    assert test.difference == pytest.approx(errors[1] - errors[0])


def test_images_that_some_network_did_not_count_are_left_out_of_all():
    first = outcomes([1, 0, 1, 0], counted=[1, 1, 1, 0])
    second = outcomes([0, 1, 1, 1], counted=[0, 1, 1, 1])
    found = compared([pair(first, second)])
    assert (found.num_samples, found.num_left_out) == (2, 2)
    assert (found.tests[0].num_fixed, found.tests[0].num_broken) == (1, 0)
    assert found.counted_N.tolist() == [False, True, True, False]
    with pytest.raises(UserError, match="no validation image in common"):
        compared([pair(outcomes([1, 1], counted=[1, 0]), outcomes([1, 1], counted=[0, 1]))])


def test_networks_on_other_images_are_refused():
    with pytest.raises(UserError, match="not validated on the same images in the same order"):
        compared([pair(outcomes([1, 0]), outcomes([1, 0], order="1" * 64))])
    with pytest.raises(UserError, match="not validated on the same images in the same order"):
        compared([pair(outcomes([1, 0]), outcomes([1, 0, 1]))])


def test_interval_over_images_is_that_of_the_normal_approximation():
    pairs = drawn(np.random.default_rng(1), 20_000, 1, effect=0.02)
    found = compared(pairs)
    changes = pairs[0].first_outcomes.right_N.astype(int) - pairs[0].second_outcomes.right_N
    half = 1.96 * changes.std() / np.sqrt(len(changes))
    assert found.over_images.low == pytest.approx(changes.mean() - half, abs=5e-4)
    assert found.over_images.high == pytest.approx(changes.mean() + half, abs=5e-4)
    assert found.over_both is None
    assert found.mean == pytest.approx(changes.mean())


def test_interval_over_seeds_and_images_holds_both_spreads():
    random = np.random.default_rng(2)
    still, moving = (compared(drawn(random, 2_000, 8, seed_std=std)) for std in (0.0, 0.05))
    assert still.over_both is not None
    assert moving.over_both is not None
    widths = [found.over_both.high - found.over_both.low for found in (still, moving)]
    assert widths[0] == pytest.approx(
        2 * 1.96 * np.sqrt(2 * 0.16 / 2_000 / 8), rel=0.3
    )  # the spread is itself uncertain
    # Seeds vary much more than images: Student's t over the seeds, as in the table.
    means = [test.difference for test in moving.tests]
    half = float(stats.t.ppf(0.975, 7) * np.std(means, ddof=1) / np.sqrt(8))
    assert widths[1] == pytest.approx(2 * half, rel=0.03)
    assert widths[1] > 1.5 * (moving.over_images.high - moving.over_images.low)


def test_every_pretrain_seed_counts_once_however_many_transfers_it_has():
    same, worse = outcomes([1, 1, 1, 1]), outcomes([1, 1, 0, 0])
    pairs = [pair(same, worse, 0, 0), *(pair(same, same, 1, transfer) for transfer in range(3))]
    assert compared(pairs).mean == pytest.approx(0.25)


def test_one_seed_speaks_of_two_networks_and_several_of_label_spaces():
    random = np.random.default_rng(3)
    one, two, three, ten = (sample_sentences(compared(drawn(random, 500, num, effect=0.1))) for num in (1, 2, 3, 10))
    assert "one pretraining seed: this interval is about these two networks, not about the ways" in one[-1]
    assert two[-1] == "two pretraining seeds are too few for an interval over seeds"
    assert three[-1].startswith("over seeds and images, of the label spaces: 95 % interval ")
    assert ten[-1].endswith("(10 pretraining seeds)")
    assert not any("differs" in line or "no significant difference" in line for line in ten)


def test_nothing_changed_says_so_and_renders():
    found = compared([pair(outcomes([1, 0, 1]), outcomes([1, 0, 1]))])
    found = replace(found, groups=groups_of([], 1))
    assert any(
        "no significant difference between the two networks: p = 1.000" in line for line in sample_sentences(found)
    )
    draw_groups(found)


def test_groups_are_tested_within_their_kind():
    line = {"num_samples": 100, "num_fixed": 9, "num_broken": 1, "num_better": 9, "num_worse": 1}
    other = {"num_samples": 50, "num_fixed": 2, "num_broken": 2, "num_better": 2, "num_worse": 2}
    counted = [{"kind": "class", "name": "x", **line}, {"kind": "class", "name": "y", **other}]
    found = groups_of([*counted, {"kind": "subset", "name": "x", **line}], num_pairs=2)
    assert [group.difference for group in found] == [-0.04, 0.0, -0.04]
    assert found[0].p_value == found[2].p_value == sign_test(9, 1) == pytest.approx(0.021484375)
    assert [group.p_holm for group in found] == pytest.approx([2 * 0.021484375, 1.0, 0.021484375])


def test_page_and_records_escape_names_and_hold_every_group():
    line = {"num_samples": 4, "num_fixed": 1, "num_broken": 0, "num_better": 1, "num_worse": 0}
    groups = groups_of([{"kind": "class", "name": f"<b>{number}", **line} for number in range(15)], 1)
    found = replace(compared([pair(outcomes([1, 0, 1]), outcomes([1, 1, 1]))], place="x"), groups=groups)
    page = render_samples_page(found, figure_png=b"1", sheet_png=b"2").decode()
    assert "<b>" not in page
    assert "&lt;b&gt;1" in page
    assert len(sample_records([found]).rows) == 1 + 15
    assert json.dumps(found.to_json())


def commit_outcomes(store, job, found, **summary):
    commit(store, job, outcomes=found, said=summary)
    return read_record(store, job.key)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    store = LocalStore(tmp_path / "store")
    accept(store, sample_plan(store.uri))
    return store


def options(store, first="levels/depth1", second="levels/depth2", **changes):
    return SampleOptions(first=first, second=second, store=store.uri, **changes)


@pytest.mark.parametrize("counted", [None, [True, False] * 10 + [True]])
def test_outcomes_survive_their_record(store, counted):
    job = sample_plan(store.uri).jobs[-1]
    found = outcomes(np.arange(21) % 3 == 0, counted=counted)
    record = commit_outcomes(store, job, found)
    again = SampleOutcomes.read(store, record)
    assert (COUNTED_PART in record.parts) is (counted is not None)
    assert again is not None
    assert again.right_N.tolist() == found.right_N.tolist()
    assert again.counted_N.tolist() == found.counted_N.tolist()
    assert again.num_wrong == found.num_wrong


@pytest.mark.parametrize("wrong", [{"num_wrong": 1}, {"num_samples": 99}])
def test_outcomes_that_are_not_what_the_record_says_are_refused(store, wrong):
    record = commit_outcomes(store, sample_plan(store.uri).jobs[-1], outcomes([1, 0, 1, 0, 0]), **wrong)
    with pytest.raises(CorruptObjectError, match=RIGHT_PART):
        SampleOutcomes.read(store, record)


def test_outcomes_of_a_later_version_that_says_more_are_read(store):
    record = commit_outcomes(store, sample_plan(store.uri).jobs[-1], outcomes([1, 0, 1]), num_unsure=1)
    found = SampleOutcomes.read(store, record)
    assert found is not None
    assert found.num_wrong == 1


def test_compare_results_of_an_earlier_version_says_what_to_do(store):
    for job in sample_plan(store.uri).jobs:
        commit(store, job)
    with pytest.raises(UserError) as caught:
        show_sample_comparison(["sample"], options(store))
    message = str(caught.value)
    assert message.startswith("finetune/superclass/levels/depth1/seed0/seed0 and 5 more: committed by an earlier")
    assert "give the transfer a new seed" in message
    assert "backbones are reused" in message


@pytest.mark.parametrize(
    ("sweeps", "names", "error", "words"),
    [
        ([], ("a", "a"), UsageError, "names a twice"),
        (["sample", "other"], ("a", "b"), UsageError, "compares within one sweep"),
        (["sampel"], ("a", "b"), NotFoundError, "sample"),
        ([], ("levels/depth1", "levels/depth7"), NotFoundError, "neither a job nor a row 'levels/depth7'"),
        ([], ("levels/depth1", "pretrain/levels/depth2/seed0"), UsageError, "two jobs or two rows"),
        ([], ("index/tree", "pretrain/levels/depth2/seed0"), UserError, "index/tree is not a network"),
        ([], ("levels/depth1", "levels/depth2"), UserError, "no committed transfers with the same seeds yet"),
        (
            [],
            ("finetune/superclass/levels/depth1/seed0/seed0", "finetune/superclass/levels/depth2/seed0/seed0"),
            NotFoundError,
            "has no result yet",
        ),
    ],
)
def test_compare_samples_of_what_cannot_be_compared_is_refused(store, sweeps, names, error, words):
    with pytest.raises(error, match=words):
        show_sample_comparison(sweeps, options(store, *names))


@pytest.mark.parametrize("transfer", ["", "superclass"])
def test_every_table_that_is_compared_has_a_folder_of_its_own(store, tmp_path, monkeypatch, transfer):
    plan = sample_plan(store.uri, sweep="blocks", spaces=("levels/depth1", "levels/depth2"), seeds=(0, 1))
    jobs = [
        replace(job, facets={**job.facets, "pretrain": f"block{job.facets['pretrain_seed']}"})
        if "pretrain_seed" in job.facets
        else job
        for job in plan.jobs
    ]
    accept(store, replace(plan, jobs=tuple(jobs)))
    for job in jobs:
        commit(store, job, outcomes=outcomes([1, 0, 1]) if "transfer" in job.facets else None)

    def answered(_question, request, _doing):
        Path(request["sheet"]).write_bytes(b"")
        return {"groups": []}

    monkeypatch.setattr("orchestrator.cli.commands.compare.ask_labels", answered)
    show_sample_comparison(["blocks"], options(store, out=str(tmp_path / "out"), transfer=transfer))
    written = {str(path.parent.relative_to(tmp_path / "out")) for path in tmp_path.rglob("samples.html")}
    transfers = [transfer] if transfer else ["superclass", "superclass-probe"]
    assert written == {f"{name}/{block}" for name in transfers for block in ("block0", "block1")}


def test_sign_test_of_nothing_is_one_and_records_are_csv():
    assert sign_test(0, 0) == 1.0
    rows = sample_records([compared([pair(outcomes([1, 0]), outcomes([1, 1]))])]).rows
    assert next(csv.reader(io.StringIO(",".join(map(str, rows[0])))))[3] == "networks"
