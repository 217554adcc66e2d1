"""One suite for every store: what `ObjectStore` promises, in a directory and on real S3."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from supervisor.clock import SystemClock
from supervisor.errors import (
    ChecksumMismatch,
    ObjectMissing,
    PermanentStoreError,
    SupervisorError,
    UploadAbandoned,
)
from supervisor.store.base import ObjectStore, ShardUpload
from supervisor.store.directory import DirectoryStore
from supervisor.store.faults import FaultyStore
from supervisor.store.retry import Retrier, RetryingStore
from supervisor.store.s3 import open_s3
from supervisor.store.s3_session import S3Settings
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

LIMIT_S = 20.0
CHUNK_BYTES = 5 * 1024 * 1024  # the smallest S3 allows
CONTENT = secrets.token_bytes(2 * CHUNK_BYTES + 12_345)
CHUNKS = [CONTENT[start : start + CHUNK_BYTES] for start in range(0, len(CONTENT), CHUNK_BYTES)]
DIGESTS = [hashlib.sha256(chunk).digest() for chunk in CHUNKS]


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> str:
    name = f"conformance-{secrets.token_hex(4)}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture(
    params=[
        "directory",
        "wrapped",
        pytest.param("s3", marks=pytest.mark.s3),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        opened = open_s3(
            S3Settings(
                bucket=request.getfixturevalue("bucket"),
                prefix=f"{secrets.token_hex(4)}/",
                endpoint_url=server.endpoint_url,
                region=REGION,
                addressing_style="path",
                access_key_id=ACCESS_KEY_ID,
                secret_access_key=SECRET_ACCESS_KEY,
            ),
            clock=SystemClock(),
        )
        yield opened
        opened.close()
        return
    directory = DirectoryStore(tmp_path)
    if request.param == "wrapped":  # the wrappers keep every promise of what they wrap
        clock = SystemClock()
        yield RetryingStore(FaultyStore(directory, clock=clock), Retrier(clock))
    else:
        yield directory
    directory.close()


def new_key() -> str:
    return f"jobs/j/data/{secrets.token_hex(8)}"


def open_upload(
    store: ObjectStore, key: str, *, token: str | None = None, content: bytes = CONTENT
) -> ShardUpload:
    return store.open_upload(
        key,
        size_bytes=len(content),
        chunk_bytes=CHUNK_BYTES,
        resume_token=token,
        timeout_s=LIMIT_S,
    )


def put_chunk(upload: ShardUpload, index: int) -> None:
    upload.put_chunk(index, memoryview(CHUNKS[index]), sha256=DIGESTS[index], timeout_s=LIMIT_S)


def read(store: ObjectStore, key: str, *, offset: int, size: int) -> bytes:
    target = bytearray(size)
    store.read_into(key, offset=offset, target=memoryview(target), timeout_s=LIMIT_S)
    return bytes(target)


def test_created_object_reads_back_and_is_described(store: ObjectStore) -> None:
    key = new_key()
    before = store.server_time(timeout_s=LIMIT_S)

    assert store.put_if_absent(key, b"content", timeout_s=LIMIT_S) is True

    assert store.get_bytes(key, max_bytes=7, timeout_s=LIMIT_S) == b"content"
    info = store.head(key, timeout_s=LIMIT_S)
    assert (info.key, info.size_bytes) == (key, 7)

    assert before - 2 <= info.modified_at <= store.server_time(timeout_s=LIMIT_S) + 2


def test_second_create_is_refused_and_changes_nothing(store: ObjectStore) -> None:
    key = new_key()
    store.put_if_absent(key, b"first", timeout_s=LIMIT_S)

    assert store.put_if_absent(key, b"second", timeout_s=LIMIT_S) is False
    assert store.put_if_absent(key, b"first", timeout_s=LIMIT_S) is False

    assert store.get_bytes(key, max_bytes=100, timeout_s=LIMIT_S) == b"first"


def test_create_race_has_one_winner_whose_content_stays(store: ObjectStore) -> None:
    for _ in range(5):
        key = new_key()
        start = threading.Barrier(8)

        def create(number: int, key: str = key, start: threading.Barrier = start) -> bool:
            start.wait()
            return store.put_if_absent(key, b"%d" % number * 1000, timeout_s=LIMIT_S)

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(create, range(8)))

        assert outcomes.count(True) == 1
        winner = outcomes.index(True)
        content = store.get_bytes(key, max_bytes=10_000, timeout_s=LIMIT_S)
        assert content == b"%d" % winner * 1000


def test_put_bytes_replaces(store: ObjectStore) -> None:
    for key in (new_key(), "jobs/j/hint"):
        store.put_bytes(key, b"old, longer", timeout_s=LIMIT_S)
        store.put_bytes(key, b"new", timeout_s=LIMIT_S)

        assert store.get_bytes(key, max_bytes=100, timeout_s=LIMIT_S) == b"new"


def test_empty_object(store: ObjectStore) -> None:
    key = new_key()
    store.put_bytes(key, b"", timeout_s=LIMIT_S)

    assert store.get_bytes(key, max_bytes=0, timeout_s=LIMIT_S) == b""
    assert store.head(key, timeout_s=LIMIT_S).size_bytes == 0


def test_too_large_an_object_is_not_read(store: ObjectStore) -> None:
    key = new_key()
    store.put_bytes(key, bytes(200_000), timeout_s=LIMIT_S)

    for max_bytes in (10, 199_999):
        with pytest.raises(PermanentStoreError, match="more than"):
            store.get_bytes(key, max_bytes=max_bytes, timeout_s=LIMIT_S)


def test_missing_object_has_its_own_error_with_the_callers_key(store: ObjectStore) -> None:
    key = new_key()
    for call in (
        lambda: store.get_bytes(key, max_bytes=1, timeout_s=LIMIT_S),
        lambda: store.head(key, timeout_s=LIMIT_S),
        lambda: read(store, key, offset=0, size=1),
    ):
        with pytest.raises(ObjectMissing) as caught:
            call()

        assert caught.value.key == key
        assert caught.value.error_id == "object_missing"
        assert not caught.value.is_retryable


def test_delete_removes_and_is_harmless_twice(store: ObjectStore) -> None:
    key, other = new_key(), new_key()
    store.put_bytes(key, b"x", timeout_s=LIMIT_S)
    store.put_bytes(other, b"y", timeout_s=LIMIT_S)

    store.delete(key, timeout_s=LIMIT_S)
    store.delete(key, timeout_s=LIMIT_S)

    with pytest.raises(ObjectMissing):
        store.head(key, timeout_s=LIMIT_S)
    assert store.get_bytes(other, max_bytes=1, timeout_s=LIMIT_S) == b"y"
    assert store.put_if_absent(key, b"again", timeout_s=LIMIT_S) is True


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (0, 1000), (7, 993), (999, 1), (3, 4)],
)
def test_ranges_are_exact(store: ObjectStore, offset: int, size: int) -> None:
    key = new_key()
    content = os.urandom(1000)
    store.put_bytes(key, content, timeout_s=LIMIT_S)

    assert read(store, key, offset=offset, size=size) == content[offset : offset + size]


@pytest.mark.parametrize(("offset", "size"), [(0, 1001), (999, 2), (1000, 1), (5000, 1)])
def test_ranges_past_the_end_are_refused(store: ObjectStore, offset: int, size: int) -> None:
    key = new_key()
    store.put_bytes(key, bytes(1000), timeout_s=LIMIT_S)

    with pytest.raises(PermanentStoreError):
        read(store, key, offset=offset, size=size)
    # The connection of a refused read is still in order.
    assert read(store, key, offset=0, size=1000) == bytes(1000)


def test_listing_is_complete_and_keeps_to_its_prefix(store: ObjectStore) -> None:
    keys = sorted(f"jobs/j/part/{n % 7}/{n % 3}-{n:04d}" for n in range(1100))
    outside = ["jobs/j/part0", "jobs/jj/part/0/x", "jobs/j/par"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: store.put_bytes(k, b"abc", timeout_s=LIMIT_S), keys + outside))

    found = list(store.list_keys("jobs/j/part/", timeout_s=LIMIT_S))

    assert sorted(info.key for info in found) == keys
    assert {info.size_bytes for info in found} == {3}
    some = [info.key for info in store.list_keys("jobs/j/part/3/1", timeout_s=LIMIT_S)]
    assert sorted(some) == [key for key in keys if key.startswith("jobs/j/part/3/1")]
    assert list(store.list_keys("jobs/nobody/", timeout_s=LIMIT_S)) == []
    later = store.list_keys("jobs/j/part/", timeout_s=LIMIT_S, start_after="jobs/j/part/4/~")
    assert sorted(info.key for info in later) == [key for key in keys if key > "jobs/j/part/4/~"]


def test_upload_becomes_visible_only_when_complete(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda index: put_chunk(upload, index), (2, 0, 1)))
    with pytest.raises(ObjectMissing):
        store.head(key, timeout_s=LIMIT_S)

    upload.complete(DIGESTS, timeout_s=LIMIT_S)

    assert store.head(key, timeout_s=LIMIT_S).size_bytes == len(CONTENT)
    assert read(store, key, offset=0, size=len(CONTENT)) == CONTENT
    edge = CHUNK_BYTES - 10
    assert read(store, key, offset=edge, size=20) == CONTENT[edge : edge + 20]
    assert [info.key for info in store.list_keys(key, timeout_s=LIMIT_S)] == [key]


def test_complete_twice_is_harmless(store: ObjectStore) -> None:
    """The reply to the first may have been lost."""
    upload = open_upload(store, new_key())
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)

    upload.complete(DIGESTS, timeout_s=LIMIT_S)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)


def test_upload_of_one_chunk(store: ObjectStore) -> None:
    key, content = new_key(), b"small"
    digest = hashlib.sha256(content).digest()
    upload = open_upload(store, key, content=content)

    upload.put_chunk(0, memoryview(content), sha256=digest, timeout_s=LIMIT_S)
    assert upload.stored_chunks(timeout_s=LIMIT_S) == {0: digest.hex()}
    upload.complete([digest], timeout_s=LIMIT_S)

    assert store.get_bytes(key, max_bytes=100, timeout_s=LIMIT_S) == content


def test_upload_resumes_after_a_restart_with_the_chunks_that_arrived(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    put_chunk(upload, 2)
    put_chunk(upload, 0)
    token = upload.resume_token
    del upload

    resumed = open_upload(store, key, token=token)

    assert resumed.stored_chunks(timeout_s=LIMIT_S) == {0: DIGESTS[0].hex(), 2: DIGESTS[2].hex()}
    put_chunk(resumed, 1)
    resumed.complete(DIGESTS, timeout_s=LIMIT_S)
    assert read(store, key, offset=0, size=len(CONTENT)) == CONTENT


def test_old_token_does_not_vouch_for_a_chunk_that_was_replaced(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    put_chunk(upload, 0)
    old_token = upload.resume_token
    other = bytes(CHUNK_BYTES)
    digest = hashlib.sha256(other)
    upload.put_chunk(0, memoryview(other), sha256=digest.digest(), timeout_s=LIMIT_S)

    resumed = open_upload(store, key, token=old_token)

    assert resumed.stored_chunks(timeout_s=LIMIT_S).get(0) in (None, digest.hexdigest())


def test_upload_completed_just_before_a_restart_completes_again(store: ObjectStore) -> None:
    """Killed between `complete` and writing that down: nothing is sent a second time."""
    key = new_key()
    upload = open_upload(store, key)
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)
    token = upload.resume_token
    upload.complete(DIGESTS, timeout_s=LIMIT_S)

    resumed = open_upload(store, key, token=token)
    for index in set(range(len(CHUNKS))) - set(resumed.stored_chunks(timeout_s=LIMIT_S)):
        put_chunk(resumed, index)
    resumed.complete(DIGESTS, timeout_s=LIMIT_S)

    assert read(store, key, offset=0, size=len(CONTENT)) == CONTENT


def test_f8_an_upload_whose_note_is_as_old_as_its_beginning_is_known_once_complete(
    store: ObjectStore,
) -> None:
    """The supervisor notes a token before the first chunk, is killed after the last, and then sends
    the same again or finds it there: either way it is this object, whole."""
    key = new_key()
    upload = open_upload(store, key)
    token = upload.resume_token
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)

    resumed = open_upload(store, key, token=token)
    for index in range(len(CHUNKS)):
        put_chunk(resumed, index)
    resumed.complete(DIGESTS, timeout_s=LIMIT_S)

    assert read(store, key, offset=0, size=len(CONTENT)) == CONTENT


@pytest.mark.parametrize("token", ["", "nonsense", "0" * 32, "../../etc/passwd", '{"id":"x"}'])
def test_unknown_token_begins_anew(store: ObjectStore, token: str) -> None:
    upload = open_upload(store, new_key(), token=token)

    assert upload.stored_chunks(timeout_s=LIMIT_S) == {}
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)


def test_chunk_that_differs_from_its_digest_is_refused(store: ObjectStore) -> None:
    for content in (CONTENT, b"small"):
        key = new_key()
        upload = open_upload(store, key, content=content)
        first = content[:CHUNK_BYTES]
        changed = bytes([first[0] ^ 1]) + first[1:]

        with pytest.raises(ChecksumMismatch):
            upload.put_chunk(
                0,
                memoryview(changed),
                sha256=hashlib.sha256(first).digest(),
                timeout_s=LIMIT_S,
            )

        assert upload.stored_chunks(timeout_s=LIMIT_S) == {}
        with pytest.raises(ObjectMissing):
            store.head(key, timeout_s=LIMIT_S)


def test_completing_with_other_digests_is_refused(store: ObjectStore) -> None:
    upload = open_upload(store, new_key())
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)

    with pytest.raises(ChecksumMismatch):
        upload.complete([DIGESTS[0], DIGESTS[0], DIGESTS[2]], timeout_s=LIMIT_S)


def test_completing_with_a_chunk_missing_is_refused(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    put_chunk(upload, 0)

    with pytest.raises(ValueError, match="chunks are stored"):
        upload.complete(DIGESTS, timeout_s=LIMIT_S)

    with pytest.raises(ObjectMissing):
        store.head(key, timeout_s=LIMIT_S)


@pytest.mark.parametrize(("index", "size"), [(3, 10), (-1, 10), (0, 10), (2, CHUNK_BYTES)])
def test_chunk_of_the_wrong_place_or_size_is_refused(
    store: ObjectStore, index: int, size: int
) -> None:
    data = bytes(size)
    upload = open_upload(store, new_key())

    with pytest.raises(ValueError, match="chunk"):
        upload.put_chunk(
            index, memoryview(data), sha256=hashlib.sha256(data).digest(), timeout_s=LIMIT_S
        )


def test_aborted_upload_cannot_go_on(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    put_chunk(upload, 0)

    upload.abort(timeout_s=LIMIT_S)
    upload.abort(timeout_s=LIMIT_S)

    with pytest.raises(UploadAbandoned):
        put_chunk(upload, 1)
    with pytest.raises(ObjectMissing):
        store.head(key, timeout_s=LIMIT_S)


def test_abort_after_complete_leaves_the_object(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    for index in range(len(CHUNKS)):
        put_chunk(upload, index)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)

    upload.abort(timeout_s=LIMIT_S)

    assert store.head(key, timeout_s=LIMIT_S).size_bytes == len(CONTENT)


def test_chunk_sent_again_replaces_the_first(store: ObjectStore) -> None:
    key = new_key()
    upload = open_upload(store, key)
    other = bytes(CHUNK_BYTES)
    upload.put_chunk(0, memoryview(other), sha256=hashlib.sha256(other).digest(), timeout_s=LIMIT_S)

    for index in range(len(CHUNKS)):
        put_chunk(upload, index)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)

    assert read(store, key, offset=0, size=len(CONTENT)) == CONTENT


def test_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    store.probe("jobs/probed/", timeout_s=LIMIT_S)

    assert list(store.list_keys("jobs/probed/", timeout_s=LIMIT_S)) == []


def test_settling_an_empty_or_read_log_is_harmless(store: ObjectStore) -> None:
    store.settle_log(timeout_s=LIMIT_S)
    store.put_if_absent("jobs/j/log/1", b"x", timeout_s=LIMIT_S)
    store.get_bytes("jobs/j/log/1", max_bytes=1, timeout_s=LIMIT_S)

    store.settle_log(timeout_s=LIMIT_S)


def test_url_names_the_place_without_secrets(store: ObjectStore) -> None:
    assert store.url.startswith(("file:///", "s3://conformance-"))
    assert SECRET_ACCESS_KEY not in store.url


def test_every_error_has_an_id_of_its_own() -> None:
    def leaves(kind: type[SupervisorError]) -> Iterator[type[SupervisorError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from leaves(child)

    kinds = [kind for kind in leaves(SupervisorError) if kind.__module__ == "supervisor.errors"]

    assert len({kind.error_id for kind in kinds}) == len(kinds)
