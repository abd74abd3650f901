"""MATLAB files, read with a limit on memory."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Final

_HEADER_BYTES: Final = 128
_COMPRESSED: Final = 15


def read_matlab(content: bytes, *, max_bytes: int, squeeze: bool = False) -> dict[str, Any]:
    """The variables of a MATLAB file (``.mat``, level 5), by ``squeeze`` without dimensions of size 1.

    Raises:
        ValueError: it is none, or expands to more than ``max_bytes``: SciPy takes any size.
    """
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    # Elements are (type, bytes) and content; those of type 15 are compressed (MAT-File Format, "Data Elements").
    position, left = _HEADER_BYTES, max_bytes
    try:
        while position + 8 <= len(content):
            kind, size = struct.unpack_from("<II", content, position)
            if kind == _COMPRESSED:
                compressed = memoryview(content)[position + 8 : position + 8 + size]
                left -= len(zlib.decompressobj().decompress(compressed, left + 1))
            if left < 0:
                raise ValueError(f"it expands to more than {max_bytes} bytes")
            position += 8 + size
        variables: dict[str, Any] = loadmat(io.BytesIO(content), squeeze_me=squeeze)
    except (TypeError, LookupError, OSError, NotImplementedError, MemoryError, zlib.error, MatReadError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return variables
