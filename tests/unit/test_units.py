"""Durations and sizes as people read them, from a tenth of a second to years."""

import pytest

from orchestrator.core.units import GIB, format_bytes, format_duration, parse_duration

HOUR = 3600.0


@pytest.mark.parametrize(
    ("duration_s", "expected"),
    [
        (0.31, "0.3s"),
        (75, "1m15s"),
        (7300, "2h01m"),
        (95 * HOUR, "95h00m"),
        (100 * HOUR, "4d04h"),
        (729 * 24 * HOUR, "729d00h"),
        (3650 * 24 * HOUR, "10.0 years"),
        (1e12, "31,709.8 years"),
    ],
)
def test_duration_has_the_unit_that_people_count_in(duration_s: float, expected: str) -> None:
    assert format_duration(duration_s) == expected


def test_duration_is_read_in_the_units_that_are_taken() -> None:
    assert [parse_duration(text) for text in ("90s", "10m", "36h", "1.5d")] == [90, 600, 36 * HOUR, 36 * HOUR]
    assert [parse_duration(text) for text in ("", "90", "s", "-1h", "1 h", "1w", "1h30m")] == [None] * 7
    assert [parse_duration(text, "mhd") for text in ("90s", "10m")] == [None, 600]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (12, "12 B"),
        (1536, "1.5 KiB"),
        (1.3 * 1024 * GIB, "1.3 TiB"),
        (2 * 1024**5, "2.0 PiB"),
        (3 * 1024**6, "3.0 EiB"),
    ],
)
def test_size_has_a_binary_prefix(num_bytes: float, expected: str) -> None:
    assert format_bytes(int(num_bytes)) == expected
