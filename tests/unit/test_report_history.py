import pytest

from orchestrator.core.errors import CorruptObjectError
from orchestrator.report.inputs import list_segments, read_metric_history
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.local import LocalStore
from tests.sample_journal import write_segment

KEY = "pretrain-sample-0123456789abcdef"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def _losses(store):
    return [(line.step, line.metrics["train_loss"]) for line in read_metric_history(store, KEY)]


def test_history_no_segments_is_empty(store):
    assert read_metric_history(store, KEY) == []


def test_history_segments_of_one_attempt_are_joined_in_order(store):
    write_segment(store, KEY, 1, 2, [3.0])
    write_segment(store, KEY, 1, 0, [1.0, 2.0])
    assert _losses(store) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_history_resumed_attempt_supersedes_later_steps_only(store):
    write_segment(store, KEY, 1, 0, [1.0, 2.0, 9.0, 9.0])
    write_segment(store, KEY, 1, 4, [9.0])
    write_segment(store, KEY, 2, 2, [3.0])
    assert _losses(store) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_history_attempt_from_the_start_supersedes_everything(store):
    write_segment(store, KEY, 1, 0, [9.0, 9.0])
    write_segment(store, KEY, 2, 0, [1.0])
    assert _losses(store) == [(1, 1.0)]
    assert [segment.attempt for segment in list_segments(store, KEY)] == [2]


def test_history_line_carries_epoch_and_time(store):
    write_segment(store, KEY, 1, 0, [1.0], at_s=100.0)
    (line,) = read_metric_history(store, KEY)
    assert (line.epoch, line.at_s) == (0.1, 101.0)


def test_history_altered_segment_is_named(store):
    store.put(metrics_segment(KEY, 1, 0, 1), b'{"step": 1}\n')
    with pytest.raises(CorruptObjectError, match=r"000000000000-000000000001\.jsonl"):
        read_metric_history(store, KEY)


def test_history_foreign_name_is_named(store):
    store.put(f"metrics/{KEY}/000001/notes.jsonl", b"")
    with pytest.raises(CorruptObjectError, match=r"notes\.jsonl"):
        list_segments(store, KEY)
