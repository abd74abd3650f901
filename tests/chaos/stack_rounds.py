"""One round of chaos on the one-machine stack: a real sweep, kills of its processes in an order of chance, the verdict.

``python -m tests.chaos.rounds --stack --rounds 40`` (``make chaos ARGS="--stack --rounds 40"``). The three lowest bits
of a seed say what the round is made of. Even seeds have a follower (``submit``), which a kill of the supervisor
concerns; with an odd one nobody follows, and after a kill of the supervisor ``status`` is run, as docs/guarantees.md
says. The next bit is the store (a directory, or the stack's own S3 server), the third whether backbones are trained by
gangs of two workers. Whatever else dies comes back without anybody.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.stack.description import BUCKET, CLIENT_FILE, S3_FOLDER, Stack, read_description, read_stack
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps.client import read_progress
from tests.chaos.kills import find_snapshot, has_ended, kill
from tests.chaos.stack_processes import KINDS, OF_GANGS, OF_S3, command_lines
from tests.chaos.verdict import audit_journal
from tests.slow_augmentation import NAME as SLOW
from tests.slow_augmentation import slow_variables, write_slow_augmentation
from tests.waiting import DEADLINE_S, wait_until

SWEEP: Final = "housekeeping"
NUM_KILLS: Final = 4
TOLD_WITHIN_S: Final = 5.0
S3_STORE: Final = f"s3://{BUCKET}/rounds"
IMAGE_PAUSE_S: Final = 0.015  # a backbone takes a minute and a half, one of a gang half of that
OF_RAY: Final = frozenset({"ray", "gcs", "raylet", "agent", "dashboard"})
_TEXT: Final = """
version: 1
name: SWEEP
resources:
  pretrain: {cpus: WORKERS, workers: WORKERS}
  transfer: {cpus: 1}
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: ["levels/*"]
  recipe: {epochs: 60, batch_size: 16, lr: 0.02, augment_plugin: SLOW}
transfer:
  - {name: tuned, target: levels/depth1, protocol: finetune, recipe: {epochs: 4, batch_size: 16, lr: 0.01}}
report: {baseline: levels/depth1}
"""


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> float:
    """As ``wait_until``, also for a store whose server may have been killed; returns the seconds that it took."""
    started_s = time.monotonic()

    def holds() -> object:
        with suppress(StorageError):
            return condition()
        return False

    wait_until(holds, what, deadline_s=deadline_s)
    return time.monotonic() - started_s


@dataclass(slots=True, kw_only=True)
class StackRound:
    """A project with its stack; all of its temporary files lie in one folder of its own."""

    temporary: Path
    project: Path
    draw: random.Random
    num_workers: int = 1
    is_on_s3: bool = False
    pause_s: float = IMAGE_PAUSE_S
    follower: subprocess.Popen[bytes] | None = None
    seen: list[Stack] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The directory of the stack."""
        return self.project / ".orchestrator"

    @property
    def code(self) -> Path:
        """A folder of PYTHONPATH, with the augmentation of the sweep."""
        return self.project / "code"

    @property
    def store(self) -> ObjectStore:
        """Of the sweep."""
        return open_store(S3_STORE) if self.is_on_s3 else LocalStore(self.home / "store")

    @property
    def processes(self) -> dict[int, str]:
        """Command lines by pid of all that runs of the stack and its commands."""
        return command_lines(self.temporary, self.project)

    def pids_of(self, kind: str) -> list[int]:
        """Processes of one kind."""
        return sorted(pid for pid, line in self.processes.items() if re.search(KINDS[kind], line))

    def start_s3(self, patch: pytest.MonkeyPatch) -> None:
        """Start the stack with its S3 server, and read ``client.env`` as a shell would."""
        self.is_on_s3 = True
        assert self.start("up", "--s3").wait(DEADLINE_S) == 0, self.told
        patch.setenv("ORCHESTRATOR_STORE", S3_STORE)
        lines = (self.home / S3_FOLDER / CLIENT_FILE).read_text(encoding="utf-8").splitlines()
        pairs = (line.removeprefix("export ").split("=", 1) for line in lines if "=" in line)
        for name, value in pairs:
            patch.setenv(name, value.strip("'\""))

    @property
    def told(self) -> str:
        """What the follower has said."""
        return (self.project / "follower.txt").read_text(encoding="utf-8")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command of the user; it prints into ``follower.txt``."""
        dropped = ("RAY_", "MLFLOW_", "ORCHESTRATOR_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment = {**inherited, **slow_variables(self.code, self.pause_s), "TMPDIR": str(self.temporary)}
        # torch makes its cache folder when it is imported, by default among the temporary files.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.project / "inductor")
        if self.is_on_s3:
            environment["ORCHESTRATOR_STORE"] = S3_STORE
        with (self.project / "follower.txt").open("ab") as file:
            command = [sys.executable, "-m", "orchestrator.cli", *arguments]
            return subprocess.Popen(command, cwd=self.project, env=environment, stdout=file, stderr=file)

    def submit(self, *, is_followed: bool) -> None:
        """Submit the sweep; with a follower the command stays."""
        (self.project / "sweep.yaml").write_text(_text(self.num_workers), encoding="utf-8")
        command = self.start("submit", "sweep.yaml", "-y", *([] if is_followed else ["--no-wait"]))
        if is_followed:
            self.follower = command
        else:
            assert command.wait(DEADLINE_S) == 0, self.told

    def snapshot(self) -> Snapshot:
        """The sweep as its journal tells it."""
        found = find_snapshot(self.store, SWEEP)
        assert found is not None
        return found

    def strike(self, kind: str) -> bool:
        """Wait until a backbone is trained a little further, kill one process, and see that all comes back.

        False if the sweep has ended before: nothing is killed.
        """
        if not self._waits_for_work():
            sys.stdout.write(f"  {kind}: left out, the sweep has ended\n")
            return False
        until(lambda: self.pids_of(kind), f"there is a {kind}")
        before, pids, said = self.snapshot(), self.pids_of(kind), len(self.told)
        stack = read_stack(self.home)
        assert stack is not None
        self.seen.append(stack)
        kill(self.draw.choice(pids))
        line = f"  {kind}:"
        if self.follower is not None and kind in OF_RAY | {"supervisor"}:
            told_s = until(lambda: " died" in self.told[said:], f"the death of {kind} is told", TOLD_WITHIN_S)
            assert "results so far are safe" in self.told[said:]
            line += f" told after {told_s:.1f} s,"
        elif kind == "supervisor":
            assert self.start("status", SWEEP).wait(DEADLINE_S) in {0, 101}, self.told
        back_s = until(lambda: self._is_back(kind, stack, before, pids), f"{kind} is back")
        sys.stdout.write(f"{line} back after {back_s:.1f} s\n")
        sys.stdout.flush()
        return True

    def _waits_for_work(self) -> bool:
        """Until some attempt is past a step of chance; false if the sweep has ended."""
        step = self.draw.randint(1, 60)

        def is_at_work() -> bool:
            found = find_snapshot(self.store, SWEEP)
            if found is None:
                return False
            if found.state.is_final:
                return True
            live = {attempt.attempt_id for attempt in found.live_attempts}
            lines = read_progress(self.store, SWEEP).values()
            return any(line.attempt_id in live and line.progress.step > step for line in lines)

        until(is_at_work, f"an attempt is past step {step}")
        return not has_ended(self.store, SWEEP)

    def _is_back(self, kind: str, stack: Stack, before: Snapshot, pids: Sequence[int]) -> bool:
        now = read_stack(self.home)
        if now is None or now.trouble:
            return False
        if kind in OF_RAY | {"supervisor"}:
            session = (stack.pid, stack.num_ray_starts)
            return (now.pid, now.num_ray_starts) != session and self.snapshot().epoch > before.epoch
        if kind == "controller":
            return self.snapshot().epoch > before.epoch
        if kind == "mlflow":
            return bool(set(self.pids_of(kind)) - set(pids)) and _answers(now.mlflow_url)
        return bool(set(self.pids_of(kind)) - set(pids))

    def finish(self) -> dict[str, str]:
        """The sweep ends, each job has succeeded once, and ``down`` leaves nothing; digests of the weights."""
        until(lambda: has_ended(self.store, SWEEP), "the sweep ends", 2 * DEADLINE_S)
        weights = self._judged()
        if self.follower is not None:
            assert self.follower.wait(DEADLINE_S) == 0, self.told
            assert "Traceback" not in self.told
        stack = read_stack(self.home)
        self.seen += [stack] if stack is not None else []
        assert self.start("down").wait(DEADLINE_S) == 0, self.told
        until(lambda: not self.processes, f"no process is left: {self.processes}", 10.0)
        assert sorted(path.name for path in self.temporary.iterdir()) == []
        assert read_description(self.home) is None
        assert not [url for one in self.seen for url in (one.mlflow_url, one.dashboard_url) if _listens(url)]
        return weights

    def _judged(self) -> dict[str, str]:
        snapshot = self.snapshot()
        assert snapshot.plan is not None
        audit = audit_journal(self.store, SWEEP, snapshot.plan.jobs)
        assert audit.sweeps[SWEEP].state == "succeeded"
        assert set(audit.sweeps[SWEEP].num_succeeded.values()) == {1}
        assert audit.sweeps[SWEEP].num_succeeded.keys() == snapshot.jobs.keys()
        return _weights(self.store, snapshot)


@cache
def undisturbed_weights(num_workers: int) -> dict[str, str]:
    """Digests of the weights of the same sweep when nothing happens to it; once for all rounds.

    One process trains what one worker trains. Two workers add their gradients up in another order, so that their sweep
    is run on a stack of its own.
    """
    if num_workers > 1:
        with _new_round(random.Random(0)) as one:  # noqa: S311 - no secret
            one.num_workers, one.pause_s = num_workers, 0.0
            one.submit(is_followed=True)
            return one.finish()
    with tempfile.TemporaryDirectory(prefix="orc-undisturbed-") as folder, pytest.MonkeyPatch.context() as patch:
        path, store, code = Path(folder, "sweep.yaml"), LocalStore(Path(folder, "store")), Path(folder, "code")
        write_slow_augmentation(code)
        patch.syspath_prepend(code)
        patch.setenv("PYTHONPATH", slow_variables(code)["PYTHONPATH"])  # of the process that checks plug-ins
        path.write_text(_text(num_workers), encoding="utf-8")
        plan = build_plan(load_sweep(str(path))[0], store_uri=store.uri)
        return _weights(store, run_sweep_inprocess(store, plan, directory=Path(folder, "node")))


def _text(num_workers: int) -> str:
    return _TEXT.replace("SWEEP", SWEEP).replace("WORKERS", str(num_workers)).replace("SLOW", SLOW)


def _weights(store: ObjectStore, snapshot: Snapshot) -> dict[str, str]:
    trained = {JobKind.PRETRAIN, JobKind.FINETUNE}
    views = [view for view in snapshot.jobs.values() if view.name.partition("/")[0] in trained]
    assert views
    return {view.name: read_record(store, view.key).summary["weights_sha256"] for view in views}


def _listens(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _answers(url: str) -> bool:
    """Whether an HTTP server answers there, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=2.0).close()  # noqa: S310 - our own server
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _new_round(draw: random.Random) -> Iterator[StackRound]:
    """A project of its own; whatever still runs of its stack at the end is killed."""
    temporary, project = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("hc-", "orc-stack-round-"))
    one = StackRound(temporary=temporary, project=project, draw=draw)
    write_slow_augmentation(one.code)
    try:
        yield one
    except BaseException:
        sys.stdout.write(f"  kept: {project}; the commands printed:\n{one.told}\n")
        raise
    else:
        shutil.rmtree(project)
        temporary.rmdir()
    finally:
        for pid in one.processes:
            kill(pid)
        if one.follower is not None:
            with suppress(subprocess.TimeoutExpired):
                one.follower.wait(10.0)


def run_stack_round(seed: int, kinds: Sequence[str] = ()) -> None:
    """Some kills of chance (or the given ones), and the verdict.

    Raises:
        AssertionError: something did not come back, was left over, or came out otherwise than undisturbed.
        Violation: something that must never happen is in the store.
    """
    started_s, draw = time.monotonic(), random.Random(seed)  # noqa: S311 - no secret
    is_followed, is_on_s3, is_gang = not seed & 1, bool(seed & 2), bool(seed & 4)
    left_out = (OF_S3 if not is_on_s3 else frozenset()) | (OF_GANGS if not is_gang else frozenset())
    victims = list(kinds) or draw.sample(sorted(KINDS.keys() - left_out), NUM_KILLS)
    made_of = f"{'with' if is_followed else 'without'} a follower, {'S3' if is_on_s3 else 'a directory'}"
    sys.stdout.write(f"round with seed {seed}, {made_of}, {'gangs' if is_gang else 'no gangs'}: {victims}\n")
    with _new_round(draw) as one, pytest.MonkeyPatch.context() as patch:
        one.num_workers = 2 if is_gang else 1
        if is_on_s3:
            one.start_s3(patch)
        one.submit(is_followed=is_followed)
        num_struck = sum(one.strike(kind) for kind in victims)
        assert num_struck, "the sweep has ended before the first kill"
        weights = one.finish()
    assert weights == undisturbed_weights(one.num_workers)
    sys.stdout.write(f"  ends as undisturbed and leaves nothing, {time.monotonic() - started_s:.0f} s\n")
    sys.stdout.flush()
