"""Records: the carried state is the fold of the log, and a reader stops at the first doubt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as struct_replace

from supervisor.commit import rules
from supervisor.commit.records import (
    MAX_RECORD_BYTES,
    START,
    Body,
    Commit,
    Epoch,
    Fail,
    Finish,
    LogState,
    PartRef,
    Pin,
    Poison,
    Record,
    Retire,
    Unpin,
    Unpoison,
    build_record,
    check_successor,
    decode_record,
    encode_record,
    step,
)
from supervisor.commit.rules import ClaimRequest, Done, Refuse, Retention
from supervisor.errors import LogCorrupt, LogTooNew
from tests.unit.tables import new_uid
from trainer_sdk.protocol.names import PartName


def an_epoch(**changes: Any) -> Epoch:
    fields = {
        "launch": "launch-1",
        "round": 0,
        "group": new_uid(),
        "nodes": 1,
        "world": 1,
        "layout": "plan-1",
        "resume": None,
    }
    return Epoch(**(fields | changes))


def a_commit(at_step: int, **changes: Any) -> Commit:
    key = PartName(generation=1, step=at_step, node=0, uid=new_uid()).key
    part = PartRef(key=key, sha256="0" * 64, size_bytes=100)
    return Commit(**({"step": at_step, "parts": (part,), "base": None} | changes))


def a_log(*bodies: Body) -> list[Record]:
    records: list[Record] = []
    for body in bodies:
        records.append(build_record(records[-1] if records else None, body, uid=new_uid()))
    return records


def state_after(*bodies: Body) -> LogState:
    return a_log(*bodies)[-1].state


def test_life_of_a_job() -> None:
    log = a_log(
        an_epoch(),
        a_commit(10),
        a_commit(20),
        Poison(commit=3, why="loss is nan"),
        an_epoch(resume=2),
        a_commit(15),
        Pin(name="best", commit=6),
        Finish(step=15),
    )

    state = log[-1].state
    assert [record.gen for record in log] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert (state.gen, state.epoch, state.resume, state.anchor) == (2, 5, 2, 2)
    assert (state.last_commit, state.last_step, state.bad) == (6, 15, (3,))
    assert [commit.seq for commit in state.good] == [2, 6]
    assert state.pinned == {6}
    assert state.finished == 15


def test_first_commit_of_a_fresh_generation_is_its_anchor() -> None:
    log = a_log(an_epoch(), a_commit(10), a_commit(20))

    assert [record.state.anchor for record in log] == [None, 2, 2]


def test_epoch_goes_back_to_the_step_of_its_commit() -> None:
    assert state_after(an_epoch(), a_commit(10), a_commit(20), an_epoch(resume=2)).last_step == 10


def test_step_back_marks_what_it_skips_and_forgives_failures() -> None:
    log = a_log(
        an_epoch(),
        a_commit(10),
        a_commit(20),
        an_epoch(resume=3),
        Fail(why="x", node=0),
        an_epoch(resume=2, skip=(3,)),
    )

    assert log[4].state.fails == 1
    assert (log[5].state.bad, log[5].state.fails) == ((3,), 0)


def test_only_64_launches_and_groups_are_remembered() -> None:
    state = START
    for number in range(70):
        state = step(state, an_epoch(launch=f"launch-{number}"), seq=number + 1)

    assert len(state.launches) == len(state.groups) == 64
    assert state.launches[-1] == "launch-69"


def test_launch_that_claims_again_is_remembered_once() -> None:
    state = state_after(an_epoch(), an_epoch(round=1))

    assert state.launches == ("launch-1",)


ILLEGAL: dict[str, tuple[list[Body], Body]] = {
    "commit before any epoch": ([], a_commit(1)),
    "commit of a step again": ([an_epoch(), a_commit(5)], a_commit(5)),
    "commit of an older step": ([an_epoch(), a_commit(5)], a_commit(4)),
    "commit on an unknown base": ([an_epoch()], a_commit(1, base=1)),
    "commit retires the anchor": ([an_epoch(), a_commit(1)], a_commit(2, retire=(2,))),
    "commit retires itself": ([an_epoch()], a_commit(1, retire=(2,))),
    "retire the newest": ([an_epoch(), a_commit(1), a_commit(2)], Retire(commits=(3,))),
    "retire what is resumed": (
        [an_epoch(), a_commit(1), an_epoch(resume=2), a_commit(2)],
        Retire(commits=(2,)),
    ),
    "retire a pinned one": (
        [an_epoch(), a_commit(1), a_commit(2), a_commit(3), Pin(name="p", commit=3)],
        Retire(commits=(3,)),
    ),
    "retire what is not there": ([an_epoch()], Retire(commits=(7,))),
    "resume from nowhere": ([an_epoch()], an_epoch(resume=1)),
    "resume from a bad one": (
        [an_epoch(), a_commit(1), Poison(commit=2)],
        an_epoch(resume=2),
    ),
    "resume from a skipped one": ([an_epoch(), a_commit(1)], an_epoch(resume=2, skip=(2,))),
    "skip what is not there": ([an_epoch(), a_commit(1)], an_epoch(resume=2, skip=(9,))),
    "poison nothing": ([an_epoch()], Poison(commit=1)),
    "pin nothing": ([an_epoch()], Pin(name="p", commit=1)),
    "fail twice": ([an_epoch(), Fail(node=0)], Fail(node=1)),
    "fail after a commit": ([an_epoch(), a_commit(1)], Fail(node=0)),
    "fail before any epoch": ([], Fail(node=0)),
    "finish before any epoch": ([], Finish(step=1)),
    "finish before the commit": ([an_epoch(), a_commit(5)], Finish(step=4)),
    "run when finished": ([an_epoch(), a_commit(5), Finish(step=5)], an_epoch(resume=2)),
    "commit beyond the end": ([an_epoch(), Finish(step=5)], a_commit(6)),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_no_correct_writer_writes_is_corrupt(case: str) -> None:
    before, body = ILLEGAL[case]
    log = a_log(*before)
    previous = log[-1] if log else None

    with pytest.raises(LogCorrupt):
        build_record(previous, body, uid=new_uid())


def test_reopening_clears_finished() -> None:
    state = state_after(an_epoch(), a_commit(5), Finish(step=5), an_epoch(resume=2, reopen=True))

    assert state.finished is None


def test_last_votes_may_be_committed_after_the_end() -> None:
    assert state_after(an_epoch(), Finish(step=5), a_commit(5)).finished == 5


def test_unpoison_and_unpin_undo() -> None:
    state = state_after(
        an_epoch(),
        a_commit(1),
        Poison(commit=2),
        Unpoison(commit=2),
        Pin(name="p", commit=2),
        Unpin(name="p", commit=2),
    )

    assert (state.bad, state.pins) == ((), ())


def test_record_reads_back() -> None:
    for record in a_log(
        an_epoch(attempt=3), a_commit(1, flags=("final",)), Pin(name="p", commit=2)
    ):
        assert decode_record(record.data, seq=record.seq) == record
        plain = json.loads(record.data)
        assert record.data == json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def changed(record: Record, **changes: Any) -> bytes:
    plain = json.loads(record.data) | changes
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("changes", [{"fmt": 2}, {"fmt": 2, "state": "?"}, {"kind": "MERGE"}])
def test_newer_record_stops_the_reader(changes: dict[str, Any]) -> None:
    (record,) = a_log(an_epoch())

    with pytest.raises(LogTooNew) as caught:
        decode_record(changed(record, **changes), seq=1)

    assert "update" in caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 2},
        {"seq": "1"},
        {"gen": 2},
        {"uid": "x"},
        {"kind": "COMMIT"},
        {"body": {}},
        {"body": None},
        {"state": {}},
        {"extra": 1},
        {"prev": "0"},
    ],
)
def test_record_of_forbidden_values_is_corrupt(changes: dict[str, Any]) -> None:
    (record,) = a_log(an_epoch())

    with pytest.raises(LogCorrupt):
        decode_record(changed(record, **changes), seq=1)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"\xff", b" " * (MAX_RECORD_BYTES + 1), b'{"x":' + b"[" * 60_000]
)
def test_rubbish_is_corrupt(data: bytes) -> None:
    with pytest.raises(LogCorrupt):
        decode_record(data, seq=1)


def test_other_spelling_of_the_same_record_is_corrupt() -> None:
    (record,) = a_log(an_epoch())
    spelled = json.dumps(json.loads(record.data), indent=1).encode()

    with pytest.raises(LogCorrupt, match="canonical"):
        decode_record(spelled, seq=1)


def test_record_too_large_for_a_slot_is_not_built() -> None:
    parts = tuple(a_commit(1).parts[0] for _ in range(256))
    (first,) = a_log(an_epoch())
    build_record(first, a_commit(1, parts=parts), uid=new_uid())  # 256 nodes do fit

    log = a_log(an_epoch(), *(a_commit(n) for n in range(1, 700)))
    with pytest.raises(ValueError, match="does not fit"):
        build_record(log[-1], a_commit(700, parts=parts), uid=new_uid())


def test_successor_is_checked() -> None:
    first, second, third = a_log(an_epoch(), a_commit(1), a_commit(2))
    other_first, *_ = a_log(an_epoch())
    check_successor(None, first)
    check_successor(first, second)

    for previous, record in (
        (None, second),
        (first, third),
        (second, second),
        (other_first, second),
        (first, replace(second, prev=None)),
        (first, replace(second, state=struct_replace(second.state, fails=7))),
        (first, replace(second, state=struct_replace(second.state, live=()))),
    ):
        with pytest.raises(LogCorrupt):
            check_successor(previous, record)


def makes(draw: st.DrawFn, state: LogState) -> rules.Make:
    """Any rule with arguments around those that matter."""
    seqs = [commit.seq for commit in state.live] + [1, 99]
    seq = draw(st.sampled_from(seqs))
    retention = Retention(keep=draw(st.integers(1, 3)))
    kinds = ["claim", "commit", "commit", "commit", "retire", "poison", "unpoison", "pin", "fail"]
    match draw(st.sampled_from([*kinds, "unpin", "finish"])):
        case "claim":
            return rules.claim(
                ClaimRequest(
                    launch=draw(st.sampled_from(["a", "b", "c"])),
                    round=draw(st.integers(0, 3)),
                    group=draw(st.sampled_from([c * 32 for c in "0123456789"])),
                    nodes=1,
                    world=1,
                    layout="x",
                    allow_fresh=True,
                    resume_at=draw(st.sampled_from([None, None, seq])),
                    fail_limit=1,
                    reopen=draw(st.booleans()),
                )
            )
        case "commit":
            at_step = state.last_step + draw(st.integers(0, 2))
            return rules.commit(
                at_step=at_step,
                parts=a_commit(at_step).parts,
                base=draw(st.sampled_from([None, state.anchor])),
                flags=(),
                retention=retention,
            )
        case "retire":
            chosen = draw(st.sampled_from([None, (seq,)]))
            return rules.retire(chosen, retention=retention, by_operator=draw(st.booleans()))
        case "poison":
            return rules.poison(seq, why="", who="")
        case "unpoison":
            return rules.unpoison(seq, why="", who="")
        case "pin":
            return rules.pin(draw(st.sampled_from("pq")), seq)
        case "unpin":
            return rules.unpin(draw(st.sampled_from("pq")))
        case "fail":
            return rules.fail(why="", node=0)
        case _:
            return rules.finish(at_step=state.last_step)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_run_of_the_rules_gives_a_log_that_reads_back(data: st.DataObject) -> None:
    """The carried state is the fold of the bodies, and the invariants of the protocol hold."""
    draw: st.DrawFn = data.draw  # type: ignore[assignment]
    previous: Record | None = None
    folded = START
    for _ in range(data.draw(st.integers(1, 25))):
        seq = previous.seq + 1 if previous else 1
        make = makes(draw, folded)
        body = make(folded, seq)
        if isinstance(body, Done | Refuse):
            continue
        record = build_record(previous, body, uid=new_uid())
        before, folded = folded, step(folded, body, seq=seq)

        assert decode_record(record.data, seq=seq).state == record.state == folded
        assert encode_record(record) == record.data
        check_successor(previous, record)
        assert_invariants(before, folded, body)
        # A rule whose goal is reached must say so, or a lost reply would be repeated.
        assert not isinstance(make(folded, seq + 1), Epoch | Commit | Fail | Finish | Poison | Pin)
        previous = record


def assert_invariants(before: LogState, after: LogState, body: Body) -> None:
    live = after.live_seqs
    assert after.gen == before.gen + isinstance(body, Epoch)  # I4
    assert {after.resume, after.anchor, after.last_commit} - {None} <= live  # I14
    assert after.pinned <= live
    assert set(after.bad) <= live
    if isinstance(body, Commit):  # I11
        assert body.step > before.last_step
    if isinstance(body, Epoch) and body.resume:  # I14, I18
        assert body.resume in {commit.seq for commit in before.good}
        assert not [c for c in after.good if c.seq > body.resume]
    if before.good and not isinstance(body, Poison | Epoch):  # I21
        assert after.good
