"""Addresses of servers that come from files and sweeps: what is refused before anything is sent. Pure.

A server that fetches given URLs can be used to reach machines that only it can reach. The most dangerous ones are the
metadata services of clouds, which give credentials to every request from the machine itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from orchestrator.core.errors import UserError

_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.azure.com", "instance-data"})
_METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(address) for address in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")
)
_METADATA_IPV4 = frozenset(
    ipaddress.IPv4Address(address) for address in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192")
)
_TRANSLATOR = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_TRANSLATOR = ipaddress.IPv6Network("64:ff9b:1::/48")
_EMBEDDED_BYTES = ((6, 7, 9, 10), (7, 9, 10, 11), (9, 10, 11, 12), (12, 13, 14, 15))
"""Where an IPv6 address holds an IPv4 one, for prefixes of 48, 56, 64 and 96 bits (RFC 6052, section 2.2)."""
_SPACE_OR_CONTROL = re.compile(r"[\x00-\x20\x7f\\]")


def check_url(url: str, *, what: str = "the URL") -> None:
    """Refuse URLs to which no request may be sent. No message shows the URL, which may have a password.

    Names are not resolved: who controls a name server of the cluster's own network can still point there.

    Raises:
        UserError: another scheme, no host, a user or password, blanks, or the address of a metadata service.
    """
    parts = _split(url, what)
    if parts.scheme not in {"http", "https"}:
        raise UserError(f"{what} has the scheme {parts.scheme!r}; allowed: http, https")
    if "@" in parts.netloc:
        raise UserError(f"{what} has a user or password, which would be stored and shown; give them by the environment")
    if not parts.hostname:
        raise UserError(f"{what} names no host; write http://host:port")
    if reason := forbidden_host(parts.hostname):
        raise UserError(f"{what} names the host {parts.hostname}, {reason}; name your own server")


def forbidden_host(host: str) -> str:
    """Why no request may be sent to a host; empty if it may. All spellings of an address (hex, octal, mapped) count."""
    if host.rstrip(".").lower() in _METADATA_NAMES:
        return "which hands out the credentials of machines"
    address = _address(host)
    if address is None:
        return ""
    if any(reached in _METADATA_ADDRESSES or reached.is_link_local for reached in (address, *_translated(address))):
        return "where clouds hand out the credentials of machines"
    return "which is not a single machine" if address.is_multicast or address.is_unspecified else ""


def _split(url: str, what: str) -> SplitResult:
    if _SPACE_OR_CONTROL.search(url):
        raise UserError(f"{what} holds blanks, control characters or backslashes, which programs read differently")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UserError(f"{what} is malformed: check its host and port") from None
    return parts


def _translated(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """IPv4 addresses to which a gateway (NAT64, RFC 6052 and 8215; IPv4-compatible; Teredo) may pass an IPv6 one on.

    A network may have a prefix of its own, which nobody here knows: so an address of any prefix is one of a metadata
    service if it ends in it.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return
    last = ipaddress.IPv4Address(address.packed[12:])
    if address in _TRANSLATOR or last in _METADATA_IPV4 or not any(address.packed[:12]):
        yield last
    if address in _LOCAL_TRANSLATOR:
        yield from (ipaddress.IPv4Address(bytes(address.packed[at] for at in places)) for places in _EMBEDDED_BYTES)
    yield from address.teredo or ()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is, in any spelling that C libraries accept."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
        except (OSError, ValueError):
            return None
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return mapped or address
