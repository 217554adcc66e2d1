"""Rows 65 and 66 of the fault matrix: records and images that were written by somebody else.

Everything here has digests that fit, so only its meaning gives it away.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import SIZED_COMMAND, assert_sized, read_log
from tests.tampering import change_last_image, change_last_part, change_last_record, log_slots

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def twice(part: dict[str, Any]) -> None:
    part["shards"] = part["shards"] * 2


def gap(part: dict[str, Any]) -> None:
    part["world"] = 2


def beyond(part: dict[str, Any]) -> None:
    part["shards"][0]["rank"] = 1


def overflow(part: dict[str, Any]) -> None:
    part["shards"][0]["size_bytes"] = 2**63


def too_few_chunks(part: dict[str, Any]) -> None:
    part["shards"][0]["size_bytes"] = 10**12


def negative(part: dict[str, Any]) -> None:
    part["step"] = -1


def unknown_field(part: dict[str, Any]) -> None:
    part["surprise"] = 1


def nesting_bomb(part: dict[str, Any]) -> bytes:
    del part
    return b"[" * 200_000


def too_large(part: dict[str, Any]) -> bytes:
    return json.dumps(part).encode() + b" " * (65 << 20)


def not_json(part: dict[str, Any]) -> bytes:
    del part
    return b"\xff\xfe\x00"


BAD_PARTS = [
    twice, gap, beyond, overflow, too_few_chunks, negative, unknown_field, nesting_bomb, too_large,
    not_json,
]  # fmt: skip


@pytest.mark.parametrize("change", BAD_PARTS, ids=lambda change: change.__name__)
def test_f65_a_part_that_makes_no_sense_is_refused_and_named(copied, change):
    cluster, node = copied
    change_last_part(cluster, change)

    verdicts = cluster.cli(node, "verify", check=False)["checkpoints"]
    shown = cluster.cli(node, "show", check=False)

    assert [verdict["is_whole"] for verdict in verdicts] == [True, False]
    assert shown["error_id"] == "manifest_invalid"
    assert len(shown["message"]) < 1000


def test_f65_a_relaunch_passes_such_a_part_over(copied):
    cluster, node = copied
    change_last_part(cluster, twice)

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert node.event("claim.failed")["error_id"] == "manifest_invalid"
    assert node.event("restore.completed")["step"] == 5


@pytest.mark.parametrize("where", ["part", "record"])
def test_f65_what_a_newer_version_wrote_is_never_skipped(copied, where):
    """An older supervisor must not resume from an older checkpoint because it cannot read."""
    cluster, node = copied
    before = {path: path.read_bytes() for path in log_slots(cluster)}
    num_lines = len(cluster.lines(0))

    def newer(document: dict[str, Any]) -> None:
        document["fmt"] = 2
        document["something_new"] = True

    (change_last_part if where == "part" else change_last_record)(cluster, newer)
    cluster.start(node, "--allow-fresh", command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert code == ExitCode.INTERNAL
    assert "log_too_new" in node.stderr
    assert "update" in node.stderr
    assert "Traceback" not in node.stderr
    assert len(cluster.lines(0)) == num_lines
    assert set(before) <= set(log_slots(cluster))
    assert not [path for path, data in list(before.items())[:-1] if path.read_bytes() != data]


def with_header(image: bytes, change: Any) -> bytes:
    """The image with another header text of the same padded length."""
    size = int.from_bytes(image[:8], "little")
    text = change(image[8 : 8 + size].rstrip()).ljust(size)
    assert len(text) == size
    return image[:8] + text + image[8 + size :]


def huge_length(image: bytes) -> bytes:
    return (100 << 20).to_bytes(8, "little") + image[8:]


def hole(image: bytes) -> bytes:
    def change(text: bytes) -> bytes:
        document = json.loads(text)
        last = max(
            (key for key in document if key != "__metadata__"),
            key=lambda key: document[key]["data_offsets"],
        )
        start, end = document[last]["data_offsets"]
        document[last]["data_offsets"] = [start + 4, end + 4]
        return json.dumps(document, separators=(",", ":")).encode()

    return with_header(image, change)


def overlap(image: bytes) -> bytes:
    def change(text: bytes) -> bytes:
        document = json.loads(text)
        keys = [key for key in document if key != "__metadata__"]
        document[keys[1]]["data_offsets"] = document[keys[0]]["data_offsets"]
        return json.dumps(document, separators=(",", ":")).encode()

    return with_header(image, change)


def duplicate_key(image: bytes) -> bytes:
    def change(text: bytes) -> bytes:
        first, _, _ = text[1:].partition(b"},")
        return b"{" + first + b"}," + text[1:]

    return with_header(image, change)


def size_mismatch(image: bytes) -> bytes:
    return image + b"\0" * 4096


def bare_words(image: bytes) -> bytes:
    return with_header(image, lambda text: b"not json")


BAD_IMAGES = [huge_length, hole, overlap, duplicate_key, size_mismatch, bare_words]


@pytest.mark.parametrize("change", BAD_IMAGES, ids=lambda change: change.__name__)
def test_f66_an_image_whose_header_lies_is_set_aside_before_a_tensor_is_touched(copied, change):
    cluster, node = copied
    change_last_image(cluster, change)

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    failed = node.event("rank.restore_failed")
    assert failed["error_id"] == "shard_invalid"
    assert failed["is_checkpoint_bad"]
    bad = [item["step"] for item in cluster.cli(node, "ls")["checkpoints"] if item["is_bad"]]
    assert bad == [10]
    assert node.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    lines = {line["step"] for line in read_log(cluster.log)[0]}
    assert lines == set(range(1, max(lines) + 1))
    assert_sized({0: cluster.lines(0)}, last_step=max(lines))
