"""A real Slurm on one machine: its controller and a few nodes, in a network of their own.

Partition ``low`` is preempted and queued again by partition ``high``, with notice.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.clusters.private_net import Host
from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CPUS = 4  # invented, of each node
READY_S = 60.0
GRACE_S = 90


def need_slurm() -> None:
    """Skip a test, with the reason, where Slurm is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm (Debian package slurm-wlm); not found: {', '.join(missing)}")


class SlurmSite:
    """``start``, then ``run('sbatch', ...)``; ``end`` comes with its host's network."""

    def __init__(self, folder: Path, host: Host, *, num_nodes: int) -> None:
        self.folder, self.host = folder, host
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Munge, the controller and the nodes; back when all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration())
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "state").mkdir()
        self._launch(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._socket}",
            f"--pid-file={self.folder / 'munged.pid'}", f"--log-file={self.folder / 'munged.log'}",
            f"--seed-file={self.folder / 'munged.seed'}",
        )  # fmt: skip
        self._wait(self._socket.exists, "munged answers")
        self._launch("slurmctld", "-D", "-c")
        for node in self.nodes:
            (self.folder / f"spool.{node}").mkdir()
            self._launch("slurmd", "-D", "-N", node)
        self._wait(lambda: self.states() == ["idle"] * len(self.nodes), "all nodes are idle")

    def run(self, *words: str, **variables: str) -> str:
        """A command of Slurm."""
        return self.host.run(*words, environment={**self.environment, **variables}, cwd=self.folder)

    def states(self) -> list[str]:
        """Of all nodes."""
        words = ("sinfo", "--noheader", "--Node", "--format=%T", "--partition=low")
        done = subprocess.run(
            self.host.command(*words), env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    def state_of(self, job: str) -> str:
        """``RUNNING``, ``PENDING``, ``COMPLETED``, ...; of an array's tasks, those of all, sorted."""
        told = self.run("scontrol", "show", "job", job, "--oneliner")
        return " ".join(sorted(word.removeprefix("JobState=") for word in told.split() if word.startswith("JobState=")))

    def restarts_of(self, job: str) -> int:
        """How often a job was queued again."""
        told = self.run("scontrol", "show", "job", job, "--oneliner")
        return max(int(word.removeprefix("Restarts=")) for word in told.split() if word.startswith("Restarts="))

    def logs(self, pattern: str = "*.log", *, num_characters: int = 3000) -> str:
        """The ends of logs."""
        paths = sorted(self.folder.glob(pattern))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-num_characters:]}" for path in paths)

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    def _launch(self, program: str, *arguments: str) -> None:
        path = self.folder / f"{program}{''.join(arguments[-1:]) if program == 'slurmd' else ''}.out.log"
        with path.open("wb") as output:
            self.host.start([program, *arguments], environment=self.environment, output=output)

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        wait_until(condition, what, deadline_s=READY_S, tell=self.logs)

    def _configuration(self) -> str:
        me, address, folder = socket.gethostname().partition(".")[0], self.host.address, self.folder
        last = 17010 + len(self.nodes)
        return f"""
ClusterName=test
SlurmctldHost={me}({address})
SlurmctldPort=17001
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={self._socket},cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
KillWait=5
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-{len(self.nodes)}] NodeHostname={me} NodeAddr={address} Port=[17011-{last}] CPUs={CPUS} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
"""
