"""An HTTP proxy in front of a real S3 server that damages what a test tells it to, and passes on the rest."""

from __future__ import annotations

import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
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
    CONDITIONS_RACY = "conditions_racy"
    """The server looks whether a condition holds, and writes later, without the condition."""
    REPLACING_RACY = "replacing_racy"
    """As the one before, for If-Match alone."""
    CONDITIONS_REFUSED = "conditions_refused"
    """400 to a request with a condition; the server never hears of it."""
    CONDITIONS_NOT_IMPLEMENTED = "conditions_not_implemented"
    """501 to a request with a condition; the server never hears of it."""
    RANGE_IGNORED = "range_ignored"
    """The server hears of no Range and sends the whole object."""

    # Of the next ones the server never hears: somebody else answers.
    EXPIRED = "expired"
    BUCKET_GONE = "bucket_gone"
    DENIED_HTML = "denied_html"
    BAD_GATEWAY_HTML = "bad_gateway_html"
    NOT_FOUND_HTML = "not_found_html"
    NOT_FOUND_EMPTY = "not_found_empty"
    LOGIN_PAGE = "login_page"
    """200 and HTML, as from a captive portal."""
    LOGIN_PAGE_XHTML = "login_page_xhtml"
    TO_LOGIN = "to_login"
    TO_HTTPS = "to_https"
    EMPTY_OK = "empty_ok"
    NO_CONTENT = "no_content"
    JSON_OK = "json_ok"

    # Of the next ones the server's answer is changed.
    NO_ETAG = "no_etag"
    WRONG_ETAG_ON_PUT = "wrong_etag_on_put"
    NO_DATE = "no_date"
    OTHER_BUCKET_LISTED = "other_bucket_listed"
    OTHER_FOLDER_LISTED = "other_folder_listed"
    LISTING_WITHOUT_NAME = "listing_without_name"
    LISTING_OF_ANOTHER_KIND = "listing_of_another_kind"
    LISTING_ENDLESS = "listing_endless"
    """Each page says that another follows, and not which."""


ERRORS = {
    Damage.THROTTLED: (503, "SlowDown"),
    Damage.ANSWER_LOST_AS_500: (500, "InternalError"),
    Damage.ANSWER_LOST_AS_409: (409, "ConditionalRequestConflict"),
    Damage.FULL: (507, "InsufficientStorage"),
    Damage.EXPIRED: (400, "ExpiredToken"),
    Damage.BUCKET_GONE: (404, "NoSuchBucket"),
}
AFTER_THE_SERVER = {Damage.ANSWER_LOST, Damage.ANSWER_LOST_AS_500, Damage.ANSWER_LOST_AS_409}
IF_CONDITIONAL = {
    Damage.CONDITIONS_REFUSED: (400, "InvalidArgument"),
    Damage.CONDITIONS_NOT_IMPLEMENTED: (501, "NotImplemented"),
}

_HTML = b"<!DOCTYPE html><html><head><title>Log in</title></head><body><p>Accept the terms<br></body></html>"
_XHTML = b'<?xml version="1.0"?><html><head><title>Log in</title></head><body><p>Accept the terms</p></body></html>'
_PAGE = [("Content-Type", "text/html")]
ANSWERS: dict[Damage, tuple[int, list[tuple[str, str]], bytes]] = {
    Damage.DENIED_HTML: (403, _PAGE, _HTML),
    Damage.BAD_GATEWAY_HTML: (502, _PAGE, _HTML),
    Damage.NOT_FOUND_HTML: (404, _PAGE, _HTML),
    Damage.NOT_FOUND_EMPTY: (404, [], b""),
    Damage.LOGIN_PAGE: (200, _PAGE, _HTML),
    Damage.LOGIN_PAGE_XHTML: (200, _PAGE, _XHTML),
    Damage.TO_LOGIN: (302, [*_PAGE, ("Location", "http://127.0.0.1:9/login")], _HTML),
    Damage.TO_HTTPS: (301, [*_PAGE, ("Location", "https://127.0.0.1:9/")], _HTML),
    Damage.EMPTY_OK: (200, [], b""),
    Damage.NO_CONTENT: (204, [], b""),
    Damage.JSON_OK: (200, [("Content-Type", "application/json")], b'{"status": "ok"}'),
}
"""Of somebody who is no S3 server."""

LISTINGS: dict[Damage, tuple[bytes, bytes]] = {
    Damage.OTHER_BUCKET_LISTED: (rb"<(Name|Bucket)>[^<]*<", rb"<\1>another<"),
    Damage.OTHER_FOLDER_LISTED: (rb"<Prefix>[^<]*</Prefix>", b"<Prefix>another/</Prefix>"),
    Damage.LISTING_WITHOUT_NAME: (rb"<(Name|Bucket)>[^<]*</(Name|Bucket)>", b""),
    Damage.LISTING_OF_ANOTHER_KIND: (rb"List(Bucket|MultipartUploads)Result", b"Listing"),
    Damage.LISTING_ENDLESS: (rb"<IsTruncated>false<", b"<IsTruncated>true<"),
}
"""What is replaced in a listing, and by what."""
LEFT_OUT = {Damage.NO_ETAG: "etag", Damage.NO_DATE: "last-modified"}

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
        if damage in IF_CONDITIONAL and _is_conditional(self.headers):
            self._refuse(*IF_CONDITIONAL[damage])
            return
        if damage in ANSWERS:
            status, headers, content = ANSWERS[damage]
            self._send(status, headers, content, None)
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
        if damage is Damage.REPLACING_RACY and "If-Match" in self.headers:
            damage = Damage.CONDITIONS_RACY
        if damage is Damage.CONDITIONS_RACY and self.command == "PUT" and _is_conditional(self.headers):
            if not self._condition_holds():
                return 412, [], b"<Error><Code>PreconditionFailed</Code></Error>"
            self.faults.closing.wait(timeout=_LOOK_TO_WRITE_S)
        if damage in {Damage.CONDITIONS_IGNORED, Damage.CONDITIONS_RACY}:
            headers = _without({"if-match", "if-none-match"}, self.command, self.path, body, headers)
        if damage is Damage.RANGE_IGNORED:
            headers = _without({"range"}, self.command, self.path, body, headers)
        return self._upstream(self.command, body, headers)

    def _condition_holds(self) -> bool:
        found = self._upstream("HEAD", b"", _without(_CONDITIONS, "HEAD", self.path, b"", dict(self.headers.items())))
        status, headers = found[0], {name.lower(): text for name, text in found[1]}
        if "If-None-Match" in self.headers:
            return status == 404
        return status == 200 and headers["etag"].strip('"') == self.headers["If-Match"].strip('"')

    def _upstream(self, method: str, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        # The Host header stays the client's: it is part of the signature.
        connection.request(method, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.getheaders(), content

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, damage: Damage | None) -> None:
        headers, content = self._changed(headers, content, damage)
        self.send_response(status)
        for name, text in headers:
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "date", "server"}:
                self.send_header(name, text)
        length = dict(headers).get("Content-Length", str(len(content)))  # of HEAD: of what is not sent
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if damage is Damage.ANSWER_TRUNCATED:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(_flip(content) if damage is Damage.ANSWER_FLIPPED else content)

    def _changed(
        self, headers: list[tuple[str, str]], content: bytes, damage: Damage | None
    ) -> tuple[list[tuple[str, str]], bytes]:
        if damage in LEFT_OUT:
            headers = [(name, text) for name, text in headers if name.lower() != LEFT_OUT[damage]]
        if damage is Damage.WRONG_ETAG_ON_PUT and self.command == "PUT":
            headers = [(name, _NO_ETAG if name.lower() == "etag" else text) for name, text in headers]
        if damage in LISTINGS and _LISTING.search(content):
            headers = [(name, text) for name, text in headers if name.lower() != "content-length"]
            content = re.sub(*LISTINGS[damage], content)
        return headers, content

    def _refuse(self, status: int, code: str) -> None:
        content = f"<Error><Code>{code}</Code><Message>damaged by the test</Message></Error>".encode()
        self._send(status, [("Content-Type", "application/xml")], content, None)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


_LOOK_TO_WRITE_S = 0.05
_NO_ETAG = f'"{"0" * 32}"'
_LISTING = re.compile(rb"List(Bucket|MultipartUploads)Result")
_CONDITIONS = {"if-match", "if-none-match"}


def _is_conditional(headers: Iterable[str]) -> bool:
    return any(name.lower() in _CONDITIONS for name in headers)


def _without(names: set[str], method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, str]:
    """The headers of a request without some of them, which are part of the signature."""
    left_out = {*names, "authorization", "x-amz-date"}
    if not body:
        left_out |= {"content-length", "content-md5", "x-amz-content-sha256", "content-encoding", "expect"}
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
