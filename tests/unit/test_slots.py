"""Image slots: page aligned, owned, and alive as long as anyone needs their bytes."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from supervisor.ranks.slots import PAGE_BYTES, SlotBuffer, round_up
from tests.unit.filesystems import tmpfs
from trainer_sdk.protocol.errors import ProtocolError


def open_fds() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("size_bytes", "expected"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_a_slot_is_whole_pages_and_at_least_one(size_bytes: int, expected: int) -> None:
    assert round_up(size_bytes) == expected
    assert SlotBuffer.in_memory("slot", size_bytes).size_bytes == expected


def test_what_one_side_writes_the_other_reads() -> None:
    slot = SlotBuffer.in_memory("slot", 3 * PAGE_BYTES)

    os.pwrite(slot.fd, b"written by a rank", PAGE_BYTES)

    assert bytes(slot.view(2 * PAGE_BYTES)[PAGE_BYTES : PAGE_BYTES + 17]) == b"written by a rank"


def test_a_view_is_as_long_as_asked_and_page_aligned() -> None:
    slot = SlotBuffer.in_memory("slot", 3 * PAGE_BYTES)

    view = slot.view(5000)

    assert len(view) == 5000


def test_a_reader_sees_the_bytes_and_cannot_change_them() -> None:
    slot = SlotBuffer.in_memory("slot", PAGE_BYTES)
    slot.view(4)[:] = b"abcd"

    fd = slot.reader()
    try:
        assert os.pread(fd, 4, 0) == b"abcd"
        with pytest.raises(OSError) as caught:
            os.write(fd, b"x")
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EBADF


def test_a_slot_that_nobody_needs_gives_its_descriptor_back() -> None:
    before = open_fds()
    slot = SlotBuffer.in_memory("slot", PAGE_BYTES)
    slot.view(10)
    del slot

    assert open_fds() == before


def test_bytes_outlive_the_slot_while_a_view_is_in_use() -> None:
    """An upload that still runs must not lose its bytes to a reallocation."""
    slot = SlotBuffer.in_memory("slot", PAGE_BYTES)
    view = slot.view(4)
    view[:] = b"abcd"
    del slot
    gc.collect()

    assert bytes(view) == b"abcd"


def test_a_slot_on_disk_has_its_blocks_before_staging_begins(tmp_path: Path) -> None:
    slot = SlotBuffer.on_disk(str(tmp_path), 10 * PAGE_BYTES - 1)

    found = os.fstat(slot.fd)
    assert slot.size_bytes == 10 * PAGE_BYTES
    assert found.st_blocks * 512 >= 10 * PAGE_BYTES
    assert found.st_mode & 0o777 == 0o600
    assert slot.is_on_disk


def test_a_new_slot_on_disk_takes_nothing_from_one_that_is_still_being_uploaded(tmp_path) -> None:
    """A state that grows gets larger slots while the old ones are still read."""
    old = SlotBuffer.on_disk(str(tmp_path), PAGE_BYTES)
    view = old.view(PAGE_BYTES)
    view[:4] = b"old!"

    new = SlotBuffer.on_disk(str(tmp_path), 4 * PAGE_BYTES)
    new.view(PAGE_BYTES)[:4] = b"new!"

    assert bytes(view[:4]) == b"old!"
    assert list(tmp_path.iterdir()) == [], "a crash leaves no file behind"


def test_a_slot_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", size="1m") as folder:
        before = open_fds()

        with pytest.raises(OSError) as caught:
            SlotBuffer.on_disk(str(folder), 8 << 20)

        assert caught.value.errno == errno.ENOSPC
        assert list(folder.iterdir()) == []
        assert open_fds() == before


def test_a_slot_cannot_be_cut_short_by_who_holds_it():
    """Reading a mapped page that is gone kills the reader."""
    slot = SlotBuffer.in_memory("slot", 8192)

    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, 4096)


def test_a_slot_handed_back_must_be_sealed_and_a_file_is_known_as_one(tmp_path):
    sealed = SlotBuffer.in_memory("slot", 8192)
    path = tmp_path / "slot"
    path.write_bytes(bytes(8192))

    back = SlotBuffer.handed_back(os.dup(sealed.fd))
    file = SlotBuffer.handed_back(os.open(path, os.O_RDWR))
    with pytest.raises(ProtocolError, match="not sealed"):
        SlotBuffer.handed_back(os.memfd_create("bare"))

    assert (back.is_on_disk, back.size_bytes) == (False, 8192)
    assert file.is_on_disk
