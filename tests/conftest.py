"""What every test shares: isolation from the caller's shell, and hypothesis without wall-clock deadlines."""

import atexit
import gc
import json
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import settings

FOREIGN_PREFIXES = ("AWS_", "MLFLOW_", "ORCHESTRATOR_", "RAY_")

# A caller's cluster, tracking server or credentials must neither decide a result nor receive one.
for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES)]:
    del os.environ[name]
_CACHE = tempfile.TemporaryDirectory(prefix="cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # nor may what a caller's commands have remembered
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# Torch's threads spin while they wait for one another; where the processes of the tests share cores, that takes most of
# the time. Results do not depend on it. It counts only when it stands before torch is loaded.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# A shell's background jobs ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two busy cores make any per-example deadline a lie; in CI the same examples run every time.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what stays anyway: a third of the time of loading, and more in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or modules in C report as leaked what the interpreter does not take down
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def sweeps_are_looked_at_here() -> Iterator[None]:
    """The data plane's answers about models and classes, without a process: importing torch and timm takes 4 s of CPU.

    Neither runs code of a project or a package, as other answers do. What commands in processes ask is asked as always.
    """
    from orchestrator.core import data_plane, errors
    from orchestrator.sweepfile import survey

    def ask(question: data_plane.Question[Any, Any], request: Any, **limits: Any) -> Any:
        if question not in (data_plane.MODELS, data_plane.COUNT, data_plane.TABLE):
            return data_plane.ask(question, request, **limits)
        module, _, function = question.handler.partition(":")
        try:
            answer = getattr(import_module(module), function)(json.loads(json.dumps(request)))
        except errors.OrchestratorError as error:
            raise data_plane.NoAnswerError(str(error)) from error
        return json.loads(json.dumps(answer))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "ask", ask)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests on the shared Ray cluster run in one process, wherever they stand."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """Gives the tests of a file to one process: they share fixtures that are costly to make."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFileOrGroup(LoadGroupScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("@")[2] if nodeid.endswith("@ray") else nodeid.split("::", maxsplit=1)[0]

    return ByFileOrGroup(config, log)
