"""A lab member submits from elsewhere to a stack that somebody else started: with its token, and not without it.

A second user of this machine does it, in a clean home, with an interpreter that they can run.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.stack import Stack, ensure_stack, stop_stack
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import SweepLedger, list_sweeps
from tests.commands import Ended

ROOT = Path(__file__).parents[2]
GUEST = "orchestrator-guest"
SWEEP = """\
version: 1
name: {name}
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2], num_train: 64, num_val: 32}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: fasternet_t0, image_size: 32}}
  labels: ["levels/depth1"]
  recipe: {{epochs: 1, batch_size: 16, optimizer: sgd, lr: {lr}}}
  seeds: [0]
transfer:
  - name: probe
    target: levels/depth2
    protocol: probe
    recipe: {{epochs: 1, batch_size: 16, optimizer: sgd, lr: 0.1}}
report: {{baseline: levels/depth1}}
resources: {{pretrain: {{cpus: 1}}, transfer: {{cpus: 1}}}}
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a second user, and act as them"),
]


class Guest:
    """A user who shares nothing with us but the machine."""

    def __init__(self, home: Path, python: Path) -> None:
        self.home = home
        user = pwd.getpwnam(GUEST)
        self._user, self._group = user.pw_uid, user.pw_gid
        self._command = [str(python), "-m", "orchestrator.cli"]
        self.environment = {
            "HOME": str(home),
            "USER": GUEST,
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "PYTHONHOME": str(python.parents[1]),
            "LD_LIBRARY_PATH": str(python.parents[1] / "lib"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.use_code(ROOT)

    def use_code(self, root: Path) -> None:
        self.environment["PYTHONPATH"] = f"{root}:{sysconfig.get_path('purelib')}"

    def write(self, name: str, text: str) -> None:
        path = self.home / name
        path.write_text(text)
        path.chmod(0o600)
        shutil.chown(path, GUEST)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            user=self._user,
            group=self._group,
            extra_groups=[],
        )

    def run(self, *arguments: str) -> Ended:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=180)
        return Ended(code=process.returncode, out=out, err=err)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    # Not pytest's own folder, which it closes to other users whenever another run begins.
    folder = Path(tempfile.mkdtemp(prefix="orc-r-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def guest(place: Path) -> Iterator[Guest]:
    home = place / "home"
    made = subprocess.run(["useradd", "-M", "-d", str(home), GUEST], capture_output=True, check=False)
    if made.returncode not in {0, 9}:  # 9: there already
        pytest.skip(f"no second user can be made here: {made.stderr.decode().strip()}")
    home.mkdir(mode=0o700)
    shutil.chown(home, GUEST)
    yield Guest(home, runnable_python(place / "python"))
    if made.returncode == 0:
        subprocess.run(["userdel", GUEST], check=True, capture_output=True)


def runnable_python(folder: Path) -> Path:
    """A copy of the interpreter: its own may lie in a home that is closed to others."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    shutil.copy2(base / "bin" / version, folder / "bin" / "python")
    left_out = shutil.ignore_patterns("site-packages", "test", "idlelib", "config-*", "__pycache__")
    shutil.copytree(base / "lib" / version, folder / "lib" / version, ignore=left_out)
    for library in base.glob("lib/libpython*.so.*"):
        shutil.copy2(library, folder / "lib")
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def stack(place: Path) -> Iterator[Stack]:
    directory = place / "project"
    directory.mkdir(mode=0o700)  # nothing of it is the guest's to read, the token least of all
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ORCHESTRATOR_STORE", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield ensure_stack(directory)
    stop_stack(directory)


@pytest.fixture(scope="module")
def invited(guest: Guest, stack: Stack) -> Guest:
    """The guest with a context and the token, which the stack's owner has given them."""
    guest.write("token", Path(stack.token_path).read_text())
    settings = (f"dashboard_address={stack.dashboard_url}", f"ray_token=file:{guest.home}/token")
    assert guest.run("config", "set-context", "lab", *settings).code == 0
    assert guest.run("config", "use-context", "lab").code == 0
    return guest


def store_of(stack: Stack) -> LocalStore:
    return LocalStore(Path(stack.directory) / "store")


def sweeps_of(stack: Stack) -> list[str]:
    return list_sweeps(store_of(stack))


def snapshot_of(stack: Stack, sweep: str) -> Snapshot:
    return SweepLedger(store_of(stack), sweep).refresh()


def test_guest_without_the_token_is_refused_and_nothing_is_submitted(guest: Guest, stack: Stack) -> None:
    guest.write("sweep.yaml", SWEEP.format(name="uninvited", lr=0.1))
    for token in ("", "0123456789abcdef0123456789abcdef"):
        guest.write("token", token)
        named = [f"ray_token=file:{guest.home}/token"] if token else []
        address = f"dashboard_address={stack.dashboard_url}"
        assert guest.run("config", "set-context", "uninvited", address, *named).code == 0
        result = guest.run("--context", "uninvited", "submit", "sweep.yaml", "-y")
        assert result.code == 1
        assert ("refuses the token" if token else "asks for a token") in result.message
    assert "uninvited" not in sweeps_of(stack)


def test_guest_with_the_token_submits_and_the_sweep_ends_without_them(
    invited: Guest, stack: Stack, until: Callable[..., None]
) -> None:
    invited.write("sweep.yaml", SWEEP.format(name="lid-closed", lr=0.1))
    process = invited.start("submit", "sweep.yaml", "-y", "--no-wait")
    assert process.stderr is not None
    told = next(line for line in process.stderr if line.startswith(("Cluster ", "error")))
    os.killpg(process.pid, signal.SIGKILL)  # the lid closes before the command has even ended
    process.communicate()
    assert "has it (6 new;" in told
    until(lambda: snapshot_of(stack, "lid-closed").state.is_final, deadline_s=150)
    snapshot = snapshot_of(stack, "lid-closed")
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.plan is not None
    assert snapshot.plan.owner == GUEST


def test_guest_is_shown_what_a_changed_sweep_would_replace(invited: Guest, stack: Stack) -> None:
    invited.write("sweep.yaml", SWEEP.format(name="changing", lr=0.1))
    assert invited.run("submit", "sweep.yaml", "-y").code == 0
    assert snapshot_of(stack, "changing").revision == 1
    invited.write("sweep.yaml", SWEEP.format(name="changing", lr=0.2))
    # Without a terminal nobody can be asked: the plan is shown, and the cluster is not even told.
    assert invited.run("submit", "sweep.yaml").code == 3
    assert snapshot_of(stack, "changing").revision == 1
    assert invited.run("submit", "sweep.yaml", "-y").code == 0
    assert snapshot_of(stack, "changing").revision == 2


SIMULATION = """\
from pathlib import Path

from steps import width


def simulate(parameters, seeds, context):
    for seed in seeds:
        home = float(str(Path(__file__)).startswith({home!r}))
        yield {{"end": width() * seed + parameters["offset"], "ran_at_home": home}}
"""
SIMULATED = """\
version: 1
name: {name}
simulate:
  ends: {{run: './mysim.py:simulate', factors: {{offset: [0, 1]}}, seeds: {{count: 4, per_job: 2}}, metric: end}}
"""


def test_plain_file_of_the_guest_travels_with_the_submit(
    invited: Guest, stack: Stack, until: Callable[..., None]
) -> None:
    invited.write("mysim.py", SIMULATION.format(home=str(invited.home)))
    invited.write("steps.py", "def width():\n    return 2.0\n")
    invited.write("sweep.yaml", SIMULATED.format(name="plain-file"))
    ended = invited.run("submit", "sweep.yaml", "-y")
    assert ended.code == 0, ended.err
    until(lambda: snapshot_of(stack, "plain-file").state.is_final, deadline_s=150)
    snapshot = snapshot_of(stack, "plain-file")
    assert snapshot.state is SweepState.SUCCEEDED
    store = store_of(stack)
    records = [read_record(store, view.key) for view in snapshot.jobs.values()]
    assert sorted(record.metrics["end"] for record in records) == [1.0, 2.0, 5.0, 6.0]
    # The stack's owner may read the guest's home here, and still the file was not taken from there.
    assert {record.metrics["ran_at_home"] for record in records} == {0.0}


def test_code_of_the_guest_replaces_that_of_an_idle_cluster(
    invited: Guest, stack: Stack, place: Path, until: Callable[..., None]
) -> None:
    until(lambda: all(snapshot_of(stack, name).state.is_final for name in sweeps_of(stack)), deadline_s=150)
    mine = place / "edited"
    for package in ("orchestrator", "workloads"):
        shutil.copytree(ROOT / package, mine / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (mine / "workloads" / "__init__.py").open("a") as file:
        file.write("\n# edited by the guest\n")
    for path in (mine, *mine.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))
    invited.use_code(mine)
    try:
        invited.write("sweep.yaml", SWEEP.format(name="by-image", lr=0.3))
        by_image = invited.run("submit", "sweep.yaml", "-y")
        assert by_image.code == 0, by_image.err
        assert "its code runs the sweep; send yours along with --code wheel" in by_image.message
        until(lambda: snapshot_of(stack, "by-image").state.is_final, deadline_s=150)
        invited.write("sweep.yaml", SWEEP.format(name="by-wheel", lr=0.4))
        by_wheel = invited.run("submit", "sweep.yaml", "-y", "--code", "wheel")
        assert by_wheel.code == 0, by_wheel.err
        assert "the cluster runs release" not in by_wheel.message
    finally:
        invited.use_code(ROOT)
    until(lambda: snapshot_of(stack, "by-wheel").state.is_final, deadline_s=150)
    digests = {name: digest_of(stack, name) for name in ("by-image", "by-wheel")}
    assert digests["by-image"] != digests["by-wheel"]
    assert snapshot_of(stack, "by-wheel").state is SweepState.SUCCEEDED


def digest_of(stack: Stack, sweep: str) -> str:
    """Of the code that trained a sweep's backbone, as its record says."""
    from orchestrator.services.artifact_lookup import read_artifact_summary

    snapshot = snapshot_of(stack, sweep)
    key = next(view.key for view in snapshot.jobs.values() if view.name.startswith("pretrain/"))
    seen = read_artifact_summary(store_of(stack), key)
    assert seen is not None
    return seen.package_digest
