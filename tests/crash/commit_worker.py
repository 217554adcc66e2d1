"""One life of a one-node job on a directory store; killed by a failpoint somewhere on the way.

Usage: commit_worker.py ROOT ROUND. Prints a line for each step whose commit was acknowledged.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from pathlib import Path

from supervisor.clock import Deadline, SystemClock
from supervisor.commit.advance import advance, write_part
from supervisor.commit.claim import claim
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.commit.sweep import sweep
from supervisor.store.directory import DirectoryStore
from trainer_sdk.protocol.manifest import PART_FORMAT, PartTable, ShardEntry, shard_digest
from trainer_sdk.protocol.names import DataName

NUM_STEPS = 4
CHUNK_BYTES = 1000


def content_of(step: int) -> bytes:
    """What every run of this step would have produced."""
    return hashlib.sha256(b"%d" % step).digest() * 100


def upload(log: CommitLog, *, gen: int, step: int) -> ShardEntry:
    data = memoryview(content_of(step))
    key = DataName(generation=gen, step=step, rank=0, uid=uuid.uuid4().hex).key
    handle = log.store.open_upload(
        log.keys.full(key),
        size_bytes=len(data),
        chunk_bytes=CHUNK_BYTES,
        resume_token=None,
        timeout_s=10,
    )
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    digests = [hashlib.sha256(piece).digest() for piece in pieces]
    for index, piece in enumerate(pieces):
        handle.put_chunk(index, piece, sha256=digests[index], timeout_s=10)
    handle.complete(digests, timeout_s=10)
    return ShardEntry(
        rank=0,
        name="state",
        key=key,
        size_bytes=len(data),
        sha256=shard_digest(digests).hex(),
        chunk_bytes=CHUNK_BYTES,
        chunks=tuple(digest.hex() for digest in digests),
    )


def main(root: Path, round_number: int) -> None:
    clock = SystemClock()
    deadline = Deadline.after(clock, 30)
    log = CommitLog(DirectoryStore(root), job_id="j", clock=clock, new_uid=lambda: uuid.uuid4().hex)
    request = ClaimRequest(
        launch="launch-1",
        round=round_number,
        group=uuid.uuid4().hex,
        nodes=1,
        world=1,
        layout="plan-1",
        allow_fresh=True,
    )
    owner = claim(log, request, deadline)
    begin = owner.resume.step if owner.resume else 0
    print("resumed", begin, flush=True)
    for step in range(begin + 1, begin + 1 + NUM_STEPS):
        table = PartTable(
            fmt=PART_FORMAT,
            gen=owner.gen,
            epoch=owner.epoch,
            step=step,
            node=0,
            nodes=1,
            world=1,
            layout="plan-1",
            base=None,
            shards=(upload(log, gen=owner.gen, step=step),),
        )
        part = write_part(log, table, deadline)
        advance(log, owner.gen, deadline, part, retention=Retention(keep=1))
        print("committed", step, flush=True)
    sweep(log, deadline, grace_s=0, dry_run=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
