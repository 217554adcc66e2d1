"""Killed at any write: what was acknowledged is there, and the next launch goes on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from supervisor.clock import Deadline, SystemClock
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import list_commits, read_manifest
from supervisor.store.directory import DirectoryStore
from tests.crash.commit_worker import content_of
from trainer_sdk.protocol.failpoints import ENVIRONMENT_NAME

ROOT = Path(__file__).parents[2]
PLACES = [
    f"{name}.{when}=kill@{hit}"
    for name, hits in (
        ("log.put", (1, 2, 3)),
        ("hint.put", (1, 2)),
        ("part.put", (1, 2)),
        ("upload.chunk", (1, 5)),
        ("upload.complete", (1, 2)),
        ("dir.link", (1, 2)),
        ("dir.rename", (1, 2)),
        ("sweep.delete", (1, 2)),
    )
    for when in ("before", "after")
    for hit in hits
]


def run_worker(folder: Path, round_number: int, failpoint: str) -> tuple[int, list[list[str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.commit_worker", str(folder), str(round_number)],
        cwd=ROOT,
        env=os.environ | {ENVIRONMENT_NAME: failpoint},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("place", PLACES)
def test_killed_life_loses_nothing_acknowledged(tmp_path: Path, place: str) -> None:
    status, lines = run_worker(tmp_path, 0, place)
    assert status == -signal.SIGKILL
    acknowledged = max((int(step) for what, step in lines if what == "committed"), default=0)

    status, lines = run_worker(tmp_path, 1, "")

    assert status == 0
    resumed = int(lines[0][1])
    # At most the one step whose commit was under way is found beyond what was acknowledged.
    assert acknowledged <= resumed <= acknowledged + 1
    check_store(tmp_path)


def check_store(folder: Path) -> None:
    """Every live commit reads back to the byte."""
    clock = SystemClock()
    deadline = Deadline.after(clock, 30)
    store = DirectoryStore(folder)
    log = CommitLog(store, job_id="j", clock=clock, new_uid=lambda: uuid.uuid4().hex)
    commits = list_commits(log, deadline)
    assert commits
    for commit in commits:
        for shard in read_manifest(log, commit.seq, deadline).shards:
            target = bytearray(shard.size_bytes)
            store.read_into(
                log.keys.full(shard.key), offset=0, target=memoryview(target), timeout_s=5
            )
            assert target == content_of(commit.step)
    store.close()
