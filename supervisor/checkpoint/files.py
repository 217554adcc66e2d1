"""Small files of the spool: written so that they are there after a crash, read as untrusted."""

from __future__ import annotations

import os

import msgspec

MAX_JSON_BYTES = 64 << 20
# A nesting bomb ends in RecursionError, bytes that are not UTF-8 in UnicodeDecodeError.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def write_synced(path: str, data: bytes) -> None:
    """Write a file and have it on the disk.

    Raises:
        OSError
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: str) -> None:
    """Have the names in a directory on the disk.

    Raises:
        OSError
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
