"""Image slots: the buffers that ranks stage into and that outlive them.

A slot is a memfd (or, where memory is short, a file in the spool) owned by the supervisor. Nothing
here decides which slot holds what; `lifecycle.columns` does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref

from trainer_sdk.protocol.errors import ProtocolError

PAGE_BYTES = 4096
# A rank that truncated its slot would have us die of SIGBUS while we hash it.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlotBuffer:
    """One buffer of `size_bytes`, a multiple of 4096.

    Invariant: the descriptor stays open and the mapping valid as long as this object or a view of
    it lives, so an upload that still runs never loses its bytes to a reallocation.
    """

    def __init__(self, fd: int, *, is_on_disk: bool = False) -> None:
        """Take over a descriptor that is already as long as the slot."""
        self.fd = fd
        self.is_on_disk = is_on_disk
        self.size_bytes = os.fstat(fd).st_size
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, fd)

    @classmethod
    def in_memory(cls, name: str, size_bytes: int) -> SlotBuffer:
        """A slot in anonymous shared memory; pages appear as they are first touched."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, round_up(size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return cls(fd)

    @classmethod
    def handed_back(cls, fd: int) -> SlotBuffer:
        """A slot that a rank held for an earlier supervisor.

        Raises:
            ProtocolError: a memfd whose size the rank could still change; it is closed.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # EINVAL: not a memfd. Source: fcntl(2), "File Sealing"
            return cls(fd, is_on_disk=True)
        if not seals & fcntl.F_SEAL_SHRINK:
            os.close(fd)
            raise ProtocolError("a slot that was handed back is not sealed against shrinking")
        return cls(fd)

    @classmethod
    def on_disk(cls, directory: str, size_bytes: int) -> SlotBuffer:
        """A slot in a file without a name, whose blocks are reserved so that staging cannot run out
        of space. Each slot has a file of its own: one that is still being uploaded keeps its bytes,
        and nothing is left behind by a crash.

        Raises:
            OSError: no space.
        """
        fd = _nameless_file(directory)
        try:
            os.posix_fallocate(fd, 0, round_up(size_bytes))
        except OSError:
            os.close(fd)
            raise
        return cls(fd, is_on_disk=True)

    def view(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` of the slot, page aligned."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size_bytes)
        return memoryview(self._map)[:size_bytes]

    def reader(self) -> int:
        """A new read-only descriptor of the slot; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


def _nameless_file(directory: str) -> int:
    """Source: open(2), O_TMPFILE; file systems without it say EOPNOTSUPP or EISDIR."""
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    fd, path = tempfile.mkstemp(prefix="slot-", dir=directory)
    os.unlink(path)
    return fd


def round_up(size_bytes: int) -> int:
    """The next multiple of the page size, at least one page."""
    return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
