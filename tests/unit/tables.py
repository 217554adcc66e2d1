"""Builders of shards and part tables for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from trainer_sdk.protocol.manifest import PART_FORMAT, PartTable, ShardEntry, shard_digest
from trainer_sdk.protocol.names import DataName

_number = 0


def new_uid() -> str:
    """A uid that no other call gave."""
    global _number
    _number += 1
    return hashlib.md5(str(_number).encode()).hexdigest()


def a_shard(
    *,
    gen: int = 1,
    step: int = 1,
    rank: int = 0,
    name: str = "state",
    content: bytes = b"0123456789",
    chunk_bytes: int = 4,
    **changes: Any,
) -> ShardEntry:
    """A shard that is in order, but for the changes."""
    pieces = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    digests = [hashlib.sha256(piece).digest() for piece in pieces]
    fields = {
        "rank": rank,
        "name": name,
        "key": DataName(generation=gen, step=step, rank=rank, uid=new_uid()).key,
        "size_bytes": len(content),
        "sha256": shard_digest(digests).hex(),
        "chunk_bytes": chunk_bytes,
        "chunks": tuple(digest.hex() for digest in digests),
    }
    return ShardEntry(**(fields | changes))


def a_part(
    *,
    gen: int = 1,
    epoch: int = 1,
    step: int = 1,
    node: int = 0,
    nodes: int = 1,
    ranks: Sequence[int] = (0,),
    shards: Sequence[ShardEntry] | None = None,
    **changes: Any,
) -> PartTable:
    """A part that is in order, but for the changes; `world` is one rank a node if not given."""
    if shards is None:
        shards = [a_shard(gen=gen, step=step, rank=rank) for rank in ranks]
    fields = {
        "fmt": PART_FORMAT,
        "gen": gen,
        "epoch": epoch,
        "step": step,
        "node": node,
        "nodes": nodes,
        "world": nodes,
        "layout": "plan-1",
        "base": None,
        "shards": tuple(shards),
    }
    return PartTable(**(fields | changes))
