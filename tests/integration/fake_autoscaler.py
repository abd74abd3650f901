"""A Ray cluster of its own whose autoscaler adds nodes that are processes of this machine, as many as a test allows.

It is Ray's provider ``fake_multinode`` under ``ray start``: own ports, own folder. Everything that it starts has this
folder in its environment, and is ended by that. Ray's ``AutoscalingCluster`` would end every Ray on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from orchestrator.backends.ray.capacity import GROUPS_VARIABLE
from orchestrator.core.units import MIB
from orchestrator.stack.description import LOOPBACK
from orchestrator.stack.environment import child_environment, renew_token
from orchestrator.stack.ports import free_ports

ROOT = Path(__file__).parents[2]
READY_S = 120.0
HEAD, WORKER = "ray.head.default", "worker"
NODE = {"CPU": 2, "GPU": 1, "object_store_memory": 100 * MIB}
"""Of every node that it may add; the GPU is invented."""
_LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
table = ray.util.placement_group_table()
reservations = [name for name, group in table.items() if group["state"] != "REMOVED"]
print(json.dumps([reservations, sum(node["Alive"] for node in ray.nodes())]))
"""


class FakeAutoscaler:
    """``start`` it, ``allow`` nodes, ``run_controller`` on it, and ``end`` it."""

    def __init__(self, max_nodes: int) -> None:
        # A path of a socket may have 107 characters.
        self.home = Path(tempfile.mkdtemp(prefix="orc-a-"))
        renew_token(self.home)
        (self._port,) = free_ports(1)
        self._config, groups = self.home / "cluster.yaml", self.home / "groups.yaml"
        self.allow(0)
        groups.write_text(yaml.safe_dump(self._document(max_nodes)))
        self.environment = {
            **child_environment(self.home),
            "PYTHONPATH": str(ROOT),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            GROUPS_VARIABLE: str(groups),
        }

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    def allow(self, num_nodes: int) -> None:
        """From its next look on, which is a second away at most, the autoscaler has this many nodes at most.

        Nodes that are there leave when they have been idle for some seconds, and may be given work until then.
        """
        written = self._config.with_suffix(".new")
        written.write_text(yaml.safe_dump(self._document(num_nodes)))
        written.replace(self._config)

    def start(self) -> None:
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--node-ip-address={LOOPBACK}",
            f"--port={self._port}", "--num-cpus=1", f"--object-store-memory={100 * MIB}", "--disable-usage-stats",
            "--include-dashboard=false", f"--temp-dir={self.home / 'r'}", f"--autoscaling-config={self._config}",
        ]  # fmt: skip
        log = self._spawn("head", command)
        end_s = time.monotonic() + READY_S
        while b"Ray runtime started" not in log.read_bytes():
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)

    def run_controller(self, store_uri: str, namespace: str) -> subprocess.Popen[bytes]:
        """A controller in a process of its own, which a test may kill."""
        command = [sys.executable, "-m", "tests.integration.grown_controller", self.address, store_uri, namespace]
        self._spawn(f"controller-{time.monotonic_ns()}", command)
        return self._child

    def reservations(self) -> set[str]:
        """Ids of the placement groups that are there, with room or without."""
        return set(self._look()[0])

    def num_nodes(self) -> int:
        """Nodes that live, the head included."""
        num: int = self._look()[1]
        return num

    def end(self) -> None:
        """Kill all that was started here, and nothing else."""
        for _ in range(3):  # what is killed may just be starting something
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.home.glob("*.log"))

    def _look(self) -> Any:
        command = [sys.executable, "-c", _LOOK, self.address]
        shown = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True)
        return json.loads(shown.stdout.splitlines()[-1])

    def _spawn(self, name: str, command: list[str]) -> Path:
        path = self.home / f"{name}.log"
        with path.open("wb") as log:
            self._child = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        return path

    def _pids(self) -> Iterator[int]:
        mark = str(self.home).encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    yield int(folder.name)

    def _document(self, num_nodes: int) -> Mapping[str, Any]:
        return {
            "cluster_name": "fake",
            "max_workers": num_nodes,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": 0.1,
            "provider": {"type": "fake_multinode", "gcs_address": self.address, "launch_multiple": True},
            "auth": {},
            "docker": {},
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            "head_node_type": HEAD,
            "available_node_types": {
                HEAD: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
                WORKER: {"resources": dict(NODE), "node_config": {}, "min_workers": 0, "max_workers": num_nodes},
            },
        }
