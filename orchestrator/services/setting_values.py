"""Which values a setting can have, for files, contexts and the environment alike. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orchestrator.core.errors import StorageError

if TYPE_CHECKING:
    from orchestrator.services.settings_sources import Setting

_WEB = frozenset({"http", "https"})
_FLAGS = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})
"""What pydantic reads as true or false."""
_RAY_ADDRESS = re.compile(r"(?:ray://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|auto|local")


def problem_of_value(setting: Setting, value: str) -> str:
    """The error in a value that is set; empty if there is none, or if it cannot be checked."""
    name = setting.name
    if setting.choices and value not in setting.choices:
        return f"{name} is {value!r}; write {' or '.join(setting.choices)}"
    if name == "store":
        return _store_problem(value)
    if name == "store_shared" and value.lower() not in _FLAGS:
        return f"{name} is {value!r}; write true or false"
    is_server = name in {"dashboard_address", "s3_endpoint_url"}
    is_server |= name == "mlflow_tracking_uri" and value.startswith(("http:", "https:"))
    if is_server and not _is_web(value):
        return f"{name} is {value!r}, and no address of a server; write https://host:port"
    if name == "ray_address" and not _is_web(value) and not _RAY_ADDRESS.fullmatch(value):
        return f"{name} is {value!r}; write host:port, or https://host:port of a dashboard"
    return ""


def _store_problem(value: str) -> str:
    from orchestrator.storage.open import check_store_uri

    try:
        check_store_uri(value)
    except StorageError as error:
        return f"store: {error}"
    return ""


def _is_web(value: str) -> bool:
    """Whether it is ``http(s)://host[:port]``, perhaps with a path."""
    try:
        parts = urlsplit(value)
        return parts.scheme in _WEB and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", value)
    except ValueError:
        return False
