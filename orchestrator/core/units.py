"""Text for people: of the units in names (``_bytes``, ``_gib``, ``_s``), and of names that others have chosen."""

from __future__ import annotations

import re

GIB = 1024**3
MIB = 1024**2
KIB = 1024

_CENT = 0.01
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LEAST_DAYS = 4
_YEAR_DAYS = 365
_LEAST_MONEY = 1e-6
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""C0 and C1 without newline and tab: terminals obey them."""
_BYTE_STEPS = ((1024**6, "EiB"), (1024**5, "PiB"), (1024**4, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def format_bytes(num_bytes: int) -> str:
    """Render a size with a binary prefix: ``1536`` -> ``1.5 KiB``."""
    for step, name in _BYTE_STEPS:
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {name}"
    return f"{num_bytes} B"


def parse_duration(text: str, units: str = "smhd") -> float | None:
    """Seconds of ``90s``, ``10m``, ``36h`` or ``1.5d``; None for any other text. ``units`` has those that are taken."""
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)([{units}])", text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def format_duration(duration_s: float) -> str:
    """Render a duration: ``0.31`` -> ``0.3s``, ``75`` -> ``1m15s``, ``7300`` -> ``2h01m``, 100 h -> ``4d04h``."""
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    if days >= 2 * _YEAR_DAYS:
        return f"{duration_s / (_YEAR_DAYS * 86_400):,.1f} years"
    if days >= _LEAST_DAYS:
        return f"{days}d{rest:02d}h"
    return f"{hours}h{minutes:02d}m"


def format_money(amount: float) -> str:
    """Render a sum in any currency: ``1234.5`` -> ``1,234.50``; below 0.01 two digits: ``0.0012``."""
    if amount == 0 or abs(amount) >= _CENT:
        return f"{amount:,.2f}"
    if abs(amount) < _LEAST_MONEY:
        return f"{'>-' if amount < 0 else '<'}{_LEAST_MONEY:.6f}"
    exponent = int(f"{amount:.1e}".partition("e")[2])  # once rounded: 0.00999 is 0.010
    return f"{amount:.{1 - exponent}f}"


def format_percent(fraction: float, *, digits: int = 2) -> str:
    """Render a fraction in [0, 1] as a percentage; fractions are the only form that is ever stored."""
    return f"{100 * fraction:.{digits}f}"


def printable(text: str) -> str:
    """Text with its control characters, such as ESC, and lone surrogates as the escapes that stand for them in Python.

    Names in tars may be any bytes. Records, logs and terminals take UTF-8 alone, and terminals obey control characters.
    """
    return text.translate(_ESCAPES).encode(errors="backslashreplace").decode()
