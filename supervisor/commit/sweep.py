"""Retire old commits and delete what nothing refers to. Section 7 of the commit protocol.

Garbage once is garbage for ever, so a sweep works on the log as it was `grace_s` ago: deleting late
harms nothing, and readers that began within the grace find everything. Any number of sweeps may run
at once. Unfinished multipart uploads are not seen here; a lifecycle rule of the bucket ends them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from supervisor import failpoints
from supervisor.clock import Deadline
from supervisor.commit import rules
from supervisor.commit.advance import DEFAULT_RETENTION
from supervisor.commit.log import CALL_TIMEOUT_S, CommitLog
from supervisor.commit.reader import manifest_of
from supervisor.commit.records import Commit, LogState, Record, Retire
from supervisor.commit.rules import Retention
from supervisor.errors import DeadlineExceeded, LogCorrupt, ObjectMissing
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.names import (
    DATA_PREFIX,
    PART_PREFIX,
    parse_data_key,
    parse_part_key,
)

DEFAULT_GRACE_S: Final = 24 * 3600.0
DEFAULT_CAP: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep did, or would do if `dry_run`. Keys are job keys."""

    dry_run: bool
    snapshot_seq: int = 0  # the slot whose state decided; 0: the log is younger than the grace
    garbage: tuple[str, ...] = ()  # deleted, or to be deleted
    garbage_bytes: int = 0
    unknown: tuple[str, ...] = ()  # names that do not parse; never deleted
    num_kept: int = 0
    is_capped: bool = False  # there may be more; run again


def retire(
    log: CommitLog,
    commits: Collection[int] | None,
    deadline: Deadline,
    *,
    retention: Retention = DEFAULT_RETENTION,
    by_operator: bool = False,
) -> tuple[int, ...]:
    """Let go of commits (None: all that retention lets go); returns those retired by this call.

    Raises:
        AppendRefused: one is in use, pinned, or among the newest good ones.
        LogError, StoreError
    """
    failpoints.hit("retire.append.before")
    make = rules.retire(commits, retention=retention, by_operator=by_operator)
    done = log.append(make, deadline=deadline)
    failpoints.hit("retire.append.after")
    body = done.record.body if done.record else None
    return body.commits if isinstance(body, Retire) else ()


def sweep(
    log: CommitLog,
    deadline: Deadline,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    dry_run: bool = True,
    cap: int = DEFAULT_CAP,
) -> SweepReport:
    """Delete what no live commit refers to and no generation can commit any more.

    Raises:
        ManifestInvalid: a part of a live commit cannot be read; nothing was deleted.
        DeadlineExceeded: deletions so far stand; run again.
        LogError, StoreError
    """
    report = SweepReport(dry_run=dry_run)
    snapshot = _find_snapshot(log, grace_s, deadline)
    if snapshot is not None:
        report = _sort_out(log, snapshot, deadline, report=report, cap=cap)
    if not dry_run:
        _delete(log, report.garbage, deadline)
    return report


def _sort_out(
    log: CommitLog, snapshot: Record, deadline: Deadline, *, report: SweepReport, cap: int
) -> SweepReport:
    """Tell garbage from what is kept, by the state of the snapshot."""
    live = _live_keys(log, snapshot.state, deadline)
    log.store.settle_log(timeout_s=deadline.sooner(CALL_TIMEOUT_S))  # rule R5: before a delete
    garbage: list[str] = []
    unknown: list[str] = []
    num_kept = garbage_bytes = 0
    for key, size_bytes in _objects(log, deadline):
        place = _place(key)
        if place is None:
            unknown.append(key)
        elif key in live or place > (snapshot.state.gen, snapshot.state.last_step):
            num_kept += 1
        else:
            garbage.append(key)
            garbage_bytes += size_bytes
        if len(garbage) >= cap:
            break
    return replace(
        report,
        snapshot_seq=snapshot.seq,
        garbage=tuple(garbage),
        garbage_bytes=garbage_bytes,
        unknown=tuple(unknown),
        num_kept=num_kept,
        is_capped=len(garbage) >= cap,
    )


def _find_snapshot(log: CommitLog, grace_s: float, deadline: Deadline) -> Record | None:
    """The newest slot that is at least `grace_s` old by the store's clock.

    The time is asked for before the slots' ages, which makes them look younger, never older. A
    slot found by bisection may be an older one than the newest: any old state is safe.
    """
    if grace_s < 0:
        raise ValueError(f"grace {grace_s} s is negative")
    last = log.tail(deadline).seq
    newest_at = log.store.server_time(timeout_s=_timeout(deadline)) - grace_s
    low, high = 0, last + 1
    while high - low > 1:
        middle = (low + high) // 2
        info = log.store.head(log.keys.log(middle), timeout_s=_timeout(deadline))
        if info.modified_at <= newest_at:
            low = middle
        else:
            high = middle
    return log.read(low, deadline) if low else None


def _live_keys(log: CommitLog, state: LogState, deadline: Deadline) -> frozenset[str]:
    """Every key that a live commit refers to; one that cannot be read ends the sweep."""
    keys: set[str] = set()
    for commit in state.live:
        try:
            record = log.read(commit.seq, deadline)
        except ObjectMissing as error:
            raise LogCorrupt(f"log slot {commit.seq} is gone") from error
        manifest = manifest_of(log, record, deadline)
        keys.update(shard.key for shard in manifest.shards)
        if isinstance(record.body, Commit):
            keys.update(ref.key for ref in record.body.parts)
    return frozenset(keys)


def _objects(log: CommitLog, deadline: Deadline) -> Iterator[tuple[str, int]]:
    for prefix in (DATA_PREFIX, PART_PREFIX):
        listing = log.store.list_keys(log.keys.full(prefix), timeout_s=_timeout(deadline))
        for info in listing:
            yield log.keys.relative(info.key), info.size_bytes


def _place(key: str) -> tuple[int, int] | None:
    try:
        name = parse_data_key(key) if key.startswith(DATA_PREFIX) else parse_part_key(key)
    except ProtocolError:
        return None
    return (name.generation, name.step)


def _delete(log: CommitLog, keys: Collection[str], deadline: Deadline) -> None:
    for key in keys:
        failpoints.hit("sweep.delete.before")
        log.store.delete(log.keys.full(key), timeout_s=_timeout(deadline))
        failpoints.hit("sweep.delete.after")


def _timeout(deadline: Deadline) -> float:
    if deadline.is_over:
        raise DeadlineExceeded("the time for the sweep is up; it may be run again")
    return deadline.sooner(CALL_TIMEOUT_S)
