"""Hosts that are network namespaces on a bridge of their own: addresses, links that can be cut, nothing beyond.

Needs root and iproute2. The machine's own network is not touched: even the bridge is in a namespace.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

_SUBNET = "10.77.0"
_NEW_NET = 0x40000000  # CLONE_NEWNET of sched.h


def need_namespaces() -> None:
    """Skip a test, with the reason, where this machine cannot have network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (Debian package iproute2), for network namespaces")
    name = f"orc-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    try:
        bridged = subprocess.run(
            ["ip", "-n", name, "link", "add", "br0", "type", "bridge"], capture_output=True, check=False
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    if bridged.returncode:
        pytest.skip("this kernel has no network bridges")


class PrivateNet:
    """``add_host`` makes hosts; ``end`` kills what runs on them and removes everything."""

    def __init__(self) -> None:
        self._prefix = f"orc-{secrets.token_hex(3)}"
        self._bridge = f"{self._prefix}-net"
        self._hosts: list[Host] = []
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")

    def add_host(self) -> Host:
        """One more, with the next address."""
        number = len(self._hosts) + 1
        host = Host(f"{self._prefix}-{number}", f"{_SUBNET}.{number}", self._bridge, f"port{number}")
        self._hosts.append(host)
        return host

    def end(self) -> None:
        """All of it goes."""
        for host in self._hosts:
            host.kill_all()
            _ip("netns", "del", host.namespace)
        _ip("netns", "del", self._bridge)


class Host:
    """A namespace with one address. Its processes share this machine's files, not its network."""

    def __init__(self, namespace: str, address: str, bridge: str, port: str) -> None:
        self.namespace, self.address = namespace, address
        self._bridge, self._port = bridge, port
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")

    def command(self, *words: str) -> list[str]:
        """The same command, on this host. (``ip netns exec`` would hide what is mounted below ``/sys``.)"""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *words]

    def start(
        self, words: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """A process in a session of its own."""
        return subprocess.Popen(
            self.command(*words),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
        )

    def run(self, *words: str, environment: Mapping[str, str], cwd: Path | None = None) -> str:
        """Run to the end; its standard output. Fails with both outputs if it fails."""
        done = subprocess.run(
            self.command(*words), env=dict(environment), capture_output=True, text=True, check=False, cwd=cwd
        )
        assert done.returncode == 0, (
            f"{' '.join(words)}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts inside the block, is on the host; afterwards it is back."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net", "rb") as home, open(f"/run/netns/{self.namespace}", "rb") as there:  # noqa: PTH123
            assert libc.setns(there.fileno(), _NEW_NET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(home.fileno(), _NEW_NET) == 0, os.strerror(ctypes.get_errno())

    def cut(self) -> None:
        """Unplug it: packets are lost, connections stay open."""
        _ip("-n", self._bridge, "link", "set", self._port, "down")

    def restore(self) -> None:
        """Plug it in again."""
        _ip("-n", self._bridge, "link", "set", self._port, "up")

    def pids(self) -> list[int]:
        """Of all processes on it."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill_all(self) -> None:
        """SIGKILL to every process on it, as if it had lost its power."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
