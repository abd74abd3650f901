"""One round of chaos: a cluster, a sweep, every kind of fault in an order of chance, and the verdict.

``python -m tests.chaos.rounds --rounds 20`` (``make chaos``); ``--seed N`` draws one again. The order of the faults and
the steps at which they come follow from the seed; what the processes do meanwhile does not. With ``--stack`` these are
rounds of the one-machine stack, see ``stack_rounds``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.journal import Journal
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import submit
from tests.chaos.chain_jobs import chain_job, read_traces
from tests.chaos.kills import find_snapshot, has_ended, kill, running_pids
from tests.chaos.ray_nodes import ROOT, RayNodes, new_home
from tests.chaos.stack_processes import KINDS
from tests.chaos.stack_rounds import run_stack_round
from tests.chaos.verdict import judge
from tests.mlflow_servers import MlflowServer, new_database
from tests.simulation.audit import Violation
from tests.waiting import wait_until

CLUSTER, NAMESPACE, SWEEP, GATE = "chaos-cluster", "chaos", "chaos", "gates/open"
FAULTS = ("runner", "gang", "controller", "sleeper", "raylet", "head", "s3", "mlflow")
HEAD_IN_START = "head_in_start"
"""Among the other faults it would come too seldom: a gang starts within seconds, and once a round."""
_IN_START = "Placement group ready"
"""What Ray Train logs between a gang's reservation and its workers."""
S3_AWAY_S = 5.0
IN_START_S = 2.0


def make_jobs() -> tuple[Job, ...]:
    """Backbones that cannot end before the gate opens, one of them trained by a gang, and what is made of them."""
    data = chain_job("dataset/tree", num_steps=2, step_s=0.01)
    gang = chain_job("pretrain/gang", data, num_steps=100, step_s=0.1, num_workers=2, cpus=2.0, gate=GATE)
    singles = [chain_job(f"pretrain/{number}", data, num_steps=100, step_s=0.1, gate=GATE) for number in range(2)]
    backbones = [gang, *singles]
    transfers = [
        chain_job(f"finetune/{one.name.partition('/')[2]}", one, num_steps=3, step_s=0.05) for one in backbones
    ]
    return (data, *backbones, *transfers)


@dataclass(slots=True, kw_only=True)
class Round:
    """A sweep at work, and everything of it that can be killed."""

    nodes: RayNodes
    s3: S3Server
    mlflow: MlflowServer
    database: Path
    store: ObjectStore
    draw: random.Random
    jobs: tuple[Job, ...] = field(default_factory=make_jobs)

    def call(self, *arguments: str) -> str:
        """A client's command on the cluster."""
        environment = {**self.nodes.environment, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.nodes.address}
        command = [sys.executable, "-m", "tests.chaos.enlist", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def snapshot(self) -> Snapshot:
        """The sweep as its journal tells it."""
        found = find_snapshot(self.store, SWEEP)
        assert found is not None
        return found

    def strike(self, fault: str) -> None:
        """Wait until what is to be hit works, hit it, and see that the sweep goes on."""
        started_s = time.monotonic()
        getattr(self, f"_hit_{fault}")()
        sys.stdout.write(f"  {fault}: {time.monotonic() - started_s:.1f} s\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """Open the gate and judge."""
        self.store.put(GATE, b"")
        wait_until(lambda: has_ended(self.store, SWEEP), "the sweep ends")
        judge(self.store, SWEEP, self.jobs)
        backbones = [job for job in self.jobs if job.name.startswith("pretrain/")]
        assert any(trace.first_step for job in backbones for trace in read_traces(self.store, job.key)), "none resumed"
        wait_until(lambda: runs_are_published(self.database, self.jobs), "MLflow has every job once")
        wait_until(lambda: not json.loads(self.call("leftovers"))["placement_groups"], "no reservation is left")

    def _trained(self, wanted: Callable[[str], bool]) -> list[int]:
        step = self.draw.randint(1, 60)
        pids: list[int] = []

        def is_at_work() -> bool:
            pids[:] = running_pids(self.store, SWEEP, wanted, past_step=step)
            return bool(pids)

        wait_until(is_at_work, f"an attempt is past step {step}")
        return pids

    def _hit_runner(self) -> None:
        kill(self.draw.choice(self._trained(lambda job: job in {"pretrain/0", "pretrain/1"})))

    def _hit_gang(self) -> None:
        kill(self.draw.choice(self._trained(lambda job: job == "pretrain/gang")))

    def _controller_pid(self) -> int:
        return int(self.snapshot().holder.rsplit("-", 2)[1])

    def _replaced(self, epoch: int) -> None:
        wait_until(lambda: self.snapshot().epoch > epoch, f"a controller after epoch {epoch}")

    def _hit_controller(self) -> None:
        epoch = self.snapshot().epoch
        kill(self._controller_pid())
        self._replaced(epoch)

    def _hit_sleeper(self) -> None:
        epoch, pid = self.snapshot().epoch, self._controller_pid()
        os.kill(pid, signal.SIGSTOP)
        self._replaced(epoch)
        with suppress(ProcessLookupError):  # whoever replaced it may have ended it
            os.kill(pid, signal.SIGCONT)

    def _hit_raylet(self) -> None:
        self._trained(lambda _: True)
        name = self.draw.choice(self.nodes.names)
        self.draw.choice([self.nodes.kill, self.nodes.kill_raylet])(name)
        self.nodes.start_node(name)

    def _hit_head(self) -> None:
        self._trained(lambda _: True)
        self._kill_head()

    def _kill_head(self) -> None:
        epoch = self.snapshot().epoch
        self.nodes.kill("head")
        self.nodes.start_node("head")
        self._replaced(epoch)

    def _hit_head_in_start(self) -> None:
        pids = self._trained(lambda job: job == "pretrain/gang")
        num_starts = self._num_gang_starts()
        kill(self.draw.choice(pids))
        wait_until(lambda: self._num_gang_starts() > num_starts, "a gang has room and wants its workers")
        time.sleep(self.draw.uniform(0.0, IN_START_S))  # at which moment of the start is the fault itself
        self._kill_head()

    def _num_gang_starts(self) -> int:
        logs = (self.nodes.home / "r").glob("session_2*/logs/train/ray-train-sys-*.log")
        return sum(log.read_text().count(_IN_START) for log in logs)

    def _hit_s3(self) -> None:
        self._trained(lambda _: True)
        self.s3.kill()
        time.sleep(self.draw.uniform(0.0, S3_AWAY_S))  # how long it stays away is the fault itself
        self.s3.start()

    def _hit_mlflow(self) -> None:
        self.mlflow.kill()
        self.mlflow.start()


def runs_are_published(database: Path, jobs: tuple[Job, ...]) -> bool:
    """Whether MLflow's database has one finished run of each job; a second one of any is an error."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60) as connection:
        rows = connection.execute(
            "SELECT t.value, r.status FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'job' "
            "WHERE r.lifecycle_stage = 'active'"
        ).fetchall()
    counts = Counter(name for name, _ in rows)
    assert not [name for name, count in counts.items() if count > 1], f"runs that are there twice: {counts}"
    return {name for name, status in rows if status == "FINISHED"} >= {job.name for job in jobs}


@contextmanager
def new_round(seed: int, *, dashboard: bool) -> Iterator[Round]:
    """A cluster, an S3 server and an MLflow server, with a sweep on them that works. What failed is kept to be read."""
    draw, home = random.Random(seed), new_home()  # noqa: S311 - no secret
    with ExitStack() as stack:
        s3 = S3Server(home / "s3")
        stack.callback(s3.kill)
        s3.start()
        os.environ.update(s3.client_environment)
        stack.callback(lambda: [os.environ.pop(name, None) for name in s3.client_environment])
        mlflow = MlflowServer(home, new_database(home / "mlflow.db"))
        stack.enter_context(mlflow)
        nodes = RayNodes(home, s3.client_environment, num_nodes=2, dashboard=dashboard)
        stack.callback(nodes.end)
        nodes.start()
        store = open_store(f"s3://{BUCKET}/chaos")
        one = Round(nodes=nodes, s3=s3, mlflow=mlflow, database=home / "mlflow.db", store=store, draw=draw)
        policy = Policy(max_failures=20, breaker=0)
        submit(
            store,
            Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=one.jobs, baseline="", policy=policy),
            "",
            CLUSTER,
        )
        one.call("serve", store.uri, CLUSTER, NAMESPACE, mlflow.url)
        try:
            yield one
        except (AssertionError, OrchestratorError, Violation):
            _tell(one, home)
            raise
    shutil.rmtree(home, ignore_errors=True)


def _tell(one: Round, home: Path) -> None:
    sys.stdout.write(f"  logs and store are kept under {home}; its journal:\n")
    with suppress(OrchestratorError):  # a store that cannot be read is no news beside the failure itself
        for event in Journal(one.store, SWEEP).read_new():
            sys.stdout.write(f"    {event}\n")
    sys.stdout.flush()


def run_round(seed: int, kinds: Sequence[str] = FAULTS) -> None:
    """All kinds of faults, in an order of chance, and the verdict. With an even seed there is no dashboard.

    Raises:
        AssertionError: something did not come back, or came out otherwise than undisturbed.
        Violation: something that must never happen is in the store.
    """
    started_s = time.monotonic()
    dashboard = bool(seed % 2)
    sys.stdout.write(f"round with seed {seed}, {'a' if dashboard else 'no'} dashboard\n")
    sys.stdout.flush()
    with new_round(seed, dashboard=dashboard) as one:
        faults = list(kinds)
        one.draw.shuffle(faults)
        for fault in faults:
            one.strike(fault)
        one.finish()
        attempts = sum(view.num_attempts for view in one.snapshot().jobs.values())
    sys.stdout.write(f"  ends as undisturbed after {attempts} attempts, {time.monotonic() - started_s:.0f} s\n")
    sys.stdout.flush()


def main() -> None:
    """Some rounds, each with a seed of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stack", action="store_true", help="of the one-machine stack instead of a cluster")
    parser.add_argument("--faults", nargs="+", choices=(*FAULTS, HEAD_IN_START, *KINDS))
    given = parser.parse_args()
    seeds = [given.seed] if given.seed is not None else [secrets.randbelow(2**32) for _ in range(given.rounds)]
    for seed in seeds:
        if given.stack:
            run_stack_round(seed, given.faults or ())
        else:
            run_round(seed, given.faults or FAULTS)


if __name__ == "__main__":
    main()
