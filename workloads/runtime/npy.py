"""Arrays as parts of artifacts: ``.npy``, never pickled."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Encode an array. Raises ``ValueError`` for arrays of objects, which would need pickle."""
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def from_npy_bytes(content: bytes) -> NDArray[Any]:
    """Decode an array. Raises ``ValueError`` for anything that would need pickle."""
    array: NDArray[Any] = np.lib.format.read_array(BytesIO(content), allow_pickle=False)
    return array
