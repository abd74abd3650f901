"""An HTTP proxy in front of a real S3 server that damages what a test tells it to, and passes on the rest."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials


class Damage(StrEnum):
    """What happens to a request. In all of the ``LOST`` cases the server has acted before the client sees a failure."""

    THROTTLED = "throttled"
    """503 SlowDown, the server never hears of it."""
    RESET = "reset"
    """The connection ends before the server hears of it."""
    ANSWER_LOST = "answer_lost"
    ANSWER_LOST_AS_500 = "answer_lost_as_500"
    ANSWER_LOST_AS_409 = "answer_lost_as_409"
    ANSWER_TRUNCATED = "answer_truncated"
    ANSWER_FLIPPED = "answer_flipped"
    """One bit of the body changes on its way to the client."""
    REQUEST_FLIPPED = "request_flipped"
    """One bit of the body changes on its way to the server."""
    SILENCE = "silence"
    """The server never hears of it and the client gets no answer for as long as it waits."""
    FULL = "full"
    """507, the server never hears of it."""
    CONDITIONS_IGNORED = "conditions_ignored"
    """The server hears of no If-Match and If-None-Match, as if it knew none; signed anew from the environment."""


ERRORS = {
    Damage.THROTTLED: (503, "SlowDown"),
    Damage.ANSWER_LOST_AS_500: (500, "InternalError"),
    Damage.ANSWER_LOST_AS_409: (409, "ConditionalRequestConflict"),
    Damage.FULL: (507, "InsufficientStorage"),
}
AFTER_THE_SERVER = {Damage.ANSWER_LOST, Damage.ANSWER_LOST_AS_500, Damage.ANSWER_LOST_AS_409}

Schedule = Callable[[str, str], Damage | None]


@dataclass(slots=True)
class Faults:
    """What is to happen to requests by method and path; ``seen`` records those that came, retries included."""

    schedule: Schedule = lambda _method, _path: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    clock_offset_s: float = 0.0
    """How far the dates in the answers are ahead."""

    def damage_next(self, method: str, *damages: Damage) -> None:
        """Damage the next requests of a method, one after the other."""
        pending = list(damages)
        lock = threading.Lock()

        def choose(found: str, _path: str) -> Damage | None:
            with lock:
                return pending.pop(0) if found == method and pending else None

        self.schedule = choose

    def damage_all(self, method: str, damage: Damage) -> None:
        """Damage every request of a method from now on."""
        self.schedule = lambda found, _path: damage if found == method else None


@contextmanager
def faulty_proxy(upstream_url: str) -> Iterator[tuple[str, Faults]]:
    """Run a proxy on a free loopback port; yields its URL and the faults to set."""
    faults = Faults()
    handler = type("Handler", (_Handler,), {"faults": faults, "upstream": urlsplit(upstream_url).netloc})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        faults.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    upstream: str

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.faults.seen.append((self.command, self.path))
        damage = self.faults.schedule(self.command, self.path)
        if damage is Damage.SILENCE:
            self.faults.closing.wait(timeout=60)
        if damage in {Damage.RESET, Damage.SILENCE}:
            self.close_connection = True
            return
        if damage in ERRORS and damage not in AFTER_THE_SERVER:
            self._refuse(*ERRORS[damage])
            return
        status, headers, content = self._ask(_flip(body) if damage is Damage.REQUEST_FLIPPED else body, damage)
        if damage is Damage.ANSWER_LOST:
            self.close_connection = True
        elif damage in ERRORS:
            self._refuse(*ERRORS[damage])
        else:
            self._send(status, headers, content, damage)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.faults.clock_offset_s)

    def _ask(self, body: bytes, damage: Damage | None) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = dict(self.headers.items())
        if damage is Damage.CONDITIONS_IGNORED:
            headers = _unconditional(self.command, self.path, body, headers)
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        # The Host header stays the client's: it is part of the signature.
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.getheaders(), content

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, damage: Damage | None) -> None:
        self.send_response(status)
        for name, text in headers:
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "date", "server"}:
                self.send_header(name, text)
        length = dict(headers).get("Content-Length", str(len(content)))  # of HEAD: of what is not sent
        self.send_header("Content-Length", length)
        self.end_headers()
        if damage is Damage.ANSWER_TRUNCATED:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(_flip(content) if damage is Damage.ANSWER_FLIPPED else content)

    def _refuse(self, status: int, code: str) -> None:
        content = f"<Error><Code>{code}</Code><Message>damaged by the test</Message></Error>".encode()
        self._send(status, [("Content-Type", "application/xml")], content, None)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


def _unconditional(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, str]:
    """The headers of the same request without its conditions, which are part of the signature."""
    left_out = {"if-match", "if-none-match", "authorization", "x-amz-date"}
    kept = {name: text for name, text in headers.items() if name.lower() not in left_out}
    request = AWSRequest(method, f"http://{headers['Host']}{path}", headers=kept, data=body)
    credentials = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    S3SigV4Auth(credentials, "s3", os.environ.get("AWS_REGION", "us-east-1")).add_auth(request)
    return dict(request.headers.items())


def _flip(content: bytes) -> bytes:
    if not content:
        return content
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
