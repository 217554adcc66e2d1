"""The log, claims, votes and sweeps over a real directory, with faults of every kind in between."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from supervisor import failpoints
from supervisor.clock import Deadline
from supervisor.commit import rules
from supervisor.commit.advance import Progress, WrittenPart, advance, write_part
from supervisor.commit.claim import Claim, claim, join_claim
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import list_commits, read_manifest
from supervisor.commit.records import Commit, build_record, check_successor
from supervisor.commit.rules import ClaimRequest, Retention
from supervisor.commit.sweep import retire, sweep
from supervisor.errors import (
    AppendRefused,
    DeadlineExceeded,
    Fenced,
    JobFinished,
    LogCorrupt,
    LogTooNew,
    ManifestInvalid,
    NoCheckpointFound,
    NoGoodCheckpoint,
    ObjectMissing,
    OutcomeUnknown,
    StoreAccessDenied,
    TransientStoreError,
)
from supervisor.store.base import ObjectStore
from supervisor.store.directory import DirectoryStore
from supervisor.store.faults import Fault, FaultKind, FaultyStore
from supervisor.store.retry import Retrier, RetryingStore
from tests.unit.tables import a_part, a_shard, new_uid
from trainer_sdk.protocol.failpoints import ENVIRONMENT_NAME
from trainer_sdk.protocol.manifest import PartTable, ShardEntry

G1, G2, G3, G4 = ("1" * 32, "2" * 32, "3" * 32, "4" * 32)
KEEP_1 = Retention(keep=1)


class FakeClock:
    """Time passes only when someone sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds + 0.001


class Job:
    """One job in one directory, and any number of processes that work on it."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock()
        self.store = DirectoryStore(root)

    def deadline(self, seconds: float = 60.0) -> Deadline:
        return Deadline.after(self.clock, seconds)

    def faulty(self, *faults: Fault) -> FaultyStore:
        return FaultyStore(self.store, clock=self.clock, faults=faults)

    def log(self, store: ObjectStore | None = None) -> CommitLog:
        """A process that knows nothing yet."""
        return CommitLog(store or self.store, job_id="j", clock=self.clock, new_uid=new_uid)

    def claim(self, log: CommitLog, group: str = G1, **changes: Any) -> Claim:
        fields = {
            "launch": "launch-1",
            "round": 0,
            "group": group,
            "nodes": 1,
            "world": 1,
            "layout": "plan-1",
        }
        return claim(log, ClaimRequest(**(fields | changes)), self.deadline())

    def upload(self, shard: ShardEntry) -> ShardEntry:
        self.store.put_bytes(f"jobs/j/{shard.key}", b"0123456789", timeout_s=1)
        return shard

    def table(self, owner: Claim, step: int, *, node: int = 0, **changes: Any) -> PartTable:
        """A part whose shards are in the store."""
        fields = {
            "gen": owner.gen,
            "epoch": owner.epoch,
            "nodes": owner.nodes,
            "world": owner.world,
            "shards": [self.upload(a_shard(gen=owner.gen, step=step, rank=node))],
        }
        return a_part(step=step, node=node, **(fields | changes))

    def vote(self, log: CommitLog, owner: Claim, step: int, **changes: Any) -> WrittenPart:
        return write_part(log, self.table(owner, step, **changes), self.deadline())

    def advance(self, log: CommitLog, gen: int, *args: Any, **options: Any) -> Progress:
        return advance(log, gen, self.deadline(), *args, **options)

    def commit(self, log: CommitLog, owner: Claim, *steps: int, **options: Any) -> Progress:
        """Vote and commit steps of a one-node job."""
        for step in steps:
            part = self.vote(log, owner, step)
            progress = self.advance(log, owner.gen, part, **options)
        return progress

    def tail_seq(self) -> int:
        return self.log().tail(self.deadline()).seq

    def kinds(self) -> list[str]:
        log = self.log()
        count = log.tail(self.deadline()).seq
        return [log.read(seq, self.deadline()).kind.value for seq in range(1, count + 1)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of fsyncs are not the subject here."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="lastgasp-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def job(root: Path) -> Iterator[Job]:
    made = Job(root)
    yield made
    made.store.close()


# The log


def test_empty_log(job: Job) -> None:
    tail = job.log().tail(job.deadline())

    assert (tail.seq, tail.record, tail.state.gen) == (0, None, 0)


@pytest.mark.parametrize(
    "hint",
    [
        None,
        b"",
        b"{",
        b'{"seq":1}',
        b'{"seq":6}',
        b'{"seq":7}',
        b'{"seq":10000000000000000000}',
        b'{"seq":-1}',
        b"x" * 9999,
    ],
)
def test_any_hint_leads_to_the_tail(job: Job, hint: bytes | None) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 6))
    if hint is None:
        job.store.delete("jobs/j/hint", timeout_s=1)
    else:
        job.store.put_bytes("jobs/j/hint", hint, timeout_s=1)

    assert job.tail_seq() == 6


def test_news_cost_few_requests(job: Job) -> None:
    store = job.faulty()
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, *range(1, 6))
    other = job.log(store)
    other.tail(job.deadline())
    assert len(store.calls) == 3  # hint, slot, the absent next

    store.calls.clear()
    other.tail(job.deadline())
    assert len(store.calls) == 1  # the absent next

    job.commit(log, owner, *range(6, 30))
    store.calls.clear()
    assert other.tail(job.deadline()).seq == 30
    assert len(store.calls) == 4


def test_hint_beyond_the_tail_costs_a_bisection_not_a_walk(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 60))
    job.store.put_bytes("jobs/j/hint", b'{"seq":64}', timeout_s=1)
    store = job.faulty()

    assert job.log(store).tail(job.deadline()).seq == 60
    assert len(store.calls) < 15


def test_joining_an_older_epoch_does_not_lower_the_floor(job: Job) -> None:
    store = job.faulty()
    log = job.log(store)
    job.commit(log, job.claim(log), 1, 2, 3)

    log.join(1, job.deadline())
    store.calls.clear()

    assert log.tail(job.deadline()).seq == 4
    assert len(store.calls) == 1


def test_floor_never_falls_on_stale_reads(job: Job) -> None:
    class StaleStore(FaultyStore):
        is_stale = False

        def get_bytes(self, key: str, *, max_bytes: int, timeout_s: float) -> bytes:
            if self.is_stale:
                raise ObjectMissing(key)
            return super().get_bytes(key, max_bytes=max_bytes, timeout_s=timeout_s)

    store = StaleStore(job.store, clock=job.clock)
    log = job.log(store)
    job.commit(log, job.claim(log), 1, 2)
    store.is_stale = True

    assert log.tail(job.deadline()).seq == 3


def test_slot_that_does_not_follow_is_corrupt(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), 1)
    first = log.read(1, job.deadline())
    body = log.read(2, job.deadline()).body
    forged = build_record(
        build_record(first, body, uid=new_uid()),
        Commit(step=2, parts=body.parts, base=None),
        uid=new_uid(),
    )
    job.store.put_if_absent(log.keys.log(3), forged.data, timeout_s=1)

    with pytest.raises(LogCorrupt):
        log.tail(job.deadline())
    # One that holds no predecessor of it cannot know; one that walks does.
    job.store.delete("jobs/j/hint", timeout_s=1)
    with pytest.raises(LogCorrupt):
        job.log().tail(job.deadline())


@pytest.mark.parametrize("data", [b"", b"{}", b"rubbish"])
def test_torn_slot_stops_everyone(job: Job, data: bytes) -> None:
    log = job.log()
    job.claim(log)
    job.store.put_if_absent(log.keys.log(2), data, timeout_s=1)

    with pytest.raises(LogCorrupt):
        log.append(rules.finish(at_step=9), deadline=job.deadline())


def test_newer_record_stops_everyone(job: Job) -> None:
    log = job.log()
    job.claim(log)
    job.store.put_if_absent(log.keys.log(2), b'{"fmt":2,"kind":"X"}', timeout_s=1)

    with pytest.raises(LogTooNew):
        log.tail(job.deadline())


def test_record_that_fits_no_slot_is_refused(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    part = job.vote(log, owner, 1)

    make = rules.commit(at_step=1, parts=(part.ref,) * 500, base=None, flags=(), retention=KEEP_1)
    with pytest.raises(AppendRefused, match="does not fit"):
        log.append(make, deadline=job.deadline())


LOG_PUT = {"method": "put_if_absent", "key_part": "/log/"}


@pytest.mark.parametrize(
    "kind", [FaultKind.DROP, FaultKind.LOST_REPLY, FaultKind.LATE, FaultKind.THROTTLE]
)
@pytest.mark.parametrize("times", [1, 3])
def test_append_without_a_reply_ends_up_once(job: Job, kind: FaultKind, times: int) -> None:
    """409, 5xx and silence: the slot itself says what happened."""
    store = job.faulty(*(Fault(kind=kind, at_call=n, **LOG_PUT) for n in range(1, times + 1)))
    log = job.log(store)

    owner = job.claim(log)

    assert (owner.gen, owner.adopted) == (1, False)
    store.land_late()
    assert job.kinds() == ["EPOCH"]


def test_append_that_lands_late_is_recognised_as_ones_own(job: Job) -> None:
    store = job.faulty(Fault(kind=FaultKind.LATE, **LOG_PUT))

    class LandsBeforeTheSecondTry(FaultyStore):
        def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
            store.land_late()
            return super().put_if_absent(key, data, timeout_s=timeout_s)

    log = job.log(LandsBeforeTheSecondTry(store, clock=job.clock))

    done = log.append(
        rules.claim(ClaimRequest(launch="a", round=0, group=G1, nodes=1, world=1, layout="x")),
        deadline=job.deadline(),
    )

    assert (done.seq, done.is_new) == (1, True)
    assert job.kinds() == ["EPOCH"]


def test_outcome_is_unknown_while_the_put_may_still_land(job: Job) -> None:
    store = job.faulty(*(Fault(kind=FaultKind.LATE, at_call=n, **LOG_PUT) for n in range(1, 99)))
    log = job.log(store)
    with pytest.raises(OutcomeUnknown):
        job.claim(log)

    assert store.land_late() > 1
    owner = job.claim(log)  # the same bytes each time: they landed once, and they are found

    assert (owner.gen, owner.adopted) == (1, True)
    assert job.kinds() == ["EPOCH"]


def test_refused_create_is_never_taken_for_success(job: Job) -> None:
    """Another writer has the slot: what was decided on is decided again on the new state."""
    log, other = job.log(), job.log()
    owner = job.claim(log)
    part = job.vote(log, owner, 1)
    stale_tail = other.tail(job.deadline())
    job.advance(log, 1, part)
    reads = [stale_tail]
    real_tail = other.tail
    other.tail = lambda deadline: reads.pop() if reads else real_tail(deadline)  # type: ignore[method-assign]

    done = other.append(rules.fail(why="boom", node=0), deadline=job.deadline())

    assert done.is_new is False  # the generation has a commit meanwhile
    assert job.kinds() == ["EPOCH", "COMMIT"]


def test_append_waits_for_a_stale_store_instead_of_fencing(job: Job) -> None:
    log = job.log()
    job.claim(log)

    with pytest.raises(DeadlineExceeded):
        log.append(rules.fail(why="", node=0), my_gen=2, deadline=job.deadline(5))


def test_access_denied_ends_an_append_at_once(job: Job) -> None:
    class ReadOnlyStore(FaultyStore):
        def put_if_absent(self, key: str, data: bytes, *, timeout_s: float) -> bool:
            raise StoreAccessDenied("no", hint="ask someone")

    started_at = job.clock.now
    with pytest.raises(StoreAccessDenied):
        job.claim(job.log(ReadOnlyStore(job.store, clock=job.clock)))

    assert job.clock.now - started_at < 1


def test_lost_hint_is_no_failure(job: Job) -> None:
    store = job.faulty(
        *(
            Fault(kind=FaultKind.DROP, method="put_bytes", key_part="hint", at_call=n)
            for n in range(1, 9)
        )
    )
    log = job.log(store)

    job.commit(log, job.claim(log), 1, 2)

    assert job.tail_seq() == 3


def test_many_writers_get_one_slot_each(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1)
    logs = [job.log() for _ in range(6)]
    start = threading.Barrier(len(logs))

    def pin(number: int) -> int:
        start.wait()
        name = f"pin-{number}"
        return logs[number].append(rules.pin(name, 2), deadline=job.deadline(1e6)).seq

    with ThreadPoolExecutor(len(logs)) as pool:
        slots = list(pool.map(pin, range(len(logs))))

    assert sorted(slots) == [3, 4, 5, 6, 7, 8]
    assert len(job.log().tail(job.deadline()).state.pins) == 6


# Claims


def test_fresh_job_then_relaunch_resumes(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    assert (owner.gen, owner.epoch, owner.resume) == (1, 1, None)
    job.commit(log, owner, 10, 20)

    again = job.claim(job.log(), G2, round=1)

    assert (again.gen, again.resume_seq) == (2, 3)
    assert again.resume is not None
    assert (again.resume.step, again.resume.gen) == (20, 1)
    assert again.resume_digest == log.read(3, job.deadline()).digest


def test_second_launch_fences_the_first(job: Job) -> None:
    log, other = job.log(), job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1)
    job.claim(other, G2, launch="launch-2")
    late = job.vote(log, owner, 2)

    for act in (
        lambda: job.advance(log, owner.gen, late),
        lambda: job.advance(log, owner.gen),
        lambda: log.append(rules.fail(why="", node=0), my_gen=1, deadline=job.deadline()),
        lambda: log.check_not_fenced(1, job.deadline()),
        lambda: job.claim(log),
        lambda: job.claim(log, G3, round=7),
    ):
        with pytest.raises(Fenced):
            act()
    assert job.kinds() == ["EPOCH", "COMMIT", "EPOCH"]


def test_two_launches_at_once_have_one_owner(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), 1)
    start = threading.Barrier(2)

    def launch(number: int) -> Claim:
        mine = job.log()
        start.wait()
        return job.claim(mine, f"{number + 5:032x}", launch=f"other-{number}")

    with ThreadPoolExecutor(2) as pool:
        owners = sorted(pool.map(launch, range(2)), key=lambda owner: owner.gen)

    assert [owner.gen for owner in owners] == [2, 3]
    with pytest.raises(Fenced):
        job.advance(job.log(), 2)
    job.advance(job.log(), 3)


def test_supervisor_that_restarts_adopts_its_generation(job: Job) -> None:
    log = job.log()
    first = job.claim(log)
    job.commit(log, first, 1)

    again = job.claim(job.log())

    assert (again.gen, again.epoch, again.adopted) == (1, 1, True)
    assert again.resume_seq is None  # what the group restored, not what is newest now
    assert job.kinds() == ["EPOCH", "COMMIT"]


def test_other_nodes_join_what_node_0_claimed(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), 1)
    owner = job.claim(log, G2, round=1, nodes=2, world=2)

    other = job.log()
    joined = join_claim(other, gen=owner.gen, epoch=owner.epoch, deadline=job.deadline())

    assert (joined.resume_seq, joined.nodes, joined.world) == (2, 2, 2)
    assert joined.resume_digest == owner.resume_digest
    for gen, epoch, kind in (
        (1, owner.epoch, LogCorrupt),
        (2, 2, LogCorrupt),
        (9, 99, DeadlineExceeded),
    ):
        with pytest.raises(kind):
            join_claim(other, gen=gen, epoch=epoch, deadline=job.deadline())


def test_next_claim_commits_what_died_between_vote_and_slot(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1)
    job.vote(log, owner, 2)  # and dies here

    again = job.claim(job.log(), G2, round=1)

    assert again.resume is not None
    assert (again.resume.step, again.resume.gen) == (2, 1)
    assert job.kinds() == ["EPOCH", "COMMIT", "COMMIT", "EPOCH"]


def test_claim_waits_while_votes_still_arrive(job: Job) -> None:
    log = job.log()
    owner = job.claim(log, nodes=3, world=3)
    late = [job.table(owner, 1, node=node) for node in (1, 2)]
    job.vote(log, owner, 1, node=0)
    sleep = job.clock.sleep

    def sleep_while_others_vote(seconds: float) -> None:
        sleep(seconds)
        if late:
            write_part(log, late.pop(), job.deadline())

    job.clock.sleep = sleep_while_others_vote  # type: ignore[method-assign]

    again = job.claim(job.log(), G2, round=1, drain_grace_s=30.0)

    assert again.resume is not None
    assert again.resume.step == 1
    assert job.clock.now < 1010  # not the whole grace


def test_claim_does_not_wait_for_votes_that_do_not_come(job: Job) -> None:
    log = job.log()
    owner = job.claim(log, nodes=2, world=2)
    job.vote(log, owner, 1, node=0)
    started_at = job.clock.now

    again = job.claim(job.log(), G2, round=1, drain_grace_s=30.0, allow_fresh=True)

    assert again.resume is None
    assert job.clock.now - started_at < 3


def test_nothing_to_resume_is_said_not_assumed(job: Job) -> None:
    log = job.log()
    job.claim(log)

    with pytest.raises(NoCheckpointFound):
        job.claim(job.log(), G2, round=1)
    assert job.claim(job.log(), G2, round=1, allow_fresh=True).gen == 2


def test_commit_that_cannot_be_read_is_marked_and_the_next_round_goes_back(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1, 2)
    newest = log.read(3, job.deadline()).body
    assert isinstance(newest, Commit)
    job.store.delete(f"jobs/j/{newest.parts[0].key}", timeout_s=1)

    with pytest.raises(ManifestInvalid) as caught:
        claim(job.log(), request(G2, round=1), job.deadline(600))
    assert "marked bad" in caught.value.hint

    again = job.claim(job.log(), G3, round=2)
    assert again.resume_seq == 2
    assert job.kinds()[3:] == ["EPOCH", "POISON", "EPOCH"]


def test_one_reply_that_came_wrong_sets_no_commit_aside(job: Job) -> None:
    """A flipped bit on the way says nothing about what is stored."""
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1, 2)
    fault = Fault(kind=FaultKind.CORRUPT_READ, method="get_bytes", key_part="/part/")
    store = FaultyStore(job.store, clock=job.clock, faults=[fault])

    again = job.claim(job.log(store), G2, round=1)

    assert again.resume_seq == 3
    assert job.kinds()[3:] == ["EPOCH"]


def request(group: str, **changes: Any) -> ClaimRequest:
    fields = {
        "launch": "launch-1",
        "round": 0,
        "group": group,
        "nodes": 1,
        "world": 1,
        "layout": "plan-1",
    }
    return ClaimRequest(**(fields | changes))


def test_all_commits_bad_needs_a_person(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), 1)
    log.append(rules.poison(2, why="nan", who="me"), deadline=job.deadline())

    with pytest.raises(NoGoodCheckpoint):
        job.claim(job.log(), G2, round=1, allow_fresh=True)


def test_finished_job_stays_finished(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 5)
    log.append(rules.finish(at_step=5), my_gen=1, deadline=job.deadline())

    for group in (G1, G2):
        with pytest.raises(JobFinished) as caught:
            job.claim(job.log(), group, launch="launch-2")
        assert caught.value.step == 5
        assert caught.value.exit_code == 0
    assert job.claim(job.log(), G2, launch="launch-2", reopen=True).resume_seq == 2


# Votes


def test_votes_one_by_one_and_the_last_or_anyone_commits(job: Job) -> None:
    logs = [job.log() for _ in range(3)]
    owner = job.claim(logs[0], nodes=3, world=3)
    for node in (0, 1):
        job.vote(logs[node], owner, 7, node=node)
        assert job.advance(logs[node], 1) == Progress(seq=None, step=0, is_new=False)
    job.vote(logs[2], owner, 7, node=2)

    assert job.advance(logs[1], 1) == Progress(seq=2, step=7, is_new=True)
    assert job.advance(logs[2], 1) == Progress(seq=2, step=7, is_new=False)
    manifest = read_manifest(job.log(), 2, job.deadline())
    assert [shard.rank for shard in manifest.shards] == [0, 1, 2]


def test_step_that_another_node_left_behind_is_committed(job: Job) -> None:
    """A voted 1 and went on to 2; B voted 1 and died."""
    log = job.log()
    owner = job.claim(log, nodes=2, world=2)
    job.vote(log, owner, 1, node=0)
    job.vote(log, owner, 2, node=0)
    job.vote(job.log(), owner, 1, node=1)

    assert job.advance(log, 1).step == 1


def test_newest_complete_step_wins_and_covers_the_older(job: Job) -> None:
    log = job.log()
    owner = job.claim(log, nodes=2, world=2)
    for step in (1, 2, 3):
        for node in (0, 1):
            if (step, node) != (3, 1):
                job.vote(log, owner, step, node=node)

    assert job.advance(log, 1) == Progress(seq=2, step=2, is_new=True)
    job.vote(log, owner, 3, node=1)
    assert job.advance(log, 1).step == 3
    assert job.kinds() == ["EPOCH", "COMMIT", "COMMIT"]


def test_second_vote_of_a_node_is_harmless(job: Job) -> None:
    log = job.log()
    owner = job.claim(log, nodes=2, world=2)
    votes = [job.vote(log, owner, 1, node=node) for node in (0, 1, 0, 1, 0)]

    job.advance(log, 1)

    body = log.read(2, job.deadline()).body
    assert isinstance(body, Commit)
    first_of_each = [
        min(vote.ref.key for vote in votes if vote.table.node == node) for node in (0, 1)
    ]
    assert [part.key for part in body.parts] == first_of_each


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 9}, {"layout": "plan-2"}, {"world": 3, "nodes": 3}, {"nodes": 3, "world": 3}],
)
def test_votes_of_another_making_do_not_count(job: Job, changes: dict[str, Any]) -> None:
    log = job.log()
    owner = job.claim(log, nodes=2, world=2)
    job.vote(log, owner, 1, node=0)
    job.vote(log, owner, 1, node=1, **changes)
    assert job.advance(log, 1).seq is None

    job.vote(log, owner, 1, node=1)

    assert job.advance(log, 1).step == 1


def test_rubbish_among_the_votes_does_not_count(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    folder = "jobs/j/part/0000000001/000000000001"
    for name, data in (
        ("00000-" + "0" * 32, b"rubbish"),
        ("00000-" + "1" * 32, b""),
        ("readme", b"hello"),
    ):
        job.store.put_bytes(f"{folder}/{name}", data, timeout_s=1)
    assert job.advance(log, 1).seq is None

    job.vote(log, owner, 1)

    assert job.advance(log, 1).step == 1


def test_different_bases_do_not_make_one_checkpoint(job: Job) -> None:
    log = job.log()
    first = job.claim(log)
    job.commit(log, first, 1, 2)
    owner = job.claim(log, G2, round=1, nodes=2, world=2)
    job.vote(log, owner, 5, node=0, base=3)
    job.vote(log, owner, 5, node=1, base=2)
    assert job.advance(log, 2).is_new is False

    job.vote(log, owner, 6, node=0, base=3)
    job.vote(log, owner, 6, node=1)

    assert job.advance(log, 2).step == 6
    body = log.read(5, job.deadline()).body
    assert isinstance(body, Commit)
    assert body.base == 3


def test_one_node_commits_without_a_listing(job: Job) -> None:
    store = job.faulty()
    log = job.log(store)
    owner = job.claim(log)
    part = job.vote(log, owner, 1)
    store.calls.clear()

    assert job.advance(log, 1, part).is_new

    assert [method for method, _ in store.calls if method == "list_keys"] == []
    assert len([key for method, key in store.calls if method == "get_bytes"]) <= 2


def test_vote_without_a_reply_takes_a_new_name(job: Job) -> None:
    store = job.faulty(
        Fault(kind=FaultKind.LOST_REPLY, method="put_bytes", key_part="/part/"),
        Fault(kind=FaultKind.DROP, method="put_bytes", key_part="/part/", at_call=2),
    )
    log = job.log(store)
    owner = job.claim(log)

    part = job.vote(log, owner, 1)

    names = [key for method, key in store.calls if method == "put_bytes" and "/part/" in key]
    assert len(set(names)) == 3
    assert names[-1].endswith(part.ref.key)
    assert job.advance(log, 1).step == 1


def test_step_back_needs_a_new_generation(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 10)
    old = job.vote(log, owner, 9)

    assert job.advance(log, 1, old) == Progress(seq=2, step=10, is_new=False)
    assert job.kinds() == ["EPOCH", "COMMIT"]


@pytest.mark.parametrize("name", ["log.put.before", "log.put.after", "hint.put.before"])
def test_failure_around_the_slot_is_settled(
    job: Job, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = job.log()
    owner = job.claim(log)
    part = job.vote(log, owner, 1)
    monkeypatch.setenv(ENVIRONMENT_NAME, f"{name}=error@1")
    failpoints.reload()
    try:
        progress = job.advance(log, 1, part)
    finally:
        monkeypatch.delenv(ENVIRONMENT_NAME)
        failpoints.reload()

    assert progress.step == 1
    assert job.kinds() == ["EPOCH", "COMMIT"]


def test_seeded_faults_never_split_the_log(root: Path) -> None:
    """Drops, lost and late replies at random; two launches; what was acknowledged is in the log."""
    for seed in range(30):
        folder = root / str(seed)
        folder.mkdir()
        job, rng = Job(folder), random.Random(seed)
        rates = dict.fromkeys(
            (FaultKind.DROP, FaultKind.LOST_REPLY, FaultKind.LATE, FaultKind.THROTTLE), 0.12
        )
        store = FaultyStore(job.store, clock=job.clock, rates=rates, rng=rng)
        retrying = RetryingStore(store, Retrier(job.clock, draw=rng.random))
        acknowledged: dict[int, int] = {}
        logs = [job.log(retrying) for _ in range(2)]
        for turn in range(8):
            log = logs[rng.randrange(2)]
            try:
                owner = job.claim(log, f"{turn:032x}", launch=f"l{turn}", allow_fresh=True)
                for step in range(1, 4):
                    if rng.random() < 0.3:
                        store.land_late()
                    at_step = (owner.resume.step if owner.resume else 0) + step
                    progress = job.commit(log, owner, at_step)
                    acknowledged[progress.seq or 0] = progress.step
            except (TransientStoreError, DeadlineExceeded, OutcomeUnknown, ManifestInvalid):
                continue
            finally:
                store.land_late()

        checked = job.log()
        count = checked.tail(job.deadline()).seq
        previous = None
        for seq in range(1, count + 1):
            record = checked.read(seq, job.deadline())
            check_successor(previous, record)
            previous = record
            if seq in acknowledged:
                assert isinstance(record.body, Commit)
                assert record.body.step == acknowledged[seq]
        assert len(acknowledged) > 3
        for commit in list_commits(checked, job.deadline()):
            read_manifest(checked, commit.seq, job.deadline())


# Readers, retention, sweep


def keys_of(job: Job) -> set[str]:
    found = job.store.list_keys("jobs/j/", timeout_s=1)
    return {info.key for info in found if "/log/" not in info.key and "hint" not in info.key}


def test_manifest_of_a_changed_part_is_refused(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1)
    body = log.read(2, job.deadline()).body
    assert isinstance(body, Commit)
    key = f"jobs/j/{body.parts[0].key}"
    data = bytearray(job.store.get_bytes(key, max_bytes=10**6, timeout_s=1))
    for other in (bytes(data) + b" ", bytes(data[:-1]), bytes(data).replace(b"plan-1", b"plan-2")):
        job.store.put_bytes(key, other, timeout_s=1)

        with pytest.raises(ManifestInvalid):
            read_manifest(job.log(), 2, job.deadline())


@pytest.mark.parametrize("seq", [1, 9])
def test_manifest_of_what_is_no_commit(job: Job, seq: int) -> None:
    log = job.log()
    job.claim(log)

    with pytest.raises(ManifestInvalid):
        read_manifest(log, seq, job.deadline())


def test_sweep_deletes_what_retention_let_go_and_nothing_else(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, *range(1, 6), retention=KEEP_1)  # keeps 1 (the anchor) and 5
    orphans = {job.upload(a_shard(step=step)).key for step in (3, 5)}
    in_flight = job.vote(log, owner, 6)
    job.store.put_bytes("jobs/j/data/notes/x", b"mine", timeout_s=1)
    before = keys_of(job)

    dry = sweep(job.log(), job.deadline(), grace_s=0)
    assert keys_of(job) == before
    report = sweep(job.log(), job.deadline(), grace_s=0, dry_run=False)

    assert report.garbage == dry.garbage
    assert before - keys_of(job) == {f"jobs/j/{key}" for key in report.garbage}
    assert orphans <= set(report.garbage)
    assert report.unknown == ("data/notes/x",)
    assert len(report.garbage) == 3 * 2 + 2
    assert f"jobs/j/{in_flight.ref.key}" in keys_of(job)
    for commit in list_commits(log, job.deadline()):
        read_manifest(log, commit.seq, job.deadline())
    assert job.advance(log, 1, in_flight).step == 6


def test_sweep_keeps_shards_that_a_live_commit_refers_to(job: Job) -> None:
    """A frozen shard uploaded once is referred to by every later commit."""
    log = job.log()
    owner = job.claim(log)
    frozen = job.upload(a_shard(name="frozen", step=1))
    first = job.vote(log, owner, 1, shards=[job.upload(a_shard(step=1)), frozen])
    job.advance(log, 1, first, retention=KEEP_1)
    for step in (2, 3, 4):
        part = job.vote(log, owner, step, shards=[job.upload(a_shard(step=step)), frozen], base=2)
        job.advance(log, 1, part, retention=KEEP_1)
    again = job.claim(log, G2, round=1)
    part = job.vote(
        log, again, 9, shards=[job.upload(a_shard(gen=2, step=9)), frozen], base=again.resume_seq
    )
    job.advance(log, 2, part, retention=KEEP_1)
    third = job.claim(log, G3, round=2)
    job.commit(log, third, 20, 21, retention=KEEP_1)

    sweep(job.log(), job.deadline(), grace_s=0, dry_run=False)

    assert f"jobs/j/{frozen.key}" in keys_of(job)


def test_sweep_works_on_the_log_as_it_was(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 6), retention=KEEP_1)

    report = sweep(job.log(), job.deadline(), grace_s=3600, dry_run=False)

    assert (report.snapshot_seq, report.garbage) == (0, ())


def test_sweep_stops_when_a_live_part_cannot_be_read(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 6), retention=KEEP_1)
    body = log.read(6, job.deadline()).body
    assert isinstance(body, Commit)
    job.store.delete(f"jobs/j/{body.parts[0].key}", timeout_s=1)
    before = keys_of(job)

    with pytest.raises(ManifestInvalid):
        sweep(job.log(), job.deadline(), grace_s=0, dry_run=False)

    assert keys_of(job) == before


def test_sweep_keeps_to_its_cap(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 8), retention=KEEP_1)

    first = sweep(job.log(), job.deadline(), grace_s=0, dry_run=False, cap=3)
    rest = sweep(job.log(), job.deadline(), grace_s=0, dry_run=False)

    assert (len(first.garbage), first.is_capped) == (3, True)
    assert (len(rest.garbage), rest.is_capped) == (7, False)


def test_sweep_takes_late_uploads_of_fenced_nodes(job: Job) -> None:
    log = job.log()
    owner = job.claim(log)
    job.commit(log, owner, 1)
    again = job.claim(job.log(), G2, round=1)
    job.commit(job.log(), again, 2)
    late = job.vote(log, owner, 50)

    report = sweep(job.log(), job.deadline(), grace_s=0, dry_run=False)

    assert set(report.garbage) == {late.ref.key, late.table.shards[0].key}


def test_retire_by_hand(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), *range(1, 6))  # slots 2 to 6; keeps 3 and the anchor

    assert [c.seq for c in list_commits(log, job.deadline())] == [2, 4, 5, 6]
    assert retire(log, None, job.deadline(), retention=KEEP_1) == (4, 5)
    assert retire(log, None, job.deadline(), retention=KEEP_1) == ()
    with pytest.raises(AppendRefused):
        retire(log, [6], job.deadline(), retention=KEEP_1, by_operator=True)


def test_list_of_commits_tells_good_bad_and_pinned(job: Job) -> None:
    log = job.log()
    job.commit(log, job.claim(log), 1, 2, 3)
    log.append(rules.poison(3, why="", who=""), deadline=job.deadline())
    log.append(rules.pin("best", 2), deadline=job.deadline())

    commits = list_commits(job.log(), job.deadline())

    assert [(c.seq, c.is_good, c.is_in_use, c.pins) for c in commits] == [
        (2, True, True, ("best",)),
        (3, False, False, ()),
        (4, True, True, ()),
    ]
