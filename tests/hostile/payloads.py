"""What a hostile file would run if anything of it were executed."""

from __future__ import annotations

import pickle
from pathlib import Path


class Command:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (self.command,)


class Code:
    """Runs Python when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (self.code,)


def payload(target: Path | str = "/tmp/hostile-was-here", protocol: int = 4) -> bytes:  # noqa: S108
    """A pickle that would create a file."""
    return pickle.dumps(Command(f"touch {target}"), protocol=protocol)


def code_payload(target: str = "/tmp/hostile-was-here") -> bytes:  # noqa: S108
    """A pickle that would create a file without a shell."""
    return pickle.dumps(Code(f"open({target!r}, 'w')"))
