"""Part tables and manifests: nothing that contradicts itself gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tables import a_part, a_shard, new_uid
from trainer_sdk.protocol.errors import ProtocolError, VersionMismatch
from trainer_sdk.protocol.manifest import (
    MAX_PART_BYTES,
    Manifest,
    PartTable,
    ShardEntry,
    decode_part,
    encode_part,
)
from trainer_sdk.protocol.names import DataName, PartName


def key_of(table: PartTable) -> str:
    return PartName(generation=table.gen, step=table.step, node=table.node, uid=new_uid()).key


def test_part_reads_back_and_is_canonical() -> None:
    table = a_part(nodes=2, node=1, ranks=(1,), flags=("final",))

    data = encode_part(table)

    assert decode_part(data, key=key_of(table)) == table
    plain = json.loads(data)
    assert data == json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert plain["flags"] == ["final"]


def test_rank_with_several_shards() -> None:
    table = a_part(shards=[a_shard(name="state"), a_shard(name="frozen")])

    assert decode_part(encode_part(table), key=key_of(table)).ranks == {0}


def test_reference_to_an_older_shard_needs_a_base() -> None:
    older = a_shard(gen=1, step=3)

    encode_part(a_part(gen=2, step=5, shards=[older], base=4))
    with pytest.raises(ProtocolError, match="without a base"):
        encode_part(a_part(gen=2, step=5, shards=[older]))


BROKEN_TABLES: dict[str, Callable[[], PartTable]] = {
    "format": lambda: a_part(fmt=2),
    "node outside": lambda: a_part(node=1, nodes=1, ranks=(0,)),
    "rank outside": lambda: a_part(ranks=(1,)),
    "shard twice": lambda: a_part(shards=[a_shard(), a_shard()]),
    "key twice": lambda: a_part(
        shards=[
            a_shard(),
            a_shard(name="other", key=DataName(generation=1, step=1, rank=0, uid="0" * 32).key),
            a_shard(name="third", key=DataName(generation=1, step=1, rank=0, uid="0" * 32).key),
        ]
    ),
    "key of another rank": lambda: a_part(
        shards=[a_shard(key=DataName(generation=1, step=1, rank=5, uid="0" * 32).key)]
    ),
    "key of a later step": lambda: a_part(shards=[a_shard(step=2)], base=1),
    "key of a later generation": lambda: a_part(shards=[a_shard(gen=2, step=0)], base=1),
    "chunk missing": lambda: a_part(shards=[a_shard(chunks=a_shard().chunks[:-1])]),
    "chunks swapped": lambda: a_part(shards=[a_shard(chunks=a_shard().chunks[::-1])]),
    "size too large": lambda: a_part(shards=[a_shard(size_bytes=13)]),
    "digest of something else": lambda: a_part(shards=[a_shard(sha256="0" * 64)]),
}


@pytest.mark.parametrize("case", BROKEN_TABLES)
def test_table_at_odds_with_itself_is_neither_written_nor_read(case: str) -> None:
    from trainer_sdk.protocol.manifest import encode_canonical

    table = BROKEN_TABLES[case]()

    with pytest.raises(ProtocolError):
        encode_part(table)
    with pytest.raises(ProtocolError):
        decode_part(encode_canonical(table), key=key_of(table))


GOOD_KEY = a_shard().key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "../../../etc/passwd"),
        ("key", f"jobs/other/{GOOD_KEY}"),
        ("key", GOOD_KEY + "/../x"),
        ("key", GOOD_KEY + "\n"),
        ("key", "log/00000000000000000001"),
        ("name", "../state"),
        ("name", "State"),
        ("name", ""),
        ("name", "a/b"),
        ("rank", -1),
        ("rank", "0"),
        ("size_bytes", 0),
        ("size_bytes", -5),
        ("size_bytes", 2**63),
        ("size_bytes", 1.5),
        ("chunk_bytes", 0),
        ("chunks", []),
        ("sha256", "00"),
        ("sha256", "Z" * 64),
        ("extra", 1),
    ],
)
def test_shard_of_forbidden_values_is_refused(field: str, value: Any) -> None:
    table = a_part()
    plain = json.loads(encode_part(table))
    plain["shards"][0][field] = value

    with pytest.raises(ProtocolError):
        decode_part(json.dumps(plain).encode(), key=key_of(table))


@pytest.mark.parametrize("field", [*PartTable.__struct_fields__, "extra"])
@pytest.mark.parametrize("value", [None, -1, "../x", [], {}, 1e300])
def test_part_of_forbidden_values_is_refused(field: str, value: Any) -> None:
    table = a_part(base=1)
    plain = json.loads(encode_part(table))
    plain[field] = value
    if (field, value) in (("base", None), ("flags", [])):
        return

    with pytest.raises(ProtocolError):
        decode_part(json.dumps(plain).encode(), key=key_of(table))


@given(st.binary(max_size=200))
def test_rubbish_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_part(data, key=key_of(a_part()))


@pytest.mark.parametrize(
    "data", [b'{"fmt":1,"layout":"\xff"}', b"[" * 100_000, b'{"x":' + b"[" * 60_000, b"", b"null"]
)
def test_hostile_json_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_part(data, key=key_of(a_part()))


def test_newer_format_says_which_one_was_wanted() -> None:
    with pytest.raises(VersionMismatch, match=r"format 2.* reads 1") as caught:
        decode_part(b'{"fmt":2,"whatever":true}', key=key_of(a_part()))

    assert "update" in caught.value.hint


def test_oversized_part_is_not_decoded() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        decode_part(bytes(MAX_PART_BYTES + 1), key=key_of(a_part()))


@pytest.mark.parametrize("changes", [{"gen": 2}, {"step": 2}, {"node": 1}])
def test_part_under_the_key_of_another_is_refused(changes: dict[str, int]) -> None:
    table = a_part(nodes=2)
    place = {"generation": table.gen, "step": table.step, "node": table.node}
    wrong = place | {
        {"gen": "generation"}.get(field, field): value for field, value in changes.items()
    }

    with pytest.raises(ProtocolError, match="another"):
        decode_part(encode_part(table), key=PartName(**wrong, uid=new_uid()).key)


def a_manifest(*parts: PartTable) -> Manifest:
    return Manifest(seq=9, digest="0" * 64, parts=parts)


def test_manifest_of_all_ranks() -> None:
    manifest = a_manifest(
        a_part(nodes=2, node=0, ranks=(0, 2), world=4),
        a_part(nodes=2, node=1, ranks=(1, 3), world=4),
    )

    assert [shard.rank for shard in manifest.shards_of(3)] == [3]
    assert manifest.size_bytes == 40
    assert (manifest.gen, manifest.step, manifest.world) == (1, 1, 4)


def pair(**changes: Any) -> tuple[PartTable, PartTable]:
    second = {"nodes": 2, "node": 1, "ranks": (1,)} | changes
    return a_part(nodes=2, node=0, ranks=(0,)), a_part(**second)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        pair()[:1],
        pair(ranks=(0, 1)),
        pair(node=0),
        pair(step=2, shards=[a_shard(rank=1, step=2)]),
        pair(gen=2, shards=[a_shard(rank=1, gen=2)]),
        pair(epoch=2),
        pair(layout="plan-2"),
        pair(world=3),
        (a_part(nodes=2, base=3), pair(base=4)[1]),
    ],
)
def test_manifest_that_is_not_one_whole_checkpoint_cannot_be_built(
    parts: tuple[PartTable, ...],
) -> None:
    with pytest.raises(ProtocolError, match="commit 9"):
        a_manifest(*parts)


def test_parts_with_and_without_a_base_go_together() -> None:
    a_manifest(a_part(nodes=2, base=3), pair()[1])


def test_shard_entries_cannot_be_changed() -> None:
    entry: ShardEntry = a_shard()

    with pytest.raises(AttributeError):
        entry.rank = 3  # type: ignore[misc]
