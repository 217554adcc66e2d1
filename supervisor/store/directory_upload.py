"""A shard on its way into a directory store.

The bytes go to `tmp/<token>.data`; `tmp/<token>.chunks` notes the digest of each chunk after it was
written. The notes are only a claim: a resumed upload hashes the file again and believes what it
finds. Nothing is durable before `complete`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from supervisor import failpoints
from supervisor.errors import (
    ChecksumMismatch,
    ObjectMissing,
    PermanentStoreError,
    UploadAbandoned,
)
from supervisor.store.durable import (
    FILE_MODE,
    SyncFailed,
    closing_fd,
    create_file,
    read_at,
    store_errors,
    sync,
    unlink_quietly,
    write_at,
)

if TYPE_CHECKING:
    from supervisor.store.directory import DirectoryStore

_TOKEN: Final = re.compile(r"^[0-9a-f]{32}\Z")
_NOTE: Final = re.compile(r"^([0-9]{1,6}) ([0-9a-f]{64})\Z")
_MAX_HEADER_BYTES: Final = 4096
_MAX_NOTES_BYTES: Final = 8 * 1024 * 1024


class DirectoryUpload:
    """Implements `ShardUpload`. Made by `open`; opens its files for each call, so it leaks none."""

    def __init__(
        self, store: DirectoryStore, key: str, *, size_bytes: int, chunk_bytes: int, token: str
    ) -> None:
        self.resume_token = token
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._digests: dict[int, str] = {}
        self._is_abandoned = False
        self._is_complete = False

    @classmethod
    def open(
        cls,
        store: DirectoryStore,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
    ) -> DirectoryUpload:
        """Go on with the upload of this token if its notes fit, else begin anew.

        Raises:
            OSError, ValueError
        """
        if size_bytes < 1 or chunk_bytes < 1:
            raise ValueError(f"shard of {size_bytes} bytes in chunks of {chunk_bytes}")
        token = resume_token or ""
        if _TOKEN.match(token):
            upload = cls(store, key, size_bytes=size_bytes, chunk_bytes=chunk_bytes, token=token)
            if upload._find_stored():
                return upload
        token = secrets.token_hex(16)
        upload = cls(store, key, size_bytes=size_bytes, chunk_bytes=chunk_bytes, token=token)
        upload._create()
        return upload

    @property
    def _data_name(self) -> str:
        return _data_name(self.resume_token)

    @property
    def _notes_name(self) -> str:
        return _notes_name(self.resume_token)

    @property
    def _header(self) -> str:
        return f"{self._size_bytes} {self._chunk_bytes} {self._key}"

    @property
    def _num_chunks(self) -> int:
        return -(-self._size_bytes // self._chunk_bytes)

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        with self._lock:
            return dict(self._digests)

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        self._check_usable()
        view = data.cast("B")
        offset = index * self._chunk_bytes
        wanted = min(self._chunk_bytes, self._size_bytes - offset)
        if not 0 <= index < self._num_chunks or len(view) != wanted:
            raise ValueError(f"chunk {index} of {self._key!r} has {len(view)} bytes, not {wanted}")
        if hashlib.sha256(view).digest() != sha256:
            raise ChecksumMismatch(f"chunk {index} of {self._key!r} differs from its digest")
        failpoints.hit("upload.chunk.before")
        with store_errors(self._key, "write"):
            self._write(index, view, offset, sha256.hex())
        failpoints.hit("upload.chunk.after")

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        wanted = [digest.hex() for digest in chunk_digests]
        failpoints.hit("upload.complete.before")
        with self._lock, store_errors(self._key, "complete"):
            if not self._is_complete:
                self._check_usable()
                self._check_digests(wanted)
                self._publish(wanted)
                self._is_complete = True
        failpoints.hit("upload.complete.after")

    def abort(self, *, timeout_s: float) -> None:
        with store_errors(self._key, "abort"):
            self._remove()
        self._is_abandoned = True

    def _check_usable(self) -> None:
        if self._is_abandoned:
            raise UploadAbandoned(f"the upload of {self._key!r} was given up")

    def _check_digests(self, wanted: Sequence[str]) -> None:
        have = [self._digests.get(index) for index in range(self._num_chunks)]
        if len(wanted) != self._num_chunks or None in have:
            raise ValueError(
                f"{self._key!r}: {len(self._digests)} of {self._num_chunks} chunks are stored, "
                f"{len(wanted)} digests given"
            )
        if have != list(wanted):
            raise ChecksumMismatch(f"{self._key!r}: the stored chunks are not those to complete")

    def _create(self) -> None:
        tmp = self._store.open_tmp()
        with closing_fd(tmp):
            # The notes first: a crash between the two must leave nothing that cannot be found.
            with closing_fd(create_file(tmp, self._notes_name)) as fd:
                write_at(fd, f"{self._header}\n".encode(), 0)
            with closing_fd(create_file(tmp, self._data_name)) as fd:
                os.ftruncate(fd, self._size_bytes)

    def _write(self, index: int, view: memoryview, offset: int, digest: str) -> None:
        tmp = self._store.open_tmp()
        with closing_fd(tmp):
            try:
                with closing_fd(self._open(tmp, self._data_name, os.O_WRONLY)) as fd:
                    write_at(fd, view, offset)
                with closing_fd(self._open(tmp, self._notes_name, os.O_WRONLY | os.O_APPEND)) as fd:
                    os.write(fd, f"{index} {digest}\n".encode())
            except FileNotFoundError as error:
                self._is_abandoned = True
                raise UploadAbandoned(f"the files of upload {self._key!r} are gone") from error
        with self._lock:
            self._digests[index] = digest

    def _publish(self, wanted: Sequence[str]) -> None:
        tmp = self._store.open_tmp()
        with closing_fd(tmp):
            try:
                with closing_fd(self._open(tmp, self._data_name, os.O_RDWR)) as fd:
                    if os.fstat(fd).st_size != self._size_bytes:
                        raise ChecksumMismatch(f"{self._key!r}: the file has another size")
                    sync(fd)
            except FileNotFoundError:
                # An earlier complete may have got here, interrupted before its fsync.
                self._check_published(wanted)
                self._store.settle_object(self._key)
                return
            except SyncFailed as error:
                self._remove()
                self._is_abandoned = True
                raise UploadAbandoned(
                    f"{self._key!r}: fsync failed; the file was thrown away",
                    hint="check the store's disk and its free space",
                ) from error
            if not self._store.publish(self._key, tmp, self._data_name, what="dir.rename"):
                self._check_published(wanted)
        self._remove()

    def _check_published(self, wanted: Sequence[str]) -> None:
        """Accept an object that is already there only if it is this one."""
        try:
            with self._store.open_object(self._key) as fd:
                is_same = os.fstat(fd).st_size == self._size_bytes and all(
                    self._hash_chunk(fd, index) == digest for index, digest in enumerate(wanted)
                )
        except ObjectMissing as error:
            self._is_abandoned = True
            raise UploadAbandoned(f"the files of upload {self._key!r} are gone") from error
        if not is_same:
            raise PermanentStoreError(
                f"another object has the name {self._key!r}", hint="names are never used twice"
            )

    def _find_stored(self) -> bool:
        """Hash again what the notes claim; False if this is not an upload of this object."""
        tmp = self._store.open_tmp()
        with closing_fd(tmp):
            try:
                with closing_fd(self._open(tmp, self._notes_name, os.O_RDONLY)) as fd:
                    notes = bytearray(min(os.fstat(fd).st_size, _MAX_NOTES_BYTES))
                    read_at(fd, memoryview(notes), 0)
                header, *lines = notes.decode("utf-8", errors="replace").split("\n")
                if header != self._header:
                    return False
                with closing_fd(self._open(tmp, self._data_name, os.O_RDONLY)) as fd:
                    claims = {int(match[1]): match[2] for match in map(_NOTE.match, lines) if match}
                    self._digests = {
                        index: digest
                        for index, digest in claims.items()
                        if index < self._num_chunks and self._hash_chunk(fd, index) == digest
                    }
            except FileNotFoundError:
                return False
        return True

    def _hash_chunk(self, fd: int, index: int) -> str:
        offset = index * self._chunk_bytes
        size = min(self._chunk_bytes, self._size_bytes - offset)
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(size, 1 << 20)))
        while size > 0:
            count = read_at(fd, buffer[:size], offset)
            if count == 0:
                break
            digest.update(buffer[:count])
            offset, size = offset + count, size - count
        return digest.hexdigest()

    def _remove(self) -> None:
        tmp = self._store.open_tmp()
        with closing_fd(tmp):
            remove_upload(tmp, self.resume_token)

    @staticmethod
    def _open(tmp: int, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=tmp)


def _data_name(token: str) -> str:
    return f"{token}.data"


def _notes_name(token: str) -> str:
    return f"{token}.chunks"


def unfinished_uploads(tmp: int) -> Iterator[tuple[str, str]]:
    """Token and key of every upload whose files are in the directory of temporary files."""
    for name in os.listdir(tmp):
        token, _, kind = name.partition(".")
        if kind != "chunks" or not _TOKEN.match(token):
            continue
        notes = bytearray(_MAX_HEADER_BYTES)
        try:
            with closing_fd(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=tmp)) as fd:
                count = read_at(fd, memoryview(notes), 0)
        except OSError:  # it ended meanwhile
            continue
        header = notes[:count].split(b"\n")[0].decode("utf-8", errors="replace").split(" ", 2)
        if len(header) == 3:
            yield token, header[2]


def remove_upload(tmp: int, token: str) -> None:
    """Remove the files of an upload, the notes last: they are what finds the others."""
    unlink_quietly(tmp, _data_name(token))
    unlink_quietly(tmp, _notes_name(token))
