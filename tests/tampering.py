"""Changing what a directory store says, as somebody who can write to it might."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.harness import Cluster

Change = Callable[[dict[str, Any]], Any]


def job_folder(cluster: Cluster) -> Path:
    return cluster.folder / "store" / "jobs" / "toy"


def log_slots(cluster: Cluster) -> list[Path]:
    return sorted((job_folder(cluster) / "log").iterdir())


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


def change_last_record(cluster: Cluster, change: Change) -> None:
    """Rewrite the newest record; nothing follows it, so the chain stays whole."""
    slot = log_slots(cluster)[-1]
    record = json.loads(slot.read_bytes())
    change(record)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    overwrite(slot, text.encode())


def change_last_part(cluster: Cluster, change: Change) -> None:
    """Rewrite the part of the newest commit, and have the commit name these very bytes.

    `change` alters the part's document, or returns the bytes to put in its place.
    """

    def rename(record: dict[str, Any]) -> None:
        [ref] = record["body"]["parts"]
        path = job_folder(cluster) / ref["key"]
        part = json.loads(path.read_bytes())
        changed = change(part)
        data = changed if isinstance(changed, bytes) else json.dumps(part).encode()
        overwrite(path, data)
        ref["sha256"] = hashlib.sha256(data).hexdigest()
        ref["size_bytes"] = len(data)

    change_last_record(cluster, rename)


def change_last_image(cluster: Cluster, change: Callable[[bytes], bytes]) -> None:
    """Rewrite the one shard of the newest commit, with digests that fit the new bytes."""

    def renew(part: dict[str, Any]) -> None:
        [shard] = part["shards"]
        path = job_folder(cluster) / shard["key"]
        data = change(path.read_bytes())
        overwrite(path, data)
        assert len(data) <= shard["chunk_bytes"], "one chunk only"
        chunk = hashlib.sha256(data)
        shard["chunks"] = [chunk.hexdigest()]
        shard["sha256"] = hashlib.sha256(chunk.digest()).hexdigest()
        shard["size_bytes"] = len(data)

    change_last_part(cluster, renew)
