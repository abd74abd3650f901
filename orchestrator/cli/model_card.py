"""The card of an exported backbone, in the form that model hubs read: what it is, and all that it was made of. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orchestrator.storage.artifacts import Record

_DIGESTS = ("dataset_digest", "num_train", "num_val", "num_classes")
"""Of what an index or label artifact says of its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is known of a backbone."""

    record: Record
    document: Mapping[str, Any]
    """Its ``model.json``."""
    epoch: int | None
    store_uri: str
    sources: Mapping[str, Record] = field(default_factory=dict)
    """By role: labels, index, dataset, ..."""


def model_card(exported: Exported) -> str:
    """Markdown with the metadata block of the Hugging Face hub."""
    return "\n".join(_lines(exported)) + "\n"


def _lines(exported: Exported) -> Iterator[str]:
    record, document = exported.record, exported.document
    size, epoch = document["image_size"], exported.epoch
    yield from ("---", "library_name: timm", "tags: [timm, image-feature-extraction]", "---", "")
    yield f"# {record.key}"
    yield ""
    of_epoch = f", as it was after epoch {epoch}" if epoch is not None else ""
    yield f"A {document['name']} backbone without classifier, {document['num_features']} features,"
    yield f"for images of {size} x {size} pixels{of_epoch}."
    yield ""
    yield from ("```python", "import timm", "")
    yield "model = timm.create_model('local-dir:THIS_FOLDER', pretrained=True)  # features"
    yield "model.reset_classifier(10)  # for a new head"
    yield from ("```", "")
    yield f"Inputs are RGB in [0, 1], normalised by mean {document['mean']} and std {document['std']}."
    yield f"`head.safetensors` is the classifier it was trained with ({document['num_classes']} classes)."
    yield from ("", "## What it was trained on", "")
    yield from _source_lines(exported)
    yield from ("", "## Results", "", "Rates are fractions; they are those of the final weights.", "")
    yield from ("| metric | value |", "|---|---|")
    yield from (f"| {name} | {value:.6g} |" for name, value in sorted(record.metrics.items()))
    yield from ("", "## Identity", "", "Everything that decides its weights; its sha256 is part of the key.", "")
    yield from ("```json", json.dumps(record.identity, indent=1, sort_keys=True), "```", "", "## Origin", "")
    yield from _origin_lines(exported)


def _source_lines(exported: Exported) -> Iterator[str]:
    for role, source in exported.sources.items():
        known = {**source.summary, **source.metrics}
        facts = [f"{name} {_plain(known[name])}" for name in _DIGESTS if name in known]
        yield f"- {role}: `{source.key}` ({source.job}){': ' if facts else ''}{', '.join(facts)}"
        space = source.identity.get("parameters", {}).get("space")
        if space:
            yield f"  - label space: `{json.dumps(space, sort_keys=True)}`"
    missing = {
        role: key for role, key in exported.record.identity.get("inputs", {}).items() if role not in exported.sources
    }
    yield from (f"- {role}: `{key}` (no longer in the store)" for role, key in missing.items())


def _origin_lines(exported: Exported) -> Iterator[str]:
    record = exported.record
    made = datetime.fromtimestamp(record.created_at_s, tz=UTC)
    yield f"- job `{record.job}` of sweep `{record.sweep}`, attempt `{record.attempt_id}`, {made:%Y-%m-%d %H:%M} UTC"
    yield f"- store {exported.store_uri}, code {record.package_digest[:12] or 'unknown'}"
    for name in ("weights_sha256", "backbone_sha256"):
        if name in record.summary:
            yield f"- {name} `{record.summary[name]}`"
    fingerprint = record.summary.get("fingerprint", {})
    if fingerprint:
        yield f"- made with {', '.join(f'{name} {value}' for name, value in sorted(fingerprint.items()))}"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"`{value}`"
