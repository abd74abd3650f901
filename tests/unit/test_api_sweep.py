"""The Python API's own rules; what it shares with the command line is tested there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api import Sweep
from orchestrator.api.sweep import Where
from orchestrator.errors import SpecError
from tests.unit.test_declared_datasets import ABSENT, Declared


def test_submit_of_a_declared_data_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    declared = Declared(tmp_path)
    declared.sweep({"from": declared.place, **ABSENT})
    sweep = Sweep.from_yaml(declared.path, store=(tmp_path / "store").as_uri())
    assert sweep.plan().plan.jobs
    with pytest.raises(SpecError, match="suffices to plan, but not to run"):
        sweep.submit(Where.INPROCESS)
    assert not (tmp_path / "store").exists()
