"""An object store in a directory of a local (or shared POSIX) file system.

Objects are plain files under their own names, so every tool can read them. Files are never changed in place: an object
is written to ``.tmp/``, flushed to disk, and then published by ``link`` (exclusive) or ``replace`` (atomic). A reader
that has opened a file therefore always sees one whole version. Folders exist while they hold an object: a deletion
removes those that it empties, and a write makes its folders again if they vanish under it. A listing is whole or an
error: what cannot be looked into is never taken for empty. NFS: ``link`` is atomic there; ``flock`` needs NFSv4 or a
lock daemon.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from orchestrator.errors import (
    NoSpaceError,
    NotFoundError,
    PreconditionFailedError,
    StorageDeniedError,
    StorageError,
    TooLargeError,
)
from orchestrator.storage.bounds import check_size
from orchestrator.storage.error_counts import count_error
from orchestrator.storage.protocol import ObjectStat, check_name

_COPY_CHUNK_BYTES = 1024 * 1024
_OF_THE_DISK = "lost+found"
"""At the root of a file system only its owner may look into this folder; there are no objects in it."""
_PUBLISH_TRIES = 1000
"""A try fails only when a deletion empties the very folder in the microseconds between two system calls."""


class LocalStore:
    """See ``ObjectStore``. ``root`` is created on first use and may be shared by any number of processes."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._staging = self.root / ".tmp"
        self._locks = self.root / ".locks"

    @property
    def uri(self) -> str:
        """``file://`` and the absolute root."""
        return self.root.as_uri()

    @property
    def is_reachable(self) -> bool:
        """Whether the directory exists. Raises ``StorageError`` if that cannot be told."""
        with our_errors(f"looking for {self.uri}"):
            return self.root.is_dir()

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        with self._staged(lambda file: _write(file, content)) as staged:
            return self._replace(name, staged)

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        with path.open("rb") as source, self._staged(lambda file: _copy(source, file)) as staged:
            return self._replace(name, staged)

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put_if_absent``."""
        target = self._path(name)
        with self._staged(lambda file: _write(file, content)) as staged:
            stat = _stat_of(name, staged.stat())
            # The content is on disk before the name exists: a crash leaves garbage in .tmp, never half an object.
            if not self._publish(target, lambda: _link(staged, target)):
                return self._resolve_conflict(name, content)
        return stat

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """See ``ObjectStore.put_if_match``."""
        with self._locked(name):
            found = self.stat(name).etag if self.exists(name) else None
            if found != etag:
                message = f"{name} has etag {found}, expected {etag}: another writer was first; read it again"
                raise PreconditionFailedError(message)
            return self.put(name, content)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        return self.get_with_stat(name, max_bytes=max_bytes)[0]

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        """See ``ObjectStore.get_with_stat``."""
        with self._opened(name) as file:
            stat = _stat_of(name, os.fstat(file.fileno()))
            check_size(name, self.uri, stat.size_bytes, max_bytes)
            return file.read(), stat

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``ObjectStore.get_range``."""
        with self._opened(name) as file:
            file.seek(start)
            return file.read(length)

    def download(self, name: str, path: Path) -> None:
        """See ``ObjectStore.download``."""
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            with self._opened(name) as source, our_errors(f"copying {name} from {self.uri} to {path}"):
                with partial.open("xb") as file:
                    _copy(source, file)
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        try:
            found = self._path(name).stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _not_found(name, self.uri) from error
        except OSError as error:
            raise _translated(error, f"looking for {name} in {self.uri}") from error
        if not S_ISREG(found.st_mode):  # a folder of objects is no object
            raise _not_found(name, self.uri)
        return _stat_of(name, found)

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        path = self._path(name)
        with our_errors(f"looking for {name} in {self.uri}"):
            return path.is_file()

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``."""
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self.root
        with our_errors(f"listing {prefix or 'everything'} in {self.uri}"):
            # Without onerror a folder that cannot be read would pass for an empty one.
            for directory, folders, files in os.walk(start, onerror=_unless_gone):
                folders[:] = [name for name in folders if not name.startswith(".") and name != _OF_THE_DISK]
                for file in files:
                    path = Path(directory, file)
                    name = path.relative_to(self.root).as_posix()
                    if name.startswith(prefix):
                        with suppress(FileNotFoundError):  # deleted while we walk
                            yield _stat_of(name, path.stat())

    def list_children(self, prefix: str) -> list[str]:
        """See ``ObjectStore.list_children``."""
        folder = self._path(prefix.rstrip("/")) if prefix else self.root
        try:
            return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _translated(error, f"listing {prefix or 'everything'} in {self.uri}") from error

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        path = self._path(name)
        with (
            our_errors(f"deleting {name} in {self.uri}"),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            path.unlink()
        # Also after a name that was not there: whoever deleted it may have died before it came to the folders.
        for folder in path.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break  # not empty

    def leftovers(self) -> Iterator[ObjectStat]:
        """See ``gc_rules.HasLeftovers``: temporary files of writes, of dead writers and of those at work."""
        with our_errors(f"listing temporary files in {self.uri}"), suppress(FileNotFoundError):
            for path in self._staging.iterdir():
                with suppress(FileNotFoundError):  # published while we look
                    yield _stat_of(path.name, path.stat())

    def delete_leftover(self, name: str) -> None:
        """See ``gc_rules.HasLeftovers``."""
        with our_errors(f"deleting the temporary file {name} in {self.uri}"):
            (self._staging / check_name(name)).unlink(missing_ok=True)

    def remove_empty_staging(self) -> None:
        """Remove ``.tmp/`` unless a write is in it; the next write makes it again."""
        with suppress(OSError):  # not there, not empty, or not ours to remove
            self._staging.rmdir()

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    @contextmanager
    def _staged(self, fill: Callable[[BinaryIO], None]) -> Iterator[Path]:
        """Write a temporary file, flush it to disk, and delete it afterwards if it was not moved away."""
        staged = self._staging / secrets.token_hex(12)
        try:
            with self._new_file(staged) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            yield staged
        except OSError as error:
            raise _translated(error, f"writing under {self.uri}") from error
        finally:
            staged.unlink(missing_ok=True)

    def _new_file(self, staged: Path) -> BinaryIO:
        for _ in range(_PUBLISH_TRIES):
            self._staging.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # somebody removed the empty folder in between
                return staged.open("xb")
        return staged.open("xb")

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        try:
            file = self._path(name).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise _not_found(name, self.uri) from error
        except OSError as error:
            raise _translated(error, f"opening {name} in {self.uri}") from error
        with file, our_errors(f"reading {name} in {self.uri}"):
            if not S_ISREG(os.fstat(file.fileno()).st_mode):  # a device, which has no size and may have no end
                raise _not_found(name, self.uri)
            yield file

    def _replace(self, name: str, staged: Path) -> ObjectStat:
        target = self._path(name)
        stat = _stat_of(name, staged.stat())
        self._publish(target, lambda: _move(staged, target))
        return stat

    def _publish(self, target: Path, publish: Callable[[], bool]) -> bool:
        """Give a staged file its name, and flush the name to disk; false if ``publish`` met another object."""
        for tries_left in reversed(range(_PUBLISH_TRIES)):
            try:
                self._make_parents(target)
                if not publish():
                    return False
                break
            except (FileNotFoundError, FileExistsError):
                # Somebody deleted the last object of a folder and then the folder, after we had made sure of it; or
                # an object stands where a folder of this name would.
                if not tries_left or any(folder.is_file() for folder in target.parents):
                    raise
        with suppress(FileNotFoundError):  # the object, and so its folder, may be deleted again by now
            _sync_directory(target.parent)
        return True

    def _make_parents(self, target: Path) -> None:
        """Create missing folders of a name and flush each new folder's entry in its parent."""
        missing = [folder for folder in target.parents if folder.is_relative_to(self.root) and not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            _sync_directory(folder.parent)

    def _resolve_conflict(self, name: str, content: bytes) -> ObjectStat:
        with suppress(TooLargeError):  # longer than ours, so it is another one
            found, stat = self.get_with_stat(name, max_bytes=len(content))
            if found == content:
                return stat
        message = f"{name} exists already in {self.uri}: another writer was first; use what it wrote"
        raise PreconditionFailedError(message)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        from filelock import FileLock  # with asyncio and more, which no command needs that only reads

        with our_errors(f"locking {name} in {self.uri}"):
            self._locks.mkdir(parents=True, exist_ok=True)
            with FileLock(self._locks / sha256(name.encode()).hexdigest()[:32]):
                yield


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _link(staged: Path, target: Path) -> bool:
    try:
        os.link(staged, target)
    except FileExistsError:
        return False
    return True


def _move(staged: Path, target: Path) -> bool:
    staged.replace(target)
    return True


def _copy(source: BinaryIO, file: BinaryIO) -> None:
    shutil.copyfileobj(source, file, _COPY_CHUNK_BYTES)


def _stat_of(name: str, stat: os.stat_result) -> ObjectStat:
    """Every write makes a new file, so inode + time + size name one version of an object."""
    etag = f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"
    return ObjectStat(name=name, size_bytes=stat.st_size, etag=etag, modified_at_s=stat.st_mtime)


def _unless_gone(error: OSError) -> None:
    """For ``os.walk``: a folder that was deleted while it walks, or was never there, is no error."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


@contextmanager
def our_errors(what: str) -> Iterator[None]:
    """Errors of the operating system inside the block become ours; ``what`` names the operation, object and store."""
    try:
        yield
    except OSError as error:
        raise _translated(error, what) from error


def _translated(error: OSError, what: str) -> StorageError:
    """Our error for one of the operating system's, counted."""
    return count_error(_named(error, what))


def _named(error: OSError, what: str) -> StorageError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpaceError(f"{what} failed: {error}; free space there: orchestrator gc")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return StorageDeniedError(f"{what} failed: {error}; ask for read and write permissions there")
    if error.errno == errno.ENAMETOOLONG:
        return StorageError(f"{what} failed: {error}; shorten it: between two '/' a disk takes 255 bytes")
    return StorageError(f"{what} failed: {error}; check the disk")


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_found(name: str, uri: str) -> NotFoundError:
    return NotFoundError(f"no object {name} in {uri}")
