"""What every test shares: isolation from the caller, hypothesis without deadlines, answers without processes."""

import atexit
import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

GROUPS = {"ray_cluster": "ray", "pool": "ranks", "s3_server": "s3", "s3": "s3"}
"""Fixtures that take seconds to make, or their parameters, and the group of tests that shares each."""

_FAILED = pytest.StashKey[bool]()
_NUMBERS = itertools.count()

FOREIGN_PREFIXES = ("AWS_", "MLFLOW_", "ORCHESTRATOR_", "RAY_", "SLURM_")

# A caller's cluster, tracking server or credentials must neither decide a result nor receive one.
for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES)]:
    del os.environ[name]
_CACHE = tempfile.TemporaryDirectory(prefix="cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # nor may what a caller's commands have remembered
os.environ["XDG_CONFIG_HOME"] = f"{_CACHE.name}/config"  # nor may a caller's own contexts
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# Threads of torch and BLAS spin while they wait for one another; where processes share cores, that takes most of the
# time. It counts only if it is set before the libraries are loaded. Jobs set their number of threads themselves.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Tests write thousands of small files and sync each: in memory that takes a seventh less time. The directory of a test
# that passed is removed at once (`tmp_path`). PYTEST_DEBUG_TEMPROOT=/tmp puts all on disk.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 * 1024**3  # noqa: S108 - pytest makes a private directory there
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# A shell's background jobs ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two busy cores make any per-example deadline a lie; in CI the same examples run every time.
settings.register_profile("project", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what stays anyway: looking at it takes a third of the time of loading."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or modules in C report as leaked what the interpreter does not take down
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _answers_of_the_data_plane() -> Iterator[None]:
    """Hundreds of tests read a sweep; each question of it to a process would take seconds."""
    from tests.answers import answered_here  # after the caller's variables are gone

    with answered_here():
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """All tests on the shared Ray cluster run in one process, and so do all with ranks and all on the S3 server."""
    grouped, places = [], {group: place for place, group in enumerate(dict.fromkeys(GROUPS.values()))}
    for item in items:
        if group := next((GROUPS[name] for name in _ingredients(item) if name in GROUPS), None):
            item.add_marker(pytest.mark.xdist_group(group))
            grouped.append(item)
    # What takes long begins first: the groups, of which that on Ray mostly waits, then files by their limits of time.
    limits: dict[Path, float] = defaultdict(float)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], mark.args[0] if mark else 0.0)

    def place(item: pytest.Item) -> tuple[int, float]:
        group = item.get_closest_marker("xdist_group")
        return places.get(group.args[0], len(places)) if group else len(places), -limits[item.path]

    items.sort(key=place)
    result = yield
    if getattr(config.option, "loadgroup", False):  # pytest-xdist appends the group's name, or loses it without a word
        assert all("@" in item.nodeid for item in grouped), "this pytest-xdist ignores xdist_group under this pytest"
    return result


def _ingredients(item: pytest.Item) -> Iterator[str]:
    """Fixtures of a test, and its parameters that are text."""
    yield from getattr(item, "fixturenames", ())
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    yield from (value for value in parameters.values() if type(value) is str)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers which tests failed."""
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As pytest's, but removed when the test has passed, and under a name that is never used again: a process remembers
    stores and databases by their paths."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.mktemp(f"{name}_{next(_NUMBERS)}", numbered=False)
    yield path
    if not request.node.stash.get(_FAILED, False):
        shutil.rmtree(path, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Only its own tests see the variables of the shared Ray cluster."""
    from tests.shared_cluster import without_cluster  # after the caller's variables are gone

    with nullcontext() if "ray_cluster" in getattr(item, "fixturenames", ()) else without_cluster():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """Gives the tests of a file to one process: they share fixtures that are costly to make."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFileOrGroup(LoadGroupScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            group = nodeid.rpartition("@")[2]
            return group if group in GROUPS.values() else nodeid.split("::", maxsplit=1)[0]

    return ByFileOrGroup(config, log)
