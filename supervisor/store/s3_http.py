"""Requests that boto3 signed and urllib3 sends: bytes go out of, and into, memory we are given.

A signed URL is a password for its time. It never appears in an error, and the two libraries that
print URLs in their debug logs are kept from it by a filter.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import urllib3
from urllib3.connection import HTTPConnection

from supervisor.clock import Clock, Deadline
from supervisor.errors import PermanentStoreError, StoreError, TransientStoreError
from supervisor.store.s3_errors import error_of

Sign = Callable[[str, Mapping[str, Any]], str]

BLOCK_BYTES: Final = 1 << 20
_MAX_REPLY_BYTES: Final = 64 * 1024
_CONNECT_S: Final = 5.0  # also the limit for each block that is sent
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9._-]{1,64})</Code>")
# Parameters of boto3 that travel as headers; the signature covers them, so they must be sent.
_HEADERS: Final = {
    "IfNoneMatch": "If-None-Match",
    "ChecksumSHA256": "x-amz-checksum-sha256",
    "ChecksumMode": "x-amz-checksum-mode",
    "ExpectedBucketOwner": "x-amz-expected-bucket-owner",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "Range": "Range",
}
_METHODS: Final = {
    "get_object": "GET",
    "head_object": "HEAD",
    "put_object": "PUT",
    "upload_part": "PUT",
    "delete_object": "DELETE",
}
_OK: Final = frozenset({200, 204, 206})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete reply; `headers` ignore case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def code(self) -> str:
        """The error code in the body, or an empty string."""
        if b"<Message>Request has expired" in self.body or b"not yet valid" in self.body:
            # Plain AccessDenied otherwise; but it was signed a moment ago, so a clock is wrong.
            return "RequestTimeTooSkewed"
        match = _CODE.search(self.body)
        return match[1].decode("ascii") if match else ""


class SecretsFilter(logging.Filter):
    """Drops log records that show a signature or what it is made of."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "X-Amz-" not in text and "Signature" not in text and "AWS4-HMAC" not in text


def hide_secrets() -> None:
    """Keep signed URLs out of the debug logs of the libraries, however they are configured."""
    for name in (
        "urllib3.connectionpool",
        "botocore.auth",
        "botocore.endpoint",
        "botocore.httpsession",
        "botocore.hooks",
        "botocore.regions",
        "botocore.retryhandler",
        "botocore.parsers",
    ):
        logger = logging.getLogger(name)
        if not any(isinstance(known, SecretsFilter) for known in logger.filters):
            logger.addFilter(SecretsFilter())


class SignedHttp:
    """Sends single attempts within a time limit. Thread-safe."""

    def __init__(
        self,
        *,
        sign: Sign,
        renew: Callable[[], bool],
        clock: Clock,
        bucket: str,
        ca_bundle: str | None,
        proxy_url: str | None,
    ) -> None:
        """`renew` looks for other credentials when those in use are refused; see `error_of`."""
        self._sign = sign
        self._renew = renew
        self._clock = clock
        self._bucket = bucket
        hide_secrets()
        options: dict[str, Any] = {
            "num_pools": 8,
            "maxsize": 64,
            "blocksize": BLOCK_BYTES,
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": ca_bundle,
            "socket_options": [
                *HTTPConnection.default_socket_options,
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            ],
        }
        self._pool: urllib3.PoolManager = (
            urllib3.ProxyManager(proxy_url, **options)
            if proxy_url
            else urllib3.PoolManager(**options)
        )

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def send(
        self,
        action: str,
        params: Mapping[str, Any],
        *,
        timeout_s: float,
        body: memoryview | bytes | None = None,
        max_bytes: int = _MAX_REPLY_BYTES,
    ) -> Reply:
        """One attempt; any HTTP status is a reply.

        Raises:
            TransientStoreError: no complete reply: the outcome is unknown.
            PermanentStoreError: the certificate is not trusted, or the reply is too large.
        """
        deadline = Deadline.after(self._clock, timeout_s)
        with_body = self._request(action, params, deadline, body)
        try:
            data = b"".join(self._blocks(with_body, action, params, deadline, max_bytes))
        finally:
            with_body.release_conn()
        return Reply(status=with_body.status, headers=with_body.headers, body=data)

    def fetch_into(
        self, params: Mapping[str, Any], *, target: memoryview, timeout_s: float
    ) -> None:
        """Fill `target` with the bytes of a ranged `get_object`.

        Raises:
            StoreError: refused, cut off, or not the range that was asked for.
        """
        deadline = Deadline.after(self._clock, timeout_s)
        reply = self._request("get_object", params, deadline, None)
        is_done = False
        try:
            if reply.status != 206:
                data = b"".join(
                    self._blocks(reply, "get_object", params, deadline, _MAX_REPLY_BYTES)
                )
                raise self.error(
                    "get_object",
                    params,
                    Reply(status=reply.status, headers=reply.headers, body=data),
                )
            self._fill(reply, params, target, deadline)
            is_done = True
        finally:
            if is_done:
                reply.release_conn()
            else:  # the rest of the body must not be taken for the next reply
                reply.close()

    def error(self, action: str, params: Mapping[str, Any], reply: Reply) -> StoreError:
        """The error for a reply that refuses."""
        key = str(params.get("Key", ""))
        if reply.status in _OK:
            return PermanentStoreError(
                f"{action} {key!r}: the store ignored the range",
                hint="a proxy between here and the store drops the Range header",
            )
        if reply.status == 416:
            return PermanentStoreError(f"{key!r} ends before the range {params.get('Range')}")
        return error_of(
            action=action,
            key=key,
            bucket=self._bucket,
            status=reply.status,
            code=reply.code,
            renew=self._renew,
        )

    def check(self, action: str, params: Mapping[str, Any], reply: Reply) -> Reply:
        """The reply, if it grants.

        Raises:
            StoreError
        """
        if reply.status not in _OK:
            raise self.error(action, params, reply)
        return reply

    def _request(
        self,
        action: str,
        params: Mapping[str, Any],
        deadline: Deadline,
        body: memoryview | bytes | None,
    ) -> urllib3.BaseHTTPResponse:
        key = str(params.get("Key", ""))
        url = self._sign(action, params)
        headers = {_HEADERS[name]: str(params[name]) for name in params if name in _HEADERS}
        headers["Accept-Encoding"] = "identity"
        chunks: Iterator[memoryview] | None = None
        if body is not None:
            view = memoryview(body).cast("B")
            headers["Content-Length"] = str(len(view))
            headers["Content-Type"] = "application/octet-stream"
            chunks = _slices(view, deadline, f"{action} {key!r}")
        left_s = max(0.05, deadline.remaining_s())
        try:
            return self._pool.urlopen(
                _METHODS[action],
                url,
                body=chunks,
                headers=headers,
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(connect=min(_CONNECT_S, left_s), read=left_s),
            )
        except urllib3.exceptions.HTTPError as error:
            # Not chained: the library's own message shows the signed URL.
            raise transport_error(f"{action} {key!r}", error) from None

    def _blocks(
        self,
        reply: urllib3.BaseHTTPResponse,
        action: str,
        params: Mapping[str, Any],
        deadline: Deadline,
        max_bytes: int,
    ) -> Iterator[bytes]:
        what = f"{action} {params.get('Key', '')!r}"
        total = 0
        try:
            for block in reply.stream(BLOCK_BYTES, decode_content=False):
                total += len(block)
                if total > max_bytes:
                    reply.close()
                    raise PermanentStoreError(f"{what}: more than {max_bytes} bytes")
                _check_time(deadline, what)
                yield block
        except urllib3.exceptions.HTTPError as error:
            raise transport_error(what, error) from None

    def _fill(
        self,
        reply: urllib3.BaseHTTPResponse,
        params: Mapping[str, Any],
        target: memoryview,
        deadline: Deadline,
    ) -> None:
        what = f"get_object {params.get('Key', '')!r}"
        view = target.cast("B")
        length = reply.headers.get("Content-Length", "")
        if length != str(len(view)):
            raise PermanentStoreError(f"{what}: {length} bytes came, {len(view)} were wanted")
        done = 0
        try:
            while done < len(view):
                block = reply.read(min(BLOCK_BYTES, len(view) - done), decode_content=False)
                if not block:
                    raise TransientStoreError(f"{what}: cut off after {done} bytes")
                view[done : done + len(block)] = block
                done += len(block)
                _check_time(deadline, what)
        except urllib3.exceptions.HTTPError as error:
            raise transport_error(what, error) from None


def transport_error(what: str, error: Exception) -> StoreError:
    """The error for a request without a reply. Only the kind of the cause is told."""
    kind = type(error).__name__
    if isinstance(error, urllib3.exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return PermanentStoreError(
                f"{what}: the server's certificate is not trusted",
                hint="set ca_bundle to the file of the authority that signed it",
            )
        return TransientStoreError(f"{what}: {kind}")
    return TransientStoreError(
        f"{what}: {kind}", hint="check the endpoint, the network and the proxy settings"
    )


def _slices(view: memoryview, deadline: Deadline, what: str) -> Iterator[memoryview]:
    """The body in blocks, without a copy; a body that is too slow ends at the deadline."""
    for start in range(0, len(view), BLOCK_BYTES):
        _check_time(deadline, what)
        yield view[start : start + BLOCK_BYTES]


def _check_time(deadline: Deadline, what: str) -> None:
    if deadline.is_over:
        raise TransientStoreError(f"{what}: not done in time")
