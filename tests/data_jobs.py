"""Runs data jobs in a store of a test's own, and commits shards made by hand."""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_record
from orchestrator.storage.local import LocalStore
from tests.photographs import png
from tests.waiting import wait_until
from workloads.data import loader
from workloads.data.decode_pool import DecodePool
from workloads.data.index import SampleIndex
from workloads.data.loader_process import Plans
from workloads.data.pipeline import PlannedBatch
from workloads.jobs.dataset import run_dataset
from workloads.jobs.index import run_index
from workloads.jobs.labels import run_labels
from workloads.labels.label_map import LabelMap

TREE = {
    "builtin": "synthetic-hierarchy",
    "version": 1,
    "branching": [2, 2, 3],
    "image_size": 16,
    "patch_size": 4,
    "num_train": 600,
    "num_val": 72,
    "seed": 0,
}
DIGITS = {"builtin": "digits", "version": 1, "val_fraction": 0.2, "seed": 0}

Member = tuple[str, bytes]
_HANDLERS = {JobKind.DATASET: run_dataset, JobKind.INDEX: run_index, JobKind.LABELS: run_labels}


@dataclass(frozen=True, kw_only=True)
class DataPlane:
    """A store and a node in one folder."""

    folder: Path

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "store")

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def run(self, kind: JobKind, parameters: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> Record:
        """Run one job to its commit."""
        request = self.request(kind, parameters, inputs or {})
        scratch = self.folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        _HANDLERS[kind](request, ExecutionContext(store=self.store, scratch=scratch, cache=self.cache))
        return read_record(self.store, request.key)

    def request(self, kind: JobKind, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> JobRequest:
        identity = {"kind": kind.value, "code_version": 1, "parameters": dict(parameters), "inputs": dict(inputs)}
        key = make_key(kind.value, "", identity)
        return JobRequest(
            attempt_id=f"{key}.1",
            attempt_number=1,
            sweep="sweep",
            job=f"{kind.value}/job",
            key=key,
            kind=kind,
            identity=identity,
            store_uri=self.store.uri,
        )

    def index(self, dataset_key: str) -> SampleIndex:
        """Run the index job of a data set and open the result."""
        record = self.run(JobKind.INDEX, {}, {"dataset": dataset_key})
        return SampleIndex.open(self.store, record.key, self.cache)

    def builtin(self, parameters: Mapping[str, Any]) -> SampleIndex:
        """Write and index a built-in data set."""
        return self.index(self.run(JobKind.DATASET, parameters).key)

    def labels(self, index: SampleIndex, space: Mapping[str, Any]) -> LabelMap:
        """Run the labels job of a space and open the result."""
        return LabelMap.open(self.store, self.run(JobKind.LABELS, {"space": space}, {"index": index.key}).key)

    def foreign(self, shards: Mapping[str, bytes], *, num_classes: int = 2) -> str:
        """Commit shards that this project did not write; returns the key of the data set."""
        request = self.request(JobKind.DATASET, {"shards": sorted(shards)}, {})
        writer = ArtifactWriter(self.store, request)
        for name, content in shards.items():
            writer.add(name, content)
        rows = [{"class": leaf, "name": f"c{leaf}", "level": f"l{leaf // 2}"} for leaf in range(num_classes)]
        writer.add("classes.json", json.dumps(rows).encode())
        writer.commit(now=0.0)
        return request.key


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> DataPlane:
    """One for all tests of a file."""
    return DataPlane(folder=tmp_path_factory.mktemp("plane"))


def tar_of(members: Sequence[Member | tarfile.TarInfo]) -> bytes:
    """A plain tar of members in this order."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, content = member
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, BytesIO(content))
    return buffer.getvalue()


def encoded(format_name: str = "PNG", *, size: tuple[int, int] = (16, 16), seed: int = 0) -> bytes:
    """A random image of (width, height) pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, format=format_name)
    return buffer.getvalue()


@contextmanager
def decoding_in_processes(*, deadline_s: float = 60.0) -> Iterator[None]:
    """Threads of this process have processes that decode, also without a GPU, and wait for these to start: else threads
    would do the first batches."""
    take = DecodePool._take

    def look(pool: DecodePool) -> tuple[Any, ...]:
        process = take(pool)
        return (process,) if process is not None or pool._tries_left <= 0 else ()

    def patient(pool: DecodePool) -> Any:
        return wait_until(lambda: look(pool), "a process that decodes", deadline_s=deadline_s, pause_s=0.01)[0]

    def here(batches: Plans, steps: Sequence[int], **_: object) -> Generator[PlannedBatch, None, None]:
        return batches.planned(steps, in_processes=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodePool, "_take", patient)
        patch.setattr(loader, "batches_of_process", here)
        patch.setattr(loader, "decodes_in_processes", lambda _device: True)
        yield


@contextmanager
def loading_in_a_process() -> Iterator[None]:
    """Loaders use another process, as where a GPU trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "decodes_in_processes", lambda _device: True)
        yield


def undecodable_png() -> bytes:
    """Whole, every checksum right, and too few pixels inside: only decoding can tell."""
    return png(16, 16, pixels=zlib.compress(b"\0" * 99))
