"""What an S3 reply means in our error tree. Knows no library.

Only codes and keys go into messages: a body may quote what was signed, and a URL is a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor.errors import (
    BucketMissing,
    ChecksumMismatch,
    CredentialsExpired,
    ObjectMissing,
    PermanentStoreError,
    StoreAccessDenied,
    StoreClockSkew,
    StoreError,
    StoreFull,
    StoreThrottled,
    TransientStoreError,
    UploadAbandoned,
)

# Source: S3 API reference, "Error responses", and botocore's retry tables; the last of each group
# are those of other servers.
_THROTTLED: Final = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_EXPIRED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
)
_BAD_CREDENTIALS: Final = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "AuthFailure",
        "NotSignedUp",
    }
)
_MISMATCH: Final = frozenset(
    {
        "BadDigest",
        "InvalidDigest",
        "ChecksumMismatch",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
        "ContentSHA256Mismatch",
    }
)
_TRANSIENT: Final = frozenset(
    {
        "ConditionalRequestConflict",
        "OperationAborted",
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        "RequestTimeoutException",
        "IncompleteBody",
        "ServiceUnavailable",
        "PriorRequestNotComplete",
    }
)
_WRONG_REGION: Final = frozenset(
    {
        "PermanentRedirect",
        "TemporaryRedirect",
        "Redirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "AuthorizationQueryParametersError",
    }
)
_LOST_UPLOAD: Final = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder"})
_FULL: Final = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_READS: Final = frozenset({"get_object", "head_object"})

_PERMISSIONS: Final = {
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_parts": "s3:ListMultipartUploadParts",
    "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "delete_object": "s3:DeleteObject",
}


def error_of(
    *,
    action: str,
    key: str,
    bucket: str,
    status: int,
    code: str,
    renew: Callable[[], bool] = lambda: False,
) -> StoreError:
    """The error for a refused request.

    Args:
        action: the name of the client method, as `get_object`.
        code: the code in the body; empty if there is none, as in replies to HEAD.
        renew: asked when the credentials are to blame; whether others are in use now, so that the
            request may be tried again.
    """
    what = f"{action} {key!r}: {code or 'HTTP status'} ({status})"
    if code in _EXPIRED:
        renew()
        return CredentialsExpired(what, hint="renew the credentials of this node")
    if code in _BAD_CREDENTIALS:
        if renew():
            return CredentialsExpired(what, hint="others were found; it is tried with those")
        return StoreAccessDenied(
            what, hint="the access key, secret or token is not valid for this endpoint"
        )
    if code == "RequestTimeTooSkewed":
        return StoreClockSkew(what, hint="set this machine's clock (chrony, NTP)")
    if code in _MISMATCH:
        return ChecksumMismatch(what, hint="the bytes changed on the way, or in memory")
    if code in _LOST_UPLOAD:
        return UploadAbandoned(
            what, hint="the upload was ended by someone else or a lifecycle rule"
        )
    if code in _FULL or status == 507:
        return StoreFull(what, hint="free space or raise the quota of the store")
    if code == "NoSuchBucket":
        return BucketMissing(
            f"bucket {bucket!r} does not exist", hint="create it, or mend the store's URL"
        )
    if code in _WRONG_REGION or status in (301, 302, 307, 308):
        return PermanentStoreError(
            what, hint=f"bucket {bucket!r} is in another region: set the region or the endpoint"
        )
    if code in _THROTTLED or status in (429, 503):
        return StoreThrottled(
            what, hint="the store is overloaded or limits this bucket: try again in a while"
        )
    if code in _TRANSIENT or status in (408, 409) or (status >= 500 and status != 501):
        return TransientStoreError(what, hint="a fault of the store: try again in a while")
    if status == 404:
        return ObjectMissing(key)
    if status in (401, 403):
        return _denied(what, action)
    return PermanentStoreError(what)


def _denied(what: str, action: str) -> StoreAccessDenied:
    permission = _PERMISSIONS.get(action, f"the permission for {action}")
    hint = f"allow {permission} on this key, and kms:GenerateDataKey, kms:Decrypt for a KMS key"
    if action in _READS:
        # Source: S3 API reference, GetObject, Permissions: without s3:ListBucket a missing key is
        # answered with 403 instead of 404.
        hint = (
            f"allow {permission} on this key and s3:ListBucket on the bucket: without the latter a "
            "key that does not exist is refused like a forbidden one"
        )
    return StoreAccessDenied(what, hint=hint)
