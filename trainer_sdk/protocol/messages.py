"""Messages between a rank and its supervisor, over one unix stream socket.

A message is a little-endian u32 length and that many bytes of JSON. File descriptors travel as
SCM_RIGHTS with the first bytes of the message that names them. A peer that sends anything else is
dropped. Ranks and the command line speak over the same socket: what a peer may say after its first
message is decided by that first message (`Hello` or `Control`).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from trainer_sdk.protocol.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 16
MAX_DEADLINE_S = 30 * 86400.0

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
SlotIndex = Annotated[int, msgspec.Meta(ge=0, lt=8)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


# ---------------------------------------------------------------- rank -> supervisor


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of a rank; on a reconnect it hands back its control page and slots.

    `incarnation` is drawn once per life of the process (and again on any rewind inside it); rank
    0's is the group of COMMIT_PROTOCOL section 2. `generation` is 0 until a Welcome told another.
    Descriptors: none when new; on a reconnect the control page, then `num_slots` slots.
    """

    protocol: int
    launch: Annotated[str, msgspec.Meta(max_length=64)]
    rank: Rank
    local_rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    pid: Annotated[int, msgspec.Meta(ge=1)]
    incarnation: Id
    generation: Generation = 0
    restart_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_slots: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    slot_bytes: Size = 0
    has_restored: bool = False


class Planned(_Message, frozen=True, tag="planned"):
    """The image of this rank needs `slot_bytes`; answered by Slots. Sent again when it grows."""

    slot_bytes: Size
    plan: Annotated[str, msgspec.Meta(max_length=64)]


class Sealed(_Message, frozen=True, tag="sealed"):
    """A slot holds the whole image of this rank at `step`; its commit word is written.

    `replicas` is a digest of a sample of every tensor that other ranks stored for this one, and of
    their names: equal on all ranks, or the checkpoint is not what it claims and is dropped.
    """

    slot: SlotIndex
    step: Step
    image_bytes: Size
    staged_s: float
    blocked_s: float
    replicas: Annotated[str, msgspec.Meta(max_length=64)] = ""
    is_final: bool = False


class Unsealed(_Message, frozen=True, tag="unsealed"):
    """A save that was asked for did not happen on this rank; training goes on."""

    slot: SlotIndex
    step: Step
    reason: Text


class Boundary(_Message, frozen=True, tag="boundary"):
    """The rank stands at a step boundary at or past `hold_at` and waits for an Order."""

    step: Step


class Restored(_Message, frozen=True, tag="restored"):
    """The rank's state is back, or it starts fresh; training begins at `step`.

    `receipt` is JSON, for people and for status.
    """

    step: Step
    seconds: float
    receipt: Annotated[str, msgspec.Meta(max_length=262144)]


class RestoreFailed(_Message, frozen=True, tag="restore_failed"):
    """The rank cannot take this checkpoint, or uses the SDK in a way that cannot work.

    `is_checkpoint_bad`: the fault is in the checkpoint itself, so an older one may do; otherwise it
    is the script's, and no other checkpoint helps.
    """

    reason: Text
    is_checkpoint_bad: bool


class SaveRequested(_Message, frozen=True, tag="save_requested"):
    """Training code asks for a checkpoint at the next boundary that all ranks can reach."""


class Finished(_Message, frozen=True, tag="finished"):
    """Training ended by itself at `step`; its final image was sealed before this message."""

    step: Step


class Note(_Message, frozen=True, tag="note"):
    """Something weaker than usual on this rank, for the supervisor's log and status."""

    event: Annotated[str, msgspec.Meta(max_length=64)]
    text: Text


RankMessage = (
    Hello
    | Planned
    | Sealed
    | Unsealed
    | Boundary
    | Restored
    | RestoreFailed
    | SaveRequested
    | Finished
    | Note
)

# ---------------------------------------------------------------- supervisor -> rank


class ShardRef(_Message, frozen=True, tag="shard"):
    """One image of the checkpoint to restore; `rank` is the saving rank."""

    rank: Rank
    name: Annotated[str, msgspec.Meta(max_length=64)]
    size_bytes: Size


class Resume(_Message, frozen=True, tag="resume"):
    """What this generation restores: exactly this, on every rank."""

    generation: Generation
    step: Step
    world_size: int


class Welcome(_Message, frozen=True, tag="welcome"):
    """The generation is claimed. Descriptors: the control page, unless the rank handed its own."""

    protocol: int
    job_id: str
    generation: Generation
    epoch: int
    resume: Resume | None
    num_slots: Annotated[int, msgspec.Meta(ge=2, le=8)]
    schedule: Literal["boundary", "overlapped"]
    hold_timeout_s: float
    plan_timeout_s: float


class Slots(_Message, frozen=True, tag="slots"):
    """The rank's image slots, `slot_bytes` each; descriptors in slot order.

    On disk they are files, to be written through small aligned buffers and not mapped.
    """

    slot_bytes: Size
    num_slots: Annotated[int, msgspec.Meta(ge=2, le=8)]
    staging: Literal["memory", "disk"]


class Images(_Message, frozen=True, tag="images"):
    """Every byte of these images was verified; one read-only descriptor a shard, in order.

    A checkpoint of many shards comes in several of these; `is_last` ends them.
    """

    source: Literal["memory", "spool", "store"]
    shards: tuple[ShardRef, ...]
    is_last: bool


class Order(_Message, frozen=True, tag="order"):
    """The answer to Boundary. `proceed`: train on and come back at boundary `step`.
    `stage`: stage into `slot`, seal, and wait for the next Order. `exit`: leave the loop through
    Preempted. `resume`: the notice was withdrawn, train on."""

    action: Literal["proceed", "stage", "exit", "resume"]
    step: Step
    slot: SlotIndex = 0


class Committed(_Message, frozen=True, tag="committed"):
    """This checkpoint is restorable from the store."""

    generation: Generation
    step: Step


class FinishRecorded(_Message, frozen=True, tag="finish_recorded"):
    """The job's end is durable; the rank may exit."""

    is_durable: bool
    reason: str = ""


class Replan(_Message, frozen=True, tag="replan"):
    """Replicated tensors turned out to differ between ranks: prove equality anew."""

    reason: Text


class Rejected(_Message, frozen=True, tag="rejected"):
    """This rank may not take part; no reconnect helps. `error_id` as in docs/errors.md."""

    error_id: str
    reason: Text


SupervisorMessage = (
    Welcome | Slots | Images | Order | Committed | FinishRecorded | Replan | Rejected
)

# ---------------------------------------------------------------- command line <-> supervisor


class Control(_Message, frozen=True, tag="control"):
    """The command line asks the running supervisor for something; answered by one Reply or,
    with `follow`, by several, the last one with `is_last`."""

    protocol: int
    verb: Literal["status", "save", "notify", "withdraw", "drill", "stop"]
    reason: Text = ""
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)] | None = None
    follow: bool = False


class Reply(_Message, frozen=True, tag="reply"):
    """`body` is one JSON document."""

    is_ok: bool
    body: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
    is_last: bool = True


ClientMessage = RankMessage | Control

_T = TypeVar("_T")

_encoder = msgspec.json.Encoder()
_client_decoder = msgspec.json.Decoder(ClientMessage)
_supervisor_decoder = msgspec.json.Decoder(SupervisorMessage | Reply)


def encode(message: ClientMessage | SupervisorMessage | Reply) -> bytes:
    """The body of a frame, without its length.

    Raises:
        ProtocolError: the message is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} message of {len(body)} bytes is over the limit of "
            f"{MAX_MESSAGE_BYTES}"
        )
    return body


def decode_from_client(body: bytes) -> ClientMessage:
    """What a rank or the command line said.

    Raises:
        ProtocolError: not one of the known messages, or a value out of its bounds.
    """
    return _decode(_client_decoder, body)


def decode_from_supervisor(body: bytes) -> SupervisorMessage | Reply:
    """What the supervisor said.

    Raises:
        ProtocolError: not one of the known messages, or a value out of its bounds.
    """
    message: SupervisorMessage | Reply = _decode(_supervisor_decoder, body)
    return message


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL_VERSION}: {error}") from error
