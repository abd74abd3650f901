"""Whatever is refused is refused with the recorded exit code and words, and nothing is written by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden_refusals import Case, all_cases, refuse

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refusal_has_the_golden_code_and_message(case: Case, tmp_path: Path) -> None:
    ended = refuse(case, tmp_path)
    assert ended.err.rstrip("\n") == case.says, "if it should be so, run: python -m tests.golden_refusals"
    assert (ended.code, ended.out) == (case.code, "")
    assert ended.code != 0
    assert not re.search(r"hunter2|AKIA|hf_abc|Traceback|pydantic|<class", ended.err)
