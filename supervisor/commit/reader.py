"""Read committed checkpoints: the manifest of a commit, and what commits there are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from supervisor.clock import Deadline
from supervisor.commit.log import CALL_TIMEOUT_S, CommitLog
from supervisor.commit.records import Commit, LogState, PartRef, Record
from supervisor.errors import (
    DeadlineExceeded,
    LogTooNew,
    ManifestInvalid,
    ObjectMissing,
    PartMissing,
    PermanentStoreError,
    TransientStoreError,
)
from trainer_sdk.protocol.errors import ProtocolError, VersionMismatch
from trainer_sdk.protocol.manifest import MAX_PART_BYTES, Manifest, PartTable, decode_part

_NUM_READERS: Final = 16
_FEW_ITEMS: Final = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """One live commit as the log's state shows it."""

    seq: int
    gen: int
    step: int
    is_good: bool
    is_in_use: bool  # what the present generation resumed from, its anchor, or the newest
    pins: tuple[str, ...]


def describe_commits(state: LogState) -> tuple[CommitInfo, ...]:
    """The live commits of a state, oldest first."""
    in_use = {state.resume, state.anchor, state.last_commit}
    return tuple(
        CommitInfo(
            seq=commit.seq,
            gen=commit.gen,
            step=commit.step,
            is_good=commit.seq not in state.bad,
            is_in_use=commit.seq in in_use,
            pins=tuple(pin.name for pin in state.pins if pin.commit == commit.seq),
        )
        for commit in state.live
    )


def list_commits(log: CommitLog, deadline: Deadline) -> tuple[CommitInfo, ...]:
    """The live commits, oldest first; those being retired are gone from it already.

    Raises:
        LogCorrupt, LogTooNew, StoreError, DeadlineExceeded
    """
    return describe_commits(log.tail(deadline).state)


def read_manifest(log: CommitLog, seq: int, deadline: Deadline) -> Manifest:
    """The commit in slot `seq` with its parts, each checked against its digest.

    Raises:
        ManifestInvalid: no commit, or a part is missing or not what the commit names.
        LogTooNew: a part of a newer format.
        StoreError, DeadlineExceeded
    """
    try:
        record = log.read(seq, deadline)
    except ObjectMissing as error:
        raise ManifestInvalid(f"log slot {seq} does not exist") from error
    return manifest_of(log, record, deadline)


def manifest_of(log: CommitLog, record: Record, deadline: Deadline) -> Manifest:
    """Like `read_manifest`, for a record that is at hand."""
    body = record.body
    if not isinstance(body, Commit):
        raise ManifestInvalid(f"log slot {record.seq} is {record.kind}, not a commit")
    tables = read_all(lambda ref: read_part(log, ref, deadline), body.parts)
    for ref, table in zip(body.parts, tables, strict=True):
        if (table.gen, table.step) != (record.gen, body.step) or table.base not in (
            None,
            body.base,
        ):
            raise ManifestInvalid(f"commit {record.seq} names {ref.key!r} of another checkpoint")
    try:
        return Manifest(seq=record.seq, digest=record.digest, parts=tuple(tables))
    except ProtocolError as error:
        raise ManifestInvalid(error.message) from error


def read_all(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Read what the items name, in their order; many of them by several threads."""
    if len(items) <= _FEW_ITEMS:
        return [read(item) for item in items]
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="part-reader") as pool:
        return list(pool.map(read, items))


def read_part(log: CommitLog, ref: PartRef, deadline: Deadline) -> PartTable:
    """The part that a commit names.

    Raises:
        PartMissing, ManifestInvalid: not there, or not the bytes the commit names.
        LogTooNew, StoreError, DeadlineExceeded
    """
    try:
        data, table = load_part(log, ref.key, deadline)
    except ObjectMissing as error:
        raise PartMissing(
            f"part {ref.key!r} is missing", hint="something other than lastgasp deleted it"
        ) from error
    except ProtocolError as error:
        raise ManifestInvalid(error.message) from error
    if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise ManifestInvalid(f"part {ref.key!r} is not what the commit names")
    return table


def load_part(log: CommitLog, key: str, deadline: Deadline) -> tuple[bytes, PartTable]:
    """The bytes under a part's job key, and what they say.

    Raises:
        ObjectMissing, ProtocolError: nothing there, or not a part.
        LogTooNew: a part of a newer format.
        StoreError, DeadlineExceeded
    """
    if deadline.is_over:
        raise DeadlineExceeded(f"the time for reading {key!r} is up")
    full_key = log.keys.full(key)
    timeout_s = deadline.sooner(CALL_TIMEOUT_S)
    try:
        data = log.store.get_bytes(full_key, max_bytes=MAX_PART_BYTES, timeout_s=timeout_s)
    except (ObjectMissing, TransientStoreError):
        raise
    except PermanentStoreError as error:
        if log.store.head(full_key, timeout_s=timeout_s).size_bytes <= MAX_PART_BYTES:
            raise
        raise ProtocolError(f"{key!r} is too large for a part") from error
    try:
        return data, decode_part(data, key=key)
    except VersionMismatch as error:
        raise LogTooNew(error.message, hint=error.hint) from error
