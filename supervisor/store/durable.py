"""Names and bytes on a POSIX file system that survive a power cut; used by the directory store.

Every path is walked from an open directory, component by component, without following links, so
that neither a key nor a planted link leads out of the store. Modes do not depend on the umask.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from supervisor.errors import (
    ForeignObject,
    ObjectMissing,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreLacksConditionalPut,
    TransientStoreError,
)

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
)
# Source: renameat2(2), include/uapi/linux/fs.h: RENAME_NOREPLACE is bit 0.
_RENAME_NOREPLACE: Final = 1


class SyncFailed(TransientStoreError):
    """fsync reported an error: what was written since is lost, whatever a second call says."""

    error_id = "store_fsync_failed"
    mend = "check the store's disk and the kernel log"


def store_error(error: OSError, key: str, action: str) -> StoreError:
    """The error of our tree for a failed system call on behalf of `key`."""
    what = f"{action} {key!r}: {error.strerror or error}"
    match error.errno:
        case errno.ENOENT:
            return ObjectMissing(key)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return StoreAccessDenied(
                what, hint="the supervisor's user needs read and write permission below the store"
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StoreFull(what, hint="free space or raise the quota of the store's file system")
        case errno.ELOOP | errno.ENOTDIR | errno.EISDIR | errno.ENAMETOOLONG:
            return ForeignObject(
                what, hint="something that is not the store's own lies in its directory"
            )
        case _:
            return TransientStoreError(what)


@contextmanager
def store_errors(key: str, action: str) -> Iterator[None]:
    """Turn system call errors of the block into errors of our tree."""
    try:
        yield
    except OSError as error:
        raise store_error(error, key, action) from error


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close the descriptor after the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(root_fd: int, parts: Sequence[str]) -> int:
    """Open a directory below `root_fd`; the caller closes it.

    Raises:
        OSError: a component is missing, not a directory, or a link.
    """
    current = os.open(".", _OPEN_DIRECTORY, dir_fd=root_fd)
    for part in parts:
        with closing_fd(current):
            current = os.open(part, _OPEN_DIRECTORY, dir_fd=current)
    return current


def make_directories(
    root_fd: int, parts: Sequence[str], *, is_settled: Callable[[tuple[str, ...]], bool]
) -> int:
    """Open a directory, making what is missing; names not known as settled are made durable.

    A directory that another process has just made may not be durable yet, so that finding one is
    no reason to skip the fsync of its parent: `is_settled` says whether this process did it before.

    Raises:
        OSError, SyncFailed: see `open_directory`.
    """
    current = os.open(".", _OPEN_DIRECTORY, dir_fd=root_fd)
    for depth, part in enumerate(parts, start=1):
        with closing_fd(current):
            child = _open_or_make(current, part)
            try:
                if not is_settled(tuple(parts[:depth])):
                    sync(current)
            except BaseException:
                os.close(child)
                raise
            current = child
    return current


def _open_or_make(parent_fd: int, name: str) -> int:
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=parent_fd)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=parent_fd)
    child = os.open(name, _OPEN_DIRECTORY, dir_fd=parent_fd)
    os.fchmod(child, DIRECTORY_MODE)
    return child


def create_file(directory_fd: int, name: str) -> int:
    """Create a new file for reading and writing; the caller closes it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, FILE_MODE, dir_fd=directory_fd)
    os.fchmod(fd, FILE_MODE)
    return fd


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at an offset."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` from an offset; returns the bytes read, fewer at the end of the file."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def sync(fd: int) -> None:
    """fsync a file or directory.

    Raises:
        SyncFailed: the kernel may have dropped the data and will not say so twice.

    Source: fsync(2), and Rebello et al., USENIX ATC 2020: after an error pages are marked clean.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed(f"fsync failed: {error.strerror}") from error


def unlink_quietly(directory_fd: int, name: str) -> None:
    """Remove a temporary name; what cannot be removed is only clutter."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except OSError:
        return


def publish(source_fd: int, source: str, target_fd: int, target: str) -> bool:
    """Give a complete, synced file its final name, unless that name is taken (rule R1).

    Returns:
        True: the name is new; the temporary name is gone. False: taken; the file is still there.

    Raises:
        OSError: the call failed.
        StoreLacksConditionalPut: the file system has neither hard links nor RENAME_NOREPLACE.
    """
    try:
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_noreplace(source_fd, source, target_fd, target)
    unlink_quietly(source_fd, source)
    return True


def _rename_noreplace(source_fd: int, source: str, target_fd: int, target: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is None:
        raise _no_exclusive_create()
    result = renameat2(
        source_fd, os.fsencode(source), target_fd, os.fsencode(target), _RENAME_NOREPLACE
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code in _NO_LINKS or code == errno.EINVAL:
        raise _no_exclusive_create()
    raise OSError(code, os.strerror(code))


def _no_exclusive_create() -> StoreLacksConditionalPut:
    return StoreLacksConditionalPut(
        "the file system has neither hard links nor rename without replacing",
        hint="use a local file system or NFS, not a FUSE mount of an object store; or s3://",
    )
