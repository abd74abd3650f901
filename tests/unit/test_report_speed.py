"""What reports do in bulk says the same as what they would do one by one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]

from orchestrator.core.errors import CorruptObjectError
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import map_in_threads, read_epochs_and_metrics, read_metric_history
from orchestrator.report.render.curves import draw_curve, encode_png, encode_svg
from orchestrator.report.render.files import json_ready, json_text
from orchestrator.report.statistics.corrections import benjamini_hochberg
from orchestrator.report.statistics.summaries import SeedPair, all_paired_differences, paired_difference
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.local import LocalStore
from orchestrator.testing.memory_store import MemoryStore
from tests.report_sweeps import StudyPlan, committed

KEY = "pretrain-a-0123456789abcdef"
PAIRS = st.builds(SeedPair, pretrain=st.integers(0, 3), transfer=st.integers(0, 2))
VALUES = st.dictionaries(PAIRS, st.floats(0, 1) | st.just(math.nan), max_size=9)


@dataclass(frozen=True)
class Leaf:
    value: float
    text: str = "a"


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]
    nothing: None = None


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TREES = st.builds(
    Tree,
    leaves=st.lists(st.builds(Leaf, value=FLOATS), max_size=3).map(tuple),
    by_name=st.dictionaries(st.text(max_size=3), st.builds(Leaf, value=FLOATS), max_size=3),
)


@given(TREES)
def test_json_text_is_that_of_the_fields_with_null_for_what_json_lacks(tree):
    text = json_text({"tree": tree}, sort_keys=True)
    assert text == json.dumps(json_ready({"tree": asdict(tree)}), sort_keys=True, allow_nan=False)


def test_json_text_of_what_is_no_json_is_refused():
    with pytest.raises(TypeError):
        json_text({"a": object()})


@given(st.lists(VALUES, max_size=5))
def test_differences_of_all_pairs_are_those_of_each(values):
    triangle = all_paired_differences(values)
    assert [len(row) for row in triangle] == list(reversed(range(len(values))))
    for first, second in combinations(range(len(values)), 2):
        found, alone = triangle[first][second - first - 1], paired_difference(values[second], values[first])
        assert found == alone  # to the last bit


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_benjamini_hochberg_is_that_of_statsmodels(p_values):
    assert benjamini_hochberg(p_values) == pytest.approx(multipletests(p_values, method="fdr_bh")[1], abs=1e-12)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_results_of_threads_come_in_order_and_each_once(count, kind, tmp_path):
    store = kind(tmp_path) if kind is LocalStore else kind()
    asked: list[int] = []

    def double(number: int) -> int:
        asked.append(number)
        return 2 * number

    assert map_in_threads(store, double, range(count)) == [2 * number for number in range(count)]
    assert sorted(asked) == list(range(count))


def _line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "epoch": step / 2, "at_s": 1.0, "metrics": metrics}) + "\n"


def test_epochs_and_metrics_are_those_of_the_lines_that_count():
    store = MemoryStore()
    store.put(metrics_segment(KEY, 1, 0, 3), (_line(2, a=2.0) + _line(1, a=math.nan, b=1.0) + _line(3)).encode())
    store.put(metrics_segment(KEY, 2, 2, 4), (_line(3, a=3.0) + _line(4, b=4.0)).encode())
    lines = read_metric_history(store, KEY)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    found = read_epochs_and_metrics(store, KEY)
    assert str(found) == str([(line.epoch, dict(line.metrics)) for line in lines])


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"step": 1}',
        b'{"step": "x", "epoch": 1, "metrics": {}}',
        b'{"step": 1, "epoch": 1, "metrics": [1]}',
        b"[]",
    ],
)
def test_segment_that_is_damaged_is_named(content):
    store = MemoryStore()
    name = metrics_segment(KEY, 1, 0, 1)
    store.put(name, content)
    for read in (read_epochs_and_metrics, read_metric_history):
        with pytest.raises(CorruptObjectError, match=name):
            read(store, KEY)


def test_both_forms_of_the_curve_have_all_of_their_panels_inside():
    """Panels are laid out once: legends below them would be cut off by another form's edge."""
    plan = StudyPlan(transfers=("main", "probe")).plan("file:///store")
    report = compute_report(plan, committed(plan, lambda job: {"val_error": 0.3}))
    figure = draw_curve(report)
    assert len(figure.axes) == 2
    for axis in figure.axes:
        legend = axis.get_legend()
        assert legend is not None
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert encode_png(figure) == encode_png(draw_curve(report))
    assert encode_svg(figure) == encode_svg(draw_curve(report))
