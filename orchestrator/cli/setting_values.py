"""What a setting's value must look like, told where it is written rather than where it is used."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from orchestrator.cli.known_settings import setting_named
from orchestrator.core.errors import StorageError
from orchestrator.storage.open import check_store_uri

_WEB = {"http", "https"}
_FLAGS = {"true", "false"}
_RAY_ADDRESS = re.compile(r"(?:ray://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|auto|local")


def problem_of_value(name: str, value: str) -> str:
    """What is wrong with a value of a known setting; empty if nothing is, or nobody can tell. Pure."""
    setting = setting_named(name)
    if setting is not None and setting.choices and value not in setting.choices:
        return f"{name} is {value!r}; write {' or '.join(setting.choices)}"
    if name == "store":
        return _store_problem(value)
    if name == "store_shared" and value not in _FLAGS:
        return f"{name} is {value!r}; write true or false"
    is_server = name in {"dashboard_address", "s3_endpoint_url"}
    is_server |= name == "mlflow_tracking_uri" and value.startswith(("http:", "https:"))
    if is_server and not _is_web(value):
        return f"{name} is {value!r}, and no address of a server; write https://host:port"
    if name == "ray_address" and not _is_web(value) and not _RAY_ADDRESS.fullmatch(value):
        return f"{name} is {value!r}; write host:port, or https://host:port of a dashboard"
    return ""


def _store_problem(value: str) -> str:
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
