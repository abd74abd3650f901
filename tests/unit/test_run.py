"""The entry point: every kind has its handler, committed keys are not computed again."""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.code import package_digest, sources_digest
from orchestrator.core.contract import ENTRY_POINT, ExecutionContext, JobRequest, JobResult, Outcome
from orchestrator.core.errors import FailureKind, IdentityMismatchError, StorageError, UserError
from orchestrator.core.job_kinds import KINDS, JobKind
from orchestrator.planning.graph.identity import make_identity
from orchestrator.storage.artifacts import ArtifactWriter, is_committed
from orchestrator.storage.local import LocalStore
from workloads.run import _HANDLERS, execute

ROOT = Path(__file__).parents[2]


@pytest.fixture
def context(tmp_path: Path) -> ExecutionContext:
    return ExecutionContext(store=LocalStore(tmp_path / "store"), scratch=tmp_path, cache=tmp_path)


def _request(context: ExecutionContext, kind: JobKind, parameters: dict[str, object]) -> JobRequest:
    key = f"{kind}-0123456789abcdef"
    return JobRequest(
        attempt_id=f"{key}.1",
        attempt_number=1,
        sweep="s",
        job=f"{kind}/x",
        key=key,
        kind=kind,
        identity=make_identity(kind, parameters, {}),
        store_uri=context.store.uri,
    )


def test_entry_point_of_the_contract_is_execute() -> None:
    module, _, name = ENTRY_POINT.partition(":")
    assert getattr(importlib.import_module(module), name) is execute


@pytest.mark.parametrize("handler", _HANDLERS.values(), ids=lambda handler: handler.partition(":")[2])
def test_run_every_handler_exists(handler: str) -> None:
    module, _, name = handler.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.ci
def test_run_jobs_that_build_no_network_do_not_import_what_builds_it() -> None:
    kinds = ["dataset", "index", "labels", "cluster", "knn", "probe", "theory"]  # a probe on cached features
    code = (
        "import sys; from orchestrator.core.job_kinds import JobKind; from workloads.run import _load_handler\n"
        f"for kind in {kinds}: _load_handler(JobKind(kind))\n"
        "print('timm' in sys.modules, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"]


def test_run_kind_without_handler_is_a_user_error(context: ExecutionContext) -> None:
    with pytest.raises(UserError, match="kind search"):
        execute(_request(context, JobKind.SEARCH, {}), context)


@pytest.mark.parametrize("role", ["dataset", "search"])
def test_run_without_an_input_is_tried_again_later(role: str, context: ExecutionContext) -> None:
    """A collection may hide it for a moment."""
    request, key = _request(context, JobKind.INDEX, {}), f"{role}-0123456789abcdef"
    request = replace(request, identity={**request.identity, "inputs": {role: key}})
    with pytest.raises(StorageError, match=f"{key}, which this job reads, is not in") as caught:
        execute(request, context)
    assert caught.value.failure_kind is FailureKind.STORAGE


def test_run_without_the_artifact_of_its_initial_weights_is_tried_again_later(
    context: ExecutionContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No input, since no job of the sweep makes it; a collection may hide it all the same."""
    key = "pretrain-before-0123456789abcdef"
    request = _request(context, JobKind.PRETRAIN, {"initial": {"artifact": key}})

    def handler(*_: object) -> JobResult:
        raise UserError(f"initial weights are to come from the artifact {key}, which the store does not hold")

    monkeypatch.setattr("workloads.run._load_handler", lambda _: handler)
    with pytest.raises(StorageError, match=f"{key}, which this job reads, is not in") as caught:
        execute(request, context)
    assert caught.value.failure_kind is FailureKind.STORAGE
    ArtifactWriter(context.store, replace(request, key=key)).commit(now=0.0)
    with pytest.raises(UserError):
        execute(request, context)


def test_run_job_that_another_release_planned_is_refused_and_its_result_is_returned(context: ExecutionContext) -> None:
    """Installing a release ends no sweep: results of its code must not come under the keys of the release before."""
    parameters = {"builtin": "digits", "version": 1, "val_fraction": 0.2, "seed": 0}
    request = _request(context, JobKind.DATASET, parameters)
    here = KINDS[JobKind.DATASET].code_version
    request = replace(request, identity={**request.identity, "code_version": 99})
    with pytest.raises(UserError, match=rf"dataset 99 \(here {here}\).*submit the sweep again"):
        execute(request, context)
    assert not is_committed(context.store, request.key)
    ArtifactWriter(context.store, request).commit(now=0.0)
    assert execute(request, context).outcome is Outcome.ALREADY_COMMITTED


def test_run_committed_key_returns_its_metrics_without_work(context: ExecutionContext) -> None:
    # Parameters that no pretraining accepts: any work at all would raise.
    request = _request(context, JobKind.PRETRAIN, {"nonsense": True})
    ArtifactWriter(context.store, request).commit(now=0.0, metrics={"val_error": 0.25})
    result = execute(request, context)
    assert result.outcome is Outcome.ALREADY_COMMITTED
    assert result.metrics == {"val_error": 0.25}
    assert result.attempt_id == request.attempt_id


def test_run_committed_key_of_another_identity_is_refused(context: ExecutionContext) -> None:
    ArtifactWriter(context.store, _request(context, JobKind.PRETRAIN, {"a": 1})).commit(now=0.0)
    with pytest.raises(IdentityMismatchError):
        execute(_request(context, JobKind.PRETRAIN, {"a": 2}), context)


def test_run_times_add_up(context: ExecutionContext) -> None:
    parameters = {"builtin": "digits", "version": 1, "val_fraction": 0.2, "seed": 0}
    timings = execute(_request(context, JobKind.DATASET, parameters), context).timings
    assert 0 <= timings.import_s <= timings.work_s
    assert timings.setup_s == 0


def test_package_digest_is_one_hash_of_both_packages() -> None:
    assert len(bytes.fromhex(package_digest())) == 32


def test_sources_digest_follows_names_and_contents_of_sources_only(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    before = sources_digest([package])
    (package / "a.pyc").write_text("compiled")
    assert sources_digest([package]) == before
    (package / "a.py").write_text("x = 2\n")
    edited = sources_digest([package])
    (package / "a.py").rename(package / "b.py")
    assert len({before, edited, sources_digest([package])}) == 3
