"""Digests: both at once, either alone, of records and manifests of every version."""

import json
from hashlib import sha256
from pathlib import Path

import blake3
import pytest

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage.artifacts import Part, Record
from orchestrator.storage.digests import Algorithm, Digests, descriptor_digest, digest_of, digests_of, file_digests
from workloads.runtime.manifest import Entry, decode_manifest, encode_manifest

CONTENT = bytes(range(256)) * 9000  # more than two chunks


def test_digests_of_bytes_and_of_a_file_are_those_of_the_libraries(tmp_path: Path) -> None:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    expected = Digests(sha256=sha256(CONTENT).hexdigest(), blake3=blake3.blake3(CONTENT).hexdigest())
    assert digests_of(CONTENT) == file_digests(path) == expected
    for algorithm, digest in ((Algorithm.SHA256, expected.sha256), (Algorithm.BLAKE3, expected.blake3)):
        assert digest_of(CONTENT, algorithm) == descriptor_digest(path, algorithm) == digest


def test_digests_choose_blake3_only_where_it_is_recorded() -> None:
    both, old = digests_of(CONTENT), Digests(sha256=sha256(CONTENT).hexdigest())
    assert (both.algorithm, both.match(both.blake3), both.match(both.sha256)) == (Algorithm.BLAKE3, True, False)
    assert (old.algorithm, old.match(old.sha256), old.match("")) == (Algorithm.SHA256, True, False)


def test_manifest_of_the_former_version_is_read_and_one_of_no_version_is_refused() -> None:
    entry = Entry(size_bytes=3, sha256="ab")
    old = encode_manifest(7, {"model": entry}, version=2)
    assert "blake3" not in old.decode()
    assert decode_manifest(old) == {"model": entry}
    with pytest.raises(CorruptObjectError, match="version 9"):
        decode_manifest(encode_manifest(7, {"model": entry}, version=9))


def test_record_without_blake3_is_read_and_written_as_it_was() -> None:
    record = Record(
        key="labels-x-0123456789abcdef",
        identity={},
        attempt_id="a",
        job="labels/x",
        sweep="s",
        created_at_s=1.0,
        parts={"map": Part(path="parts/1-a/map", size_bytes=3, sha256="ab")},
        version=2,
    )
    content = record.to_bytes()
    assert "blake3" not in json.loads(content)["parts"]["map"]
    assert Record.from_bytes(content) == record
    assert Record.from_bytes(content).to_bytes() == content


def test_record_of_a_newer_version_says_so() -> None:
    document = {"version": 99, "parts": {}}
    with pytest.raises(ValueError, match=r"version 99.*update"):
        Record.from_bytes(json.dumps(document).encode())
