"""One image on its way into a file of the spool."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from supervisor import failpoints
from supervisor.checkpoint.chunks import PAGE_BYTES
from supervisor.checkpoint.spool_errors import SpoolError, spool_error

# Source: posix_fallocate(3): where the file system has no fallocate, glibc writes single bytes,
# which an O_DIRECT descriptor refuses with EINVAL.
_CANNOT_RESERVE = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class ImageWriter:
    """One image file, written chunk by chunk in any order by several threads, then synced.

    With O_DIRECT where the file system has it, which spares the page cache and is faster for large
    files; without it the data goes through the page cache and fsync.

    Invariant: the descriptor is closed once, and never while a write uses it, so a write that hangs
    cannot end up in a file that got the same number later.
    """

    def __init__(self, path: str, *, size_bytes: int) -> None:
        """Create the file and reserve its space.

        Raises:
            SpoolFull, SpoolError: nothing of use is left behind.
        """
        self._path = path
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._num_writes = 0
        self._is_closing = False
        self.is_direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            failpoints.hit("spool.open.before")
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
                self._fd = os.open(path, flags, 0o600)
            try:
                self._reserve()
                failpoints.hit("spool.open.after")
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise spool_error(error, path) from error

    def _reserve(self) -> None:
        """Without its space reserved, a full disk would show only in the middle of the image."""
        try:
            os.posix_fallocate(self._fd, 0, -(-self._size_bytes // PAGE_BYTES) * PAGE_BYTES)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise

    def write(self, padded: memoryview, offset: int) -> None:
        """Write a chunk. `padded` is page aligned and a multiple of the page size.

        Raises:
            SpoolFull, SpoolError: the file must be abandoned.
        """
        with self._in_use():
            try:
                failpoints.hit("spool.write.before")
                done = 0
                while done < len(padded):
                    done += os.pwrite(self._fd, padded[done:], offset + done)
                failpoints.hit("spool.write.after")
            except OSError as error:
                raise spool_error(error, self._path) from error

    def finish(self) -> None:
        """Cut to the image's size, sync, close; every write has returned.

        Raises:
            SpoolFull, SpoolError: the file must be thrown away. It is never synced again: a second
            fsync may succeed although the first one lost the data.
        """
        try:
            with self._in_use():
                os.ftruncate(self._fd, self._size_bytes)
                failpoints.hit("spool.fsync.before")
                os.fsync(self._fd)
                failpoints.hit("spool.fsync.after")
                self._is_closing = True
        except OSError as error:  # NFS and quotas tell of it as late as on close
            raise spool_error(error, self._path) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without a claim on what was written; a write under way closes when it returns."""
        with self._lock:
            self._is_closing = True
            if self._is_over():
                with contextlib.suppress(OSError):
                    self._close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closing:
                raise SpoolError(f"{self._path} was given up")
            self._num_writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writes -= 1
                if self._is_over():
                    self._close()

    def _is_over(self) -> bool:
        return self._is_closing and self._num_writes == 0

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            failpoints.hit("spool.close.before")
            os.close(fd)
            failpoints.hit("spool.close.after")
