"""A store in an S3 bucket, or in anything that speaks S3. The only import of boto3.

boto3 finds credentials, endpoint and region, signs everything, and makes the small calls whose
replies are XML. Objects travel over `s3_http`, from and into our own memory, each in one attempt
with an exact limit; the small calls (listing, begin and end of a multipart upload) wait 5 s for a
reply, or 60 s where the caller has 20 s or more. Nothing in here retries.

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
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

from supervisor.clock import Clock
from supervisor.errors import (
    ConfigError,
    CredentialsExpired,
    ObjectMissing,
    PermanentStoreError,
    StoreAccessDenied,
    StoreError,
    StoreLacksConditionalPut,
    TransientStoreError,
    UploadAbandoned,
)
from supervisor.store.base import ObjectInfo, ShardUpload
from supervisor.store.s3_errors import error_of
from supervisor.store.s3_http import Reply, SignedHttp, hide_secrets
from supervisor.store.s3_upload import (
    MultipartUpload,
    SinglePut,
    StoredPart,
    UploadPlan,
    parse_token,
)

_EXPIRES_S: Final = 900  # a signed request is sent at once; S3 looks at its age when it arrives
_PATIENT_FROM_S: Final = 20.0
_SHA256_BASE64: Final = re.compile(r"^[A-Za-z0-9+/]{43}=\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """How to reach a bucket.

    Args:
        prefix: what every key begins with; empty, or ends with a slash.
        request_checksums: "when_supported" sends our SHA-256 with every object, and the store must
            keep it; "when_required" is for stores that refuse such headers.
        ca_bundle: file of the authorities to trust instead of the system's.
        access_key_id, secret_access_key: for tests and local servers; None: boto3's own chain.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    request_checksums: Literal["when_supported", "when_required"] = "when_supported"
    sse_kms_key_id: str | None = None
    expected_bucket_owner: str | None = None
    ca_bundle: str | None = None
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None

    def __post_init__(self) -> None:
        if self.prefix and (not self.prefix.endswith("/") or self.prefix.startswith("/")):
            raise ValueError(f"prefix {self.prefix!r} must end, and not begin, with a slash")

    def __repr__(self) -> str:
        return f"S3Settings(bucket={self.bucket!r}, prefix={self.prefix!r}, ...)"


def open_s3(settings: S3Settings, *, clock: Clock) -> S3Store:
    """Make a store. To be called before threads start: boto3's session is not thread-safe.

    Raises:
        ConfigError: boto3 is missing, or does not take the settings.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(
            "boto3 is not installed", hint="pip install 'lastgasp[daemon]'"
        ) from error
    hide_secrets()
    try:
        session = boto3.Session(
            profile_name=settings.profile,
            region_name=settings.region,
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=settings.secret_access_key,
        )
        clients = [_make_client(session, settings, read_s=read_s) for read_s in (5.0, 60.0)]
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3://{settings.bucket}: {error}") from error
    return S3Store(settings, quick=clients[0], patient=clients[1], clock=clock)


def _make_client(session: Any, settings: S3Settings, *, read_s: float) -> Any:
    from botocore.config import Config

    config = Config(
        signature_version="s3v4",
        connect_timeout=3.0,
        read_timeout=read_s,
        max_pool_connections=32,
        tcp_keepalive=True,
        retries={"mode": "standard", "total_max_attempts": 1},
        # Checksums are ours: what boto3 would add to a signed URL could not be sent with it.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": settings.addressing_style},
    )
    return session.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        config=config,
        verify=settings.ca_bundle,
    )


class S3Store:
    """Implements `ObjectStore`; made by `open_s3`."""

    def __init__(self, settings: S3Settings, *, quick: Any, patient: Any, clock: Clock) -> None:
        self.url = f"s3://{settings.bucket}/{settings.prefix}"
        self.sends_checksums = settings.request_checksums == "when_supported"
        self._settings = settings
        self._quick = quick
        self._patient = patient
        self._http = SignedHttp(
            sign=self._sign,
            clock=clock,
            bucket=settings.bucket,
            ca_bundle=settings.ca_bundle or _default_ca_bundle(),
            proxy_url=_proxy_of(quick.meta.endpoint_url),
        )

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()
        for client in (self._quick, self._patient):
            client.close()

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
        checksum = reply.headers.get("x-amz-checksum-sha256", "")
        sha256 = base64.b64decode(checksum).hex() if _SHA256_BASE64.match(checksum) else None
        return ObjectInfo(
            key=key,
            size_bytes=int(reply.headers.get("Content-Length", "-1")),
            modified_at=_http_date(reply.headers.get("Last-Modified", "")),
            sha256=sha256,
        )

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        params = self._bucket_params() | {"Prefix": self._settings.prefix + prefix}
        # Source: S3 API reference, ListObjectsV2: directory buckets do not take StartAfter.
        if start_after and not self._settings.bucket.endswith("--x-s3"):
            params["StartAfter"] = self._settings.prefix + start_after
        while True:
            page = self._call("list_objects_v2", prefix, params, timeout_s)
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
        upload_id = self._call("create_multipart_upload", key, params, timeout_s)["UploadId"]
        return MultipartUpload(self, plan, upload_id=upload_id, listed={}, noted={})

    def settle_log(self, *, timeout_s: float) -> None:
        """An object that can be read is durable."""

    def probe(self, prefix: str, *, timeout_s: float) -> None:
        key = f"{prefix}probe-{secrets.token_hex(16)}"
        self._probe_missing(key, timeout_s)
        self.put_if_absent(key, b"probe", timeout_s=timeout_s)
        try:
            if self.put_if_absent(key, b"probe", timeout_s=timeout_s):
                raise _lacks_condition(self.url, "a second create of one key was not refused")
        finally:
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
            self._call("complete_multipart_upload", plan.key, params, timeout_s)
        except ObjectMissing as error:
            raise UploadAbandoned(f"the upload of {plan.key!r} is gone") from error

    def abort_parts(self, key: str, *, upload_id: str, timeout_s: float) -> None:
        """Drop an upload; one that is gone is fine."""
        params = self._params(key) | {"UploadId": upload_id}
        with contextlib.suppress(UploadAbandoned, ObjectMissing):
            self._call("abort_multipart_upload", key, params, timeout_s)

    def head_checksum(self, key: str, *, timeout_s: float) -> tuple[int, str | None]:
        """Size of an object and the SHA-256 the store keeps, as S3 writes it."""
        reply = self._head(key, timeout_s)
        size = int(reply.headers.get("Content-Length", "-1"))
        return size, reply.headers.get("x-amz-checksum-sha256")

    def _head(self, key: str, timeout_s: float) -> Reply:
        params = self._params(key)
        if self.sends_checksums:
            params["ChecksumMode"] = "ENABLED"
        reply = self._http.send("head_object", params, timeout_s=timeout_s)
        return self._check_object(key, "head_object", params, reply)

    def _resume(self, plan: UploadPlan, token: str, timeout_s: float) -> MultipartUpload | None:
        upload_id, noted = parse_token(token)
        if not upload_id:
            return None
        listed: dict[int, StoredPart] | None = None
        with contextlib.suppress(UploadAbandoned, ObjectMissing):
            listed = self._list_parts(plan.key, upload_id, timeout_s)
        if listed is None:
            # The upload is over. If it was completed, `complete` finds and verifies the object.
            if set(noted) != set(range(1, plan.num_chunks + 1)):
                return None
            with contextlib.suppress(ObjectMissing):
                size_bytes, _ = self.head_checksum(plan.key, timeout_s=timeout_s)
                if size_bytes == plan.size_bytes:
                    listed = {
                        number: StoredPart(
                            etag=etag, sha256=None, size_bytes=plan.chunk_size(number - 1)
                        )
                        for number, (etag, _) in noted.items()
                    }
        if listed is None:
            return None
        return MultipartUpload(self, plan, upload_id=upload_id, listed=listed, noted=noted)

    def _list_parts(self, key: str, upload_id: str, timeout_s: float) -> dict[int, StoredPart]:
        params = self._params(key) | {"UploadId": upload_id}
        parts: dict[int, StoredPart] = {}
        while True:
            page = self._call("list_parts", key, params, timeout_s)
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

    def _sign(self, action: str, params: Mapping[str, Any]) -> str:
        key = str(params.get("Key", ""))
        with self._library_errors(action, key):
            url: str = self._quick.generate_presigned_url(
                action, Params=dict(params), ExpiresIn=_EXPIRES_S
            )
            return url
        raise AssertionError("unreachable")

    def _call(
        self, action: str, key: str, params: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        client = self._patient if timeout_s >= _PATIENT_FROM_S else self._quick
        with self._library_errors(action, key):
            answer: dict[str, Any] = getattr(client, action)(**params)
            return answer
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _library_errors(self, action: str, key: str) -> Iterator[None]:
        """Turn boto3's errors into ours, without chaining: theirs may show what was signed."""
        from botocore import exceptions as theirs

        what = f"{action} {key!r}"
        try:
            yield
        except theirs.ClientError as error:
            raise error_of(
                action=action,
                key=key,
                bucket=self._settings.bucket,
                status=int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)),
                code=str(error.response.get("Error", {}).get("Code", "")),
            ) from None
        except (theirs.NoCredentialsError, theirs.PartialCredentialsError):
            raise StoreAccessDenied(
                f"{what}: no complete credentials found",
                hint="give this node a role, a profile, or AWS_ACCESS_KEY_ID and its secret",
            ) from None
        except (theirs.TokenRetrievalError, theirs.UnauthorizedSSOTokenError):
            raise CredentialsExpired(f"{what}: the session ran out") from None
        except (theirs.ParamValidationError, theirs.ProfileNotFound) as error:
            raise ValueError(f"{what}: {type(error).__name__}") from None
        except theirs.SSLError:
            raise PermanentStoreError(
                f"{what}: the connection could not be secured",
                hint="set ca_bundle to the file of the authority of the server's certificate",
            ) from None
        except RecursionError:  # boto3 asks for the region for ever if all answers are redirects
            raise PermanentStoreError(
                f"{what}: redirected again and again", hint="set the region or the endpoint"
            ) from None
        except theirs.BotoCoreError as error:
            raise TransientStoreError(
                f"{what}: {type(error).__name__}",
                hint="check the endpoint, the network and the credentials' source",
            ) from None

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
        hint="use a store with conditional writes (If-None-Match), or, for one node and one launch "
        "at a time only, set exclusive = true",
    )
