"""Whether a Ray cluster answers at all, asked without Ray, which tries for minutes before it says no."""

from __future__ import annotations

import socket

TIMEOUT_S = 4.0
# What an HTTP/2 client begins with (RFC 9113, section 3.4), and an empty SETTINGS frame: gRPC servers answer at once.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def check_answers(address: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raise ``OSError`` if nobody takes a connection at ``host:port``, or whoever does stays silent.

    Addresses of other forms (``ray://``) pass: only Ray knows how to ask there.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        connection.sendall(_PREFACE)
        connection.recv(1)  # an end of the stream is an answer, too: a server with TLS closes
