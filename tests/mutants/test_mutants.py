"""Bugs planted on purpose are found: a few of them always, all of them by ``make mutants``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.engine import Mutant, StaleMutantError, planted

ROOT = Path(__file__).parents[2]
QUICK = (
    "launch before append",
    "adoption is not written",
    "epoch does not rise",
    "runner is not released",
    "room is not taken",
    "job is launched before all that it needs",
)


def hunt(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.mutants", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_mutants_quick_ones_are_caught() -> None:
    assert f"caught {len(QUICK)}/{len(QUICK)}" in hunt("--seeds", "15", *(f"--only={name}" for name in QUICK))


def test_mutants_have_code_to_change_and_names_of_their_own() -> None:
    for mutant in MUTANTS:
        with planted(mutant):
            pass
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_mutant_of_code_that_is_gone_says_so() -> None:
    gone = Mutant(name="gone", where="orchestrator.core.units:format_bytes", old="no such code", new="", seed=0)
    with pytest.raises(StaleMutantError, match="gone"), planted(gone):
        pass


def test_planted_bug_is_gone_afterwards() -> None:
    from orchestrator.core import units

    mutant = Mutant(name="bits", where="orchestrator.core.units:format_bytes", old="} B", new="} bits", seed=0)
    with planted(mutant):
        assert units.format_bytes(1) == "1 bits"
    assert units.format_bytes(1) == "1 B"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mutants_are_all_caught() -> None:
    assert f"caught {len(MUTANTS)}/{len(MUTANTS)}" in hunt()
