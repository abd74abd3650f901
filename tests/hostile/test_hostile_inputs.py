"""Hostile files and objects: nothing is executed, nothing written elsewhere, and each is refused in words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import SpecError, StorageError, UserError
from orchestrator.core.security.urls import check_url
from orchestrator.storage.open import check_store_uri, find_objects, open_store
from orchestrator.storage.protocol import check_name
from orchestrator.sweepfile import load_sweep
from tests.hostile import archives, objects, pictures, places, sweeps, weights
from tests.hostile.guard import watched
from workloads.data.decode import DecoderName, decoder_of
from workloads.data.images import ImageCheck, check_image
from workloads.data.reasons import BadSampleError
from workloads.data.scan import ClassRule, scan_shard
from workloads.models.weights import decode_weights
from workloads.runtime.npy import from_npy_bytes

MIN_INPUTS = 300
DECODERS = (DecoderName.PILLOW, DecoderName.TURBO)
MAX_MESSAGE_CHARACTERS = 20_000


SWEEP_FILES = list(sweeps.documents())
SWEEP_VALUES = list(sweeps.sweeps())
SHARDS = list(archives.shards())
IMAGES = list(pictures.pictures())
POLYGLOTS = list(pictures.polyglots())
WEIGHTS = list(weights.weights())


def cases(pairs: Iterable[tuple[str, Any]]) -> Any:
    return [pytest.param(content, id=name) for name, content in pairs]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where something may be written; also the current one."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(deed: Callable[[], object], kind: type[Exception], root: Path) -> str:
    """What a deed says as it refuses; it must not do anything else."""
    with watched(root), pytest.raises(kind) as caught:
        deed()
    message = str(caught.value)
    assert 8 <= len(message) <= MAX_MESSAGE_CHARACTERS
    assert "\x1b" not in message
    return message


def scanned(shard: bytes) -> Any:
    pieces = (shard[start : start + 65536] for start in range(0, len(shard), 65536))
    return scan_shard(pieces, "hostile.tar", ClassRule(num_classes=2))


@pytest.mark.parametrize("content", cases(SWEEP_FILES))
def test_sweep_file_hostile_is_refused_in_words(content: bytes, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_SECRET", "correct horse battery")
    os.mkfifo(root / "pipe")
    file = root / "sweep.yaml"
    file.write_bytes(content)
    message = refused(lambda: load_sweep(str(file)), SpecError, root)
    assert re.match(r"\S+:\d+:\d+: ", message)
    assert "correct horse" not in message


@pytest.mark.parametrize("content", cases(SWEEP_VALUES))
def test_sweep_value_hostile_is_refused_or_means_nothing(content: bytes, root: Path) -> None:
    file = root / "sweep.yaml"
    file.write_bytes(content)
    with watched(root):
        try:
            sweep, _ = load_sweep(str(file))
        except SpecError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        assert "sweep.yaml" in refusal
        return
    # What passes is a plain name, which can be part of an object's name.
    for name in (sweep.name, *sweep.datasets):
        assert "/" not in check_name(name)


@pytest.mark.parametrize("content", cases(SHARDS))
def test_shard_hostile_gives_no_sample_of_the_member(content: bytes, root: Path) -> None:
    with watched(root):
        table = scanned(content)
    assert list(root.iterdir()) == []
    for bad in table.bad:
        assert bad.message
    for offset, length in zip(table.offsets, table.lengths, strict=True):
        check_image(content[offset : offset + length])  # only whole images are samples
    names = bytes(table.keys).decode(errors="replace")
    assert ".." not in names.split("/")
    assert not names.startswith("/")


@pytest.mark.parametrize("content", cases(IMAGES))
def test_image_hostile_is_refused_by_checks_and_decoders(content: bytes, root: Path) -> None:
    def check() -> None:
        check_image(content, ImageCheck.PIXELS)

    refused_or_small(check, content, root)
    for name in DECODERS:
        refused_or_small(partial(decoder_of(name).decode, content), content, root)


def refused_or_small(deed: Callable[[], object], content: bytes, root: Path) -> None:
    """Decoders may make something of what is left of a broken image; never of a bomb, and never more than it says."""
    with watched(root):
        try:
            pixels = deed()
        except BadSampleError:
            return
    assert pixels is None or getattr(pixels, "nbytes", 0) <= 64 * 64 * 3, content[:16]


@pytest.mark.parametrize("content", cases(POLYGLOTS))
def test_image_polyglot_is_an_image_and_nothing_else(content: bytes, root: Path) -> None:
    with watched(root):
        check_image(content, ImageCheck.PIXELS)
        assert all(decoder_of(name).decode(content).shape == (8, 8, 3) for name in DECODERS)


@pytest.mark.parametrize("content", cases(WEIGHTS))
def test_weights_hostile_are_refused_in_words(content: bytes, root: Path) -> None:
    message = refused(lambda: decode_weights(content, "hostile.pth"), UserError, root)
    assert "hostile.pth" in message


@pytest.mark.parametrize("content", cases(WEIGHTS))
def test_array_hostile_is_refused(content: bytes, root: Path) -> None:
    with watched(root), pytest.raises((ValueError, EOFError, OSError)):
        from_npy_bytes(content)


@pytest.mark.parametrize("uri", places.STORES)
def test_store_uri_hostile_is_refused(uri: str, root: Path) -> None:
    message = refused(lambda: check_store_uri(uri), StorageError, root)
    assert ":p@" not in message
    assert "pass@" not in message
    refused(lambda: open_store(uri), StorageError, root)
    refused(lambda: find_objects([f"{uri}/train.tar"]), StorageError, root)


@pytest.mark.parametrize("url", places.URLS)
def test_url_hostile_is_refused(url: str, root: Path) -> None:
    message = refused(lambda: check_url(url), UserError, root)
    assert "u:p" not in message


@pytest.mark.parametrize("name", places.OBJECT_NAMES)
def test_object_name_hostile_is_refused(name: str, root: Path) -> None:
    refused(lambda: check_name(name), StorageError, root)
    store = open_store(root.as_uri())
    refused(lambda: store.put(name, b"x"), StorageError, root)
    refused(lambda: store.get(name), StorageError, root)
    refused(lambda: store.delete(name), StorageError, root)


def test_corpus_is_large_enough_and_every_input_another() -> None:
    contents = [
        *(content for pairs in (SWEEP_FILES, SWEEP_VALUES, SHARDS, IMAGES, POLYGLOTS, WEIGHTS) for _, content in pairs),
        *(content for _, content in objects.garbage()),
        *(text.encode(errors="replace") for text in (*places.STORES, *places.URLS, *places.OBJECT_NAMES)),
    ]
    assert len(set(contents)) >= MIN_INPUTS
