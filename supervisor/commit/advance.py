"""Vote for a step and commit it once every node has. Section 6 of the commit protocol.

A part is a vote: everything it names is durable before it is written. Any node of the generation,
or the next one's claimer, turns a complete set of votes into a commit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from supervisor import failpoints
from supervisor.clock import Deadline
from supervisor.commit import rules
from supervisor.commit.log import CALL_TIMEOUT_S, CommitLog, Tail
from supervisor.commit.reader import load_part, read_all
from supervisor.commit.records import Epoch, PartRef
from supervisor.commit.rules import Retention
from supervisor.errors import (
    DeadlineExceeded,
    LogCorrupt,
    ObjectMissing,
    TransientStoreError,
)
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.manifest import PartTable, encode_part, find_gap
from trainer_sdk.protocol.names import PartName, parse_part_key, part_prefix

DEFAULT_RETENTION: Final = Retention()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """A vote that is in the store."""

    ref: PartRef
    table: PartTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a generation is committed: its newest commit, or what it resumed from."""

    seq: int | None
    step: int
    is_new: bool  # this call appended the commit


def write_part(log: CommitLog, table: PartTable, deadline: Deadline) -> WrittenPart:
    """Write this node's vote. Each attempt takes a new name, so no name has two contents.

    Raises:
        ProtocolError: the table is wrong.
        DeadlineExceeded: no attempt was known to succeed; a vote may be there all the same, which
            harms nothing: what it names is durable.
        StoreError
    """
    data = encode_part(table)
    waits = log.waits(deadline)
    last_error: TransientStoreError | None = None
    while not deadline.is_over:
        key = PartName(
            generation=table.gen, step=table.step, node=table.node, uid=log.new_uid()
        ).key
        try:
            failpoints.hit("part.put.before")
            log.store.put_bytes(log.keys.full(key), data, timeout_s=deadline.sooner(CALL_TIMEOUT_S))
            failpoints.hit("part.put.after")
        except TransientStoreError as error:
            last_error = error
            waits()
            continue
        sha256 = hashlib.sha256(data).hexdigest()
        return WrittenPart(ref=PartRef(key=key, sha256=sha256, size_bytes=len(data)), table=table)
    raise DeadlineExceeded(
        f"step {table.step}: the time for writing the part of node {table.node} is up"
    ) from last_error


def advance(
    log: CommitLog,
    gen: int,
    deadline: Deadline,
    known_part: WrittenPart | None = None,
    *,
    retention: Retention = DEFAULT_RETENTION,
) -> Progress:
    """Commit the newest step of `gen` that every node has voted for, if there is one.

    To be called until one's own vote is covered. Reads no votes but those that count. With
    `known_part` a one-node generation needs no listing.

    Raises:
        Fenced: a newer generation has begun.
        OutcomeUnknown, DeadlineExceeded: call again.
        LogError, StoreError
    """
    tail = _tail_of(log, gen, deadline)
    ballot = _Ballot(
        log=log,
        tail=tail,
        epoch=_epoch_of(log, tail, deadline),
        known_part=known_part,
        deadline=deadline,
    )
    for step, votes in ballot.candidates():
        chosen = ballot.complete_set(votes)
        if chosen is None:
            continue
        make = rules.commit(
            at_step=step,
            parts=tuple(part.ref for part in chosen),
            base=next((p.table.base for p in chosen if p.table.base is not None), None),
            flags=tuple(sorted({flag for part in chosen for flag in part.table.flags})),
            retention=retention,
        )
        done = log.append(make, my_gen=gen, deadline=deadline)
        return Progress(seq=done.state.last_commit, step=done.state.last_step, is_new=done.is_new)
    newest = tail.state.last_commit if tail.state.has_committed else tail.state.resume
    return Progress(seq=newest, step=tail.state.last_step, is_new=False)


def pending_parts(log: CommitLog, tail: Tail, deadline: Deadline) -> frozenset[str]:
    """Job keys of the votes of the tail's generation that no commit covers."""
    found = _list_votes(log, tail, deadline)
    return frozenset(name.key for names in found.values() for name in names)


def _tail_of(log: CommitLog, gen: int, deadline: Deadline) -> Tail:
    waits = log.waits(deadline)
    while True:
        tail = log.check_not_fenced(gen, deadline)
        if tail.state.gen == gen:
            return tail
        waits()  # a stale read: the generation is known to have begun


def _epoch_of(log: CommitLog, tail: Tail, deadline: Deadline) -> Epoch:
    record = log.read(tail.state.epoch or 0, deadline)
    if not isinstance(record.body, Epoch):
        raise LogCorrupt(f"log slot {record.seq} should have begun generation {tail.state.gen}")
    return record.body


def _list_votes(log: CommitLog, tail: Tail, deadline: Deadline) -> dict[int, list[PartName]]:
    state = tail.state
    votes: dict[int, list[PartName]] = {}
    for info in log.store.list_keys(
        log.keys.full(part_prefix(state.gen)),
        timeout_s=deadline.sooner(CALL_TIMEOUT_S),
        start_after=log.keys.full(part_prefix(state.gen, state.last_step)) + "~",
    ):
        try:
            name = parse_part_key(log.keys.relative(info.key))
        except ProtocolError:
            continue  # not a vote; the sweep reports it
        if name.step > state.last_step:
            votes.setdefault(name.step, []).append(name)
    for names in votes.values():
        names.sort(key=lambda name: name.key)
    return votes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ballot:
    """The votes of one generation, as one call of `advance` sees them."""

    log: CommitLog
    tail: Tail
    epoch: Epoch
    known_part: WrittenPart | None
    deadline: Deadline

    def candidates(self) -> list[tuple[int, list[PartName]]]:
        """Steps that may be complete, newest first, with their votes' names in key order."""
        own = self.known_part
        if own and self.epoch.nodes == 1 and self._fits(own.table):
            is_news = own.table.step > self.tail.state.last_step
            return [(own.table.step, [parse_part_key(own.ref.key)])] if is_news else []
        votes = _list_votes(self.log, self.tail, self.deadline)
        return [
            (step, votes[step])
            for step in sorted(votes, reverse=True)
            # Every node has a rank, so fewer nodes than the generation's cannot be complete.
            if len({name.node for name in votes[step]}) >= self.epoch.nodes
        ]

    def complete_set(self, votes: list[PartName]) -> list[WrittenPart] | None:
        """The first fitting part of each node, if together they are the whole checkpoint."""

        def first_fitting(node: int) -> WrittenPart | None:
            for name in votes:
                if name.node == node:
                    part = self._load(name)
                    if part and self._fits(part.table):
                        return part
            return None

        found = read_all(first_fitting, sorted({name.node for name in votes}))
        parts = [part for part in found if part]
        return None if find_gap([part.table for part in parts]) else parts

    def _load(self, name: PartName) -> WrittenPart | None:
        if self.known_part and self.known_part.ref.key == name.key:
            return self.known_part
        try:
            data, table = load_part(self.log, name.key, self.deadline)
        except (ObjectMissing, ProtocolError):
            return None  # swept meanwhile, or not a vote; another part of the node may be
        sha256 = hashlib.sha256(data).hexdigest()
        ref = PartRef(key=name.key, sha256=sha256, size_bytes=len(data))
        return WrittenPart(ref=ref, table=table)

    def _fits(self, table: PartTable) -> bool:
        epoch = self.epoch
        return (table.gen, table.epoch, table.nodes, table.world, table.layout) == (
            self.tail.state.gen,
            self.tail.state.epoch,
            epoch.nodes,
            epoch.world,
            epoch.layout,
        )
