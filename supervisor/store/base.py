"""The interface of an object store: the few promises the commit protocol rests on.

- `put_if_absent` on one key is atomic; a created object is never changed behind our back.
- An object stays readable, byte for byte, until it is deleted.
- Every method may be called by several threads at once.

Keys are full keys below the store's root; a prefix in the store's URL is the store's own affair.
Every method may raise `TransientStoreError` (a retry may help; for a write the outcome is unknown)
and `PermanentStoreError` (it does not). Nothing in here retries: `retry.py` wraps any store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object; `modified_at` is in seconds since 1970 by its clock."""

    key: str
    size_bytes: int
    modified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that was begun and neither completed nor aborted; `token` is the store's own."""

    key: str
    token: str


class ShardUpload(Protocol):
    """One shard on its way into the store, chunk by chunk, in any order and by many threads.

    `resume_token` is opaque; persisted by the caller and given to `open_upload` again it lets a
    restarted supervisor go on. It may grow with each chunk: persist it again now and then (an older
    one is valid too, but may resume fewer chunks). It is empty where nothing can be resumed.
    """

    @property
    def resume_token(self) -> str: ...

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        """Chunk index to SHA-256 (hex), of the chunks the store holds and has verified."""
        ...

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        """Send one chunk without copying it; sending one again replaces it.

        Raises:
            ChecksumMismatch: the bytes are not those of the digest; the chunk is not stored.
            UploadAbandoned: this upload cannot go on; begin another under a new key.
        """
        ...

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        """Make the object visible. After it returned the object is durable and verified.

        Calling it again after an unknown outcome is harmless.

        Raises:
            ChecksumMismatch: the stored object is another one and must not be used.
            UploadAbandoned: this upload cannot go on; begin another under a new key.
        """
        ...

    def abort(self, *, timeout_s: float) -> None:
        """Drop what was sent. An object that is already complete stays."""
        ...


class ObjectStore(Protocol):
    """A flat space of immutable objects."""

    @property
    def url(self) -> str:
        """Where this is, without secrets: for messages."""
        ...

    def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
        """Create an object in one single attempt.

        Returns:
            True: created and durable. False: there is one already, maybe by an earlier attempt.

        Raises:
            TransientStoreError: outcome unknown; it may land at any later time. Read it back.
        """
        ...

    def put_bytes(self, key: str, data: bytes, *, timeout_s: float) -> None:
        """Write a small object, replacing what is there, durably (except the hint)."""
        ...

    def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
        """Read a small object.

        Raises:
            ObjectMissing: there is none.
            PermanentStoreError: it is larger than `max_bytes`.
        """
        ...

    def read_into(self, key: str, *, offset: int, target: memoryview, timeout_s: float) -> None:
        """Fill `target` exactly with the object's bytes from `offset`.

        Raises:
            ObjectMissing: there is none.
            PermanentStoreError: the object ends too early. On any error `target` holds rubbish.
        """
        ...

    def head(self, key: str, *, timeout_s: float) -> ObjectInfo:
        """Describe an object.

        Raises:
            ObjectMissing: there is none.
        """
        ...

    def list_keys(
        self, prefix: str, *, timeout_s: float, start_after: str = ""
    ) -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix`, each once, in no order to rely on.

        `start_after` only saves requests: keys up to it, in the order of strings, may be left out.

        S3 sorts by key, but directory buckets and SeaweedFS do not. What appears or goes while the
        listing runs may be in it or not. The limit holds for each request that it needs.
        """
        ...

    def delete(self, key: str, *, timeout_s: float) -> None:
        """Remove an object; removing an absent one succeeds."""
        ...

    def open_upload(
        self,
        key: str,
        *,
        size_bytes: int,
        chunk_bytes: int,
        resume_token: str | None,
        timeout_s: float,
    ) -> ShardUpload:
        """Begin the upload of a large object, or go on with an earlier one.

        A token that the store does not know any more begins anew.
        """
        ...

    def open_uploads(self, prefix: str, *, timeout_s: float) -> Iterator[OpenUpload]:
        """Uploads under way or left behind, of keys that begin with `prefix`."""
        ...

    def drop_upload(self, upload: OpenUpload, *, timeout_s: float) -> None:
        """Abort one of `open_uploads`; one that is gone is fine."""
        ...

    def settle_log(self, *, timeout_s: float) -> None:
        """Make durable every log slot this store object has read or created (rule R5).

        Does nothing where a visible object is durable.
        """
        ...

    def probe(self, prefix: str, *, timeout_s: float) -> Sequence[str]:
        """Find out at start whether the store can be used at all under this prefix.

        Returns:
            What is weaker or slower with this store than with others, in words.

        Raises:
            StoreLacksConditionalPut: a second create of one key was not refused.
            BucketMissing, StoreAccessDenied: with a hint what to mend.
        """
        ...

    def server_time(self, *, timeout_s: float) -> float:
        """Seconds since 1970 by the clock that also sets `modified_at`."""
        ...
