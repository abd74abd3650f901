"""The same cells of several sweeps."""

from dataclasses import replace

import pytest
from scipy import stats

from orchestrator.core.errors import UserError
from orchestrator.report.build import compute_report
from orchestrator.report.compare_sweeps import SAME, UNPAIRED, compare_sweeps, comparison_tables, sweep_records
from tests.report_sweeps import StudyPlan, committed, renamed

FIRST = StudyPlan(sweep="first")
OFFSETS = {0: 0.010, 1: 0.013, 2: 0.008}


def _values(offset):
    return lambda job: {
        "val_error": 0.1 + 0.02 * job.facets["pretrain_seed"] + offset.get(job.facets["pretrain_seed"], 0.0)
    }


def _report(study, offset=OFFSETS):
    plan = study.plan()
    other = {job.key: f"{job.key}-{study.sweep}" for job in plan.jobs}
    plan = replace(plan, jobs=tuple(replace(job, key=other[job.key]) for job in plan.jobs))
    return compute_report(plan, committed(plan, _values(offset))), plan


def _compare(*studied):
    """Of reports, each with its plan."""
    reports, plans = zip(*studied, strict=True)
    return compare_sweeps(reports, plans)


def test_compare_pairs_runs_of_equal_seeds_over_sweeps():
    comparison = _compare(_report(FIRST, {}), _report(replace(FIRST, sweep="second")))
    (cells,) = comparison.places.values()
    differences = [found for cell in cells for found in cell.differences if found is not None]
    found = differences[0]
    expected = stats.ttest_1samp(list(OFFSETS.values()), 0.0)
    assert [cell.label_space for cell in cells] == list(FIRST.spaces)
    assert found.mean == pytest.approx(sum(OFFSETS.values()) / 3)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.p_value == pytest.approx(expected.pvalue)
    # All three cells have the same p-value here, and are one family.
    assert [other.p_holm for other in differences] == pytest.approx([3 * expected.pvalue] * 3)


def test_compare_runs_of_one_artifact_are_called_the_same():
    plan = FIRST.plan()
    reports = [compute_report(renamed(plan, name), committed(plan, _values({}))) for name in ("first", "again")]
    table = comparison_tables(compare_sweeps(reports, [plan, plan]))[0]
    assert {row[-4] for row in table.rows} == {SAME}


def test_compare_sweeps_without_a_common_seed_as_independent_samples():
    """Their cells had no difference, and nothing said why."""
    comparison = _compare(_report(FIRST), _report(replace(FIRST, sweep="second", pretrain_seeds=(3, 4))))
    (cells,) = comparison.places.values()
    (found,) = cells[0].differences
    assert found.mean == pytest.approx((0.16 + 0.18) / 2 - (0.110 + 0.133 + 0.148) / 3)
    assert (found.is_paired, found.num_pretrain_seeds) == (False, 2)
    table = comparison_tables(comparison)[0]
    assert {row[-3] for row in table.rows} == {UNPAIRED}
    assert f"{UNPAIRED}: their backbones share no seed, or only its number" in table.caption
    # Backbones of equal seeds that are transferred with other seeds are no independent samples.
    others = _compare(_report(FIRST), _report(replace(FIRST, sweep="second", transfer_seeds=(1,))))
    assert [cell.differences for some in others.places.values() for cell in some] == [(None,)] * 3


def test_compare_three_sweeps_has_a_difference_each_and_cells_of_two_count():
    third = replace(FIRST, sweep="third", spaces={"levels/depth1": 2, "levels/depth4": 64})
    comparison = _compare(_report(FIRST), _report(replace(FIRST, sweep="second")), _report(third))
    (cells,) = comparison.places.values()
    assert [cell.label_space for cell in cells] == list(FIRST.spaces)
    assert [cell.rows[2] is not None for cell in cells] == [True, False, False]
    assert comparison.notes == ("1 cells are in third only (first: levels/depth4 under main)",)
    header = comparison_tables(comparison)[0].header
    assert header[-8::4] == ("second - first [points]", "third - first [points]")
    records = sweep_records(comparison)
    assert len(records.rows) == 9
    assert {len(row) for row in records.rows} == {len(records.columns)}


def test_compare_nothing_in_common_says_how_cells_are_matched():
    comparison = _compare(_report(FIRST), _report(replace(FIRST, sweep="second", transfers=("other",))))
    assert comparison.places == {}
    assert "matched by name, protocol, target and facets" in comparison.notes[0]


@pytest.mark.parametrize(
    ("studies", "words"),
    [
        ([FIRST], "at least two different sweeps"),
        ([FIRST, FIRST], "at least two different sweeps"),
        ([FIRST, replace(FIRST, sweep="second", metric="best_val_error")], "name the one to compare with --metric"),
    ],
)
def test_compare_what_cannot_be_compared_is_refused(studies, words):
    with pytest.raises(UserError, match=words):
        _compare(*map(_report, studies))


def test_compare_says_which_sweep_selected_its_cells_on_validation():
    """The larger grid is the more optimistic one, and only one of the sweeps has a grid."""
    grid = replace(FIRST, sweep="grid", cells=("lr=0.1", "lr=1"))
    (note,) = _compare(_report(FIRST), _report(grid)).notes
    assert note.startswith("report of grid: rows marked as selected on validation")
    assert "optimistic" in note
