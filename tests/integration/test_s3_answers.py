"""Every operation of a store under every fault between it and a real S3 server, or by somebody in the server's place.

An operation ends with the right answer or with one error that a person can read: never with another answer, and never
with a traceback of somebody else's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import NotFoundError, PreconditionFailedError, StorageError
from orchestrator.storage.s3.store import S3Store
from tests.s3_proxy import Damage, Faults
from tests.s3_server import SMALL_PARTS_BYTES, proxy, s3_server, s3_store

__all__ = ["proxy", "s3_server"]

SHORT_S = 0.1
OTHER_ETAG = "1" * 32
BIG = secrets.token_bytes(SMALL_PARTS_BYTES + 1000)
SMALL = b"0123456789"
LONGEST_MESSAGE = 700

ANSWERS = (NotFoundError, PreconditionFailedError)
"""Errors that say what is in the store: right or wrong, as any other answer."""
PROBED = {Damage.CONDITIONS_IGNORED, Damage.CONDITIONS_RACY, Damage.REPLACING_RACY}
"""A single client cannot know; ``probe_store`` asks with several (test_s3_faults.py)."""
QUICK = {Damage.EMPTY_OK, Damage.WRONG_ETAG_ON_PUT}
"""The others run with the slow tests: all of them take two minutes."""
UNKNOWABLE: Mapping[Damage, set[str]] = {
    # "No content" is all that S3 says to a deletion, too.
    Damage.NO_CONTENT: {"delete", "delete_leftover"},
    # No checksum covers a range of an object or a listing: TLS does, and the digests in records.
    Damage.ANSWER_FLIPPED: {
        "get_range",
        "get_range_big",
        "download_big",
        "list",
        "list_nothing",
        "children",
        "leftovers",
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """An operation, and the answer that is right."""

    run: Callable[[S3Store], object]
    right: object
    writes: str = ""
    """Object that is there with the right content once it has answered."""


@dataclass(slots=True)
class Place:
    """One prefix of the bucket, reached directly and through the proxy."""

    good: S3Store
    store: S3Store
    folder: Path
    faults: Faults
    etag: str = ""
    upload: str = ""

    def prepare(self) -> None:
        self.faults.schedule = lambda _method, _path: None
        for name in ("new", "new_big"):
            self.good.delete(name)
        self.good.put("a", SMALL)
        self.etag = self.good.put("b", b"before").etag
        self.good.put("c", SMALL)
        for leftover in list(self.good.leftovers()):
            self.good.delete_leftover(leftover.name)

    def begin_upload(self) -> None:
        bucket, key = self.good._bucket, self.good._key("probes/node-0123456789abcdef")
        self.upload = f"{bucket.repeat('create_multipart_upload', key)['UploadId']} {key}"

    def downloaded(self, store: S3Store, name: str) -> bytes:
        store.download(name, self.folder / "copy")
        return (self.folder / "copy").read_bytes()


def cases(place: Place) -> dict[str, Case]:
    def put_file(store: S3Store) -> object:
        (place.folder / "source").write_bytes(BIG)
        return store.put_file("new_big", place.folder / "source").size_bytes

    return {
        "put": Case(lambda store: store.put("new", SMALL).etag, "etag", "new"),
        "put_big": Case(lambda store: store.put("new_big", BIG).size_bytes, len(BIG), "new_big"),
        "put_file": Case(put_file, len(BIG), "new_big"),
        "put_if_absent": Case(lambda store: store.put_if_absent("new", SMALL).etag, "etag", "new"),
        "put_if_absent_taken": Case(lambda store: store.put_if_absent("a", b"mine"), PreconditionFailedError),
        "put_if_match": Case(lambda store: store.put_if_match("b", SMALL, place.etag).etag, "etag", "b"),
        "put_if_match_lost": Case(lambda store: store.put_if_match("a", b"mine", OTHER_ETAG), PreconditionFailedError),
        "get": Case(lambda store: store.get("a"), SMALL),
        "get_bounded": Case(lambda store: store.get("a", max_bytes=100), SMALL),
        "get_missing": Case(lambda store: store.get("no"), NotFoundError),
        "get_range": Case(lambda store: store.get_range("a", 2, 3), SMALL[2:5]),
        "get_range_beyond": Case(lambda store: store.get_range("a", 20, 3), b""),
        "get_range_missing": Case(lambda store: store.get_range("no", 0, 1), NotFoundError),
        "get_range_big": Case(lambda store: store.get_range("big", len(BIG) - 9, 9), BIG[-9:]),
        "download": Case(lambda store: place.downloaded(store, "a"), SMALL),
        "download_big": Case(lambda store: place.downloaded(store, "big"), BIG),
        "stat": Case(lambda store: store.stat("a").size_bytes, len(SMALL)),
        "stat_missing": Case(lambda store: store.stat("no"), NotFoundError),
        "exists": Case(lambda store: store.exists("a"), True),
        "exists_missing": Case(lambda store: store.exists("no"), False),
        "list": Case(lambda store: sorted(stat.name for stat in store.list_objects("")), ["a", "b", "big", "c"]),
        "list_nothing": Case(lambda store: list(store.list_objects("nothing/")), []),
        "children": Case(lambda store: store.list_children(""), ["a", "b", "big", "c"]),
        "is_reachable": Case(lambda store: store.is_reachable, True),
        "delete": Case(lambda store: store.delete("c"), None),
        "leftovers": Case(lambda store: [stat.name for stat in store.leftovers()], ["upload"]),
        "delete_leftover": Case(lambda store: store.delete_leftover(place.upload), None),
    }


@pytest.fixture
def place(proxy: tuple[str, Faults], s3_server: object, tmp_path: Path) -> Place:
    url, faults = proxy
    impatient = s3_store(tmp_path, endpoint_url=url, deadline_s=SHORT_S, read_timeout_s=2 * SHORT_S)
    found = Place(good=s3_store(tmp_path), store=impatient, folder=tmp_path, faults=faults)
    found.prepare()
    found.good.put("big", BIG)
    return found


def is_wrong(place: Place, name: str, case: Case, damage: Damage) -> str:
    """What is wrong with how an operation ends under a fault; empty if nothing is."""
    place.faults.schedule = lambda _method, _path: damage
    try:
        found: Any = case.run(place.store)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
        return "" if is_clear(error, case) else f"{name}: {error!r}"
    finally:
        place.faults.schedule = lambda _method, _path: None
    if case.writes and place.good.get(case.writes) != (BIG if case.writes == "new_big" else SMALL):
        return f"{name}: it says that it wrote, and has not"
    if name == "delete" and place.good.exists("c"):
        return f"{name}: it says that it deleted, and has not"
    right = right_answer(place, name, case, damage)
    return "" if found == right else f"{name}: {str(found)[:100]!r}, and {str(right)[:100]!r} is right"


def right_answer(place: Place, name: str, case: Case, damage: Damage) -> object:
    if name == "leftovers":
        return [place.upload]
    if name == "is_reachable" and damage is Damage.BUCKET_GONE:
        return False
    return place.good.stat(case.writes).etag if case.right == "etag" else case.right


def is_clear(error: Exception, case: Case) -> bool:
    """Whether it is the right answer, or an error of the store in one line that is told once."""
    if isinstance(error, ANSWERS):
        return type(error) is case.right
    text = str(error)
    is_short = 20 < len(text) < LONGEST_MESSAGE and "\n" not in text and text.count("given up") <= 1
    return isinstance(error, StorageError) and is_short


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, marks=[] if damage in QUICK else [pytest.mark.slow])
        for damage in Damage
        if damage not in PROBED
    ],
)
def test_every_operation_ends_with_the_right_answer_or_one_clear_error(damage: Damage, place: Place) -> None:
    wrong = []
    for name, case in cases(place).items():
        if name in UNKNOWABLE.get(damage, ()):
            continue
        place.prepare()
        if "leftover" in name:
            place.begin_upload()
        wrong.append(is_wrong(place, name, case, damage))
        assert place.good.get("a") == SMALL, f"{name} has changed what is not its own"
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (Damage.TO_HTTPS, r"redirects to 'https://127.0.0.1:9'.*AWS_ENDPOINT_URL_S3"),
        (Damage.TO_LOGIN, r"redirects to 'http://127.0.0.1:9'.*whether this network asks for a login"),
        (Damage.LOGIN_PAGE, r"not the answer of an S3 server.*whether this network asks for a login"),
        (Damage.LOGIN_PAGE_XHTML, r"the answer is <html>, S3's is <ListBucketResult>"),
        (Damage.EMPTY_OK, r"the answer is 0 bytes of something else, S3's is <ListBucketResult>"),
        (Damage.OTHER_BUCKET_LISTED, r"a listing of Name 'another', and 'orchestrator' was asked for"),
        (Damage.LISTING_WITHOUT_NAME, r"a listing that does not say of which Name it is"),
        (Damage.OTHER_FOLDER_LISTED, r"a listing of Prefix 'another/', and 'tests/.*/' was asked for"),
        (Damage.LISTING_ENDLESS, r"says that its listing goes on, and not where"),
    ],
)
def test_listing_that_is_not_the_one_asked_for_says_what_it_is(damage: Damage, told: str, place: Place) -> None:
    place.faults.schedule = lambda _method, _path: damage
    with pytest.raises(StorageError, match=told):
        list(place.store.list_objects(""))
