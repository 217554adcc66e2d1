"""A store in a directory: local disk, or NFS shared by the nodes (`file://`).

Same names as files. The rules R1 to R5 of the commit protocol are kept here: a name appears only
by link(2) from a complete, fsynced file; every directory on the way is fsynced; and what was read
from the log is settled before anyone acts on it. After a failed fsync the file is abandoned, and a
directory whose fsync failed is not trusted again by this process.

Temporary files lie in `tmp/` beside `jobs/`. Time limits cannot be kept: the kernel decides.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from supervisor import failpoints
from supervisor.errors import (
    BucketMissing,
    ForeignObject,
    PermanentStoreError,
    StoreError,
    StoreLacksConditionalPut,
)
from supervisor.store.base import ObjectInfo, OpenUpload, ShardUpload
from supervisor.store.directory_upload import (
    DirectoryUpload,
    remove_upload,
    unfinished_uploads,
)
from supervisor.store.durable import (
    SyncFailed,
    closing_fd,
    create_file,
    make_directories,
    open_directory,
    publish,
    read_at,
    store_errors,
    sync,
    unlink_quietly,
    write_at,
)

TMP: Final = "tmp"
_HINT: Final = "hint"
_LOG: Final = "log"
_COMPONENT: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class DirectoryStore:
    """Implements `ObjectStore` below one existing directory.

    Raises:
        BucketMissing: the directory does not exist; it is never made here, since a missing mount
            would then go unnoticed.
    """

    def __init__(self, root: Path) -> None:
        self.url = root.resolve().as_uri()
        try:
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BucketMissing(
                f"store directory {root}: {error.strerror}",
                hint="create the directory, or mount it, before starting",
            ) from error
        self._lock = threading.Lock()
        self._settled: set[tuple[str, ...]] = set()
        self._log_places: set[tuple[str, ...]] = set()
        self._distrusted: set[tuple[str, ...]] = set()

    def close(self) -> None:
        """Give the directory back; no call may follow."""
        os.close(self._root_fd)

    def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
        place, name = self._split(key)
        if place[-1] == _LOG:
            self._remember_log(place)
        return self._put(key, place, name, data)

    def put_bytes(self, key: str, data: bytes, *, timeout_s: float) -> None:
        place, name = self._split(key)
        with store_errors(key, "write"), self._temporary(data, durable=name != _HINT) as tmp:
            directory = self._make_place(place)
            with closing_fd(directory):
                os.rename(tmp[1], name, src_dir_fd=tmp[0], dst_dir_fd=directory)
                if name != _HINT:  # a hint is never trusted, so it need not be durable
                    self._sync_place(place, directory)

    def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
        place, _ = self._split(key)
        if place[-1] == _LOG:
            self._remember_log(place)
        with self._open(key) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise PermanentStoreError(f"{key!r} has {size} bytes, more than {max_bytes}")
            data = bytearray(size)
            if read_at(fd, memoryview(data), 0) != size:
                raise PermanentStoreError(f"{key!r} became shorter while it was read")
        return bytes(data)

    def read_into(self, key: str, *, offset: int, target: memoryview, timeout_s: float) -> None:
        with self._open(key) as fd:
            count = read_at(fd, target, offset)
        if count != len(target):
            raise PermanentStoreError(
                f"{key!r} ends at byte {offset + count}; {offset + len(target)} were wanted"
            )

    def head(self, key: str, *, timeout_s: float) -> ObjectInfo:
        with self._open(key) as fd:
            status = os.fstat(fd)
        return ObjectInfo(key=key, size_bytes=status.st_size, modified_at=status.st_mtime)

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        parents = prefix.split("/")[:-1]
        if not all(_COMPONENT.match(part) for part in parents):
            raise ValueError(f"prefix {prefix!r} is not one of this store")
        with store_errors(prefix, "list"):
            try:
                directory = open_directory(self._root_fd, parents)
            except FileNotFoundError:
                return
            with closing_fd(directory):
                start = "".join(f"{part}/" for part in parents)
                for info in self._walk(directory, start, prefix):
                    if info.key > start_after:
                        yield info

    def delete(self, key: str, *, timeout_s: float) -> None:
        place, name = self._split(key)
        with store_errors(key, "delete"), contextlib.suppress(FileNotFoundError):
            directory = open_directory(self._root_fd, place)
            with closing_fd(directory):
                os.unlink(name, dir_fd=directory)
            self._drop_empty(place)

    def open_upload(
        self,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
        timeout_s: float,
    ) -> ShardUpload:
        self._split(key)
        with store_errors(key, "begin the upload of"):
            return DirectoryUpload.open(
                self,
                key,
                size_bytes=size_bytes,
                chunk_bytes=chunk_bytes,
                resume_token=resume_token,
            )

    def settle_log(self, *, timeout_s: float) -> None:
        with self._lock:
            places = sorted(self._log_places)
        for place in places:
            with store_errors("/".join(place), "settle"):
                try:
                    directory = open_directory(self._root_fd, place)
                except FileNotFoundError:
                    continue
                with closing_fd(directory):
                    self._sync_place(place, directory)

    def open_uploads(self, prefix: str, *, timeout_s: float) -> Iterator[OpenUpload]:
        with store_errors(prefix, "list the uploads of"):
            tmp = self.open_tmp()
            with closing_fd(tmp):
                found = list(unfinished_uploads(tmp))
        for token, key in found:
            if key.startswith(prefix):
                yield OpenUpload(key=key, token=token)

    def drop_upload(self, upload: OpenUpload, *, timeout_s: float) -> None:
        with store_errors(upload.key, "drop the upload of"):
            tmp = self.open_tmp()
            with closing_fd(tmp):
                remove_upload(tmp, upload.token)

    def probe(self, prefix: str, *, timeout_s: float) -> Sequence[str]:
        key = f"{prefix}probe-{secrets.token_hex(16)}"
        self.put_if_absent(key, b"probe", timeout_s=timeout_s)
        try:
            if self.put_if_absent(key, b"probe", timeout_s=timeout_s):
                raise StoreLacksConditionalPut(
                    f"{self.url}: a second create of one name was not refused",
                    hint="this file system cannot keep two writers apart; use another store",
                )
        finally:
            with contextlib.suppress(StoreError):
                self.delete(key, timeout_s=timeout_s)
        return ()

    def server_time(self, *, timeout_s: float) -> float:
        with store_errors(TMP, "make a file in"):
            directory = self.open_tmp()
            with closing_fd(directory):
                name = secrets.token_hex(16)
                with closing_fd(create_file(directory, name)) as fd:
                    status = os.fstat(fd)
                unlink_quietly(directory, name)
        return status.st_mtime

    # Also used by DirectoryUpload.

    def open_tmp(self) -> int:
        """Open the directory of temporary files; the caller closes it."""
        return self._make_place((TMP,))

    def publish(self, key: str, tmp_fd: int, tmp_name: str, *, what: str) -> bool:
        """Give a complete, synced temporary file its name, durably (R1, R3, R4).

        Returns:
            False: the name is taken; the temporary file is still there.

        Raises:
            OSError, StoreError: the name may be there or not.
        """
        place, name = self._split(key)
        for is_last in (False, True):
            directory = self._make_place(place)
            with closing_fd(directory):
                failpoints.hit(f"{what}.before")
                try:
                    is_new = publish(tmp_fd, tmp_name, directory, name)
                except FileNotFoundError:
                    # Someone tidied the empty directory away: make it once more.
                    self._forget(place)
                    if is_last:
                        raise
                    continue
                failpoints.hit(f"{what}.after")
                self._sync_place(place, directory)
                return is_new
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def open_object(self, key: str) -> Iterator[int]:
        """Open an object for reading."""
        with self._open(key) as fd:
            yield fd

    def settle_object(self, key: str) -> None:
        """fsync an object and its directory."""
        place, name = self._split(key)
        directory = self._make_place(place)
        with closing_fd(directory):
            with closing_fd(os.open(name, _OPEN_FILE, dir_fd=directory)) as fd:
                sync(fd)
            self._sync_place(place, directory)

    def _put(self, key: str, place: tuple[str, ...], name: str, data: bytes) -> bool:
        with store_errors(key, "create"), self._temporary(data, durable=True) as tmp:
            if place[-1] == _LOG:
                os.chmod(tmp[1], 0o400, dir_fd=tmp[0])  # a slot is never written again
            return self.publish(key, *tmp, what="dir.link")

    @contextlib.contextmanager
    def _temporary(self, data: bytes, *, durable: bool) -> Iterator[tuple[int, str]]:
        """A complete file in `tmp/`: (directory, name); removed after the block if still there."""
        directory = self.open_tmp()
        name = secrets.token_hex(16)
        with closing_fd(directory):
            try:
                with closing_fd(create_file(directory, name)) as fd:
                    write_at(fd, data, 0)
                    if durable:
                        sync(fd)
                yield directory, name
            finally:
                unlink_quietly(directory, name)

    def _split(self, key: str) -> tuple[tuple[str, ...], str]:
        parts = key.split("/")
        if len(parts) < 2 or parts[0] == TMP or not all(_COMPONENT.match(part) for part in parts):
            raise ValueError(f"key {key!r} is not one of this store")
        return tuple(parts[:-1]), parts[-1]

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int]:
        place, name = self._split(key)
        with store_errors(key, "read"):
            directory = open_directory(self._root_fd, place)
            with closing_fd(directory):
                fd = os.open(name, _OPEN_FILE, dir_fd=directory)
            with closing_fd(fd):
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ForeignObject(f"{key!r} is not a regular file")
                yield fd

    def _make_place(self, place: tuple[str, ...]) -> int:
        directory = make_directories(
            self._root_fd, place, is_settled=lambda part: part in self._settled
        )
        with self._lock:
            self._settled.update(place[:depth] for depth in range(1, len(place) + 1))
        return directory

    def _forget(self, place: tuple[str, ...]) -> None:
        with self._lock:
            self._settled.difference_update([place[:depth] for depth in range(1, len(place) + 1)])

    def _sync_place(self, place: tuple[str, ...], directory: int) -> None:
        """fsync a directory, and never believe a success that follows a failure."""
        if place in self._distrusted:
            raise PermanentStoreError(
                f"an fsync of {'/'.join(place)!r} failed earlier; it is not trusted any more",
                hint="check the disk and the kernel log, then start the supervisor again",
            )
        try:
            sync(directory)
        except SyncFailed:
            with self._lock:
                self._distrusted.add(place)
            raise

    def _remember_log(self, place: tuple[str, ...]) -> None:
        with self._lock:
            self._log_places.add(place)

    def _drop_empty(self, place: tuple[str, ...]) -> None:
        """Remove the step's and the generation's directory if nothing is left in them."""
        for depth in (len(place), len(place) - 1):
            if depth < 4:  # jobs/<job>/data/.. stays
                return
            parent = open_directory(self._root_fd, place[: depth - 1])
            with closing_fd(parent):
                try:
                    os.rmdir(place[depth - 1], dir_fd=parent)
                except OSError:
                    return
            self._forget(place[:depth])

    def _walk(self, directory: int, start: str, prefix: str) -> Iterator[ObjectInfo]:
        with os.scandir(directory) as entries:
            # A directory sorts as "name/", which makes the whole walk run in the order of keys.
            found = sorted(
                entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in entries
            )
        for name in found:
            key = start + name
            if not (key.startswith(prefix) or prefix.startswith(key)) or key == f"{TMP}/":
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if name.endswith("/"):
                    child = open_directory(directory, [name[:-1]])
                    with closing_fd(child):
                        yield from self._walk(child, key, prefix)
                    continue
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and key.startswith(prefix):
                    yield ObjectInfo(
                        key=key, size_bytes=status.st_size, modified_at=status.st_mtime
                    )
