"""The running code as a wheel, from a checkout or an installation alike.

It names no requirements: Ray installs it into a folder of its own, where pip would fetch all of them once more. What it
needs is what the cluster's image has.
"""

from __future__ import annotations

import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("orchestrator", "workloads")
_DATE = (1980, 1, 1, 0, 0, 0)
"""The same code makes the same bytes, so that it is uploaded once."""
_LEFT_OUT = {".pyc", ".pyo"}


def build_wheel(folder: Path, *, release: str, digest: str) -> Path:
    """Write the wheel into a folder; returns its path.

    Args:
        folder: must exist.
        release: version of the distribution, such as ``0.1.0``.
        digest: of the code. It becomes part of the version: Ray takes two wheels of one name for the same.
    """
    number = release.partition("+")[0]
    version = f"{number if number[:1].isdigit() else '0'}+code.{digest[:16]}"
    info = f"pretraining_orchestrator-{version}.dist-info"
    contents = [
        *_sources(),
        (f"{info}/METADATA", f"Metadata-Version: 2.1\nName: pretraining-orchestrator\nVersion: {version}\n".encode()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: orchestrator\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ]
    record = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in contents]
    contents.append((f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode()))
    path = folder / f"pretraining_orchestrator-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents:
            wheel.writestr(_entry(name), content)
    return path


def pack(name: str, content: bytes) -> bytes:
    """A zip archive with one file, of the same bytes every time; what Ray takes for a working directory."""
    from io import BytesIO

    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry(name), content)
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or []:
            root = Path(folder)
            for path in sorted(root.rglob("*")):
                if path.is_file() and path.suffix not in _LEFT_OUT:
                    yield path.relative_to(root.parent).as_posix(), path.read_bytes()


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
