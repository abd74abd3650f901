"""How this process reaches S3: with ``allowed``, the one reader of the environment in the storage layer.

Credentials are not here: boto3's own chain finds them (environment, profile files, web identity, instance role), so
they are in no value that could be printed, pickled or stored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.core.security.urls import forbidden_host

_MAX_READ_BYTES = 0x7FFFF000
"""What Linux reads of a file at once at most (``read(2)``); a piece is read at once."""


class Addressing(StrEnum):
    """Position of the bucket in a URL."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


class Checksums(StrEnum):
    """When requests carry, and responses are checked against, a checksum beside the signature."""

    WHEN_SUPPORTED = "when_supported"
    WHEN_REQUIRED = "when_required"
    """For servers that refuse the checksum headers."""


class S3Settings(BaseSettings):
    """Environment variables; each is also the name of a field with the prefix ``ORCHESTRATOR_S3_``."""

    model_config = SettingsConfigDict(
        env_prefix="ORCHESTRATOR_S3_", extra="ignore", frozen=True, populate_by_name=True, hide_input_in_errors=True
    )

    endpoint_url: str = Field("", validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    """URL of an S3-compatible server; empty for AWS itself or the profile's endpoint."""
    addressing: Addressing = Addressing.AUTO
    checksums: Checksums = Checksums.WHEN_SUPPORTED
    allowed_buckets: str = ""
    """Comma-separated; any other bucket is refused. Empty: all are allowed."""
    deadline_s: float = Field(60.0, gt=0)
    """An operation is retried until so many seconds after its start; its last try may end ``read_timeout_s`` later."""
    connect_timeout_s: float = Field(5.0, gt=0)
    read_timeout_s: float = Field(30.0, gt=0)
    """Longest silence of the server within one request."""
    part_bytes: int = Field(16 * 1024**2, ge=5 * 1024**2, le=_MAX_READ_BYTES)
    """Size of the pieces in which large objects travel; larger objects than one piece are sent and read in parallel."""
    num_parallel_parts: int = Field(4, ge=1)
    """Pieces of one object under way at once; a transfer holds at most so many of them in memory."""

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        parts = urlsplit(self.endpoint_url)
        if self.endpoint_url and (parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc):
            message = (
                "the S3 endpoint must be http(s)://host[:port] without user or password; check AWS_ENDPOINT_URL_S3"
            )
            raise ValueError(message)
        if reason := forbidden_host(parts.hostname or ""):
            raise ValueError(f"the S3 endpoint is {parts.hostname}, {reason}; check AWS_ENDPOINT_URL_S3")
        return self

    def allows(self, bucket: str) -> bool:
        """Whether a bucket may be used at all."""
        allowed = {name.strip() for name in self.allowed_buckets.split(",") if name.strip()}
        return not allowed or bucket in allowed
