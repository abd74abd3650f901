"""Why samples cannot be used, counted by reason and named ``shard:key``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from orchestrator.core.units import printable

NUM_NAMED: Final = 10
"""Samples that are named for each reason; the others are counted."""


class Reason(StrEnum):
    """What is wrong with a sample, or with a part of a shard."""

    EMPTY = "empty"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    UNDECODABLE = "undecodable"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_LARGE = "too_large"
    NO_IMAGE = "no_image"
    SEVERAL_IMAGES = "several_images"
    NO_CLASS = "no_class"
    BAD_CLASS = "bad_class"
    SEVERAL_CLASSES = "several_classes"
    CLASS_OUT_OF_RANGE = "class_out_of_range"
    BAD_METADATA = "bad_metadata"
    DUPLICATE_KEY = "duplicate_key"
    NOT_A_PLAIN_FILE = "not_a_plain_file"
    UNSAFE_NAME = "unsafe_name"
    DAMAGED_ARCHIVE = "damaged_archive"
    COMPRESSED_ARCHIVE = "compressed_archive"


OF_ARCHIVES: Final = frozenset({Reason.DAMAGED_ARCHIVE, Reason.COMPRESSED_ARCHIVE})
"""Reasons of whole shards, which lose more than one sample."""


class BadSampleError(Exception):
    """One sample cannot be used. Never leaves the scan: it becomes a `BadSample` there."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that was left out."""

    place: str
    """``shard:key``."""
    reason: Reason
    message: str
    """What follows the place in a sentence."""
    num_samples: int = 1
    """How many are lost there: more than one of a shard that cannot be read, of which nobody knows the exact number."""

    def __str__(self) -> str:
        return printable(f"{self.place} {self.message}")


@dataclass(slots=True, kw_only=True)
class BadCount:
    """Bad samples by reason: how many, and the first few."""

    counts: dict[Reason, int] = field(default_factory=dict)
    named: dict[Reason, list[BadSample]] = field(default_factory=dict)

    def add(self, found: Iterable[BadSample]) -> None:
        """Count some samples."""
        for sample in found:
            self.counts[sample.reason] = self.counts.get(sample.reason, 0) + sample.num_samples
            first = self.named.setdefault(sample.reason, [])
            if len(first) < NUM_NAMED:
                first.append(sample)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """``{reason: {"count": n, "first": ["shard:key ...", ...]}}``, the most frequent first."""
        order = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return {
            reason.value: {"count": self.counts[reason], "first": [str(sample) for sample in self.named[reason]]}
            for reason in order
        }

    def describe(self) -> str:
        """One line for errors: reasons with their counts, then the first sample of each."""
        counts = ", ".join(f"{reason.value} {count}" for reason, count in sorted(self.counts.items()))
        first = "; ".join(str(samples[0]) for samples in self.named.values())
        return f"{counts}: {first}"
