"""Free ports for servers, and whether a Ray cluster answers at all.

The second is checked without Ray, which would try for minutes before it gives up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from random import SystemRandom

# ``ray start`` refuses 10002-19999, where its workers listen; the kernel hands out 32768 and above to everybody.
FIRST_PORT, LAST_PORT = 20_000, 32_000
_MAX_TRIES = 200
TIMEOUT_S = 4.0
# What an HTTP/2 client begins with (RFC 9113, section 3.4), and an empty SETTINGS frame: gRPC servers answer at once.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free at this moment; a server that binds later may still find one taken, and must
    report it.

    Raises:
        OSError: no free ports were found.
    """
    chosen: list[int] = []
    with ExitStack() as held:
        for port in SystemRandom().sample(range(FIRST_PORT, LAST_PORT), _MAX_TRIES):
            if len(chosen) == count:
                break
            with suppress(OSError):
                probe = held.enter_context(socket.socket())
                probe.bind(("", port))
                chosen.append(port)
    if len(chosen) < count:
        message = f"found {len(chosen)} of {count} free ports between {FIRST_PORT} and {LAST_PORT}; close some servers"
        raise OSError(message)
    return chosen


def listen_on_loopback() -> socket.socket:
    """A socket that listens on a free port of loopback: nobody else can have this port while it is open.

    Raises:
        OSError: no free port was found.
    """
    for port in SystemRandom().sample(range(FIRST_PORT, LAST_PORT), _MAX_TRIES):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    message = f"found no free port between {FIRST_PORT} and {LAST_PORT}; close some servers"
    raise OSError(message)


def are_free(ports: Iterable[int]) -> bool:
    """Whether a server can have these ports of loopback again.

    Connections that a killed server left behind hold its port for a minute, but not against a new server.
    """
    with ExitStack() as held:
        try:
            for port in ports:
                probe = held.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_answers(address: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raise ``OSError`` if no server accepts a connection at ``host:port``, or if it does not answer.

    Addresses of other forms (``ray://``) pass: only Ray can check them.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        connection.sendall(_PREFACE)
        connection.recv(1)  # an end of the stream is an answer, too: a server with TLS closes
