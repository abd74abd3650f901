"""The link-local metadata services of AWS and Google Cloud, as far as machines ask them for notices, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

_TTL_HEADER, _TOKEN_HEADER = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"


class Metadata:
    """What the services say; a test changes it."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.paths: dict[str, str] = {}
        """Texts by path; anything else does not exist."""
        self.tokens: set[str] = set()
        """Of AWS, those that are valid."""
        self.num_requests = 0
        self.status = 200
        """Of every answer; 503 = out of order."""

    def interrupt(self, seconds: float) -> None:
        """AWS takes the machine back."""
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        notice = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.paths["/latest/meta-data/spot/instance-action"] = json.dumps(notice)


@contextmanager
def serve_metadata() -> Iterator[Metadata]:
    """A server on a free port of loopback, until the end of the block."""
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if self.headers.get(_TTL_HEADER) is None:
                self._answer(400, "")
                return
            token = f"token{len(metadata.tokens)}"
            metadata.tokens.add(token)
            self._answer(metadata.status, token)

        def do_GET(self) -> None:
            metadata.num_requests += 1
            is_google = self.path.startswith("/computeMetadata/")
            may_ask = (
                self.headers.get("Metadata-Flavor") == "Google" or self.headers.get(_TOKEN_HEADER) in metadata.tokens
            )
            found = metadata.paths.get(self.path)
            if metadata.status != 200:
                self._answer(metadata.status, "")
            elif not may_ask:
                self._answer(403 if is_google else 401, "")
            else:
                self._answer(404 if found is None else 200, found or "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    metadata.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield metadata
    finally:
        server.shutdown()
        server.server_close()


NOTHING = MappingProxyType(
    {
        "/computeMetadata/v1/instance/preempted": "FALSE",
        "/computeMetadata/v1/instance/maintenance-event": "NONE",
    }
)
"""What Google's service says of a machine that stays."""
