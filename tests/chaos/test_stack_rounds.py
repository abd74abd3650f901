"""Rounds of kills on the one-machine stack; ``make chaos ARGS="--stack --rounds 40"`` runs more."""

from __future__ import annotations

import secrets

import pytest

from tests.chaos.stack_rounds import run_stack_round


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stack_ends_its_sweep_and_leaves_nothing_whatever_is_killed():
    """Three to five minutes, and other deaths every time: many runs draw more of them than one long one."""
    made_of = secrets.choice((0, 1, 2, 5, 6))  # followed or not, a directory or S3, gangs or not
    run_stack_round(8 * secrets.randbelow(2**31) + made_of)
