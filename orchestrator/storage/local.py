"""An object store in a directory of a local (or shared POSIX) file system.

Objects are plain files under their own names, so every tool can read them. Files are never changed in place: an object
is written to ``.tmp/``, flushed to disk, and then published by ``link`` (exclusive) or ``replace`` (atomic). A reader
that has opened a file therefore always sees one whole version. Folders exist while they hold an object: a deletion
removes those that it empties, and a write makes its folders again if they vanish under it. A listing is complete or an
error: an unreadable folder is never taken as empty. Users who may write into the directory may put other things than
files there, so only regular files are opened, and links are followed only if they stay inside. NFS: ``link`` is atomic
there; ``flock`` needs NFSv4 or a lock daemon, and on Lustre the mount option ``flock``.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import BinaryIO
from urllib.parse import SplitResult, unquote

from orchestrator.core.errors import (
    CorruptObjectError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageTimeoutError,
    TooLargeError,
    UnsupportedStoreError,
)
from orchestrator.storage.bounds import check_size
from orchestrator.storage.files import (
    NotRegularFileError,
    is_inside,
    open_regular,
    real_folder,
    replaced_file,
    stat_and_real_path,
)
from orchestrator.storage.os_errors import count_error, named, our_errors, translated
from orchestrator.storage.protocol import ObjectStat, Scheme, check_name, is_name

_COPY_CHUNK_BYTES = 1024 * 1024
_STAGED = re.compile(r"[0-9a-f]{24}")
"""Names of our temporary files."""
_OF_THE_DISK = "lost+found"
"""At the root of a file system only its owner may look into this folder; there are no objects in it."""
_PUBLISH_TRIES = 1000
"""A try fails only if a deletion removes the same folder in the microseconds between two system calls."""
_LOCK_TIMEOUT_S = 60.0
"""A lock is held for the moment between two steps on the disk."""
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


class LocalStore:
    """See ``ObjectStore``. ``root`` is created on first use and may be shared by any number of processes."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._staging = self.root / ".tmp"
        self._locks = self.root / ".locks"
        self._root = str(self.root)
        self._uri = self.root.as_uri()
        self._real_root = ""
        """Real path of the root at the last check; the root may be a link that is changed to another folder."""

    @property
    def uri(self) -> str:
        """``file://`` and the absolute root."""
        return self._uri

    @property
    def is_reachable(self) -> bool:
        """Whether the directory exists. Raises ``StorageError`` if it cannot be checked."""
        with our_errors(f"looking for {self.uri}"):
            return self.root.is_dir()

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        with self._staged(lambda file: _write(file, content)) as staged:
            return self._replace(name, staged)

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        with our_errors(f"reading {path} to write it as {name} to {self.uri}"):
            source = open_regular(path)[0]
        with source, self._staged(lambda file: _copy(source, file)) as staged:
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
        # On disk before the etags are compared: a write without a condition takes no lock, and one that comes between
        # the comparison and the rename is undone.
        with self._staged(lambda file: _write(file, content)) as staged, self._locked(name):
            found = self._etag_of_opened(name)
            if found != etag:
                message = f"{name} has etag {found}, expected {etag}: another writer was first; read it again"
                raise PreconditionFailedError(message)
            return self._replace(name, staged)

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
        operation = f"copying {name} from {self.uri} to {path}"
        with self._opened(name) as source, our_errors(operation), replaced_file(path) as file:
            _copy(source, file)

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        with self._found_errors(name, f"looking for {name} in {self.uri}"):
            found, real = stat_and_real_path(self._path(name))
        self._check_inside(name, real)
        return _stat_of(name, found)

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        try:
            self.stat(name)
        except NotFoundError:
            return False
        return True

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``; pipes, devices, links out of the store and the like are no objects.

        Other programs leave files here, too: NFS its ``.nfs0000``, rsync its partial copies, people their notes.
        """
        folder = prefix.rpartition("/")[0]
        start = self._folder(folder)
        with our_errors(f"listing {prefix or 'everything'} in {self.uri}"):
            # Without onerror, an unreadable folder would count as empty.
            for directory, folders, files in os.walk(start, onerror=_unless_gone):
                folders[:] = [name for name in folders if not name.startswith(".") and name != _OF_THE_DISK]
                for file in files:
                    path = Path(directory, file)
                    name = path.relative_to(self.root).as_posix()
                    found = self._listed(name, path) if name.startswith(prefix) and is_name(name) else None
                    if found is not None:
                        yield found

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        return [child for child in self._children(prefix) if child > start_after and is_name(f"{prefix}{child}")]

    def refused_children(self, prefix: str) -> list[str]:
        """See ``OpenableStore.refused_children``."""
        return [child for child in self._children(prefix) if not is_name(f"{prefix}{child}")]

    def _children(self, prefix: str) -> list[str]:
        folder = self._folder(prefix.rstrip("/"))
        try:
            return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translated(error, f"listing {prefix or 'everything'} in {self.uri}") from error

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        path = self._path(name)
        if path.parent != self.root:
            self._folder(name.rpartition("/")[0])
        with (
            our_errors(f"deleting {name} in {self.uri}"),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            path.unlink()  # also a pipe or a link, never its target
        # Also for a missing name: the process that deleted it may have died before it removed the folders.
        for folder in path.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break  # not empty

    def leftovers(self, *, until_s: float = math.inf) -> Iterator[ObjectStat]:
        """See ``gc_rules.HasLeftovers``: temporary files of writes, of dead writers and of those at work."""
        with our_errors(f"listing temporary files in {self.uri}"), suppress(FileNotFoundError):
            for path in self._staging.iterdir():
                # Another name is another program's, which may have its temporary files here, too.
                if not _STAGED.fullmatch(path.name) or path.is_dir():
                    continue
                with suppress(FileNotFoundError):  # published meanwhile
                    found = _stat_of(path.name, path.stat())
                    if found.modified_at_s <= until_s:
                        yield found

    def delete_leftover(self, name: str) -> None:
        """See ``gc_rules.HasLeftovers``."""
        with our_errors(f"deleting the temporary file {name} in {self.uri}"):
            (self._staging / check_name(name)).unlink(missing_ok=True)

    def remove_empty_staging(self) -> None:
        """Remove ``.tmp/`` unless a write is in it; the next write makes it again."""
        with suppress(OSError):  # missing, not empty, or not allowed
            self._staging.rmdir()

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _folder(self, name: str) -> Path:
        """The directory of a folder of objects, empty for the root, after a check that it is in the store."""
        folder = self._path(name) if name else self.root
        with our_errors(f"looking for {name or 'everything'} in {self.uri}"):
            try:
                real = real_folder(folder)
            except (FileNotFoundError, NotADirectoryError):
                return folder
        self._check_inside(name, real)
        return folder

    def _check_inside(self, name: str, real: str) -> None:
        """Raise ``CorruptObjectError`` if the real path of something by this name is not in the store."""
        if self._real_root and is_inside(real, self._real_root):
            return
        with our_errors(f"looking for {self.uri}"):
            self._real_root = real_folder(self.root)
        if not is_inside(real, self._real_root):
            message = f"{name or 'it'} in {self.uri} is a link out of the store, to {real}, and not followed; "
            raise CorruptObjectError(message + "put a copy there, or name the folder where it lies as the store")

    def _listed(self, name: str, path: Path) -> ObjectStat | None:
        try:
            found = path.lstat()
            if S_ISLNK(found.st_mode):
                return self.stat(name)
        except (FileNotFoundError, NotFoundError, CorruptObjectError):  # deleted while we walk, or no object
            return None
        return _stat_of(name, found) if S_ISREG(found.st_mode) else None

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
            raise translated(error, f"writing under {self.uri}") from error
        finally:
            _remove(staged)

    def _new_file(self, staged: Path) -> BinaryIO:
        for _ in range(_PUBLISH_TRIES):
            self._staging.mkdir(parents=True, exist_ok=True)
            self._check_inside(self._staging.name, real_folder(self._staging))
            with suppress(FileNotFoundError):  # another process removed the empty folder in between
                return staged.open("xb")
        return staged.open("xb")

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        with self._found_errors(name, f"opening {name} in {self.uri}"):
            # A text: making a path of it takes as long as opening the file.
            file, real = open_regular(f"{self._root}/{check_name(name)}")
        with file, our_errors(f"reading {name} in {self.uri}"):
            self._check_inside(name, real)
            yield file

    def _etag_of_opened(self, name: str) -> str | None:
        """The etag of an object as it is now; none if there is none. NFS asks its server when a file is opened, but may
        answer ``stat`` from memory for a minute, with what another node has replaced since.
        """
        try:
            with self._opened(name) as file:
                return _stat_of(name, os.fstat(file.fileno())).etag
        except NotFoundError:
            return None

    @contextmanager
    def _found_errors(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _not_found(name, self.uri) from error
        except NotRegularFileError as error:
            if self._path(name).is_dir():  # of a folder of objects, S3 says the same
                raise NotFoundError(f"no object {name} in {self.uri}: it is a directory") from error
            message = f"{what} failed: {error.strerror}; nothing of it was read, remove it"
            raise CorruptObjectError(message) from error
        except OSError as error:
            raise translated(error, what) from error

    def _replace(self, name: str, staged: Path) -> ObjectStat:
        target = self._path(name)
        stat = _stat_of(name, staged.stat())
        self._publish(target, lambda: _move(staged, target))
        return stat

    def _publish(self, target: Path, publish: Callable[[], bool]) -> bool:
        """Give a staged file its name, and flush the name to disk; False if ``publish`` found another object."""
        for tries_left in reversed(range(_PUBLISH_TRIES)):
            try:
                self._make_parents(target)
                if not publish():
                    return False
                break
            except (FileNotFoundError, FileExistsError):
                # Another process deleted the last object of a folder and then the folder, after we had created it; or
                # there is an object with the name of the folder.
                if not tries_left or any(folder.is_file() for folder in target.parents):
                    raise
        with suppress(FileNotFoundError):  # the object, and so its folder, may be deleted again by now
            _sync_directory(target.parent)
        return True

    def _make_parents(self, target: Path) -> None:
        """Create missing folders of a name and flush each new folder's entry in its parent."""
        missing = [folder for folder in target.parents if folder.is_relative_to(self.root) and not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        self._check_inside(target.relative_to(self.root).as_posix(), real_folder(target.parent))
        for folder in reversed(missing):
            _sync_directory(folder.parent)

    def _resolve_conflict(self, name: str, content: bytes) -> ObjectStat:
        with suppress(TooLargeError):  # longer than ours, so it is another one
            try:
                found, stat = self.get_with_stat(name, max_bytes=len(content))
            except NotFoundError as error:
                if self._path(name).is_dir():
                    raise named(IsADirectoryError(errno.EISDIR, "Is a directory"), f"writing {name}") from error
                raise
            if found == content:
                return stat
        message = f"{name} exists already in {self.uri}: another writer was first; use what it wrote"
        raise PreconditionFailedError(message)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        from filelock import FileLock, Timeout  # with asyncio and more, which no command needs that only reads

        path = self._locks / sha256(name.encode()).hexdigest()[:32]
        # Where the file system has no locks, filelock would take the file itself for one: that of a dead process stays.
        lock = FileLock(path, timeout=_LOCK_TIMEOUT_S, fallback_to_soft=False)
        what = f"locking {name} in {self.uri}"
        with our_errors(what):
            self._locks.mkdir(parents=True, exist_ok=True)
            self._check_inside(self._locks.name, real_folder(self._locks))
            try:
                lock.acquire()
            except Timeout as error:
                message = f"{what} failed: another writer has held {path} for {_LOCK_TIMEOUT_S:g} s; end it if it "
                message += "hangs (`lsof` names it), check the lock daemon of a shared file system, or try again"
                raise count_error(StorageTimeoutError(message)) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                message = (
                    f"{what} failed: {error}; this file system has no locks, without which two controllers could both "
                )
                message += (
                    "believe they own a sweep: mount Lustre with `-o flock`, NFS as version 4 or with its lock daemon"
                )
                raise UnsupportedStoreError(message) from error
        try:
            yield
        finally:
            lock.release()


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _remove(path: Path) -> None:
    """Delete a temporary file if it exists; if that fails, the earlier error is raised."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


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


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_found(name: str, uri: str) -> NotFoundError:
    return NotFoundError(f"no object {name} in {uri}")


def _path_of(parts: SplitResult, uri: str) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.is_absolute():
        message = f"store {uri!r} is not absolute; write file:///absolute/path"
        raise StorageError(message)
    return path


FILE = Scheme(
    name="file",
    example="file:///absolute/path",
    check=_path_of,
    open=lambda parts, uri, _: LocalStore(_path_of(parts, uri)),
)
