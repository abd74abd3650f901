"""Connections to addresses that people write into files: no metadata services, no redirects, no clear text to far away.

A receiver that sends a byte now and then keeps every read alive, so besides each step the whole has a deadline.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import socket
import ssl
import threading
from contextlib import closing, suppress
from typing import Self
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from orchestrator.core.errors import UserError
from orchestrator.core.security.urls import check_url, forbidden_host

_MAX_ANSWER_BYTES = 64 * 1024
_HTTPS_PORT, _HTTP_PORT = 443, 80


def post(url: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> int:
    """Send a POST; returns the status of the answer, which is not followed if it leads elsewhere.

    ``timeout_s`` is for all of it, but for asking the name server, which has limits of its own.

    The name is resolved once, and what it is resolved to is checked and connected to: an answer of a name server that
    changes in between changes nothing.

    Raises:
        UserError: the URL is refused.
        OSError: nobody answers in time, or not in HTTP.
    """
    check_url(url, what="the webhook")
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with Deadline(timeout_s) as deadline, closing(_connection(parts, deadline)) as connection:
            connection.request("POST", target, body=body, headers={**headers, "User-Agent": "pretraining-orchestrator"})
            answer = connection.getresponse()
            answer.read(_MAX_ANSWER_BYTES)
            return answer.status
    except http.client.HTTPException as error:
        raise ConnectionError(type(error).__name__) from None


class Deadline:
    """Cuts the connections that were made by it when its time is over, whatever still comes over them.

    Leaving it then raises ``TimeoutError`` in the place of what a library makes of the end of its connection.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._is_over = threading.Event()
        self._held: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for held in self._held:
            held.close()
        if isinstance(error, Exception) and self._is_over.is_set():
            raise TimeoutError(errno.ETIMEDOUT, f"it did not end within {self.timeout_s:g} s") from error

    def connect(self, address: tuple[str, int], *_: object) -> socket.socket:
        """As ``socket.create_connection``. Raises ``OSError``."""
        if self._is_over.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "no time is left to connect")
        found = socket.create_connection(address, self.timeout_s)
        # TLS takes a socket over; a second descriptor of the same connection cuts it in the midst of a handshake, too.
        self._held.append(found.dup())
        return found

    def _cut(self) -> None:
        self._is_over.set()
        for held in self._held:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


def checked_address(host: str, port: int) -> str:
    """The address of a host. Raises ``UserError`` if it leads to a metadata service, ``OSError`` if to nothing."""
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if reason := forbidden_host(address):
        raise UserError(f"the host {host} leads to {address}, {reason}; name a server of your own")
    return address


class _To(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name leads to by now."""

    def __init__(self, host: str, port: int, address: str, deadline: Deadline) -> None:
        super().__init__(host, port, timeout=deadline.timeout_s)
        self._address, self._deadline = address, deadline

    def connect(self) -> None:
        self.sock = self._deadline.connect((self._address, self.port))


class _SecurelyTo(_To):
    """The same with TLS; the certificate must be the host's."""

    def connect(self) -> None:
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _connection(parts: SplitResult, deadline: Deadline) -> http.client.HTTPConnection:
    host = str(parts.hostname)
    is_secure = parts.scheme == "https"
    port = parts.port or (_HTTPS_PORT if is_secure else _HTTP_PORT)
    proxy = None if proxy_bypass(host) else getproxies().get("https")
    if is_secure and proxy:
        # The proxy resolves the name; that it leads to no metadata service is then the proxy's to see to.
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        tunnel = http.client.HTTPSConnection(
            str(way.hostname), way.port or _HTTP_PORT, timeout=deadline.timeout_s, context=ssl.create_default_context()
        )
        setattr(tunnel, "_create_connection", deadline.connect)  # noqa: B010 - the seam of http.client for this
        tunnel.set_tunnel(host, port)
        return tunnel
    address = checked_address(host, port)
    if is_secure:
        return _SecurelyTo(host, port, address, deadline)
    if not ipaddress.ip_address(address.partition("%")[0]).is_private:
        message = f"the webhook of {host} is asked over http, which everybody on the way reads; use https"
        raise UserError(message)
    return _To(host, port, address, deadline)
