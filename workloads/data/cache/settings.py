"""How large the cache may become: the one reader of its environment."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ByteSize, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.core.errors import UserError

_FREE_SHARE = 0.5
"""Of the space that would be free without the cache: scratch, logs and other programs need the rest."""


class CacheSettings(BaseSettings):
    """``ORCHESTRATOR_CACHE_BYTES``: a number, or a size such as ``500GB`` or ``1.5TiB``; unset: half the free space."""

    model_config = SettingsConfigDict(env_prefix="ORCHESTRATOR_CACHE_", extra="ignore", frozen=True)

    bytes: ByteSize | None = None

    @classmethod
    def read(cls) -> CacheSettings:
        """From the environment. Raises ``UserError`` if the variable is no size."""
        try:
            return cls()
        except ValidationError as error:
            given = os.environ.get("ORCHESTRATOR_CACHE_BYTES")
            message = f"ORCHESTRATOR_CACHE_BYTES is {given!r}: write a number of bytes or a size such as 500GB or 2TiB"
            raise UserError(message) from error

    def limit_bytes(self, folder: Path, used_bytes: int) -> int:
        """What the cache in ``folder`` may hold now, where it holds ``used_bytes``."""
        if self.bytes is not None:
            return int(self.bytes)
        found = os.statvfs(folder)
        return int(_FREE_SHARE * (found.f_bavail * found.f_frsize + used_bytes))
