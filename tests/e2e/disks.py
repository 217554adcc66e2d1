"""Disks for end-to-end tests: small, slow, read-only, gone; and what is on a node's spool."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.harness import Cluster, Node


@contextmanager
def spool_on_tmpfs(node: Node, *, size: str) -> Iterator[Path]:
    """The node's spool is a file system of this size."""
    folder = node.folder / "spool"
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "lastgasp-test", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Lazily: a failed test may still hold a file open, and the next one must not suffer."""
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def checkpoints_folder(node: Node) -> Path:
    return node.folder / "spool" / "toy" / "checkpoints"


def ready_sets(node: Node) -> dict[tuple[int, int], dict[str, Any]]:
    """(generation, step) to the record of every set in the spool; each is proved to be whole."""
    found = {}
    for ready in checkpoints_folder(node).glob("*/READY.json"):
        record = json.loads(ready.read_bytes())
        for shard in record["shards"]:
            path = ready.parent / f"{shard['rank']:06d}-{shard['name']}.safetensors"
            assert digest_of(path, shard["chunk_bytes"]) == shard["sha256"], path
        found[record["gen"], record["step"]] = record
    return found


def digest_of(path: Path, chunk_bytes: int) -> str:
    """A shard's digest: the SHA-256 of the SHA-256 of its chunks."""
    data = path.read_bytes()
    chunks = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()


def leftovers(node: Node) -> list[str]:
    """Temporary directories of the spool."""
    folder = checkpoints_folder(node)
    return [path.name for path in folder.iterdir() if path.name.startswith("tmp-")]


def events_named(node: Node, name: str) -> list[dict[str, Any]]:
    return [event for event in node.events() if event["event"] == name]


def steps_of(node: Node, name: str) -> list[int]:
    return [event["step"] for event in events_named(node, name)]


def committed_steps(cluster: Cluster, node: Node) -> list[int]:
    """The steps of the checkpoints in the store, oldest first."""
    return sorted(row["step"] for row in cluster.cli(node, "ls")["checkpoints"])


@contextmanager
def write_limit(node: Node, *, bytes_per_s: int) -> Iterator[None]:
    """The disk of the node's folder takes no more than this from the supervisor (cgroup v1)."""
    assert node.process is not None
    group = Path("/sys/fs/cgroup/blkio") / f"lastgasp-test-{node.process.pid}"
    device = os.stat(node.folder).st_dev
    group.mkdir()
    try:
        (group / "blkio.throttle.write_bps_device").write_text(
            f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        )
        (group / "cgroup.procs").write_text(str(node.process.pid))
        yield
    finally:
        leave(group)


@contextmanager
def thread_limit(node: Node, *, spare: int = 0) -> Iterator[None]:
    """The supervisor gets no more threads than it has, but `spare` (cgroup v1)."""
    assert node.process is not None
    group = Path("/sys/fs/cgroup/pids") / f"lastgasp-test-{node.process.pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(node.process.pid))
        now = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(now + spare))
        yield
    finally:
        (group / "pids.max").write_text("max")
        leave(group)


def leave(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        try:
            (group.parent / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue
    group.rmdir()
