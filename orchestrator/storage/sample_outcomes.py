"""Which validation samples a network predicted correctly: one bit per sample, parts of the record of its job.

Bit i belongs to the sample with ordinal i: row i of the validation split of the data set's index (shards ordered by
basename, samples by their row in the shard). The order follows from the index alone, so it is the same for every job
on that data set, for any target, batch size, number of ranks or protocol. ``order_sha256`` is the digest of the
shards' names and of all keys in this order; readers compare it before they compare two networks.

``val_right.npy`` holds the bits, eight to a byte, the first sample in the highest bit. ``val_counted.npy``, in the same
form, is there only if some sample has no outcome: it has no label in the target, or could not be decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Self

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage.artifacts import Record, read_part
from orchestrator.storage.protocol import ObjectStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


RIGHT_PART: Final = "val_right.npy"
COUNTED_PART: Final = "val_counted.npy"
SUMMARY_FIELD: Final = "val_samples"
"""Field of a record's summary."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleOutcomes:
    """The outcomes of one network on N validation samples."""

    right_N: NDArray[np.bool_]
    """False where the sample has no outcome."""
    counted_N: NDArray[np.bool_]
    """Whether the sample has an outcome."""
    order_sha256: str

    @property
    def num_counted(self) -> int:
        """Samples with an outcome."""
        return int(self.counted_N.sum())

    @property
    def num_wrong(self) -> int:
        """Samples with another prediction than (any of) their targets."""
        return self.num_counted - int(self.right_N.sum())

    def parts(self) -> dict[str, bytes]:
        """Parts of the artifact by name."""
        parts = {RIGHT_PART: _packed(self.right_N)}
        return parts if self.counted_N.all() else parts | {COUNTED_PART: _packed(self.counted_N)}

    def summary(self) -> dict[str, Any]:
        """The record's description of the parts, under ``SUMMARY_FIELD``."""
        return {
            "num_samples": len(self.right_N),
            "num_counted": self.num_counted,
            "num_wrong": self.num_wrong,
            "order_sha256": self.order_sha256,
        }

    @classmethod
    def read(cls, store: ObjectStore, record: Record) -> Self | None:
        """From a committed record; None if it was made by a version that kept no outcomes.

        Raises:
            CorruptObjectError: the parts are not what the record says.
        """
        described = record.summary.get(SUMMARY_FIELD)
        if described is None or RIGHT_PART not in record.parts:
            return None
        right_N = _unpacked(store, record, RIGHT_PART, described)
        has_gaps = COUNTED_PART in record.parts
        counted_N = _unpacked(store, record, COUNTED_PART, described) if has_gaps else right_N | True
        found = cls(right_N=right_N, counted_N=counted_N, order_sha256=str(described["order_sha256"]))
        # A record of a later version may have more fields: only the known ones are read.
        differs = any(described.get(name) != value for name, value in found.summary().items())
        if (right_N & ~counted_N).any() or differs:
            raise CorruptObjectError(f"{record.key}: {RIGHT_PART} has {found.summary()}, its record says {described}")
        return found


def _packed(bits_N: NDArray[np.bool_]) -> bytes:
    import numpy as np

    buffer = BytesIO()
    np.save(buffer, np.packbits(bits_N), allow_pickle=False)
    return buffer.getvalue()


def _unpacked(store: ObjectStore, record: Record, name: str, described: Mapping[str, Any]) -> NDArray[np.bool_]:
    import numpy as np

    num_samples = int(described["num_samples"])
    try:
        packed = np.lib.format.read_array(BytesIO(read_part(store, record, name)), allow_pickle=False)
    except ValueError as error:
        raise CorruptObjectError(f"{record.key}: {name} is not an array of numpy: {error}") from error
    if packed.dtype != np.uint8 or packed.shape != (-(-num_samples // 8),):
        found = f"{packed.dtype} of shape {packed.shape}"
        raise CorruptObjectError(f"{record.key}: {name} is {found}, which does not hold {num_samples} bits")
    return np.unpackbits(packed, count=num_samples).astype(np.bool_)
