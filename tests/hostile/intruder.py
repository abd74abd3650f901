"""Another user of the machine at every door of a stack: ``python -m tests.hostile.intruder`` as root.

Reads what is to be tried from standard input (``Doors``), becomes the user ``nobody``, tries all of it, and writes what
it was answered to standard output. It starts as root only because the interpreter may lie where ``nobody`` cannot go.
"""
# ruff: noqa: E501 - tables of requests

from __future__ import annotations

import json
import os
import pwd
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

NOBODY = "nobody"
_TIMEOUT_S = 5.0
_MAX_BODY = 4_000_000
JSON = {"Content-Type": "application/json"}
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "CANCELLED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What there is to try."""

    ports: list[int]
    sockets: list[str]
    """Paths of Unix sockets."""
    paths: list[str]
    """Files and folders."""
    run_id: str
    """Of a run in MLflow."""
    marker: str
    """A path that a job would write; its folder is the intruder's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one deed."""

    door: str
    """``tcp:PORT``, ``unix:PATH`` or ``file:PATH``."""
    deed: str
    result: str
    """Status of HTTP, code of gRPC, or what the kernel said."""
    is_success: bool
    body: str = ""


def http_deeds(doors: Doors) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """(method, path, headers, body): each server's own, tried on all of them."""
    run, artifacts = doors.run_id, "/api/2.0/mlflow-artifacts/artifacts"
    for path in (
        "/", "/health", "/version", "/metrics", "/api/version", "/api/healthz", "/api/local_raylet_healthz", "/api/jobs/",
        "/api/gcs_healthz", "/api/authentication_mode", "/api/v0/actors", "/api/v0/logs", "/nodes?view=summary", "/logs",
        "/api/prometheus/sd", "/worker/traceback?pid=1", "/api/v0/logs/file?filename=raylet.out", "/api/job_agent/jobs/",
        "/static-files/index.html", "/graphql", "/api/2.0/mlflow/experiments/search?max_results=9", f"{artifacts}/note.txt",
        f"/get-artifact?path=note.txt&run_uuid={run}", f"/get-artifact?path=link/ray_token&run_uuid={run}",
        f"/get-artifact?path=../../../ray_token&run_uuid={run}", f"/api/2.0/mlflow/runs/get?run_id={run}",
        f"/ajax-api/2.0/mlflow/artifacts/list?run_id={run}", f"/get-artifact?path=link.txt&run_uuid={run}",
        f"{artifacts}/link/ray_token", f"{artifacts}/..%2f..%2fray_token", f"{artifacts}/%2e%2e/ray_token",
        "/static-files/..%2f..%2f..%2f..%2fetc/passwd", "/static/..%2f..%2f..%2f..%2fetc/passwd", "/../../../etc/passwd",
        "/dir/assign", "/dir/lookup?volumeId=1", "/dir/status", "/cluster/status", "/cluster/healthz", "/vol/grow?count=1",
        "/status", "/ui/index.html", "/stats/counter", "/buckets/", "/buckets/orchestrator/private-object", "/topics/",
        "/buckets/orchestrator/?limit=9", "/orchestrator", "/orchestrator/private-object", "/orchestrator?list-type=2",
        "/etc/iam/identity.json", "/1,01", "/healthz", "/debug/pprof/cmdline", "/buckets/..%2f..%2fs3.json",
    ):  # fmt: skip
        yield "GET", path, {}, ""
    location = json.dumps({"name": "intruder", "artifact_location": f"file://{Path(doors.marker).parent}"})
    job = json.dumps({"entrypoint": f"touch {doors.marker}"})
    yield "POST", "/api/2.0/mlflow/experiments/create", JSON, location
    yield "POST", "/ajax-api/2.0/mlflow/experiments/create", JSON, json.dumps({"name": "intruder"})
    yield "POST", "/api/2.0/mlflow/experiments/delete", JSON, json.dumps({"experiment_id": "1"})
    yield "POST", "/api/2.0/mlflow/runs/delete", JSON, json.dumps({"run_id": run})
    yield "POST", "/api/2.0/mlflow/registered-models/create", JSON, json.dumps({"name": "intruder"})
    yield "POST", "/graphql", JSON, json.dumps({"query": "{__typename}"})
    yield "POST", f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path=new.txt", {}, "x"
    yield "POST", "/ajax-api/3.0/mlflow/assistant/chat", JSON, json.dumps({"message": f"touch {doors.marker}"})
    yield "POST", "/v1/traces", {"Content-Type": "application/x-protobuf", "x-mlflow-experiment-id": "0"}, ""
    for path in (f"{artifacts}/new.txt", "/orchestrator/new", "/buckets/orchestrator/new", "/intruder", "/1,01"):
        yield "PUT", path, {}, "x"
    for path in ("/api/jobs/", "/api/job_agent/jobs/"):
        yield "POST", path, JSON, job
    for path in ("/get_or_create_runtime_env", "/submit", "/buckets/orchestrator/new", "/orchestrator/new?uploads"):
        yield "POST", path, {}, "x"
    for path in (
        "/api/jobs/raysubmit_1", f"{artifacts}/note.txt", "/orchestrator/private-object", "/1,01", "/orchestrator",
        "/buckets/orchestrator/private-object", "/col/delete?collection=orchestrator",
    ):  # fmt: skip
        yield "DELETE", path, {}, ""


GRPC_METHODS = (
    "grpc.health.v1.Health/Check",
    *(f"ray.rpc.{name}" for name in (
        "HealthCheckGcsService/CheckAlive", "NodeInfoGcsService/GetAllNodeInfo", "NodeInfoGcsService/CheckAlive",
        "InternalKVGcsService/InternalKVKeys", "InternalKVGcsService/InternalKVGet", "InternalKVGcsService/InternalKVPut",
        "JobInfoGcsService/GetAllJobInfo", "JobInfoGcsService/AddJob", "ActorInfoGcsService/GetAllActorInfo",
        "ActorInfoGcsService/RegisterActor", "ActorInfoGcsService/KillActorViaGcs", "InternalPubSubGcsService/GcsPublish",
        "RuntimeEnvGcsService/PinRuntimeEnvURI", "WorkerInfoGcsService/GetAllWorkerInfo", "TaskInfoGcsService/GetTaskEvents",
        "NodeManagerService/GetNodeStats", "NodeManagerService/RequestWorkerLease", "NodeManagerService/GetSystemConfig",
        "NodeManagerService/KillLocalActor", "CoreWorkerService/PushTask", "CoreWorkerService/GetCoreWorkerStats",
        "CoreWorkerService/GetObjectStatus", "CoreWorkerService/KillActor", "CoreWorkerService/Exit",
        "ObjectManagerService/Pull", "ObjectManagerService/Push", "ObjectManagerService/FreeObjects", "LogService/ListLogs",
        "ReporterService/GetTraceback", "ReporterService/HealthCheck", "JobAgentService/InitializeJobEnv",
        "RayletDriver/Init", "RayletDriver/ClusterInfo", "RayletDataStreamer/Datapath",
        "RuntimeEnvService/GetOrCreateRuntimeEnv", "AgentManagerService/RegisterAgent",
    )),
    "master_pb.Seaweed/Assign", "master_pb.Seaweed/LookupVolume", "master_pb.Seaweed/VolumeList",
    "master_pb.Seaweed/CollectionDelete", "filer_pb.SeaweedFiler/ListEntries", "filer_pb.SeaweedFiler/CreateEntry",
    "filer_pb.SeaweedFiler/KvGet", "filer_pb.SeaweedFiler/GetFilerConfiguration", "filer_pb.SeaweedFiler/DeleteCollection",
    "volume_server_pb.VolumeServer/VolumeServerStatus", "volume_server_pb.VolumeServer/DeleteCollection",
    "volume_server_pb.VolumeServer/BatchDelete", "iam_pb.SeaweedIdentityAccessManagement/GetConfiguration",
    "s3_pb.SeaweedS3/Configure", "worker_pb.WorkerService/WorkerStream", "messaging_pb.SeaweedMessaging/ListTopics",
)  # fmt: skip


def knock(port: int, doors: Doors) -> Iterator[Answer]:
    """Every request on one port."""
    for method, path, headers, body in http_deeds(doors):
        result, content = _ask(port, method, path, headers, body)
        is_success = result.isdigit() and 200 <= int(result) < 300
        yield Answer(door=f"tcp:{port}", deed=f"{method} {path}", result=result, is_success=is_success, body=content)
        if not result.isdigit() or "HTTPS server" in content:
            break  # not HTTP
    yield _greet_tls(port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in GRPC_METHODS:
            code, body = _call(channel, method)
            yield Answer(
                door=f"tcp:{port}", deed=f"gRPC {method}", result=code, is_success=code not in REFUSED, body=body
            )
            if code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:
                break  # not gRPC, or TLS without us


def _ask(port: int, method: str, path: str, headers: dict[str, str], body: str) -> tuple[str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body.encode() or None, headers)
        answer = connection.getresponse()
        return str(answer.status), answer.read(_MAX_BODY).decode(errors="replace")
    except (OSError, HTTPException) as error:
        return type(error).__name__, ""
    finally:
        connection.close()


def _greet_tls(port: int) -> Answer:
    """Shake hands without a certificate; whoever lets us in goes on to answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = "answered" if connection.recv(1) else "closed"
    except OSError as error:  # of TLS, too
        said = type(error).__name__
    return Answer(door=f"tcp:{port}", deed="TLS without a certificate", result=said, is_success=said == "answered")


def _call(channel: grpc.Channel, method: str) -> tuple[str, str]:
    call: Any = channel.unary_unary(f"/{method}")  # bytes in, bytes out
    try:
        return "OK", (call(b"", timeout=_TIMEOUT_S) or b"").decode(errors="replace")
    except grpc.RpcError as error:
        return str(error.code().name), str(error.details())


def touch_files(path: str) -> Iterator[Answer]:
    """Read, write, list, create and delete, as the kernel lets us."""
    deeds = {"read": os.O_RDONLY, "write": os.O_WRONLY, "append": os.O_WRONLY | os.O_APPEND}
    for deed, flags in deeds.items():
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
            said = "opened"
        except OSError as error:
            said = type(error).__name__
        yield Answer(door=f"file:{path}", deed=deed, result=said, is_success=said == "opened")
    acts: dict[str, Callable[[str], object]] = {"list": os.listdir, "delete": os.unlink}
    for deed, act in acts.items():
        try:
            act(path)
            said = "done"
        except OSError as error:
            said = type(error).__name__
        yield Answer(door=f"file:{path}", deed=deed, result=said, is_success=said == "done")
    with suppress(OSError):  # what it is not a folder, or not for us, says nothing
        Path(path, "intruder").touch()
        yield Answer(door=f"file:{path}", deed="create", result="done", is_success=True)


def enter(path: str) -> Answer:
    """Connect to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(_TIMEOUT_S)
        try:
            one.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
            said = "connected"
        except OSError as error:
            said = type(error).__name__
    return Answer(door=f"unix:{path}", deed="connect", result=said, is_success=said == "connected")


def main() -> None:
    """Drop all rights, then try everything."""
    doors = Doors(**json.load(sys.stdin))
    list(knock(1, doors))  # nobody is there; what Python imports late is imported now
    user = pwd.getpwnam(NOBODY)
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    assert os.getresuid() == (user.pw_uid,) * 3
    answers = [answer for port in doors.ports for answer in knock(port, doors)]
    answers += [enter(path) for path in doors.sockets]
    answers += [answer for path in doors.paths for answer in touch_files(path)]
    json.dump([asdict(answer) for answer in answers], sys.stdout)


if __name__ == "__main__":
    main()
