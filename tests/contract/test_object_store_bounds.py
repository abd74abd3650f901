"""What every ``ObjectStore`` must do about objects that are larger than who reads them allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import NotFoundError, PreconditionFailedError, TooLargeError
from orchestrator.storage import ObjectStore
from tests.contract.test_object_store import IMPLEMENTATIONS

SIZE_BYTES = 100_000


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    made = IMPLEMENTATIONS[request.param](tmp_path)
    made.put("a", b"x" * SIZE_BYTES)
    return made


def test_object_at_the_bound_is_read(store: ObjectStore) -> None:
    assert len(store.get("a", max_bytes=SIZE_BYTES)) == SIZE_BYTES
    content, stat = store.get_with_stat("a", max_bytes=SIZE_BYTES)
    assert (len(content), stat) == (SIZE_BYTES, store.stat("a"))
    assert store.get_with_stat("a") == store.get_with_stat("a", max_bytes=None)


@pytest.mark.parametrize("read", ["get", "get_with_stat"])
def test_object_beyond_the_bound_is_refused_with_its_name_and_size(store: ObjectStore, read: str) -> None:
    for _ in range(3):  # a connection that was given up is not used again
        with pytest.raises(TooLargeError, match=f"^a in .* has {SIZE_BYTES} bytes, and at most {SIZE_BYTES - 1}"):
            getattr(store, read)("a", max_bytes=SIZE_BYTES - 1)
    assert store.get("a") == b"x" * SIZE_BYTES


def test_conditional_writes_that_meet_a_longer_object_lose_without_reading_it(store: ObjectStore) -> None:
    for content in (b"", b"x", b"x" * (SIZE_BYTES - 1)):
        with pytest.raises(PreconditionFailedError):
            store.put_if_absent("a", content)
        with pytest.raises(PreconditionFailedError):
            store.put_if_match("a", content, "another")
    assert store.put_if_absent("a", b"x" * SIZE_BYTES) == store.stat("a")


def test_missing_object_is_not_found_whatever_the_bound(store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        store.get("b", max_bytes=0)
