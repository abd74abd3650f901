"""Which values a setting can have, for files, contexts and the environment alike, and how they are shown. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orchestrator.core.errors import StorageError
from orchestrator.core.security.redaction import HIDDEN, redacted
from orchestrator.core.security.references import is_reference
from orchestrator.core.security.secret_patterns import names_secret

if TYPE_CHECKING:
    from orchestrator.services.settings_sources import Setting

_WEB = frozenset({"http", "https"})
_FLAGS = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})
"""What pydantic reads as true or false."""
_LOGIN = re.compile(r"(?i)(https?://|(?:^|://)(?=[^/?#\s]*:[^/?#\s]*@))[^/?#\s]*@")
"""In a URI; a user without a password is shown, but for the web, where it may be a token."""
_IN_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]+")
_RAY_ADDRESS = re.compile(r"(?:ray://)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|auto|local")


def as_reference(text: str) -> str:
    """``${file:/path}`` for ``file:/path``: shells replace the long form in double quotes, so both are taken."""
    return text if text.startswith("${") else f"${{{text}}}"


def without_password(text: str) -> str:
    """A setting's value without passwords and tokens; a reference to a secret stays as it is."""
    if is_reference(as_reference(text)):
        return text
    return redacted(_IN_QUERY.sub(_without_secret, _LOGIN.sub(rf"\1{HIDDEN}@", text)))


def _without_secret(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if names_secret(found[1]) else found[0]


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
        return f"{name} is {without_password(value)!r}, and no address of a server; write https://host:port"
    if name == "ray_address" and not _is_web(value) and not _RAY_ADDRESS.fullmatch(value):
        return f"{name} is {without_password(value)!r}; write host:port, or https://host:port of a dashboard"
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
