"""Records of the commit log and the state they add up to. Pure: no clock, file, socket or thread.

A record is canonical JSON, at most 64 KiB, built on one exact predecessor, and carries the state
after it. `step` computes that state; a reader that holds slot n checks slot n+1 with
`check_successor` and stops at the first doubt.

`finished`: a FINISH record makes `state.finished` its step. From then on no COMMIT of a later step
and no EPOCH follows, except an EPOCH whose body says `reopen`, which clears it. So "finished" is an
ordinary record: terminal, durable, and undone only on purpose.

Three fields of the state go beyond the list in the protocol, because a rule that decides inside
`make` sees nothing but the state: `token.attempt`, `fail_gen` (the generation whose FAIL was
counted) and `finished`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace as struct_replace

from supervisor.errors import LogCorrupt, LogTooNew
from trainer_sdk.protocol.manifest import (
    MAX_NODES,
    Flags,
    Generation,
    LayoutId,
    Nodes,
    Seq,
    Sha256Hex,
    SizeBytes,
    Step,
    World,
    encode_canonical,
)
from trainer_sdk.protocol.names import PART_KEY_PATTERN, UID_PATTERN

RECORD_FORMAT: Final = 1
MAX_RECORD_BYTES: Final = 64 * 1024
MAX_REMEMBERED: Final = 64  # launches and groups kept in the state

LaunchId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}\Z")]
GroupId = Annotated[str, msgspec.Meta(pattern=UID_PATTERN)]
Uid = Annotated[str, msgspec.Meta(pattern=UID_PATTERN)]
PinName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
PartKey = Annotated[str, msgspec.Meta(pattern=PART_KEY_PATTERN)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seqs = Annotated[tuple[Seq, ...], msgspec.Meta(max_length=4096)]


class RecordKind(StrEnum):
    """What a record does."""

    EPOCH = "EPOCH"
    COMMIT = "COMMIT"
    RETIRE = "RETIRE"
    POISON = "POISON"
    UNPOISON = "UNPOISON"
    PIN = "PIN"
    UNPIN = "UNPIN"
    FAIL = "FAIL"
    FINISH = "FINISH"


class LocalStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step whose images the nodes of a group still hold.

    `group` is the process group that staged it: the number of a generation alone does not tell one
    life of a job from another under the same name.
    """

    gen: Generation
    step: Step
    group: GroupId


class Epoch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begins a generation and fences every older one."""

    launch: LaunchId
    round: Count
    group: GroupId
    attempt: Count | None = None
    nodes: Nodes
    world: World
    layout: LayoutId
    resume: Seq | None
    skip: Seqs = ()
    local: LocalStep | None = None
    reopen: bool = False
    why: Text = ""


class PartRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part as a commit names it."""

    key: PartKey
    sha256: Sha256Hex
    size_bytes: SizeBytes


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Makes a checkpoint visible."""

    step: Step
    parts: Annotated[tuple[PartRef, ...], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    base: Seq | None
    retire: Seqs = ()
    flags: Flags = ()


class Retire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lets a sweep delete these commits; permanent."""

    commits: Annotated[tuple[Seq, ...], msgspec.Meta(min_length=1, max_length=4096)]


class Poison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Marks a commit as bad: it is not resumed from."""

    commit: Seq
    why: Text = ""
    who: Text = ""


class Unpoison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes the mark back."""

    commit: Seq
    why: Text = ""
    who: Text = ""


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps a commit from being retired."""

    name: PinName
    commit: Seq


class Unpin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends a pin."""

    name: PinName
    commit: Seq


class Fail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainers of this generation ended by themselves before its first commit."""

    why: Text = ""
    node: Count


class Finish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job is done; `step` is where it ended."""

    step: Step


Body = Epoch | Commit | Retire | Poison | Unpoison | Pin | Unpin | Fail | Finish

_BODY_TYPES: Final[dict[RecordKind, type[Body]]] = {
    RecordKind.EPOCH: Epoch,
    RecordKind.COMMIT: Commit,
    RecordKind.RETIRE: Retire,
    RecordKind.POISON: Poison,
    RecordKind.UNPOISON: Unpoison,
    RecordKind.PIN: Pin,
    RecordKind.UNPIN: Unpin,
    RecordKind.FAIL: Fail,
    RecordKind.FINISH: Finish,
}
_KINDS: Final = {body: kind for kind, body in _BODY_TYPES.items()}


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who owns a generation."""

    launch: LaunchId
    round: Count
    group: GroupId
    attempt: Count | None = None


class LiveCommit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commit that is not retired."""

    seq: Seq
    gen: Generation
    step: Step

    @property
    def place(self) -> tuple[int, int]:
        """(generation, step), the order of checkpoints."""
        return (self.gen, self.step)


class PinEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pin in force."""

    name: PinName
    commit: Seq


class LogState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the whole log up to one slot amounts to. `live`, `bad` and `pins` are sorted."""

    gen: Annotated[int, msgspec.Meta(ge=0)] = 0
    epoch: Seq | None = None
    token: Token | None = None
    launches: Annotated[tuple[LaunchId, ...], msgspec.Meta(max_length=MAX_REMEMBERED)] = ()
    groups: Annotated[tuple[GroupId, ...], msgspec.Meta(max_length=MAX_REMEMBERED)] = ()
    resume: Seq | None = None
    anchor: Seq | None = None
    last_commit: Seq | None = None
    last_step: Count = 0
    live: tuple[LiveCommit, ...] = ()
    bad: tuple[Seq, ...] = ()
    pins: tuple[PinEntry, ...] = ()
    fails: Count = 0
    fail_gen: Count = 0
    finished: Step | None = None
    local: LocalStep | None = None

    @property
    def good(self) -> tuple[LiveCommit, ...]:
        """The live commits that are not bad, oldest first."""
        return tuple(commit for commit in self.live if commit.seq not in self.bad)

    @property
    def live_seqs(self) -> frozenset[int]:
        return frozenset(commit.seq for commit in self.live)

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(pin.commit for pin in self.pins)

    @property
    def has_committed(self) -> bool:
        """Whether the present generation has a commit."""
        return self.last_commit is not None and self.last_commit > (self.epoch or 0)

    def find(self, seq: int | None) -> LiveCommit | None:
        """The live commit in this slot, if there is one."""
        return next((commit for commit in self.live if commit.seq == seq), None)


START: Final = LogState()


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fmt: int
    seq: Seq
    uid: Uid
    kind: RecordKind
    gen: Generation
    prev: Sha256Hex | None
    body: msgspec.Raw
    state: LogState
    sig: str | None = None


class _Version(msgspec.Struct):
    fmt: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One log record; `data` are its exact bytes, whose SHA-256 the next record names."""

    seq: int
    uid: str
    gen: int
    prev: str | None
    body: Body
    state: LogState
    data: bytes = b""

    @property
    def kind(self) -> RecordKind:
        return _KINDS[type(self.body)]

    @property
    def digest(self) -> str:
        """SHA-256 of the record's bytes, hex."""
        return hashlib.sha256(self.data).hexdigest()


def build_record(previous: Record | None, body: Body, *, uid: str) -> Record:
    """The record that puts `body` on top of `previous` (None: the log is empty).

    Raises:
        LogCorrupt: the body may not follow that state.
        ValueError: the record is larger than a slot may be.
    """
    seq = previous.seq + 1 if previous else 1
    before = previous.state if previous else START
    state = step(before, body, seq=seq)
    record = Record(
        seq=seq,
        uid=uid,
        gen=state.gen,
        prev=previous.digest if previous else None,
        body=body,
        state=state,
    )
    data = encode_record(record)
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes does not fit a log slot")
    return replace(record, data=data)


def encode_record(record: Record) -> bytes:
    """The canonical bytes of a record."""
    envelope = _Envelope(
        fmt=RECORD_FORMAT,
        seq=record.seq,
        uid=record.uid,
        kind=record.kind,
        gen=record.gen,
        prev=record.prev,
        body=msgspec.Raw(encode_canonical(record.body)),
        state=record.state,
    )
    return encode_canonical(envelope)


def decode_record(data: bytes, *, seq: int) -> Record:
    """Read the bytes of slot `seq`.

    Raises:
        LogTooNew: a format or kind of a newer version.
        LogCorrupt: not a record of this slot in its canonical form.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise LogCorrupt(f"log slot {seq}: {len(data)} bytes are over the limit")
    try:
        version = msgspec.json.decode(data, type=_Version)
        if version.fmt != RECORD_FORMAT or version.kind not in _BODY_TYPES:
            raise LogTooNew(
                f"log slot {seq} has format {version.fmt}, kind {version.kind!r}; "
                f"this version reads format {RECORD_FORMAT}",
                hint="a newer lastgasp wrote to this job; update this node",
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = msgspec.json.decode(envelope.body, type=_BODY_TYPES[envelope.kind])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LogCorrupt(f"log slot {seq} is not a record: {error}") from error
    record = Record(
        seq=envelope.seq,
        uid=envelope.uid,
        gen=envelope.gen,
        prev=envelope.prev,
        body=body,
        state=envelope.state,
        data=data,
    )
    if record.seq != seq or record.gen != record.state.gen:
        raise LogCorrupt(f"log slot {seq} holds a record of slot {record.seq}")
    if envelope.sig is None and encode_record(record) != data:
        raise LogCorrupt(f"log slot {seq} is not in the canonical form")
    return record


def check_successor(previous: Record | None, record: Record) -> None:
    """Check a record against its predecessor (None: the empty log).

    Raises:
        LogCorrupt: it does not follow.
    """
    seq = previous.seq + 1 if previous else 1
    if record.seq != seq:
        raise LogCorrupt(f"log slot {record.seq} read where {seq} was due")
    if record.prev != (previous.digest if previous else None):
        raise LogCorrupt(
            f"log slot {seq} names another predecessor",
            hint="the log was changed or restored from a copy; do not run until that is understood",
        )
    expected = step(previous.state if previous else START, record.body, seq=seq)
    if record.state != expected:
        raise LogCorrupt(f"log slot {seq} carries a state that does not follow from its body")


def step(state: LogState, body: Body, *, seq: int) -> LogState:
    """The state after a record with this body in slot `seq`.

    Raises:
        LogCorrupt: no correct writer puts this body on this state.
    """
    match body:
        case Epoch():
            return _step_epoch(state, body, seq)
        case Commit():
            return _step_commit(state, body, seq)
        case Retire():
            return _without(state, body.commits, seq)
        case Poison():
            _require(body.commit in state.live_seqs, seq, "poisons what is not live")
            return struct_replace(state, bad=_sorted({*state.bad, body.commit}))
        case Unpoison():
            return struct_replace(state, bad=_sorted(set(state.bad) - {body.commit}))
        case Pin():
            _require(body.commit in state.live_seqs, seq, "pins what is not live")
            others = [pin for pin in state.pins if pin.name != body.name]
            pins = [*others, PinEntry(name=body.name, commit=body.commit)]
            return struct_replace(state, pins=tuple(sorted(pins, key=lambda pin: pin.name)))
        case Unpin():
            rest = tuple(pin for pin in state.pins if pin.name != body.name)
            return struct_replace(state, pins=rest)
        case Fail():
            _require(state.gen > state.fail_gen, seq, "counts a generation's failure twice")
            _require(not state.has_committed, seq, "fails a generation that has committed")
            return struct_replace(state, fails=state.fails + 1, fail_gen=state.gen)
        case Finish():
            _require(state.gen > 0, seq, "finishes a job that never began")
            _require(body.step >= state.last_step, seq, "finishes before the last commit")
            return struct_replace(state, finished=body.step)


def _step_epoch(state: LogState, body: Epoch, seq: int) -> LogState:
    resume = state.find(body.resume)
    _require(body.resume is None or resume is not None, seq, "resumes from what is not live")
    _require(body.resume not in {*state.bad, *body.skip}, seq, "resumes from a bad commit")
    _require(set(body.skip) <= state.live_seqs, seq, "skips what is not live")
    _require(state.finished is None or body.reopen, seq, "runs a finished job")
    token = Token(launch=body.launch, round=body.round, group=body.group, attempt=body.attempt)
    return struct_replace(
        state,
        gen=state.gen + 1,
        epoch=seq,
        token=token,
        launches=_remember(state.launches, body.launch),
        groups=_remember(state.groups, body.group),
        resume=body.resume,
        anchor=body.resume,
        last_step=resume.step if resume else 0,
        bad=_sorted({*state.bad, *body.skip}),
        fails=0 if body.skip else state.fails,
        finished=None,
        local=body.local,
    )


def _step_commit(state: LogState, body: Commit, seq: int) -> LogState:
    _require(state.gen > 0, seq, "commits before any generation")
    _require(body.step > state.last_step, seq, "commits a step that is not newer")
    _require(body.base is None or body.base in state.live_seqs, seq, "has a retired base")
    _require(state.finished is None or body.step <= state.finished, seq, "follows the end")
    own = LiveCommit(seq=seq, gen=state.gen, step=body.step)
    grown = struct_replace(
        state,
        live=(*state.live, own),
        last_commit=seq,
        last_step=body.step,
        anchor=seq if state.anchor is None else state.anchor,
        fails=0,
    )
    return _without(grown, body.retire, seq) if body.retire else grown


def _without(state: LogState, commits: tuple[int, ...], seq: int) -> LogState:
    gone = set(commits)
    kept = {state.resume, state.anchor, state.last_commit, *state.pinned}
    _require(not gone & kept, seq, "retires a commit that is in use")
    _require(gone <= state.live_seqs, seq, "retires what is not live")
    return struct_replace(
        state,
        live=tuple(commit for commit in state.live if commit.seq not in gone),
        bad=tuple(bad for bad in state.bad if bad not in gone),
    )


def _remember(known: tuple[str, ...], new: str) -> tuple[str, ...]:
    return (*(item for item in known if item != new), new)[-MAX_REMEMBERED:]


def _sorted(seqs: set[int]) -> tuple[int, ...]:
    return tuple(sorted(seqs))


def _require(holds: bool, seq: int, what: str) -> None:
    if not holds:
        raise LogCorrupt(f"log slot {seq} {what}")
