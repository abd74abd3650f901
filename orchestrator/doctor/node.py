"""The checks that run on each node of the cluster, in an actor.

It is pickled by value, so that it also runs on nodes where the package has another version or is missing, which it must
find out. So this module imports nothing of ours at the top.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("ray", "torch", "torchvision", "timm", "numpy", "pretraining-orchestrator")
_GOOGLE_TYPE_URL = "http://metadata.google.internal/computeMetadata/v1/instance/machine-type"
_BLOCK = 1024**2
_NUM_BLOCKS = 64
_WRITING_S = 3.0
_GPU_FIELDS = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
_QUERY_TIMEOUT_S = 8.0
_IN_USE_MIB = 1024.0
"""A GPU with more used memory has work that Ray does not know of."""
_DEVICES_SHARE = 0.25
"""Part of the limit for repetitions on the devices; loading torch and compiling take the rest."""


class NodeDoctor:
    """One node. Every method returns plain JSON; errors become ``{"error": text}``."""

    def now(self) -> float:
        """The node's clock, unix seconds."""
        return time.time()

    def facts(self) -> dict[str, Any]:
        """Hardware and software of the node; ``free_port`` is an unused port."""
        import ray

        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "free_port": _free_port(),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "digest": _digest(),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "shared_memory": _room(Path("/dev/shm")),  # noqa: S108 - the very place
            "cache": _cache(),
            "gpus": _gpus(),
            "machine_type": _machine_type(),
            "asks_for_token": os.environ.get("RAY_AUTH_MODE", "") == "token",
        }

    def store(self, uri: str, folder: str, content: str) -> dict[str, Any]:
        """Read what the driver wrote into the store, write an object of its own, and try conditional writes."""
        try:
            from orchestrator.storage.open import open_store
            from orchestrator.storage.probe import probe_store

            started_s = time.monotonic()
            store = open_store(uri)
            seen = store.exists(f"{folder}/driver") and store.get(f"{folder}/driver").decode() == content
            store.put(f"{folder}/node-{secrets.token_hex(8)}", socket.gethostname().encode())
            probe_store(store)
        except Exception as error:  # noqa: BLE001 - it becomes the check's result
            return _error_answer(error)
        return {"sees_driver": seen, "took_s": time.monotonic() - started_s}

    def tracking(self, uri: str, *, of_sweep: bool) -> dict[str, Any]:
        """Whether a publisher on this node can use a tracking URI; one that a sweep names may not see every login."""
        try:
            from orchestrator.doctor.sweep_inputs import reach_tracking
            from orchestrator.storage.open import check_tracking

            if of_sweep:
                check_tracking(uri)
            return {"found": reach_tracking(uri)}
        except Exception as error:  # noqa: BLE001 - it becomes the check's result
            return _error_answer(error)

    def shards(self, samples: list[list[str]]) -> dict[str, Any]:
        """Whether some shards, given by store and name, can be read on this node."""
        try:
            from orchestrator.doctor.sweep_inputs import read_beginnings

            return {"found": read_beginnings(samples)}
        except Exception as error:  # noqa: BLE001 - it becomes the check's result
            return _error_answer(error)

    def rank(self, place: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Take part in an all-reduce."""
        return self._ask("node.all_reduce", place, limit_s, sees_gpus=place["backend"] == "nccl")

    def devices(self, found: list[dict[str, str]], limit_s: float) -> dict[str, Any]:
        """Whether idle GPUs, of those ``found``, compute, remember and compile; ``not_checked`` names the others."""
        busy = [gpu["index"] for gpu in found if is_in_use(gpu)]
        idle = [gpu["index"] for gpu in found if not is_in_use(gpu)]
        if not idle:
            return {"devices": [], "not_checked": "all"}
        request = {"limit_s": _DEVICES_SHARE * limit_s, "compile": True}
        if not busy:
            return self._ask("node.check", request, limit_s, sees_gpus=True)
        checked = self._ask("node.check", request, limit_s, sees_gpus=True, only=",".join(idle))
        for one, index in zip(checked.get("devices", []), idle, strict=False):
            one["device"] = f"cuda:{index}"
        return {**checked, "not_checked": ", ".join(f"cuda:{index}" for index in busy)}

    def _ask(
        self, question: str, request: dict[str, Any], limit_s: float, *, sees_gpus: bool, only: str = ""
    ) -> dict[str, Any]:
        """In a process of its own, all children of which are ended if it hangs. ``only``: indexes of GPUs."""
        # Ray may have hidden the GPUs from an actor that asked for none.
        hidden = {"CUDA_VISIBLE_DEVICES"} if sees_gpus else set()
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if only:
            # In the driver's order, not the fastest first.
            environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": only}
        try:
            from orchestrator.core.data_plane import QUESTIONS, ask

            answer: dict[str, Any] = ask(QUESTIONS[question], request, limit_s=limit_s, environment=environment)
        except Exception as error:  # noqa: BLE001 - it becomes the check's result
            return _error_answer(error)
        return answer


def is_in_use(gpu: dict[str, str]) -> bool:
    """Whether a process uses memory of a GPU, according to the driver; False where the driver does not tell."""
    try:
        return float(gpu.get("used_mib", "")) > _IN_USE_MIB
    except ValueError:
        return False


def _error_answer(error: Exception) -> dict[str, Any]:
    """The text of our own errors; other errors may quote anything, also credentials."""
    is_ours = type(error).__module__.startswith("orchestrator.") or isinstance(error, ImportError)
    return {"error": str(error) if is_ours else type(error).__name__}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest() -> str:
    """Digest of our code on this node; empty if there is none. As ``backends.ray.code_digest.code_digest``."""
    try:
        from orchestrator.backends.ray.code_digest import code_digest

        return code_digest()
    except Exception:  # noqa: BLE001 - another version of it, or none
        return ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _room(folder: Path) -> dict[str, int]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"total": 0, "free": 0}
    return {"total": usage.total, "free": usage.free}


def _cache() -> dict[str, Any]:
    """The directory where attempts keep downloads: its free space, and its write speed."""
    default = Path(tempfile.gettempdir(), f"orchestrator-cache-{os.getuid()}")
    folder = Path(os.environ.get("ORCHESTRATOR_CACHE_DIR") or default)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    found: dict[str, Any] = {"folder": str(folder), **_room(there)}
    try:
        found["written_per_s"] = _writing_speed(there)
        found["is_on_root"] = there.stat().st_dev in _root_devices()
    except OSError as error:
        found["error"] = f"{there} cannot be written to: {error.strerror}"
    return found


def _root_devices() -> set[int]:
    """Of this machine: in a container, /etc/hosts comes from the disk on which the engine keeps containers."""
    return {Path(place).stat().st_dev for place in ("/", "/etc/hosts") if Path(place).exists()}


def _machine_type() -> str:
    """The provider's type of the machine (``p5.48xlarge``, ``a3-highgpu-8g``); empty elsewhere."""
    try:
        name = Path("/sys/class/dmi/id/product_name").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    if name != "Google Compute Engine":
        return name if re.fullmatch(r"[a-z]+\d\S*\.\d*\w+", name) else ""
    request = urllib.request.Request(_GOOGLE_TYPE_URL, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=1.0) as answer:  # noqa: S310 - the metadata service, by http
            return str(answer.read(200).decode()).rpartition("/")[2]
    except (OSError, ValueError):
        return ""


def _writing_speed(folder: Path) -> float:
    """Write speed of the disk, bytes per second."""
    path, block = folder / f".orchestrator-doctor-{secrets.token_hex(8)}", os.urandom(_BLOCK)
    started_s, written = time.monotonic(), 0
    try:
        with path.open("xb") as file:
            while written < _NUM_BLOCKS * _BLOCK and time.monotonic() - started_s < _WRITING_S:
                written += file.write(block)
                os.fsync(file.fileno()) if written % (16 * _BLOCK) == 0 else None
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return written / max(1e-9, time.monotonic() - started_s)


def _gpus() -> dict[str, Any]:
    """The driver's data of every GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"devices": []}
    command = [program, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"devices": [], "error": f"nvidia-smi fails ({type(error).__name__}): the driver is not loaded or hangs"}
    names = ("index", "name", "driver", "memory_mib", "used_mib", "ecc_errors")
    rows = ([cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip())
    return {"devices": [dict(zip(names, row, strict=False)) for row in rows]}
