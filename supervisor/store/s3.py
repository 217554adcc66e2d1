"""A store in an S3 bucket, or in anything that speaks S3.

Objects travel over `s3_http`, from and into our own memory, each in one attempt with an exact
limit; the small calls whose replies are XML (listing, begin and end of a multipart upload) go
through boto3 in `s3_session`. Nothing in here retries.

Source: measured on SeaweedFS, a signed PUT of a memoryview took 1.4 CPU-s per GiB with SHA-256,
boto3's `upload_part` 3.6.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, Final

from supervisor.clock import Clock
from supervisor.errors import (
    BucketMissing,
    ChecksumMismatch,
    ObjectMissing,
    PermanentStoreError,
    StoreAccessDenied,
    StoreClockSkew,
    StoreError,
    StoreFull,
    StoreLacksConditionalPut,
    UploadAbandoned,
)
from supervisor.store.base import ObjectInfo, OpenUpload, ShardUpload
from supervisor.store.s3_http import Reply, SignedHttp
from supervisor.store.s3_session import Checksums, S3Session, S3Settings
from supervisor.store.s3_upload import (
    EndedUpload,
    MultipartUpload,
    SinglePut,
    StoredPart,
    UploadPlan,
    parse_token,
)

_SHA256_BASE64: Final = re.compile(r"^[A-Za-z0-9+/]{43}=\Z")


def open_s3(settings: S3Settings, *, clock: Clock) -> S3Store:
    """Make a store. To be called before threads start.

    Raises:
        ConfigError: boto3 is missing, or does not take the settings.
    """
    return S3Store(settings, session=S3Session(settings, clock), clock=clock)


class S3Store:
    """Implements `ObjectStore`; made by `open_s3`."""

    def __init__(self, settings: S3Settings, *, session: S3Session, clock: Clock) -> None:
        self.url = f"s3://{settings.bucket}/{settings.prefix}"
        self._settings = settings
        self._session = session
        self._checksums: Checksums = settings.checksums
        self._http = SignedHttp(
            sign=session.sign,
            renew=session.renew,
            clock=clock,
            bucket=settings.bucket,
            ca_bundle=settings.ca_bundle or _default_ca_bundle(),
            proxy_url=_proxy_of(session.endpoint_url),
        )

    @property
    def sends_checksums(self) -> bool:
        """Whether the store is given our digests; `auto` means yes until the probe found out."""
        return self._checksums in ("auto", "sha256")

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()
        self._session.close()

    def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
        params = self._put_params(key, _sha256(data)) | {"IfNoneMatch": "*"}
        reply = self._http.send("put_object", params, body=data, timeout_s=timeout_s)
        if reply.status == 412:
            return False
        if reply.status == 501 or (reply.status == 400 and reply.code == "NotImplemented"):
            raise _lacks_condition(self.url, "it does not know If-None-Match")
        self._http.check("put_object", params, reply)
        return True

    def put_bytes(self, key: str, data: bytes, *, timeout_s: float) -> None:
        self.put_object(key, memoryview(data), sha256=_sha256(data), timeout_s=timeout_s)

    def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
        params = self._params(key)
        reply = self._http.send(
            "get_object", params, timeout_s=timeout_s, max_bytes=max(max_bytes, 64 * 1024)
        )
        body = self._check_object(key, "get_object", params, reply).body
        if len(body) > max_bytes:
            raise PermanentStoreError(f"{key!r} has more than {max_bytes} bytes")
        return body

    def read_into(self, key: str, *, offset: int, target: memoryview, timeout_s: float) -> None:
        if not target.nbytes:
            return
        params = self._params(key) | {"Range": f"bytes={offset}-{offset + target.nbytes - 1}"}
        with self._own_keys(key):
            self._http.fetch_into(params, target=target, timeout_s=timeout_s)

    def head(self, key: str, *, timeout_s: float) -> ObjectInfo:
        reply = self._head(key, timeout_s)
        return ObjectInfo(
            key=key,
            size_bytes=int(reply.headers.get("Content-Length", "-1")),
            modified_at=_http_date(reply.headers.get("Last-Modified", "")),
        )

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        params = self._bucket_params() | {"Prefix": self._settings.prefix + prefix}
        # Source: S3 API reference, ListObjectsV2: directory buckets do not take StartAfter.
        if start_after and not self._settings.bucket.endswith("--x-s3"):
            params["StartAfter"] = self._settings.prefix + start_after
        while True:
            page = self._session.call("list_objects_v2", prefix, params, timeout_s)
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    key=item["Key"][len(self._settings.prefix) :],
                    size_bytes=item["Size"],
                    modified_at=item["LastModified"].timestamp(),
                )
            if not page.get("IsTruncated"):
                return
            params["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str, *, timeout_s: float) -> None:
        params = self._params(key)
        reply = self._http.send("delete_object", params, timeout_s=timeout_s)
        if reply.status != 404:
            self._http.check("delete_object", params, reply)
        elif reply.code == "NoSuchBucket":
            raise self._http.error("delete_object", params, reply)

    def open_upload(
        self,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
        timeout_s: float,
    ) -> ShardUpload:
        plan = UploadPlan(key=key, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
        if plan.num_chunks == 1:
            return SinglePut(self, plan)
        if resume_token and (resumed := self._resume(plan, resume_token, timeout_s)):
            return resumed
        params = self._params(key) | self._encryption()
        if self.sends_checksums:
            params["ChecksumAlgorithm"] = "SHA256"
        upload_id = self._session.call("create_multipart_upload", key, params, timeout_s)[
            "UploadId"
        ]
        return MultipartUpload(self, plan, upload_id=upload_id, listed={}, noted={})

    def settle_log(self, *, timeout_s: float) -> None:
        """An object that can be read is durable."""

    def open_uploads(self, prefix: str, *, timeout_s: float) -> Iterator[OpenUpload]:
        params = self._bucket_params() | {"Prefix": self._settings.prefix + prefix}
        while True:
            page = self._session.call("list_multipart_uploads", prefix, params, timeout_s)
            for item in page.get("Uploads", ()):
                key = item["Key"][len(self._settings.prefix) :]
                yield OpenUpload(key=key, token=item["UploadId"])
            if not page.get("IsTruncated"):
                return
            params["KeyMarker"] = page["NextKeyMarker"]
            params["UploadIdMarker"] = page["NextUploadIdMarker"]

    def drop_upload(self, upload: OpenUpload, *, timeout_s: float) -> None:
        self.abort_parts(upload.key, upload_id=upload.token, timeout_s=timeout_s)

    def probe(self, prefix: str, *, timeout_s: float) -> Sequence[str]:
        key = f"{prefix}probe-{secrets.token_hex(16)}"
        self._probe_missing(key, timeout_s)
        if self._checksums == "auto":
            self._checksums = self._probe_checksums(key, timeout_s)
        self.put_if_absent(key, b"probe", timeout_s=timeout_s)
        try:
            if self.put_if_absent(key, b"probe", timeout_s=timeout_s):
                raise _lacks_condition(self.url, "a second create of one key was not refused")
        finally:
            self._tidy(key, timeout_s)
        if self._checksums == "read-back" and self._settings.checksums == "auto":
            return ("it keeps no SHA-256 of objects: each shard is read back before it counts",)
        return ()

    def _probe_checksums(self, key: str, timeout_s: float) -> Checksums:
        """Does the store take a SHA-256, as a header and on a multipart upload, and keep it?"""
        key += "-checksum"
        digest = _sha256(b"probe")
        try:
            self.put_object(key, memoryview(b"probe"), sha256=digest, timeout_s=timeout_s)
            _, kept = self.head_checksum(key, timeout_s=timeout_s)
            kept_of_parts = self._probe_parts(f"{key}-parts", digest, timeout_s)
        except ChecksumMismatch as error:
            raise ChecksumMismatch(
                error.message, hint="something between here and the store changes bytes"
            ) from error
        except (StoreAccessDenied, BucketMissing, StoreFull, StoreClockSkew):
            raise  # would fail without a checksum too
        except PermanentStoreError:
            return "read-back"
        finally:
            self._tidy(key, timeout_s)
        composite = base64.b64encode(_sha256(digest)).decode()
        keeps_both = (kept, kept_of_parts) == (_base64(digest), f"{composite}-1")
        return "sha256" if keeps_both else "read-back"

    def _probe_parts(self, key: str, digest: bytes, timeout_s: float) -> str | None:
        """What the store says of an object made of one part."""
        plan = UploadPlan(key=key, size_bytes=len(b"probe"), chunk_bytes=len(b"probe"))
        params = self._params(key) | self._encryption() | {"ChecksumAlgorithm": "SHA256"}
        upload_id = self._session.call("create_multipart_upload", key, params, timeout_s)[
            "UploadId"
        ]
        try:
            etag = self.put_part(
                key,
                memoryview(b"probe"),
                upload_id=upload_id,
                number=1,
                sha256=digest,
                timeout_s=timeout_s,
            )
            part = StoredPart(etag=etag, sha256=digest.hex(), size_bytes=plan.size_bytes)
            self.complete_parts(plan, upload_id=upload_id, parts=[part], timeout_s=timeout_s)
            return self.head_checksum(key, timeout_s=timeout_s)[1]
        except StoreError:
            self.abort_parts(key, upload_id=upload_id, timeout_s=timeout_s)
            raise
        finally:
            self._tidy(key, timeout_s)

    def _tidy(self, key: str, timeout_s: float) -> None:
        with contextlib.suppress(StoreError):  # nodes may lack the right to delete
            self.delete(key, timeout_s=timeout_s)

    def server_time(self, *, timeout_s: float) -> float:
        params = self._params("server-time")
        reply = self._http.send("head_object", params, timeout_s=timeout_s)
        return _http_date(reply.headers.get("Date", ""))

    # Also used by the uploads.

    def put_object(self, key: str, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        """Write an object in one PUT; the server verifies the digest."""
        params = self._put_params(key, sha256)
        reply = self._http.send("put_object", params, body=data, timeout_s=timeout_s)
        self._http.check("put_object", params, reply)

    def put_part(
        self,
        key: str,
        data: memoryview,
        *,
        upload_id: str,
        number: int,
        sha256: bytes,
        timeout_s: float,
    ) -> str:
        """Send a part; returns its ETag."""
        params = self._params(key) | {"UploadId": upload_id, "PartNumber": number}
        if self.sends_checksums:
            params["ChecksumSHA256"] = base64.b64encode(sha256).decode()
        reply = self._http.send("upload_part", params, body=data, timeout_s=timeout_s)
        if reply.status == 404 and reply.code != "NoSuchBucket":
            raise UploadAbandoned(f"the upload of {key!r} is gone", hint="begin another one")
        self._http.check("upload_part", params, reply)
        return reply.headers.get("ETag", "")

    def complete_parts(
        self, plan: UploadPlan, *, upload_id: str, parts: Sequence[StoredPart], timeout_s: float
    ) -> None:
        """Make an object of its parts."""
        listed: list[dict[str, Any]] = []
        for number, part in enumerate(parts, start=1):
            entry: dict[str, Any] = {"PartNumber": number, "ETag": part.etag}
            if self.sends_checksums and part.sha256:
                entry["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(part.sha256)).decode()
            listed.append(entry)
        params = self._params(plan.key) | {
            "UploadId": upload_id,
            "MultipartUpload": {"Parts": listed},
        }
        if self.sends_checksums:
            params["MpuObjectSize"] = plan.size_bytes
        try:
            self._session.call("complete_multipart_upload", plan.key, params, timeout_s)
        except ObjectMissing as error:
            raise UploadAbandoned(f"the upload of {plan.key!r} is gone") from error

    def abort_parts(self, key: str, *, upload_id: str, timeout_s: float) -> None:
        """Drop an upload; one that is gone is fine."""
        params = self._params(key) | {"UploadId": upload_id}
        with contextlib.suppress(UploadAbandoned, ObjectMissing):
            self._session.call("abort_multipart_upload", key, params, timeout_s)

    def head_checksum(self, key: str, *, timeout_s: float) -> tuple[int, str | None]:
        """Size of an object and the SHA-256 the store keeps, as S3 writes it."""
        reply = self._head(key, timeout_s, ChecksumMode="ENABLED")
        size = int(reply.headers.get("Content-Length", "-1"))
        return size, reply.headers.get("x-amz-checksum-sha256")

    def read_back(
        self, plan: UploadPlan, chunk_digests: Sequence[bytes], *, timeout_s: float
    ) -> None:
        """Read an object and compare it with its chunks' digests.

        Args:
            timeout_s: for each chunk.

        Raises:
            ChecksumMismatch: it holds other bytes.
        """
        buffer = memoryview(bytearray(min(plan.chunk_bytes, plan.size_bytes)))
        for index, digest in enumerate(chunk_digests):
            target = buffer[: plan.chunk_size(index)]
            offset = index * plan.chunk_bytes
            self.read_into(plan.key, offset=offset, target=target, timeout_s=timeout_s)
            if hashlib.sha256(target).digest() != digest:
                raise ChecksumMismatch(
                    f"{plan.key!r}: chunk {index} reads back as other bytes than were sent",
                    hint="the store, or something between here and it, changes what it is given",
                )

    @property
    def reads_back(self) -> bool:
        """Whether a shard is to be read again before it counts."""
        return self._checksums == "read-back"

    def _head(self, key: str, timeout_s: float, **more: str) -> Reply:
        params = self._params(key) | more
        reply = self._http.send("head_object", params, timeout_s=timeout_s)
        return self._check_object(key, "head_object", params, reply)

    def _resume_ended(self, plan: UploadPlan, timeout_s: float) -> ShardUpload:
        """The upload is over: either it was completed just before the kill, or someone ended it.

        Raises:
            UploadAbandoned: its object is not there; another key is to be taken.
        """
        try:
            self.head(plan.key, timeout_s=timeout_s)
        except ObjectMissing as error:
            raise UploadAbandoned(f"the upload of {plan.key!r} is gone") from error
        return EndedUpload(self, plan)

    def _resume(self, plan: UploadPlan, token: str, timeout_s: float) -> ShardUpload | None:
        upload_id, noted = parse_token(token)
        if not upload_id:
            return None
        listed: dict[int, StoredPart] | None = None
        with contextlib.suppress(UploadAbandoned, ObjectMissing):
            listed = self._list_parts(plan.key, upload_id, timeout_s)
        if listed is None:
            return self._resume_ended(plan, timeout_s)
        return MultipartUpload(self, plan, upload_id=upload_id, listed=listed, noted=noted)

    def _list_parts(self, key: str, upload_id: str, timeout_s: float) -> dict[int, StoredPart]:
        params = self._params(key) | {"UploadId": upload_id}
        parts: dict[int, StoredPart] = {}
        while True:
            page = self._session.call("list_parts", key, params, timeout_s)
            for item in page.get("Parts", ()):
                checksum = item.get("ChecksumSHA256", "")
                is_known = _SHA256_BASE64.match(checksum)
                number = item["PartNumber"]
                part = StoredPart(
                    etag=item["ETag"],
                    sha256=base64.b64decode(checksum).hex() if is_known else None,
                    size_bytes=item["Size"],
                )
                if parts.setdefault(number, part).etag != part.etag:
                    # SeaweedFS lists a replaced part beside the new one: which it is, is unknown.
                    parts[number] = replace(part, etag="", sha256=None)
            if not page.get("IsTruncated"):
                return parts
            params["PartNumberMarker"] = page["NextPartNumberMarker"]

    def _probe_missing(self, key: str, timeout_s: float) -> None:
        """A missing key must read as missing, or a job with a log could look like a new one."""
        params = self._params(key)
        reply = self._http.send("get_object", params, timeout_s=timeout_s)
        if reply.status == 404 and reply.code != "NoSuchBucket":
            return
        self._http.check("get_object", params, reply)

    def _check_object(
        self, key: str, action: str, params: Mapping[str, Any], reply: Reply
    ) -> Reply:
        with self._own_keys(key):
            return self._http.check(action, params, reply)

    @contextlib.contextmanager
    def _own_keys(self, key: str) -> Iterator[None]:
        """Callers know keys without the store's prefix."""
        try:
            yield
        except ObjectMissing as error:
            raise ObjectMissing(key) from error

    def _bucket_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"Bucket": self._settings.bucket}
        if self._settings.expected_bucket_owner:
            params["ExpectedBucketOwner"] = self._settings.expected_bucket_owner
        return params

    def _params(self, key: str) -> dict[str, Any]:
        return self._bucket_params() | {"Key": self._settings.prefix + key}

    def _encryption(self) -> dict[str, Any]:
        if not self._settings.sse_kms_key_id:
            return {}
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self._settings.sse_kms_key_id}

    def _put_params(self, key: str, sha256: bytes) -> dict[str, Any]:
        params = self._params(key) | self._encryption()
        if self.sends_checksums:
            params["ChecksumSHA256"] = base64.b64encode(sha256).decode()
        return params


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _http_date(text: str) -> float:
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError as error:
        raise PermanentStoreError(f"the store's reply has no valid date: {text!r}") from error


def _default_ca_bundle() -> str | None:
    return os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")


def _proxy_of(url: str) -> str | None:
    scheme, _, rest = url.partition("://")
    host = rest.split("/")[0].split(":")[0]
    if urllib.request.proxy_bypass(host):
        return None
    proxy: str | None = urllib.request.getproxies().get(scheme)
    return proxy


def _lacks_condition(url: str, why: str) -> StoreLacksConditionalPut:
    return StoreLacksConditionalPut(
        f"{url}: {why}",
        hint="use a store with conditional writes (If-None-Match: *), or a file:// store",
    )
