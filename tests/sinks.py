"""A webhook and a mail server on this machine that keep what they get."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from aiosmtpd.smtp import AuthResult, LoginPassword
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Webhook:
    """What came, and what is answered: the next of ``statuses``, then 200."""

    url: str
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answers."""


@contextmanager
def webhook_sink() -> Iterator[Webhook]:
    found = Webhook(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:  # of a client that takes it for its proxy
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            found.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(found.statuses.pop(0) if found.statuses else 200)
            for name, value in {"Content-Length": "0", **found.headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    found.url = f"http://{LOOPBACK}:{server.server_address[1]}/hook?x=1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def dripping_sink(first: bytes, num_bytes: int, every_s: float) -> Iterator[tuple[str, int]]:
    """A server that answers each connection with ``first`` and then one blank at a time, so that no read times out."""
    is_closed = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as server:

        def drip() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.sendall(first)
                        for _ in range(num_bytes):
                            if is_closed.wait(every_s):
                                return
                            connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            is_closed.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@dataclass(slots=True)
class Mailbox:
    """A mail server and the mails that it took."""

    server: str
    certificate: Path
    mails: list[Message] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def mail_sink(folder: Path, *, password: str) -> Iterator[Mailbox]:
    """With STARTTLS and a login of ``user`` that are both required."""
    certificate, key = make_certificate(folder)
    found = Mailbox(server="", certificate=certificate)

    class Keeper(MessageHandler):
        def handle_message(self, message: Message) -> None:
            found.mails.append(message)

    def check(_server: object, _session: object, _envelope: object, _mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        found.logins.append((data.login.decode(), data.password.decode()))
        return AuthResult(success=data.password.decode() == password, handled=False)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    controller = Controller(
        Keeper(), LOOPBACK, 0, tls_context=context, require_starttls=True, auth_required=True, authenticator=check
    )
    controller.port = free_port()
    controller.start()
    found.server = f"{LOOPBACK}:{controller.port}"
    try:
        yield found
    finally:
        controller.stop()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for this machine that signs itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sink")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
