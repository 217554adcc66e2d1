"""What `ls`, `show` and `verify` find out from the store alone; works without a daemon."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from supervisor.clock import Deadline
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import CommitInfo, list_commits, read_manifest
from supervisor.errors import (
    ManifestInvalid,
    ObjectMissing,
    ShardCorrupt,
    ShardError,
    ShardMissing,
    SupervisorError,
    UsageError,
)
from trainer_sdk.protocol.manifest import Manifest, ShardEntry

CHUNK_TIMEOUT_S = 120.0


class NoSuchCheckpoint(UsageError):
    """The id names no commit of this job."""

    error_id = "checkpoint_unknown"
    mend = "`lastgasp ls` lists the checkpoints"


def find_commit(log: CommitLog, which: str | None, deadline: Deadline) -> CommitInfo:
    """The commit that an operator means: its number, "GENERATION-STEP", a step, or the newest.

    Raises:
        NoSuchCheckpoint: none of these.
        LogError, StoreError
    """
    commits = list_commits(log, deadline)
    if not commits:
        raise NoSuchCheckpoint(
            f"job {log.keys.job_id!r} has no checkpoint at {log.store.url}",
            hint="check [job] id and [store] url; `lastgasp status` shows a running job",
        )
    if which is None:
        good = [commit for commit in commits if commit.is_good]
        return (good or list(commits))[-1]
    found = [commit for commit in commits if which in _names(commit)]
    if not found:
        known = ", ".join(f"{commit.gen}-{commit.step}" for commit in commits[-5:])
        raise NoSuchCheckpoint(
            f"no checkpoint {which!r}", hint=f"the newest are {known}; `lastgasp ls` lists all"
        )
    return found[-1]


def _names(commit: CommitInfo) -> tuple[str, ...]:
    return f"{commit.gen}-{commit.step}", f"#{commit.seq}", str(commit.step)


def describe(manifest: Manifest, commit: CommitInfo) -> dict[str, Any]:
    """A manifest as one JSON document."""
    return {
        "id": f"{commit.gen}-{commit.step}",
        "seq": commit.seq,
        "generation": manifest.gen,
        "step": manifest.step,
        "world_size": manifest.world,
        "is_bad": not commit.is_good,
        "size_bytes": manifest.size_bytes,
        "record_sha256": manifest.digest,
        "shards": [msgspec.to_builtins(shard) for shard in manifest.shards],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verifying one checkpoint found. `problem` is empty if it is whole."""

    commit: CommitInfo
    num_shards: int = 0
    checked_bytes: int = 0
    problem: str = ""
    error_id: str = ""


def verify(
    log: CommitLog,
    commit: CommitInfo,
    *,
    share: float,
    deadline: Deadline,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Verdict:
    """Check a checkpoint: its record, parts, and each object's presence and size; and of the bytes
    a random share of the chunks against their digests.

    Args:
        share: 0 reads no data, 1 all of it.
    """
    try:
        manifest = read_manifest(log, commit.seq, deadline)
        checked = 0
        for shard in manifest.shards:
            _check_object(log, shard)
            for index in _sample(len(shard.chunks), share):
                size = _check_chunk(log, shard, index)
                checked += size
                on_bytes(size)
    except (ManifestInvalid, ObjectMissing, ShardError) as error:
        return Verdict(commit=commit, problem=str(error), error_id=error.error_id)
    return Verdict(commit=commit, num_shards=len(tuple(manifest.shards)), checked_bytes=checked)


def _sample(count: int, share: float) -> Iterator[int]:
    if share >= 1:
        yield from range(count)
    elif share > 0:
        yield from sorted(random.sample(range(count), max(1, round(count * share))))


def _check_object(log: CommitLog, shard: ShardEntry) -> None:
    try:
        found = log.store.head(log.keys.full(shard.key), timeout_s=CHUNK_TIMEOUT_S)
    except ObjectMissing as error:
        raise ShardMissing(f"rank {shard.rank}: {shard.key} is gone") from error
    if found.size_bytes != shard.size_bytes:
        raise ShardCorrupt(
            f"rank {shard.rank}: {shard.key} has {found.size_bytes} bytes, not {shard.size_bytes}"
        )


def _check_chunk(log: CommitLog, shard: ShardEntry, index: int) -> int:
    start = index * shard.chunk_bytes
    size = min(shard.chunk_bytes, shard.size_bytes - start)
    target = memoryview(bytearray(size))
    key = log.keys.full(shard.key)
    log.store.read_into(key, offset=start, target=target, timeout_s=CHUNK_TIMEOUT_S)
    if hashlib.sha256(target).hexdigest() != shard.chunks[index]:
        raise ShardCorrupt(
            f"rank {shard.rank}: chunk {index} of {shard.key} differs from its digest",
            hint="`lastgasp run` sets it aside by itself and takes the next older one",
        )
    return size


def parse_share(text: str) -> float:
    """A share such as "5%", "0.05" or "100%".

    Raises:
        UsageError: not a share.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise _no_share(text) from error
    if not 0 < share <= 1:
        raise _no_share(text)
    return share


def _no_share(text: str) -> SupervisorError:
    return UsageError(f"--read-data={text} is not a share", hint='such as "5%" or "100%"')
