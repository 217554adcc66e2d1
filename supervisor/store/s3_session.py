"""boto3: where credentials, endpoint and region come from, what signs, and the small calls.

Credentials that ran out or were replaced are looked for again. Roles and web identities renew
themselves inside botocore; a credentials file that was written anew is only read by a new session.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from supervisor.clock import Clock
from supervisor.errors import (
    ConfigError,
    CredentialsExpired,
    PermanentStoreError,
    StoreAccessDenied,
    TransientStoreError,
)
from supervisor.store.s3_errors import error_of
from supervisor.store.s3_http import hide_secrets

Credentials = tuple[str, str, str | None]
Checksums = Literal["auto", "sha256", "read-back", "off"]

_EXPIRES_S: Final = 900  # a signed request is sent at once; S3 looks at its age when it arrives
_PATIENT_FROM_S: Final = 20.0
# Every call that is refused asks for other credentials; where they come from is asked this often.
LOOK_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """How to reach a bucket.

    Args:
        prefix: what every key begins with; empty, or ends with a slash.
        checksums: "sha256" sends our SHA-256 with every object, and the store must keep it;
            "read-back" is for stores that refuse such headers: every shard is read and hashed
            again before it counts; "off" trusts the store; "auto" finds out at the probe which of
            the first two it is.
        ca_bundle: file of the authorities to trust instead of the system's.
        access_key_id, secret_access_key: for tests and local servers; None: boto3's own chain.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    checksums: Checksums = "auto"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clients:
    """One session's clients and the credentials they began with."""

    quick: Any
    patient: Any
    credentials: Credentials | None


class S3Session:
    """Signs and calls. Thread-safe; made before threads start, as boto3's sessions are not."""

    def __init__(self, settings: S3Settings, clock: Clock) -> None:
        """Make the clients.

        Raises:
            ConfigError: boto3 is missing, or does not take the settings.
        """
        hide_secrets()
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._clients = _make_clients(_make_session(settings), settings)

    @property
    def endpoint_url(self) -> str:
        url: str = self._clients.quick.meta.endpoint_url
        return url

    def close(self) -> None:
        """Close idle connections."""
        for client in (self._clients.quick, self._clients.patient):
            client.close()

    def renew(self) -> bool:
        """Look for credentials again; whether there are others now than before."""
        before = self._clients
        with self._lock:
            if self._clients is not before:  # another thread was faster
                return True
            now = self._clock.monotonic()
            if now - self._looked_at < LOOK_EVERY_S:
                return False
            self._looked_at = now
            try:
                session = _make_session(self._settings)
                if _credentials_of(session) == before.credentials:
                    return False
                self._clients = _make_clients(session, self._settings)
            except ConfigError:  # the file is being written: the next look finds it whole
                return False
            return True  # the old clients go when the last call on them has returned

    def sign(self, action: str, params: Mapping[str, Any]) -> str:
        """A URL that is a password for its time."""
        with self._library_errors(action, str(params.get("Key", ""))):
            url: str = self._clients.quick.generate_presigned_url(
                action, Params=dict(params), ExpiresIn=_EXPIRES_S
            )
            return url
        raise AssertionError("unreachable")

    def call(
        self, action: str, key: str, params: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """One attempt at a small call; waits 5 s for the reply, or 60 s where there is time."""
        clients = self._clients
        client = clients.patient if timeout_s >= _PATIENT_FROM_S else clients.quick
        with self._library_errors(action, key):
            answer: dict[str, Any] = getattr(client, action)(**params)
            if action == "create_multipart_upload" and not answer.get("UploadId"):
                raise PermanentStoreError(
                    f"{action} {key!r}: the reply is not that of an S3 server",
                    hint="check [store] endpoint_url: something else answers there",
                )
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
                renew=self.renew,
            ) from None
        except (theirs.NoCredentialsError, theirs.PartialCredentialsError):
            if self.renew():
                raise CredentialsExpired(f"{what}: credentials were there only later") from None
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


def _make_session(settings: S3Settings) -> Any:
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(
            "boto3 is not installed", hint="pip install 'lastgasp[daemon]'"
        ) from error
    with _settings_errors(settings):
        return boto3.Session(
            profile_name=settings.profile,
            region_name=settings.region,
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=settings.secret_access_key,
        )


def _make_clients(session: Any, settings: S3Settings) -> _Clients:
    with _settings_errors(settings):
        quick, patient = [_make_client(session, settings, read_s=read_s) for read_s in (5.0, 60.0)]
        return _Clients(quick=quick, patient=patient, credentials=_credentials_of(session))


def _credentials_of(session: Any) -> Credentials | None:
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
        frozen = found.get_frozen_credentials() if found else None
    except BotoCoreError as error:
        raise ConfigError(f"credentials: {error}") from error
    return (frozen.access_key, frozen.secret_key, frozen.token) if frozen else None


@contextlib.contextmanager
def _settings_errors(settings: S3Settings) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"s3://{settings.bucket}: {error}",
            hint="check [store] endpoint_url, region and the AWS profile",
        ) from error


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
