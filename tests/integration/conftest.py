"""One Ray cluster for all tests of a run; every test has its own namespace and store on it."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Backend
from orchestrator.stack.environment import child_environment, renew_token
from orchestrator.storage.local import LocalStore
from tests.integration.ray_jobs import Gate, look
from tests.shared_cluster import enter_cluster, leave_cluster
from tests.waiting import wait_until

NUM_CPUS = 8  # invented: runners of tests mostly wait
ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0  # below the limit of a test; on a busy machine a gang may take more than a minute to start
FINISH_WITHIN_S = 110.0
"""For a gang, which takes half a minute to start where nothing else runs."""


@pytest.fixture(scope="session")
def ray_cluster():
    import ray

    if ray.is_initialized():  # by this very fixture under another folder's conftest, which also ends it
        yield ray
        return
    # Not pytest's own directory: a socket's path may have 107 characters.
    home = Path(tempfile.mkdtemp(prefix="orc-t-"))
    renew_token(home)
    # As a node of Slurm has it: whoever was assigned no GPU must not see one.
    enter_cluster({**child_environment(home), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0,1"})
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        namespace="tests",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(home / "r"),
    )
    yield ray
    ray.shutdown()
    leave_cluster()
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def fresh_namespace(ray_cluster) -> Iterator[str]:
    """A namespace whose actors all end behind the yield."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    wait_until(lambda: _all_ended(ray_cluster, name), f"actors and gangs of {name} have ended", deadline_s=60.0)


def _all_ended(ray_cluster, namespace: str) -> bool:
    """Kills the actors of a namespace, and gives back what their gangs hold; whether nothing was left to do."""
    # Not at the top: the tests of training here also run where there is no Ray.
    from orchestrator.backends.ray import placement_groups
    from orchestrator.controller.connect import CONTROLLER_NAME, WATCHDOG_NAME

    def is_runner(_name: str, where: str) -> bool:
        return where == namespace

    listed = ray_cluster.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in listed if actor["namespace"] == namespace]
    # First the watchdog, which would bring the controller back, then the controller, which would make runners.
    for name in sorted(names, key=lambda name: (name != WATCHDOG_NAME, name != CONTROLLER_NAME)):
        with suppress(ValueError):  # it has ended meanwhile
            ray_cluster.kill(ray_cluster.get_actor(name, namespace=namespace), no_restart=True)
    for group_id in placement_groups.orphaned_groups(is_runner):
        placement_groups.remove_reservation(group_id)
    makers = [placement_groups._actor(group.creator_actor_id) for group in placement_groups._live_groups()]
    return not names and not any(maker and placement_groups._is_ours(maker, is_runner) for maker in makers)


@pytest.fixture
def namespace(ray_cluster):
    """A namespace whose actors all end with the test."""
    with fresh_namespace(ray_cluster) as name:
        yield name


@pytest.fixture
def backend(namespace, request):
    """With the file's ``SETTINGS``; it keeps no runners ready."""
    from orchestrator.backends.ray.backend import RayBackend  # not at the top: see above

    made = RayBackend(namespace, settings=request.module.SETTINGS, spare_runners=0)
    made.announce(1)
    return made


@pytest.fixture
def nodes(ray_cluster, tmp_path, until):
    """Nodes that join the cluster, and leave it with the test."""
    from tests.integration.extra_nodes import ExtraNodes  # see above

    made = ExtraNodes(ray_cluster, tmp_path, until)
    yield made
    made.end()


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait for a condition that another process brings about; fail after a generous deadline."""

    def wait(condition: Callable[[], object], deadline_s: float = DEADLINE_S, *, pause_s: float | None = None) -> None:
        wait_until(condition, deadline_s=deadline_s, pause_s=pause_s)

    return wait


@pytest.fixture
def gate(tmp_path):
    return Gate(path=tmp_path / "gate")


@pytest.fixture
def finish(until):
    """Observe an attempt to its end."""

    def finished(backend: Backend, attempt_id: str) -> AttemptReport:
        until(lambda: look(backend, attempt_id).status is not AttemptStatus.RUNNING, FINISH_WITHIN_S)
        return look(backend, attempt_id)

    return finished


@pytest.fixture
def running_pid(until):
    """Process of the runner in which an attempt runs, once it does."""

    def pid(backend: Backend, attempt_id: str) -> int:
        def progress():
            report = look(backend, attempt_id)
            assert report.status is AttemptStatus.RUNNING, report
            told = report.progress
            # The runner adds what the attempt has done besides steps.
            return told if told and "pid" in told.metrics and told.done else None

        until(progress)
        found = progress()
        assert found is not None
        return int(found.metrics["pid"])

    return pid
