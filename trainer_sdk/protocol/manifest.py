"""Part tables and the manifest: which shards a checkpoint consists of.

A *part* is one node's shard table of one step, written once its shards are durable: its vote. The
*manifest* is the complete list, made of a commit's parts. This module checks everything that can be
checked without the store; whether the bytes match their digests is the reader's business.

Keys in here are job keys (see `names`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from trainer_sdk.protocol.errors import ProtocolError, VersionMismatch
from trainer_sdk.protocol.names import (
    DATA_KEY_PATTERN,
    MAX_GENERATION,
    MAX_NODE,
    MAX_RANK,
    MAX_STEP,
    SHA256_PATTERN,
    parse_data_key,
    parse_part_key,
)

PART_FORMAT: Final = 1
MAX_PART_BYTES: Final = 64 * 1024 * 1024
MAX_CHUNKS: Final = 10_000  # Source: S3 User Guide, multipart upload limits: parts 1 to 10,000
MAX_NODES: Final = 256
MAX_SHARDS_PER_PART: Final = 4096
_MAX_INT: Final = 2**63 - 1

Sha256Hex = Annotated[str, msgspec.Meta(pattern=SHA256_PATTERN)]
DataKey = Annotated[str, msgspec.Meta(pattern=DATA_KEY_PATTERN)]
ShardName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")]
LayoutId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}\Z")]
Flag = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z")]
Flags = Annotated[tuple[Flag, ...], msgspec.Meta(max_length=16)]
Seq = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
SizeBytes = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
Nodes = Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
World = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK + 1)]


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's image of one checkpoint, or one of several told apart by `name`.

    `sha256` is the SHA-256 of the concatenated binary SHA-256 of the chunks, which are
    `chunk_bytes` long except the last.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
    name: ShardName
    key: DataKey
    size_bytes: SizeBytes
    sha256: Sha256Hex
    chunk_bytes: SizeBytes
    chunks: Annotated[tuple[Sha256Hex, ...], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS)]


class PartTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node's shard table of one step. `epoch` is the log slot that began the generation."""

    fmt: int
    gen: Generation
    epoch: Seq
    step: Step
    node: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE)]
    nodes: Nodes
    world: World
    layout: LayoutId
    base: Seq | None
    shards: Annotated[
        tuple[ShardEntry, ...], msgspec.Meta(min_length=1, max_length=MAX_SHARDS_PER_PART)
    ]
    flags: Flags = ()

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks this part speaks for."""
        return frozenset(shard.rank for shard in self.shards)


class _Version(msgspec.Struct):
    fmt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The complete list of shards of a committed checkpoint.

    Invariant: every rank of 0..world-1 is in exactly one part, all parts are of one generation,
    step, world and layout, and no two shards share a rank and a name.

    Raises:
        ProtocolError: the parts do not describe one whole checkpoint.
    """

    seq: int
    digest: str  # SHA-256 of the commit record's bytes
    parts: tuple[PartTable, ...]

    def __post_init__(self) -> None:
        problem = find_gap(self.parts)
        if problem:
            raise ProtocolError(f"commit {self.seq}: {problem}")

    @property
    def gen(self) -> int:
        return self.parts[0].gen

    @property
    def epoch(self) -> int:
        return self.parts[0].epoch

    @property
    def step(self) -> int:
        return self.parts[0].step

    @property
    def world(self) -> int:
        return self.parts[0].world

    @property
    def layout(self) -> str:
        return self.parts[0].layout

    @property
    def shards(self) -> Iterator[ShardEntry]:
        """All shards, by node."""
        return (shard for part in self.parts for shard in part.shards)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    def shards_of(self, rank: int) -> tuple[ShardEntry, ...]:
        """The shards of one rank, at least one if the rank is below `world`."""
        return tuple(shard for shard in self.shards if shard.rank == rank)


def shard_digest(chunk_digests: Sequence[bytes]) -> bytes:
    """A shard's digest from the binary SHA-256 of its chunks."""
    return hashlib.sha256(b"".join(chunk_digests)).digest()


def num_chunks(*, size_bytes: int, chunk_bytes: int) -> int:
    """How many chunks a shard of this size has."""
    return -(-size_bytes // chunk_bytes)


def encode_canonical(value: Any) -> bytes:
    """The one encoding of a struct: JSON, keys sorted, no spaces."""
    return msgspec.json.encode(value, order="sorted")


def encode_part(table: PartTable) -> bytes:
    """Encode a part after checking it.

    Raises:
        ProtocolError: the table contradicts itself or is too large.
    """
    check_part(table)
    data = encode_canonical(table)
    if len(data) > MAX_PART_BYTES:
        raise ProtocolError(f"a part of {len(data)} bytes is over the limit of {MAX_PART_BYTES}")
    return data


def decode_part(data: bytes, *, key: str) -> PartTable:
    """Decode and check the bytes stored under a part's job key.

    Raises:
        VersionMismatch: written in a format this version does not know.
        ProtocolError: too large, not a part, at odds with itself or with its key.
    """
    if len(data) > MAX_PART_BYTES:
        raise ProtocolError(f"{key!r}: {len(data)} bytes are over the limit of {MAX_PART_BYTES}")
    try:
        version = msgspec.json.decode(data, type=_Version).fmt
        if version != PART_FORMAT:
            raise VersionMismatch(
                f"{key!r} has part format {version}; this version reads {PART_FORMAT}",
                hint="update lastgasp on this node",
            )
        table = msgspec.json.decode(data, type=PartTable)
    # A nesting bomb ends in RecursionError, bytes that are not UTF-8 in UnicodeDecodeError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{key!r} is not a part: {error}") from error
    name = parse_part_key(key)
    if (name.generation, name.step, name.node) != (table.gen, table.step, table.node):
        raise ProtocolError(f"{key!r} holds the part of another generation, step or node")
    check_part(table)
    return table


def check_part(table: PartTable) -> None:
    """Check what the types cannot express.

    Raises:
        ProtocolError: the table contradicts itself.
    """
    where = f"part of node {table.node}, step {table.step}"
    if table.fmt != PART_FORMAT:
        raise VersionMismatch(f"{where}: part format {table.fmt}, this version has {PART_FORMAT}")
    if table.node >= table.nodes:
        raise ProtocolError(f"{where}: the generation has {table.nodes} nodes")
    seen: set[tuple[int, str]] = set()
    keys: set[str] = set()
    for shard in table.shards:
        if shard.rank >= table.world:
            raise ProtocolError(f"{where}: rank {shard.rank} in a world of {table.world}")
        if (shard.rank, shard.name) in seen or shard.key in keys:
            raise ProtocolError(f"{where}: shard {shard.name!r} of rank {shard.rank} named twice")
        seen.add((shard.rank, shard.name))
        keys.add(shard.key)
        _check_shard(shard, table, where)


def _check_shard(shard: ShardEntry, table: PartTable, where: str) -> None:
    here = f"{where}, shard {shard.name!r} of rank {shard.rank}"
    name = parse_data_key(shard.key)
    if name.rank != shard.rank:
        raise ProtocolError(f"{here}: the key is of rank {name.rank}")
    own, named = (table.gen, table.step), (name.generation, name.step)
    if named > own or (named < own and table.base is None):
        raise ProtocolError(f"{here}: the key is of generation and step {named}, without a base")
    wanted = num_chunks(size_bytes=shard.size_bytes, chunk_bytes=shard.chunk_bytes)
    if wanted != len(shard.chunks):
        raise ProtocolError(f"{here}: {len(shard.chunks)} chunks listed, its size needs {wanted}")
    digest = shard_digest([bytes.fromhex(chunk) for chunk in shard.chunks]).hex()
    if digest != shard.sha256:
        raise ProtocolError(f"{here}: its digest is not that of its chunks")


def find_gap(parts: Sequence[PartTable]) -> str:
    """Say why these parts are not one whole checkpoint; empty if they are."""
    if not parts:
        return "no parts"
    first = parts[0]
    nodes: set[int] = set()
    ranks: set[int] = set()
    for part in parts:
        if (part.gen, part.epoch, part.step, part.nodes, part.world, part.layout) != (
            first.gen,
            first.epoch,
            first.step,
            first.nodes,
            first.world,
            first.layout,
        ):
            return f"the parts of nodes {first.node} and {part.node} are of different checkpoints"
        if part.node in nodes:
            return f"node {part.node} has two parts"
        if part.ranks & ranks:
            return f"ranks {sorted(part.ranks & ranks)[:8]} are in two parts"
        nodes.add(part.node)
        ranks |= part.ranks
    if len({part.base for part in parts if part.base is not None}) > 1:
        return "the parts refer to different bases"
    missing = set(range(first.world)) - ranks
    return f"no shard of ranks {sorted(missing)[:8]}" if missing else ""
