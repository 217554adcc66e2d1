"""What only S3 can do wrong: credentials, buckets, conditions, checksums, and secrets in errors."""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import ClassVar, cast

import pytest

from supervisor.clock import SystemClock
from supervisor.errors import (
    BucketMissing,
    ChecksumMismatch,
    CredentialsExpired,
    ObjectMissing,
    PermanentStoreError,
    StoreAccessDenied,
    StoreClockSkew,
    StoreLacksConditionalPut,
    StoreThrottled,
    SupervisorError,
    TransientStoreError,
    UploadAbandoned,
)
from supervisor.store.s3 import S3Store, open_s3
from supervisor.store.s3_session import S3Settings
from supervisor.store.s3_upload import MultipartUpload, StoredPart, UploadPlan
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

LIMIT_S = 10.0
CHUNK_BYTES = 5 * 1024 * 1024
CONTENT = secrets.token_bytes(CHUNK_BYTES + 1000)
CHUNKS = [CONTENT[:CHUNK_BYTES], CONTENT[CHUNK_BYTES:]]
DIGESTS = [hashlib.sha256(chunk).digest() for chunk in CHUNKS]


def settings(endpoint_url: str, **changes: object) -> S3Settings:
    plain = S3Settings(
        bucket="only-s3",
        endpoint_url=endpoint_url,
        region=REGION,
        addressing_style="path",
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def endpoint_url(s3_server: S3Server) -> str:
    s3_server.make_bucket("only-s3")
    return s3_server.endpoint_url


def upload(store: S3Store, key: str) -> None:
    upload = store.open_upload(
        key,
        size_bytes=len(CONTENT),
        chunk_bytes=CHUNK_BYTES,
        resume_token=None,
        timeout_s=LIMIT_S,
    )
    for index, chunk in enumerate(CHUNKS):
        upload.put_chunk(index, memoryview(chunk), sha256=DIGESTS[index], timeout_s=LIMIT_S)
    upload.complete(DIGESTS, timeout_s=LIMIT_S)


EVERY_CALL = {
    "put_if_absent": lambda s: s.put_if_absent("jobs/j/x", b"x", timeout_s=LIMIT_S),
    "put_bytes": lambda s: s.put_bytes("jobs/j/x", b"x", timeout_s=LIMIT_S),
    "get_bytes": lambda s: s.get_bytes("jobs/j/x", max_bytes=9, timeout_s=LIMIT_S),
    "read_into": lambda s: s.read_into(
        "jobs/j/x", offset=0, target=memoryview(bytearray(1)), timeout_s=LIMIT_S
    ),
    "list_keys": lambda s: list(s.list_keys("jobs/j/", timeout_s=LIMIT_S)),
    "delete": lambda s: s.delete("jobs/j/x", timeout_s=LIMIT_S),
    "open_upload": lambda s: upload(s, "jobs/j/x"),
    "probe": lambda s: s.probe("jobs/j/", timeout_s=LIMIT_S),
}


@pytest.mark.s3
@pytest.mark.parametrize("call", EVERY_CALL)
@pytest.mark.parametrize(
    "wrong", [{"secret_access_key": "not-the-secret"}, {"access_key_id": "nobody"}]
)
def test_wrong_credentials_are_named(
    endpoint_url: str, call: str, wrong: dict[str, object]
) -> None:
    store = open_s3(settings(endpoint_url, **wrong), clock=SystemClock())

    with pytest.raises(StoreAccessDenied) as caught:
        EVERY_CALL[call](store)

    assert "jobs/j/" in caught.value.message
    assert "access key" in caught.value.hint
    assert_no_secret(caught.value)
    store.close()


@pytest.mark.s3
@pytest.mark.parametrize("call", EVERY_CALL)
def test_missing_bucket_is_named(endpoint_url: str, call: str) -> None:
    store = open_s3(settings(endpoint_url, bucket="no-such-bucket"), clock=SystemClock())

    with pytest.raises(BucketMissing, match="no-such-bucket") as caught:
        EVERY_CALL[call](store)

    assert caught.value.hint
    store.close()


@pytest.mark.s3
def test_without_checksum_headers_size_decides(endpoint_url: str, s3_server: S3Server) -> None:
    store = open_s3(settings(endpoint_url, checksums="off"), clock=SystemClock())

    upload(store, "jobs/j/plain")
    store.put_if_absent("jobs/j/log/plain", b"record", timeout_s=LIMIT_S)

    client = s3_server.client()
    for key in ("jobs/j/plain", "jobs/j/log/plain"):
        head = client.head_object(Bucket="only-s3", Key=key, ChecksumMode="ENABLED")
        assert "ChecksumSHA256" not in head
    client.close()
    store.close()


@pytest.mark.s3
def test_server_keeps_the_shards_own_digest(endpoint_url: str, s3_server: S3Server) -> None:
    """The composite checksum of S3 is the digest in the manifest, so both verify each other."""
    store = open_s3(settings(endpoint_url), clock=SystemClock())

    upload(store, "jobs/j/summed")

    client = s3_server.client()
    head = client.head_object(Bucket="only-s3", Key="jobs/j/summed", ChecksumMode="ENABLED")
    digest = hashlib.sha256(b"".join(DIGESTS)).digest()
    assert head["ChecksumSHA256"] == f"{base64.b64encode(digest).decode()}-2"
    client.close()
    store.close()


@pytest.mark.s3
@pytest.mark.parametrize("size_bytes", [1000, len(CONTENT)])
def test_object_that_is_not_the_one_sent_is_never_called_complete(
    endpoint_url: str, s3_server: S3Server, size_bytes: int
) -> None:
    store = open_s3(settings(endpoint_url), clock=SystemClock())
    content = CONTENT[:size_bytes]
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, size_bytes, CHUNK_BYTES)]
    digests = [hashlib.sha256(chunk).digest() for chunk in chunks]
    upload = store.open_upload(
        "jobs/j/swapped",
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        resume_token=None,
        timeout_s=LIMIT_S,
    )
    for index, chunk in enumerate(chunks):
        upload.put_chunk(index, memoryview(chunk), sha256=digests[index], timeout_s=LIMIT_S)
    upload.complete(digests, timeout_s=LIMIT_S)

    client = s3_server.client()
    for other in (bytes(size_bytes), content[:-1]):
        client.put_object(
            Bucket="only-s3", Key="jobs/j/swapped", Body=other, ChecksumAlgorithm="SHA256"
        )
        with pytest.raises(ChecksumMismatch):
            upload.complete(digests, timeout_s=LIMIT_S)
    client.close()
    store.close()


@pytest.mark.s3
def test_debug_logs_show_no_signature(endpoint_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = open_s3(settings(endpoint_url), clock=SystemClock())

    upload(store, "jobs/j/logged")
    store.get_bytes("jobs/j/logged", max_bytes=len(CONTENT), timeout_s=LIMIT_S)
    list(store.list_keys("jobs/j/", timeout_s=LIMIT_S))

    assert "X-Amz-Signature" not in caplog.text
    assert "Signature=" not in caplog.text
    store.close()


class ScriptedS3(BaseHTTPRequestHandler):
    """Answers every request as the test says; keeps objects and ignores conditions otherwise."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    answer: ClassVar[tuple[int, str] | None] = None
    seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        self.seen.append((self.command, path, dict(self.headers)))
        if self.answer:
            status, code = self.answer
            self.reply(status, f"<Error><Code>{code}</Code></Error>".encode() if code else b"")
        elif self.command == "PUT":
            self.objects[path] = body
            self.reply(200, b"")
        elif self.command == "DELETE":
            self.objects.pop(path, None)
            self.reply(204, b"")
        elif path in self.objects:
            self.reply(200, self.objects[path])
        else:
            self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@pytest.fixture
def scripted() -> Iterator[tuple[type[ScriptedS3], S3Store]]:
    class Script(ScriptedS3):
        objects: ClassVar[dict[str, bytes]] = {}
        answer: ClassVar[tuple[int, str] | None] = None
        seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    with _Server(("127.0.0.1", 0), Script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="scripted-s3")
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        store = open_s3(settings(url, prefix="team/", checksums="sha256"), clock=SystemClock())
        yield Script, store
        store.close()
        server.shutdown()
        thread.join()


def test_store_that_ignores_the_condition_is_refused_at_start(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    """Such a store lets two launches commit over each other in silence."""
    script, store = scripted

    with pytest.raises(StoreLacksConditionalPut) as caught:
        store.probe("jobs/j/", timeout_s=LIMIT_S)

    assert "file://" in caught.value.hint
    assert script.objects == {}
    puts = [headers for command, _, headers in script.seen if command == "PUT"]
    assert [headers["If-None-Match"] for headers in puts] == ["*", "*"]


def test_store_that_does_not_know_the_condition_is_refused(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    script, store = scripted
    script.answer = (501, "NotImplemented")

    with pytest.raises(StoreLacksConditionalPut):
        store.put_if_absent("jobs/j/log/1", b"x", timeout_s=LIMIT_S)


def test_missing_list_permission_is_explained_at_start(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    """S3 answers 403 for a missing key then; a job must not look new, nor broken, for it."""
    script, store = scripted
    script.answer = (403, "AccessDenied")

    for call in (
        lambda: store.probe("jobs/j/", timeout_s=LIMIT_S),
        lambda: store.get_bytes("jobs/j/log/1", max_bytes=9, timeout_s=LIMIT_S),
        lambda: store.head("jobs/j/log/1", timeout_s=LIMIT_S),
    ):
        with pytest.raises(StoreAccessDenied) as caught:
            call()

        assert "s3:ListBucket" in caught.value.hint
        assert "jobs/j/" in caught.value.message


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", StoreThrottled),
        (429, "TooManyRequests", StoreThrottled),
        (503, "", StoreThrottled),
        (500, "InternalError", TransientStoreError),
        (502, "", TransientStoreError),
        (409, "ConditionalRequestConflict", TransientStoreError),
        (400, "ExpiredToken", CredentialsExpired),
        (403, "ExpiredToken", CredentialsExpired),
        (403, "RequestTimeTooSkewed", StoreClockSkew),
        (403, "SignatureDoesNotMatch", StoreAccessDenied),
        (403, "AccessDenied", StoreAccessDenied),
        (403, "", StoreAccessDenied),
        (404, "NoSuchBucket", BucketMissing),
        (400, "BadDigest", ChecksumMismatch),
        (301, "PermanentRedirect", PermanentStoreError),
        (400, "AuthorizationHeaderMalformed", PermanentStoreError),
        (400, "InvalidRequest", PermanentStoreError),
    ],
)
def test_every_answer_becomes_one_of_our_errors(
    scripted: tuple[type[ScriptedS3], S3Store],
    status: int,
    code: str,
    kind: type[SupervisorError],
) -> None:
    script, store = scripted
    script.answer = (status, code)

    for call in ("put_if_absent", "put_bytes", "get_bytes", "read_into", "list_keys"):
        with pytest.raises(SupervisorError) as caught:
            EVERY_CALL[call](store)

        assert type(caught.value) is kind, call
        assert caught.value.is_retryable == issubclass(kind, TransientStoreError)
        assert "jobs/j/" in caught.value.message or kind is BucketMissing
        assert_no_secret(caught.value)


def test_refused_condition_is_an_answer_and_only_there(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    script, store = scripted
    script.answer = (412, "PreconditionFailed")

    assert store.put_if_absent("jobs/j/log/1", b"x", timeout_s=LIMIT_S) is False
    with pytest.raises(PermanentStoreError):
        store.put_bytes("jobs/j/x", b"x", timeout_s=LIMIT_S)


def test_one_attempt_only(scripted: tuple[type[ScriptedS3], S3Store]) -> None:
    """A hidden retry would turn one's own first success into 'exists'."""
    script, store = scripted
    script.answer = (500, "InternalError")

    with pytest.raises(TransientStoreError):
        store.put_if_absent("jobs/j/log/1", b"x", timeout_s=LIMIT_S)

    assert len(script.seen) == 1


def test_store_that_takes_checksums_but_keeps_none_is_not_believed(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    _, store = scripted
    content = b"small"
    digest = hashlib.sha256(content).digest()
    upload = store.open_upload(
        "jobs/j/x", size_bytes=5, chunk_bytes=CHUNK_BYTES, resume_token=None, timeout_s=LIMIT_S
    )
    upload.put_chunk(0, memoryview(content), sha256=digest, timeout_s=LIMIT_S)

    with pytest.raises(PermanentStoreError) as caught:
        upload.complete([digest], timeout_s=LIMIT_S)

    assert "read-back" in caught.value.hint


def test_store_that_ignores_ranges_is_not_believed(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    _, store = scripted
    store.put_bytes("jobs/j/x", b"0123456789", timeout_s=LIMIT_S)

    with pytest.raises(PermanentStoreError, match="range"):
        store.read_into("jobs/j/x", offset=4, target=memoryview(bytearray(3)), timeout_s=LIMIT_S)


def test_prefix_of_the_store_is_unseen_by_callers(
    scripted: tuple[type[ScriptedS3], S3Store],
) -> None:
    script, store = scripted

    store.put_bytes("jobs/j/x", b"x", timeout_s=LIMIT_S)
    with pytest.raises(ObjectMissing) as caught:
        store.head("jobs/j/absent", timeout_s=LIMIT_S)

    assert list(script.objects) == ["/only-s3/team/jobs/j/x"]
    assert caught.value.key == "jobs/j/absent"


def test_nobody_answers(scripted: tuple[type[ScriptedS3], S3Store]) -> None:
    store = open_s3(settings("http://127.0.0.1:9"), clock=SystemClock())

    for call in ("put_if_absent", "get_bytes", "list_keys"):
        with pytest.raises(TransientStoreError) as caught:
            EVERY_CALL[call](store)

        assert_no_secret(caught.value)
        assert caught.value.__cause__ is None  # the library's own error may quote the URL
        assert caught.value.__suppress_context__
    store.close()


class _ForgetfulS3:
    """Has forgotten the upload id, as AWS does some time after a complete whose reply was lost."""

    sends_checksums = True
    reads_back = False

    def __init__(self, checksum: str | None) -> None:
        self.checksum = checksum

    def complete_parts(self, plan: UploadPlan, **call: object) -> None:
        raise UploadAbandoned("NoSuchUpload")

    def head_checksum(self, key: str, *, timeout_s: float) -> tuple[int, str | None]:
        if self.checksum is None:
            raise ObjectMissing(key)
        return len(CONTENT), self.checksum


def test_complete_whose_reply_was_lost_is_settled_by_the_object() -> None:
    digest = hashlib.sha256(b"".join(DIGESTS)).digest()
    plan = UploadPlan(key="k", size_bytes=len(CONTENT), chunk_bytes=CHUNK_BYTES)
    parts = {
        number: StoredPart(etag="e", sha256=DIGESTS[number - 1].hex(), size_bytes=len(chunk))
        for number, chunk in enumerate(CHUNKS, start=1)
    }

    def complete(checksum: str | None) -> None:
        store = cast(S3Store, _ForgetfulS3(checksum))
        upload = MultipartUpload(store, plan, upload_id="u", listed=parts, noted={})
        upload.complete(DIGESTS, timeout_s=LIMIT_S)

    complete(f"{base64.b64encode(digest).decode()}-2")
    with pytest.raises(ChecksumMismatch):
        complete(f"{base64.b64encode(bytes(32)).decode()}-2")
    with pytest.raises(UploadAbandoned):
        complete(None)


def test_settings_do_not_print_secrets() -> None:
    assert SECRET_ACCESS_KEY not in repr(settings("http://127.0.0.1:9"))


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    nobody = settings("http://127.0.0.1:9", access_key_id=None, secret_access_key=None)
    store = open_s3(nobody, clock=SystemClock())

    with pytest.raises(StoreAccessDenied) as caught:
        store.get_bytes("jobs/j/x", max_bytes=1, timeout_s=LIMIT_S)

    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    store.close()


def assert_no_secret(error: BaseException) -> None:
    """Neither the error nor anything it is chained to shows what was signed."""
    shown: BaseException | None = error
    while shown is not None:
        text = f"{shown} {shown!r}"
        assert "X-Amz-" not in text
        assert SECRET_ACCESS_KEY not in text
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
