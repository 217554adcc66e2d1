"""The directory store keeps its rules R1 to R5, and stays inside its directory."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.errors import (
    BucketMissing,
    ObjectMissing,
    PermanentStoreError,
    StoreAccessDenied,
    StoreFull,
    StoreLacksConditionalPut,
    TransientStoreError,
    UploadAbandoned,
)
from supervisor.store.base import ShardUpload
from supervisor.store.directory import DirectoryStore
from supervisor.store.directory_upload import DirectoryUpload

LIMIT_S = 5.0
SLOT = "jobs/j/log/00000000000000000001"
SHARD = "jobs/j/data/ab/0000000001/000000000002/000000-" + "ab" * 16
CONTENT = b"0123456789"
CHUNKS = [b"0123", b"4567", b"89"]
DIGESTS = [hashlib.sha256(chunk).digest() for chunk in CHUNKS]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    opened = DirectoryStore(tmp_path)
    yield opened
    opened.close()


class Disk:
    """Watches fsync, link and unlink, and lets fsync fail on demand."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.events: list[tuple[str, str]] = []
        self.failing = ""  # a path below the root whose fsync fails, once
        self._fsync = os.fsync
        self._link = os.link
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "link", self.link)

    def path_of(self, fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self.root)

    def fsync(self, fd: int) -> None:
        path = self.path_of(fd)
        self.events.append(("fsync", path))
        if self.failing and path.startswith(self.failing):
            self.failing = ""
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(fd)

    def link(self, source: str, target: str, **where: int) -> None:
        self._link(source, target, **where)
        place = self.path_of(where["dst_dir_fd"])
        self.events.append(("link", f"{place}/{target}"))

    def index(self, kind: str, path: str) -> int:
        return next(
            place
            for place, event in enumerate(self.events)
            if event[0] == kind and event[1].startswith(path)
        )


@pytest.fixture
def disk(tmp_path: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def put_all(store: DirectoryStore, key: str = SHARD) -> ShardUpload:
    upload = store.open_upload(
        key, size_bytes=10, chunk_bytes=4, resume_token=None, timeout_s=LIMIT_S
    )
    for index, chunk in enumerate(CHUNKS):
        upload.put_chunk(index, memoryview(chunk), sha256=DIGESTS[index], timeout_s=LIMIT_S)
    return upload


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_slot_is_synced_then_linked_then_its_directories_are_synced(
    store: DirectoryStore, disk: Disk
) -> None:
    """R1, R2, R4; and R3 for the parents that were made."""
    assert store.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)

    file, link, after = (
        disk.index("fsync", "tmp/"),
        disk.index("link", SLOT),
        disk.index("fsync", "jobs/j/log"),
    )
    assert file < link < after
    for parent in (".", "jobs", "jobs/j"):
        assert ("fsync", parent) in disk.events[: link + 1]


def test_shard_is_synced_before_it_is_named_and_its_directories_with_it(
    store: DirectoryStore, disk: Disk
) -> None:
    """R3."""
    put_all(store).complete(DIGESTS, timeout_s=LIMIT_S)

    file, link = disk.index("fsync", "tmp/"), disk.index("link", SHARD)
    assert file < link < disk.index("fsync", os.path.dirname(SHARD))
    assert ("fsync", "jobs/j/data/ab/0000000001") in disk.events


def test_parents_made_by_another_process_are_synced_too(
    tmp_path: Path, store: DirectoryStore, disk: Disk
) -> None:
    """It may have died between mkdir and fsync."""
    (tmp_path / SHARD).parent.mkdir(parents=True)

    store.put_bytes(SHARD, b"x", timeout_s=LIMIT_S)

    assert {"jobs", "jobs/j", "jobs/j/data"} <= {path for _, path in disk.events}


def test_log_that_was_read_is_settled_before_anyone_acts(
    tmp_path: Path, store: DirectoryStore, disk: Disk
) -> None:
    """R5: slots of others are made durable, too."""
    other = DirectoryStore(tmp_path)
    other.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)
    other.close()
    disk.events.clear()
    store.get_bytes(SLOT, max_bytes=100, timeout_s=LIMIT_S)

    store.settle_log(timeout_s=LIMIT_S)

    assert disk.events == [("fsync", "jobs/j/log")]


def test_hint_is_not_synced(store: DirectoryStore, disk: Disk) -> None:
    store.put_bytes("jobs/j/hint", b"1", timeout_s=LIMIT_S)
    disk.events.clear()

    store.put_bytes("jobs/j/hint", b"2", timeout_s=LIMIT_S)

    assert disk.events == []


def test_slot_whose_fsync_failed_never_appears(
    tmp_path: Path, store: DirectoryStore, disk: Disk
) -> None:
    disk.failing = "tmp/"

    with pytest.raises(TransientStoreError):
        store.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)

    assert files_below(tmp_path) == set()
    assert store.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)  # from a new file


def test_log_directory_whose_fsync_failed_is_not_trusted_again(
    store: DirectoryStore, disk: Disk
) -> None:
    """The kernel reports the error once; the next fsync would 'succeed'."""
    disk.failing = "jobs/j/log"
    with pytest.raises(TransientStoreError):
        store.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)

    for _ in range(2):
        with pytest.raises(PermanentStoreError, match="not trusted"):
            store.settle_log(timeout_s=LIMIT_S)


def test_shard_whose_fsync_failed_is_thrown_away(
    tmp_path: Path, store: DirectoryStore, disk: Disk
) -> None:
    upload = put_all(store)
    disk.failing = "tmp/"

    for _ in range(2):
        with pytest.raises(UploadAbandoned):
            upload.complete(DIGESTS, timeout_s=LIMIT_S)

    assert files_below(tmp_path) == set()
    put_all(store).complete(DIGESTS, timeout_s=LIMIT_S)


def test_shard_whose_directory_could_not_be_synced_is_never_called_complete(
    store: DirectoryStore, disk: Disk
) -> None:
    upload = put_all(store)
    disk.failing = os.path.dirname(SHARD)
    with pytest.raises(TransientStoreError):
        upload.complete(DIGESTS, timeout_s=LIMIT_S)

    for _ in range(2):
        with pytest.raises(PermanentStoreError, match="not trusted"):
            upload.complete(DIGESTS, timeout_s=LIMIT_S)


def test_resumed_upload_believes_the_bytes_not_the_notes(
    tmp_path: Path, store: DirectoryStore
) -> None:
    """After a power cut the notes may be there and the bytes not."""
    upload = put_all(store)
    (data,) = (tmp_path / "tmp").glob("*.data")
    data.write_bytes(b"0123\0\0\0\089")

    resumed = store.open_upload(
        SHARD,
        size_bytes=10,
        chunk_bytes=4,
        resume_token=upload.resume_token,
        timeout_s=LIMIT_S,
    )

    assert set(resumed.stored_chunks(timeout_s=LIMIT_S)) == {0, 2}


@pytest.mark.parametrize(
    ("key", "size_bytes", "chunk_bytes"),
    [(SHARD, 11, 4), (SHARD, 10, 5), (SHARD[:-1] + "0", 10, 4)],
)
def test_token_of_another_object_begins_anew(
    store: DirectoryStore, key: str, size_bytes: int, chunk_bytes: int
) -> None:
    token = put_all(store).resume_token

    other = store.open_upload(
        key,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        resume_token=token,
        timeout_s=LIMIT_S,
    )

    assert other.resume_token != token
    assert other.stored_chunks(timeout_s=LIMIT_S) == {}


def test_upload_that_was_published_but_not_noted_completes_again(
    tmp_path: Path, store: DirectoryStore
) -> None:
    """Killed after the link: the next supervisor finds the name taken, by this very shard."""
    first = put_all(store)
    first.complete(DIGESTS, timeout_s=LIMIT_S)

    second = put_all(store)
    second.complete(DIGESTS, timeout_s=LIMIT_S)

    assert (tmp_path / SHARD).read_bytes() == CONTENT
    assert {name for name in files_below(tmp_path) if name.startswith("tmp")} == set()


def test_name_taken_by_another_shard_is_not_overwritten(
    tmp_path: Path, store: DirectoryStore
) -> None:
    store.put_bytes(SHARD, b"9876543210", timeout_s=LIMIT_S)

    with pytest.raises(PermanentStoreError, match="another object"):
        put_all(store).complete(DIGESTS, timeout_s=LIMIT_S)

    assert (tmp_path / SHARD).read_bytes() == b"9876543210"


BAD_KEYS = [
    "",
    "x",
    "/etc/passwd",
    "jobs/../../x",
    "jobs/./x",
    "jobs//x",
    "jobs/x/",
    "jobs/.hidden",
    "jobs/a\0b",
    "jobs/a b",
    "jobs/ä",
    "tmp/x",
    "jobs/" + "x" * 201,
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_lead_elsewhere_are_refused(
    tmp_path: Path, store: DirectoryStore, key: str
) -> None:
    for call in (
        lambda: store.put_if_absent(key, b"", timeout_s=LIMIT_S),
        lambda: store.put_bytes(key, b"", timeout_s=LIMIT_S),
        lambda: store.get_bytes(key, max_bytes=1, timeout_s=LIMIT_S),
        lambda: store.head(key, timeout_s=LIMIT_S),
        lambda: store.delete(key, timeout_s=LIMIT_S),
        lambda: put_all(store, key),
    ):
        with pytest.raises(ValueError, match="not one of this store"):
            call()
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("place", ["jobs", "jobs/j", "jobs/j/log", SLOT])
def test_links_are_not_followed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, place: str
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    target = outside / "x"
    if place == SLOT:
        target.write_bytes(b"secret")
    else:
        target.mkdir()
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    store = DirectoryStore(tmp_path)

    with pytest.raises(PermanentStoreError):
        store.get_bytes(SLOT, max_bytes=100, timeout_s=LIMIT_S)
    if place == SLOT:
        assert store.put_if_absent(SLOT, b"mine", timeout_s=LIMIT_S) is False
        assert target.read_bytes() == b"secret"
    else:
        with pytest.raises(PermanentStoreError):
            store.put_if_absent(SLOT, b"mine", timeout_s=LIMIT_S)
        assert list(target.iterdir()) == []
    assert list(store.list_keys("jobs/j/log/", timeout_s=LIMIT_S)) == [] if place == SLOT else True
    store.close()


def test_fifo_in_the_store_blocks_nobody(tmp_path: Path, store: DirectoryStore) -> None:
    (tmp_path / SLOT).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / SLOT)

    with pytest.raises(PermanentStoreError, match="regular"):
        store.get_bytes(SLOT, max_bytes=100, timeout_s=LIMIT_S)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(
    tmp_path: Path, store: DirectoryStore, umask: int
) -> None:
    before = os.umask(umask)
    try:
        store.put_if_absent(SLOT, b"record", timeout_s=LIMIT_S)
        put_all(store).complete(DIGESTS, timeout_s=LIMIT_S)
    finally:
        os.umask(before)

    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert modes[tmp_path / SLOT] == 0o400
    assert modes[tmp_path / SHARD] == 0o600


def test_missing_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(BucketMissing) as caught:
        DirectoryStore(tmp_path / "absent")

    assert "mount" in caught.value.hint
    assert not (tmp_path / "absent").exists()


def test_without_hard_links_rename_does_it(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*args: object, **where: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)

    assert store.put_if_absent(SLOT, b"first", timeout_s=LIMIT_S) is True
    assert store.put_if_absent(SLOT, b"second", timeout_s=LIMIT_S) is False
    assert store.get_bytes(SLOT, max_bytes=9, timeout_s=LIMIT_S) == b"first"
    store.probe("jobs/j/", timeout_s=LIMIT_S)


def test_link_that_overwrites_is_found_at_start(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwriting_link(
        source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> None:
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "link", overwriting_link)

    with pytest.raises(StoreLacksConditionalPut):
        store.probe("jobs/j/", timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EROFS, StoreAccessDenied),
        (errno.EACCES, StoreAccessDenied),
        (errno.EIO, TransientStoreError),
        (errno.ESTALE, TransientStoreError),
    ],
)
def test_failed_writes_have_errors_of_their_kind_and_leave_nothing(
    tmp_path: Path,
    store: DirectoryStore,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[Exception],
) -> None:
    def failing(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    upload = put_all(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        for call in (
            lambda: store.put_if_absent(SLOT, b"x", timeout_s=LIMIT_S),
            lambda: store.put_bytes(SLOT, b"x", timeout_s=LIMIT_S),
            lambda: upload.put_chunk(
                0, memoryview(CHUNKS[0]), sha256=DIGESTS[0], timeout_s=LIMIT_S
            ),
        ):
            with pytest.raises(kind):
                call()

    upload.abort(timeout_s=LIMIT_S)
    assert files_below(tmp_path) == set()


def test_deleting_the_last_shard_of_a_step_tidies_up(tmp_path: Path, store: DirectoryStore) -> None:
    store.put_bytes(SHARD, b"x", timeout_s=LIMIT_S)

    store.delete(SHARD, timeout_s=LIMIT_S)

    assert [path.name for path in (tmp_path / "jobs/j/data/ab").iterdir()] == []
    store.put_bytes(SHARD, b"again", timeout_s=LIMIT_S)
    assert store.get_bytes(SHARD, max_bytes=9, timeout_s=LIMIT_S) == b"again"


def test_directory_tidied_away_by_another_process_is_made_again(
    tmp_path: Path, store: DirectoryStore
) -> None:
    store.put_bytes(SHARD, b"x", timeout_s=LIMIT_S)
    other = DirectoryStore(tmp_path)
    other.delete(SHARD, timeout_s=LIMIT_S)
    other.close()

    put_all(store).complete(DIGESTS, timeout_s=LIMIT_S)

    assert store.head(SHARD, timeout_s=LIMIT_S).size_bytes == 10


def test_object_missing_from_an_absent_directory(store: DirectoryStore) -> None:
    with pytest.raises(ObjectMissing):
        store.head("jobs/nobody/log/1", timeout_s=LIMIT_S)


def test_upload_class_is_what_the_store_gives(store: DirectoryStore) -> None:
    assert isinstance(put_all(store), DirectoryUpload)
