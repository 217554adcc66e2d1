"""Claim a generation for a process group. Section 5 of the commit protocol.

Only node 0 claims; it hands (gen, epoch, resume, digest) to the other nodes, which `join`. The
claim names the one commit that every rank restores; nobody looks for "the newest" again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from supervisor.clock import Deadline
from supervisor.commit import rules
from supervisor.commit.advance import DEFAULT_RETENTION, advance, pending_parts
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import manifest_of
from supervisor.commit.records import Epoch, LocalStep, Record
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.errors import (
    AppendRefused,
    DeadlineExceeded,
    Fenced,
    LogCorrupt,
    ManifestInvalid,
    ObjectMissing,
    PartMissing,
    TransientStoreError,
)
from trainer_sdk.protocol.manifest import Manifest

MISSING_GRACE_S: Final = 120.0  # Source: nfs(5), acdirmax: a name may stay hidden for 60 s
# A commit is only given up for good when it reads wrong so many times, a moment apart.
INVALID_READS: Final = 3
_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A generation and what its ranks restore: `local` if it is there, else `resume`, else nothing.

    `adopted`: this very group had claimed it before, an earlier self of this supervisor.
    """

    gen: int
    epoch: int
    resume_seq: int | None
    resume: Manifest | None
    local: LocalStep | None
    adopted: bool
    nodes: int
    world: int
    layout: str

    @property
    def resume_digest(self) -> str | None:
        """SHA-256 of the commit record: handed to the other nodes, who compare it."""
        return self.resume.digest if self.resume else None


def claim(
    log: CommitLog,
    request: ClaimRequest,
    deadline: Deadline,
    *,
    retention: Retention = DEFAULT_RETENTION,
) -> Claim:
    """Begin a generation (or adopt the one this group began) and read what to resume from.

    Raises:
        Fenced: this group, launch or round was superseded.
        JobFinished, NoCheckpointFound, NoGoodCheckpoint: see `rules.claim`.
        ManifestInvalid: the commit to resume from cannot be read. It is marked bad now: end this
            group, the next round claims an older one.
        OutcomeUnknown, DeadlineExceeded: claim again with the same request.
        LogError, StoreError
    """
    _help_last_group(log, request, deadline, retention)
    done = log.append(rules.claim(request), deadline=deadline)
    record = done.record or log.read(done.seq, deadline)
    return _load_claim(log, record, deadline, adopted=not done.is_new)


def join_claim(log: CommitLog, *, gen: int, epoch: int, deadline: Deadline) -> Claim:
    """What node 0 claimed, read by another node of the group.

    Raises:
        LogCorrupt: slot `epoch` did not begin generation `gen`.
        ManifestInvalid: as for `claim`.
        DeadlineExceeded: the slot did not become visible.
        LogError, StoreError
    """
    waits = log.waits(deadline)
    while True:
        try:
            record = log.join(epoch, deadline)
            break
        except ObjectMissing as error:
            if deadline.is_over:
                raise DeadlineExceeded(f"log slot {epoch} is not visible yet") from error
            waits()
    if record.gen != gen:
        raise LogCorrupt(f"log slot {epoch} is of generation {record.gen}, not {gen}")
    return _load_claim(log, record, deadline, adopted=True)


def _load_claim(log: CommitLog, record: Record, deadline: Deadline, *, adopted: bool) -> Claim:
    body = record.body
    if not isinstance(body, Epoch):
        raise LogCorrupt(f"log slot {record.seq} should have begun generation {record.gen}")
    resume = None
    if body.resume is not None:
        resume = _read_resume(log, record.gen, body.resume, deadline)
    return Claim(
        gen=record.gen,
        epoch=record.seq,
        resume_seq=body.resume,
        resume=resume,
        local=body.local,
        adopted=adopted,
        nodes=body.nodes,
        world=body.world,
        layout=body.layout,
    )


def _help_last_group(
    log: CommitLog, request: ClaimRequest, deadline: Deadline, retention: Retention
) -> None:
    """Commit what the last group had fully voted, so that its work is not lost."""
    tail = log.tail(deadline)
    token = tail.state.token
    if token is None or token.group == request.group or tail.state.finished is not None:
        return
    _advance_for_others(log, tail.state.gen, deadline, retention)
    grace = Deadline.after(log.clock, deadline.sooner(request.drain_grace_s))
    seen = pending_parts(log, log.tail(deadline), deadline)
    while seen and not grace.is_over:
        log.clock.sleep(grace.sooner(_POLL_S))
        now = pending_parts(log, log.tail(deadline), deadline)
        if now == seen:
            break
        seen = now
        _advance_for_others(log, tail.state.gen, deadline, retention)


def _advance_for_others(log: CommitLog, gen: int, deadline: Deadline, retention: Retention) -> None:
    try:
        advance(log, gen, deadline, retention=retention)
    except (Fenced, AppendRefused):
        return  # someone claims at the same time, or the votes cannot count: the claim goes on


def _read_resume(log: CommitLog, gen: int, seq: int, deadline: Deadline) -> Manifest:
    patience = Deadline.after(log.clock, deadline.sooner(MISSING_GRACE_S))
    waits = log.waits(patience)
    problem: PartMissing | ManifestInvalid | ObjectMissing
    num_invalid = 0
    while True:
        try:
            return manifest_of(log, log.read(seq, deadline), deadline)
        except TransientStoreError:  # says nothing about the commit
            if patience.is_over:
                raise
        except (PartMissing, ObjectMissing) as error:
            problem = error
            if patience.is_over:
                break
        except ManifestInvalid as error:
            problem = error
            num_invalid += 1
            if num_invalid >= INVALID_READS or patience.is_over:
                break  # it is there, and says the same again: one reply may have come wrong
        waits()
    if deadline.is_over:
        raise DeadlineExceeded(
            f"commit {seq} could not be read in time: {problem.message}"
        ) from problem
    mark_resume_bad(log, gen=gen, seq=seq, why=problem.message, deadline=deadline)
    raise ManifestInvalid(
        f"commit {seq} cannot be resumed from: {problem.message}",
        hint="it is marked bad; start again to resume from an older one",
    ) from problem


def mark_resume_bad(log: CommitLog, *, gen: int, seq: int, why: str, deadline: Deadline) -> None:
    """Note that the commit this generation should restore is broken; the group must end then.

    Raises:
        Fenced: a newer generation has begun and decides for itself.
        LogError, StoreError
    """
    make = rules.poison(seq, why=why, who=f"restore of generation {gen}")
    log.append(make, my_gen=gen, deadline=deadline)
