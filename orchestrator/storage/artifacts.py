"""The commit protocol: parts under the attempt's own nonce, then one ``record.json`` by ``put_if_absent``.

The record names its objects with sizes and sha256, and has its own sha256.

Invariants:
- A key is committed exactly if its ``record.json`` exists. All parts are durable before it is written.
- Nothing under a committed name is ever rewritten.
- Of two writers of one key the first commit wins; the parts of the other are garbage, which no reader can reach.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from orchestrator.core.contract import JobRequest, Outcome
from orchestrator.core.errors import (
    CorruptObjectError,
    IdentityMismatchError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)
from orchestrator.core.ids import canonical_json, sha256_hex
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import RECORD_BYTES, check_writable
from orchestrator.storage.digests import Digests, descriptor_digest, digest_of, digests_of, file_digests
from orchestrator.storage.layout import artifact_folder, checkpoints_folder, parts_folder, record_name
from orchestrator.storage.protocol import ObjectStore

RECORD_VERSION = 3
_FIRST_SEALED_VERSION = 2
_SEAL = "record_sha256"
"""Sha256 of the canonical JSON (RFC 8785) of the record without this field; those of version 1 have none."""
_WHOLE_FLOAT_END = re.compile(r"\.0(?=[,}\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One object of a committed artifact; ``path`` is relative to the artifact's folder."""

    path: str
    size_bytes: int
    sha256: str
    blake3: str = ""
    """Empty in records before version 3."""

    def __post_init__(self) -> None:
        size_bytes: object = self.size_bytes
        is_sized = isinstance(size_bytes, int) and size_bytes >= 0
        if not is_sized or not all(isinstance(text, str) for text in (self.path, self.sha256, self.blake3)):
            raise TypeError(f"a part has {self.size_bytes!r} bytes, or a path or digest that is not text")

    @property
    def digests(self) -> Digests:
        """Expected digests of its bytes."""
        return Digests(sha256=self.sha256, blake3=self.blake3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The committed output of a job.

    ``metrics`` are final scalars (rates as fractions); ``summary`` is further JSON data of the kind.
    """

    key: str
    identity: Mapping[str, Any]
    attempt_id: str
    job: str
    sweep: str
    created_at_s: float
    parts: Mapping[str, Part]
    metrics: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    package_digest: str = ""
    version: int = RECORD_VERSION

    def to_bytes(self) -> bytes:
        """JSON document, sorted and indented for people, with its own sha256."""
        document = asdict(self)
        for part in document["parts"].values():
            if not part["blake3"]:
                del part["blake3"]  # as it was written
        if self.version >= _FIRST_SEALED_VERSION:
            document[_SEAL] = sha256_hex(canonical_json(document))
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Inverse of ``to_bytes``. Raises ``ValueError`` if the content's own digest shows that it was altered."""
        document = parse_json(content)
        if document["version"] > RECORD_VERSION:
            raise ValueError(f"it has version {document['version']}, this program reads {RECORD_VERSION}: update it")
        seal = document.pop(_SEAL, None)
        is_sealed = seal is not None or document["version"] >= _FIRST_SEALED_VERSION
        if is_sealed and not _fits(seal, document):
            raise ValueError("it is not as it was written: its own sha256 does not match")
        parts = {name: Part(**part) for name, part in document["parts"].items()}
        return cls(**{**document, "parts": parts})


def _fits(seal: object, document: Mapping[str, Any]) -> bool:
    """Whether a record's sha256 is that of its canonical JSON.

    Python's own encoder takes half the time of the canonical one, and differs from it for common records in how it
    writes 1.0 only. Where its text has the digest, it is the canonical text; where not, or where a string holds what
    looks like the end of such a number, that is made.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Outside of strings the number of quotes before a place is even, as long as none is escaped.
    is_plain = "\\" not in text and all(
        text.count('"', 0, end.start()) % 2 == 0 for end in _WHOLE_FLOAT_END.finditer(text)
    )
    if is_plain and seal == sha256_hex(_WHOLE_FLOAT_END.sub("", text).encode(errors="surrogatepass")):
        return True
    return bool(seal == sha256_hex(canonical_json(document)))


def once(write: Callable[[], object]) -> None:
    """Make a write, and do not repeat it: the default where a caller may give what does."""
    write()


class ArtifactWriter:
    """Collects the parts of one attempt and commits them; use once.

    ``persist`` does each operation of the store; it may repeat it, which writes the same bytes under the same names.
    """

    def __init__(
        self, store: ObjectStore, request: JobRequest, *, persist: Callable[[Callable[[], object]], object] = once
    ) -> None:
        self._store = store
        self._request = request
        self._persist = persist
        self._folder = parts_folder(request.key, request.attempt_number, secrets.token_hex(8))
        self._parts: dict[str, Part] = {}

    def add(self, name: str, content: bytes) -> None:
        """Write a part from memory."""
        self._persist(partial(self._store.put, f"{self._folder}/{name}", content))
        self._remember(name, len(content), digests_of(content))

    def add_file(self, name: str, path: Path) -> Part:
        """Write a part from a local file."""
        digests = file_digests(path)
        self._persist(partial(self._store.put_file, f"{self._folder}/{name}", path))
        return self._remember(name, path.stat().st_size, digests)

    def alias(self, name: str, other: str) -> None:
        """Give an added part a second name; nothing is written. Raises ``KeyError``."""
        self._parts[name] = self._parts[other]

    def adopt(self, name: str, object_name: str, *, size_bytes: int, digests: Digests) -> None:
        """Name an object of a checkpoint of the same job, of any attempt, as a part; nothing is written.

        Garbage collection keeps the folders that a record names.
        """
        relative = object_name.removeprefix(artifact_folder(self._request.key) + "/")
        self._parts[name] = _part(relative, size_bytes, digests)

    def commit(
        self,
        *,
        now: float,
        metrics: Mapping[str, float] | None = None,
        summary: Mapping[str, Any] | None = None,
        package_digest: str = "",
    ) -> Outcome:
        """Publish the record, or notice that another writer already did.

        Raises:
            IdentityMismatchError: the committed record of this key has another identity.
            StorageError: parts are gone, or the record is too large to be read again; nothing is committed.
        """
        self._persist(self._check_parts)
        request = self._request
        record = Record(
            key=request.key,
            identity=request.identity,
            attempt_id=request.attempt_id,
            job=request.job,
            sweep=request.sweep,
            created_at_s=now,
            parts=self._parts,
            metrics=dict(metrics or {}),
            summary={**(summary or {}), **({"chosen": request.chosen} if request.chosen else {})},
            package_digest=package_digest,
        )
        name, content = record_name(request.key), record.to_bytes()
        check_writable(name, len(content), RECORD_BYTES, "give it fewer parts or a shorter summary")
        try:
            # All parts are durable before the record names them: a crash before this line leaves only garbage.
            self._persist(partial(self._store.put_if_absent, name, content))
        except PreconditionFailedError:
            self._persist(partial(read_record, self._store, request.key, identity=request.identity))
            return Outcome.ALREADY_COMMITTED
        return Outcome.COMMITTED

    def _check_parts(self) -> None:
        """Check once more that all parts exist.

        Any time may pass between the first part and the commit, as on a suspended machine, and garbage
        collection takes the parts of an attempt that its controller gave up long ago.
        """
        root = artifact_folder(self._request.key)
        folders = sorted({f"{root}/{part.path}".rpartition("/")[0] for part in self._parts.values()})
        # Parts of this attempt may lie in sub-folders, so its folder is listed once, as a whole.
        others = [folder for folder in folders if not f"{folder}/".startswith(f"{self._folder}/")]
        checkpoints = checkpoints_folder(self._request.key)
        if sum(folder.startswith(f"{checkpoints}/") for folder in others) > 1:
            # Thousands of folders may be adopted: one listing of all takes a request per thousand objects.
            others = [checkpoints, *(folder for folder in others if not folder.startswith(f"{checkpoints}/"))]
        listed = (self._store.list_objects(f"{folder}/") for folder in (self._folder, *others))
        found = {stat.name: stat.size_bytes for stats in listed for stat in stats}
        wrong = [name for name, part in self._parts.items() if found.get(f"{root}/{part.path}") != part.size_bytes]
        if wrong:
            message = (
                f"parts {', '.join(wrong)} of {self._request.attempt_id} are not in {self._store.uri} any more as they "
                "were written: the attempt was given up and its parts collected as garbage, or the store lost them; "
                "nothing is committed, run the job again"
            )
            raise StorageError(message)

    def _remember(self, name: str, size_bytes: int, digests: Digests) -> Part:
        relative = f"{self._folder}/{name}".removeprefix(artifact_folder(self._request.key) + "/")
        self._parts[name] = _part(relative, size_bytes, digests)
        return self._parts[name]


def _part(path: str, size_bytes: int, digests: Digests) -> Part:
    return Part(path=path, size_bytes=size_bytes, sha256=digests.sha256, blake3=digests.blake3)


def is_committed(store: ObjectStore, key: str) -> bool:
    """Whether a key has its record."""
    return store.exists(record_name(key))


def read_record(store: ObjectStore, key: str, *, identity: Mapping[str, Any] | None = None) -> Record:
    """Read a committed record and, if given, compare its identity.

    Raises:
        NotFoundError: the key is not committed.
        CorruptObjectError: the record is not as any program wrote it, or too large to be one.
        IdentityMismatchError: the stored identity differs from ``identity``.
    """
    name = record_name(key)
    record = _decode_record(store.get(name, max_bytes=RECORD_BYTES), key, store.uri)
    if identity is not None and canonical_json(record.identity) != canonical_json(identity):
        message = f"{key} is committed with another identity in {store.uri}; run fsck, then delete the altered record"
        raise IdentityMismatchError(message)
    return record


def _decode_record(content: bytes, key: str, store_uri: str) -> Record:
    try:
        record = Record.from_bytes(content)
        if record.key != key:
            raise ValueError(f"it is the record of {record.key}")
        if not all(isinstance(value, dict) for value in (record.identity, record.metrics, record.summary)):
            raise TypeError("identity, metrics and summary must be objects")
        if record.version < _FIRST_SEALED_VERSION:
            canonical_json(record.identity)  # for other records, the seal has shown that there is a canonical form
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = (
            f"{record_name(key)} in {store_uri} cannot be read as a record ({error!r}): it was damaged or altered, so "
            "nothing of its artifact can be trusted; run fsck, then delete this object and submit again to redo the job"
        )
        raise CorruptObjectError(message) from error
    return record


def part_object(record: Record, name: str) -> str:
    """Full object name of a part. Raises ``NotFoundError`` if the record has no such part."""
    if name not in record.parts:
        message = f"artifact {record.key} has no part {name!r}; it has {sorted(record.parts)}"
        raise NotFoundError(message)
    return f"{artifact_folder(record.key)}/{record.parts[name].path}"


def remedy_of(object_name: str) -> str:
    """What a person has to do about an object whose bytes are not those on record, as the end of a sentence.

    A job that runs again takes over what earlier attempts finished, of which it compares sizes only, as there may be
    terabytes: so the object must go, too. Indexes name shards of data sets by their place, which changes.
    """
    _, kind, key, *_ = [*object_name.split("/"), "", ""]
    if not object_name.startswith(f"{artifact_folder(key)}/"):
        return "write it again, or index the data set again"
    record = record_name(key)
    gone = (
        f"it, {record} and the records of the indexes that name it" if kind == JobKind.DATASET else f"it and {record}"
    )
    return f"delete {gone}, then submit again to make it anew"


def read_part(store: ObjectStore, record: Record, name: str) -> bytes:
    """Read a part and verify its size and digest. Raises ``CorruptObjectError``."""
    content = store.get(part_object(record, name))
    _verify(record, name, len(content), digest_of(content, record.parts[name].digests.algorithm))
    return content


def download_part(store: ObjectStore, record: Record, name: str, path: Path) -> Path:
    """Download a part to a file and verify it. Raises ``CorruptObjectError``."""
    store.download(part_object(record, name), path)
    found = descriptor_digest(path, record.parts[name].digests.algorithm)
    _verify(record, name, path.stat().st_size, found)
    return path


def _verify(record: Record, name: str, size_bytes: int, found: str) -> None:
    part, digests = record.parts[name], record.parts[name].digests
    if size_bytes != part.size_bytes or not digests.match(found):
        object_name = part_object(record, name)
        message = (
            f"{object_name} (part {name}) has {size_bytes} bytes and {digests.algorithm} {found[:12]}..., its record "
            f"says {part.size_bytes} and {digests.expected[:12]}...: the store lost or changed it; "
        )
        raise CorruptObjectError(message + remedy_of(object_name))
