"""HTTP to addresses that people write into files: no metadata services, no redirects, no clear text to far away."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from orchestrator.errors import UserError
from orchestrator.security.urls import check_url, forbidden_host

_MAX_ANSWER_BYTES = 64 * 1024
_HTTPS_PORT, _HTTP_PORT = 443, 80


def post(url: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> int:
    """Send a POST; returns the status of the answer, which is not followed if it leads elsewhere.

    The name is resolved once, and what it is resolved to is checked and connected to: an answer of a name server that
    changes in between changes nothing.

    Raises:
        UserError: the URL is refused.
        OSError: nobody answers in time, or not in HTTP.
    """
    check_url(url, what="the webhook")
    parts = urlsplit(url)
    connection = _connection(parts, timeout_s)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body=body, headers={**headers, "User-Agent": "pretraining-orchestrator"})
        answer = connection.getresponse()
        answer.read(_MAX_ANSWER_BYTES)
        return answer.status
    except http.client.HTTPException as error:
        raise ConnectionError(type(error).__name__) from None
    finally:
        connection.close()


def checked_address(host: str, port: int) -> str:
    """The address of a host. Raises ``UserError`` if it leads to a metadata service, ``OSError`` if to nothing."""
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if reason := forbidden_host(address):
        raise UserError(f"the host {host} leads to {address}, {reason}; name a server of your own")
    return address


class _To(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name leads to by now."""

    def __init__(self, host: str, port: int, address: str, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)


class _SecurelyTo(_To):
    """The same with TLS; the certificate must be the host's."""

    def connect(self) -> None:
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    host = str(parts.hostname)
    is_secure = parts.scheme == "https"
    port = parts.port or (_HTTPS_PORT if is_secure else _HTTP_PORT)
    proxy = None if proxy_bypass(host) else getproxies().get("https")
    if is_secure and proxy:
        # The proxy resolves the name; that it leads to no metadata service is then the proxy's to see to.
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        tunnel = http.client.HTTPSConnection(
            str(way.hostname), way.port or _HTTP_PORT, timeout=timeout_s, context=ssl.create_default_context()
        )
        tunnel.set_tunnel(host, port)
        return tunnel
    address = checked_address(host, port)
    if is_secure:
        return _SecurelyTo(host, port, address, timeout_s)
    if not ipaddress.ip_address(address.partition("%")[0]).is_private:
        message = f"the webhook of {host} is asked over http, which everybody on the way reads; use https"
        raise UserError(message)
    return _To(host, port, address, timeout_s)
