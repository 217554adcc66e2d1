"""The shards of one set on their way into the store, chunk by chunk, straight from memory."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial

from supervisor.checkpoint.shards import StagedShard, in_turns
from supervisor.checkpoint.workers import WorkerPool
from supervisor.errors import ChecksumMismatch, ShardError, StoreError
from supervisor.store.base import ObjectStore, ShardUpload

ABORT_TIMEOUT_S = 5.0


class ImageChanged(ShardError):
    """A staged image is not any more what was hashed of it: it must never be committed."""

    error_id = "shard_corrupt_local"
    mend = (
        "nothing: another save is asked for; if it goes on, test the memory and the "
        "disk of this node"
    )

    def __init__(self, message: str, *, rank: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class SetUpload:
    """All shards of one set. Methods are called in their order here, by one thread."""

    def __init__(
        self,
        store: ObjectStore,
        shards: Sequence[StagedShard],
        *,
        step: int,
        timeout_s: float,
        is_cancelled: Callable[[], bool],
        on_uploaded: Callable[[int], None],
    ) -> None:
        """`timeout_s` is for one chunk, and for each of the small calls."""
        self._store = store
        self._shards = shards
        self._step = step
        self._timeout_s = timeout_s
        self._is_cancelled = is_cancelled
        self._on_uploaded = on_uploaded
        self._has_failed = threading.Event()
        self._uploads: dict[int, ShardUpload] = {}
        self._stored: dict[int, Mapping[int, str]] = {}

    def begin(self, full_keys: Mapping[int, str], resume_tokens: Mapping[int, str]) -> None:
        """Begin every shard's upload, or go on with the one that its token names.

        Raises:
            StoreError
        """
        for shard in self._shards:
            token = resume_tokens.get(shard.rank)
            upload = self._store.open_upload(
                full_keys[shard.rank],
                size_bytes=shard.size_bytes,
                chunk_bytes=shard.chunk_bytes,
                resume_token=token,
                timeout_s=self._timeout_s,
            )
            self._uploads[shard.rank] = upload
            if token:
                self._stored[shard.rank] = dict(upload.stored_chunks(timeout_s=self._timeout_s))

    def resume_tokens(self) -> dict[int, str]:
        """Where each shard's upload could go on, by rank; without those that cannot."""
        return {
            rank: upload.resume_token
            for rank, upload in self._uploads.items()
            if upload.resume_token
        }

    def send(self, pool: WorkerPool) -> None:
        """Send every chunk as soon as it is hashed.

        Raises:
            StoreError, ImageChanged: the first error; the chunks after it were not sent.
        """
        sent = [pool.submit(partial(self._send, shard, i)) for shard, i in in_turns(self._shards)]
        first: BaseException | None = None
        for future in sent:
            error = future.exception()
            if error is not None and first is None:
                first = error
                self._has_failed.set()
        if first is not None:
            raise first

    def complete(self) -> None:
        """Have the store put the chunks together and verify every shard.

        Raises:
            StoreError
        """
        for shard in self._shards:
            if self._is_cancelled():
                return
            self._uploads[shard.rank].complete(shard.digests(), timeout_s=self._timeout_s)

    def abort(self) -> None:
        """Drop what was sent, so that no store bills for it. What fails here a sweep takes."""
        for upload in self._uploads.values():
            with contextlib.suppress(StoreError):
                upload.abort(timeout_s=ABORT_TIMEOUT_S)

    def _send(self, shard: StagedShard, index: int) -> None:
        if self._is_cancelled() or self._has_failed.is_set():
            return
        try:
            digest = shard.hashed[index].result()
        except CancelledError:
            return
        chunk = shard.chunk(index)
        if self._stored.get(shard.rank, {}).get(index) != digest.hex():
            self._put_chunk(shard, index, chunk, digest)
        self._on_uploaded(len(chunk))

    def _put_chunk(self, shard: StagedShard, index: int, chunk: memoryview, digest: bytes) -> None:
        try:
            self._uploads[shard.rank].put_chunk(
                index, chunk, sha256=digest, timeout_s=self._timeout_s
            )
        except ChecksumMismatch as error:
            if hashlib.sha256(chunk).digest() == digest:
                raise
            raise ImageChanged(
                f"step {self._step}: chunk {index} of rank {shard.rank}'s image changed in memory "
                "after it was hashed",
                rank=shard.rank,
                hint="the image is staged again; if it goes on, test this machine's memory",
            ) from error
