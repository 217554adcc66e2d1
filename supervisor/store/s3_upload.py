"""A shard on its way into S3: one PUT if it is one chunk, else a multipart upload, a part a chunk.

The server verifies the SHA-256 of every chunk as it arrives and, for the whole, the SHA-256 of the
chunks' digests (the composite checksum, which is by construction the shard's own digest). Nothing
here puts a condition on a name: names are never used twice.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from supervisor import failpoints
from supervisor.errors import (
    ChecksumMismatch,
    ObjectMissing,
    PermanentStoreError,
    UploadAbandoned,
)
from trainer_sdk.protocol.manifest import MAX_CHUNKS, num_chunks, shard_digest

if TYPE_CHECKING:
    from supervisor.store.s3 import S3Store

# Source: S3 User Guide, "Amazon S3 multipart upload limits".
MIN_PART_BYTES: Final = 5 * 1024 * 1024
MAX_PART_BYTES: Final = 5 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A part the store holds; `etag` is opaque."""

    etag: str
    sha256: str | None  # hex
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """Key and division of one shard."""

    key: str
    size_bytes: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.chunk_bytes < 1:
            raise ValueError(f"shard of {self.size_bytes} bytes in chunks of {self.chunk_bytes}")
        if self.num_chunks > MAX_CHUNKS:
            raise ValueError(f"{self.num_chunks} chunks; S3 takes {MAX_CHUNKS}")
        if self.num_chunks > 1 and self.chunk_bytes < MIN_PART_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes; S3 wants {MIN_PART_BYTES}")
        if min(self.chunk_bytes, self.size_bytes) > MAX_PART_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes; S3 takes {MAX_PART_BYTES}")

    @property
    def num_chunks(self) -> int:
        return num_chunks(size_bytes=self.size_bytes, chunk_bytes=self.chunk_bytes)

    def chunk_size(self, index: int) -> int:
        """The size of one chunk.

        Raises:
            ValueError: there is no such chunk.
        """
        if not 0 <= index < self.num_chunks:
            raise ValueError(f"{self.key!r} has {self.num_chunks} chunks, no {index}")
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def check_chunk(self, index: int, data: memoryview) -> memoryview:
        """The chunk as bytes.

        Raises:
            ValueError: it has another size than planned.
        """
        view = data.cast("B")
        if len(view) != self.chunk_size(index):
            raise ValueError(f"chunk {index} of {self.key!r} has {len(view)} bytes")
        return view


class SinglePut:
    """Implements `ShardUpload` for a shard of one chunk. Cannot be resumed; it is sent again."""

    resume_token = ""

    def __init__(self, store: S3Store, plan: UploadPlan) -> None:
        self._store = store
        self._plan = plan
        self._digest: bytes | None = None

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        return {} if self._digest is None else {0: self._digest.hex()}

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        view = self._plan.check_chunk(index, data)
        failpoints.hit("upload.chunk.before")
        self._store.put_object(self._plan.key, view, sha256=sha256, timeout_s=timeout_s)
        self._digest = sha256
        failpoints.hit("upload.chunk.after")

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        if len(chunk_digests) != 1 or self._digest is None:
            raise ValueError(f"{self._plan.key!r}: its one chunk was not sent")
        if chunk_digests[0] != self._digest:
            raise ChecksumMismatch(f"{self._plan.key!r}: another chunk was sent")
        failpoints.hit("upload.complete.before")
        verify_object(
            self._store,
            self._plan,
            chunk_digests,
            wanted=base64.b64encode(self._digest).decode(),
            timeout_s=timeout_s,
        )
        failpoints.hit("upload.complete.after")

    def abort(self, *, timeout_s: float) -> None:
        """Nothing is under way; an object that was sent is garbage for a sweep."""


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a resumed upload has to know: its id, and ETag and SHA-256 of the parts it sent.

    Not every store lists the checksums of parts. An ETag that is still the one its PUT was
    answered with says as much: the part was not replaced.
    """

    id: str
    parts: dict[int, tuple[str, str]]


def parse_token(token: str) -> tuple[str, Mapping[int, tuple[str, str]]]:
    """Upload id and noted parts; an empty id if this is not a token."""
    try:
        read = msgspec.json.decode(token, type=_Token)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", {}
    return read.id, read.parts


class MultipartUpload:
    """Implements `ShardUpload` for a shard of several chunks."""

    def __init__(
        self,
        store: S3Store,
        plan: UploadPlan,
        *,
        upload_id: str,
        listed: Mapping[int, StoredPart],
        noted: Mapping[int, tuple[str, str]],
    ) -> None:
        self._store = store
        self._plan = plan
        self._upload_id = upload_id
        self._lock = threading.Lock()
        self._parts: dict[int, StoredPart] = {}
        for number, part in listed.items():
            etag, sha256 = noted.get(number, ("", ""))
            known = part.sha256 or (sha256 if etag and etag == part.etag else None)
            # A part of unknown content is sent again.
            is_ours = 1 <= number <= plan.num_chunks
            if known and is_ours and part.size_bytes == plan.chunk_size(number - 1):
                self._parts[number - 1] = replace(part, sha256=known)

    @property
    def resume_token(self) -> str:
        with self._lock:
            parts = {
                index + 1: (part.etag, part.sha256 or "") for index, part in self._parts.items()
            }
        return msgspec.json.encode(_Token(self._upload_id, parts)).decode()

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        with self._lock:
            return {index: part.sha256 or "" for index, part in self._parts.items()}

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        view = self._plan.check_chunk(index, data)
        failpoints.hit("upload.chunk.before")
        etag = self._store.put_part(
            self._plan.key,
            view,
            upload_id=self._upload_id,
            number=index + 1,
            sha256=sha256,
            timeout_s=timeout_s,
        )
        part = StoredPart(etag=etag, sha256=sha256.hex(), size_bytes=len(view))
        with self._lock:
            self._parts[index] = part
        failpoints.hit("upload.chunk.after")

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        with self._lock:
            parts = dict(self._parts)
        self._check_digests(parts, chunk_digests)
        failpoints.hit("upload.complete.before")
        try:
            self._store.complete_parts(
                self._plan,
                upload_id=self._upload_id,
                parts=[parts[index] for index in range(len(chunk_digests))],
                timeout_s=timeout_s,
            )
        except UploadAbandoned:
            # An earlier attempt without a reply may have completed it.
            self._verify(chunk_digests, timeout_s, is_expected=False)
        else:
            self._verify(chunk_digests, timeout_s, is_expected=True)
        failpoints.hit("upload.complete.after")

    def abort(self, *, timeout_s: float) -> None:
        self._store.abort_parts(self._plan.key, upload_id=self._upload_id, timeout_s=timeout_s)

    def _check_digests(
        self, parts: Mapping[int, StoredPart], chunk_digests: Sequence[bytes]
    ) -> None:
        wanted = self._plan.num_chunks
        if len(chunk_digests) != wanted or len(parts) != wanted:
            raise ValueError(
                f"{self._plan.key!r}: {len(parts)} of {wanted} chunks are stored, "
                f"{len(chunk_digests)} digests given"
            )
        for index, digest in enumerate(chunk_digests):
            if parts[index].sha256 != digest.hex():
                raise ChecksumMismatch(f"{self._plan.key!r}: another chunk {index} was sent")

    def _verify(
        self, chunk_digests: Sequence[bytes], timeout_s: float, *, is_expected: bool
    ) -> None:
        composite = base64.b64encode(shard_digest(chunk_digests)).decode()
        try:
            verify_object(
                self._store,
                self._plan,
                chunk_digests,
                wanted=f"{composite}-{len(chunk_digests)}",
                timeout_s=timeout_s,
            )
        except ObjectMissing as error:
            if is_expected:
                raise PermanentStoreError(
                    f"{self._plan.key!r} is not there right after it was completed",
                    hint="this store does not keep what it was given",
                ) from error
            raise UploadAbandoned(
                f"the upload of {self._plan.key!r} is gone", hint="begin another one"
            ) from error


class EndedUpload:
    """Implements `ShardUpload` for one that is over and whose object is there: nothing is sent
    again, and `complete` finds out whether it is this very object."""

    resume_token = ""

    def __init__(self, store: S3Store, plan: UploadPlan) -> None:
        self._store = store
        self._plan = plan

    def stored_chunks(self, *, timeout_s: float) -> Mapping[int, str]:
        return {}

    def put_chunk(self, index: int, data: memoryview, *, sha256: bytes, timeout_s: float) -> None:
        self._plan.check_chunk(index, data)

    def complete(self, chunk_digests: Sequence[bytes], *, timeout_s: float) -> None:
        composite = base64.b64encode(shard_digest(chunk_digests)).decode()
        wanted = f"{composite}-{len(chunk_digests)}"
        try:
            verify_object(
                self._store, self._plan, chunk_digests, wanted=wanted, timeout_s=timeout_s
            )
        except ChecksumMismatch as error:
            raise UploadAbandoned(
                f"another object has the name {self._plan.key!r}", hint="begin another upload"
            ) from error

    def abort(self, *, timeout_s: float) -> None:
        """Nothing is under way."""


def verify_object(
    store: S3Store,
    plan: UploadPlan,
    chunk_digests: Sequence[bytes],
    *,
    wanted: str,
    timeout_s: float,
) -> None:
    """Check that a complete object is the one that was sent, as the store's settings say.

    Raises:
        ChecksumMismatch: it is another object.
        PermanentStoreError: the store took checksums but keeps none.
        ObjectMissing, StoreError
    """
    if not store.sends_checksums:
        size_bytes: int = store.head(plan.key, timeout_s=timeout_s).size_bytes
        _check_size(plan, size_bytes)
        if store.reads_back:
            store.read_back(plan, chunk_digests, timeout_s=timeout_s)
        return
    size_bytes, checksum = store.head_checksum(plan.key, timeout_s=timeout_s)
    _check_size(plan, size_bytes)
    if checksum is None:
        raise PermanentStoreError(
            f"{plan.key!r}: the store keeps no SHA-256 of it",
            hint='set [store] checksums = "read-back" for this store',
        )
    if checksum != wanted:
        raise ChecksumMismatch(f"{plan.key!r}: the store's checksum is not the shard's")


def _check_size(plan: UploadPlan, size_bytes: int) -> None:
    if size_bytes != plan.size_bytes:
        raise ChecksumMismatch(f"{plan.key!r} has {size_bytes} bytes, not {plan.size_bytes}")
