"""The wire forms of the contract, and errors through pickle."""

import inspect
import json
import pickle

import pytest

from orchestrator.core import errors
from orchestrator.core.contract import Execution, JobFailure, JobRequest, JobResult, Outcome, Progress, Timings
from orchestrator.core.errors import FailureKind, OrchestratorError, SourceLocation, SpecError
from orchestrator.core.job_kinds import KINDS, JobKind

REQUEST = JobRequest(
    attempt_id="k.1",
    attempt_number=1,
    sweep="s",
    job="pretrain/x/seed0",
    key="k",
    kind=JobKind.PRETRAIN,
    identity={"kind": "pretrain", "code_version": 1, "parameters": {"seed": 0}, "inputs": {"index": "i"}},
    store_uri="file:///s",
    execution=Execution(num_threads=2, checkpoint_every_steps=5),
)
RESULT = JobResult(
    attempt_id="k.1",
    key="k",
    outcome=Outcome.COMMITTED,
    metrics={"val_error": 0.25},
    timings=Timings(work_s=2.0),
    resumed_from_step=3,
)
FAILURE = JobFailure(attempt_id="k.1", key="k", kind=FailureKind.HANG, message="m", traceback="t")
PROGRESS = Progress(phase="train", step=1, total_steps=2, metrics={"lr": 0.1})
ERRORS = [
    type_
    for _, type_ in inspect.getmembers(errors, inspect.isclass)
    if issubclass(type_, OrchestratorError) and type_ is not SpecError
]


@pytest.mark.parametrize("value", [REQUEST, RESULT, FAILURE, PROGRESS], ids=lambda value: type(value).__name__)
def test_value_through_json_and_back_is_equal(value: JobRequest | JobResult | JobFailure | Progress) -> None:
    restored = type(value).from_json(json.loads(json.dumps(value.to_json())))
    assert restored == value
    assert repr(restored) == repr(value)  # enums and nested classes, not only equal strings


def test_request_names_its_parameters_and_inputs() -> None:
    assert REQUEST.parameters == {"seed": 0}
    assert REQUEST.inputs == {"index": "i"}


@pytest.mark.parametrize("type_", ERRORS)
def test_error_through_pickle_keeps_message_and_kind(type_: type[OrchestratorError]) -> None:
    restored = pickle.loads(pickle.dumps(type_("what, why, what to do")))  # noqa: S301 - our own bytes
    assert type(restored) is type_
    assert str(restored) == "what, why, what to do"
    assert restored.failure_kind in FailureKind


def test_spec_error_through_pickle_keeps_its_problems() -> None:
    location = SourceLocation(file="sweep.yaml", line=14, column=7)
    error = SpecError((f"{location}: unknown key",))
    restored = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert restored.problems == error.problems
    assert str(restored) == "sweep.yaml:14:7: unknown key"


def test_every_kind_has_one_row_in_order() -> None:
    assert list(KINDS) == list(JobKind)
    assert all(row.handler for row in KINDS.values() if row.trains)
    assert all(row.resources and row.code_version for row in KINDS.values() if row.handler)
