"""What may be appended, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.commit import rules
from supervisor.commit.records import (
    Body,
    Commit,
    Epoch,
    Fail,
    Finish,
    LocalStep,
    LogState,
    Pin,
    Poison,
    Retire,
    step,
)
from supervisor.commit.rules import ClaimRequest, Done, Refuse, Retention, excess
from supervisor.errors import (
    AppendRefused,
    Fenced,
    JobFinished,
    LogError,
    NoCheckpointFound,
    NoGoodCheckpoint,
)
from tests.unit.test_records import a_commit, an_epoch

G1, G2, G3, G4 = ("1" * 32, "2" * 32, "3" * 32, "4" * 32)
KEEP_3 = Retention(keep=3)


def fold(*bodies: Body) -> LogState:
    state = LogState()
    for seq, body in enumerate(bodies, start=1):
        state = step(state, body, seq=seq)
    return state


def a_request(**changes: Any) -> ClaimRequest:
    fields = {
        "launch": "launch-1",
        "round": 1,
        "group": G2,
        "nodes": 1,
        "world": 1,
        "layout": "plan-1",
    }
    return ClaimRequest(**(fields | changes))


def claim(state: LogState, *, seq: int = 50, **changes: Any) -> Epoch:
    body = rules.claim(a_request(**changes))(state, seq)
    assert isinstance(body, Epoch)
    return body


def refusal(make: rules.Make, state: LogState, *, seq: int = 50) -> LogError:
    answer = make(state, seq)
    assert isinstance(answer, Refuse)
    return answer.error


FIRST = an_epoch(group=G1)


def test_first_claim_of_an_empty_log_starts_fresh() -> None:
    assert claim(LogState(), seq=1).resume is None


def test_later_fresh_start_has_to_be_allowed() -> None:
    state = fold(FIRST)

    assert isinstance(refusal(rules.claim(a_request()), state), NoCheckpointFound)
    assert claim(state, allow_fresh=True).resume is None


def test_claim_resumes_from_the_newest_good_commit() -> None:
    state = fold(FIRST, a_commit(1), a_commit(2), a_commit(3), Poison(commit=4))

    body = claim(state)

    assert (body.resume, body.skip) == (3, ())


def test_same_group_adopts_its_generation() -> None:
    state = fold(FIRST, a_commit(1), an_epoch(group=G2, resume=2, round=1))

    assert rules.claim(a_request(group=G2))(state, 4) == Done(3)


def test_group_that_was_superseded_is_fenced() -> None:
    state = fold(FIRST, a_commit(1), an_epoch(group=G2, resume=2, round=1))

    error = refusal(rules.claim(a_request(group=G1, round=5)), state)

    assert isinstance(error, Fenced)
    assert error.hint


def test_lower_round_of_the_launch_is_fenced_and_the_same_is_not() -> None:
    state = fold(an_epoch(group=G1, round=3), a_commit(1))

    assert isinstance(refusal(rules.claim(a_request(round=2)), state), Fenced)
    assert claim(state, round=3).round == 3


def test_new_launch_takes_over_whatever_its_round() -> None:
    state = fold(an_epoch(group=G1, round=3), a_commit(1))

    assert claim(state, launch="launch-2", round=0).launch == "launch-2"


def test_launch_that_lost_the_job_stays_fenced() -> None:
    state = fold(FIRST, a_commit(1), an_epoch(group=G2, launch="launch-2", resume=2))

    assert isinstance(refusal(rules.claim(a_request(group=G3, round=9)), state), Fenced)


def test_lower_attempt_is_fenced_where_both_are_known() -> None:
    state = fold(an_epoch(group=G1, attempt=4), a_commit(1))

    make = rules.claim(a_request(launch="launch-2", attempt=3))
    assert isinstance(refusal(make, state), Fenced)
    for attempt in (None, 4, 5):
        assert claim(state, launch="launch-2", attempt=attempt).attempt == attempt


def failed(times: int) -> LogState:
    bodies: list[Body] = [FIRST, a_commit(1), a_commit(2)]
    for number in range(times):
        bodies += [an_epoch(group=f"{number + 5:032x}", round=1, resume=3), Fail(node=0)]
    return fold(*bodies)


def test_repeated_failures_step_back_once_and_leave_a_mark() -> None:
    assert claim(failed(2), fail_limit=3).resume == 3

    body = claim(failed(3), fail_limit=3)

    assert (body.resume, body.skip) == (2, (3,))


def test_preemptions_do_not_step_back() -> None:
    """Epochs without a commit are what quick preemptions produce, too."""
    bodies = [FIRST, a_commit(1), a_commit(2)]
    bodies += [an_epoch(group=f"{n:032x}", round=1, resume=3) for n in range(9)]

    assert claim(fold(*bodies), fail_limit=3).resume == 3


def test_without_another_good_commit_there_is_no_step_back() -> None:
    state = fold(FIRST, a_commit(1), an_epoch(group=G3, resume=2), Fail(node=0))

    assert claim(state, fail_limit=1).resume == 2


def test_operators_choice_skips_what_is_newer() -> None:
    state = fold(FIRST, a_commit(1), a_commit(2), a_commit(3))

    body = claim(state, resume_at=2)

    assert (body.resume, body.skip) == (2, (3, 4))


@pytest.mark.parametrize("resume_at", [1, 4, 9])
def test_operators_choice_must_be_good(resume_at: int) -> None:
    state = fold(FIRST, a_commit(1), a_commit(2), a_commit(3), Poison(commit=4))

    error = refusal(rules.claim(a_request(resume_at=resume_at)), state)
    assert isinstance(error, NoCheckpointFound)


def test_all_bad_stops_even_if_a_fresh_start_is_allowed() -> None:
    state = fold(FIRST, a_commit(1), Poison(commit=2))

    error = refusal(rules.claim(a_request(allow_fresh=True)), state)
    assert isinstance(error, NoGoodCheckpoint)


def test_finished_job_is_not_run_again_unless_reopened() -> None:
    state = fold(FIRST, a_commit(1), Finish(step=1))

    for group in (G1, G2):
        error = refusal(rules.claim(a_request(group=group)), state)
        assert isinstance(error, JobFinished)
        assert error.step == 1
    assert claim(state, reopen=True).reopen is True
    assert claim(fold(FIRST, a_commit(1)), reopen=True).reopen is False


TWO_COMMITS: list[Body] = [FIRST, a_commit(10), a_commit(20)]


def a_local(gen: int, at: int, group: str = G1) -> LocalStep:
    return LocalStep(gen=gen, step=at, group=group)


THREE_COMMITS: list[Body] = [*TWO_COMMITS, a_commit(30)]
LOCAL_EPOCH = an_epoch(group=G2, resume=3, local=a_local(1, 25))


@pytest.mark.parametrize(
    ("bodies", "local", "is_used"),
    [
        (TWO_COMMITS, a_local(1, 25), True),
        (TWO_COMMITS, a_local(1, 20), False),  # not newer than the commit
        (TWO_COMMITS, a_local(1, 15), False),
        (TWO_COMMITS, a_local(2, 1), False),  # of a generation that is not there yet
        (TWO_COMMITS, a_local(1, 25, G4), False),  # of another life of this job's name
        ([*TWO_COMMITS, Poison(commit=3)], a_local(1, 25), False),  # stems from the bad one
        ([*TWO_COMMITS, Poison(commit=3)], a_local(1, 15), False),  # the claim goes back further
        ([*THREE_COMMITS, Poison(commit=3), Poison(commit=4), Retire(commits=(3,))],
         a_local(1, 25), False),  # a bad one that is retired has not become good
        ([*TWO_COMMITS, an_epoch(group=G2, resume=3)], a_local(1, 25), False),  # superseded
        ([*TWO_COMMITS, LOCAL_EPOCH], a_local(1, 25), True),  # the same again after a crash
        ([*TWO_COMMITS, LOCAL_EPOCH], a_local(1, 24), False),
        ([*TWO_COMMITS, LOCAL_EPOCH, a_commit(25), Poison(commit=5)], a_local(1, 25), False),
        ([*TWO_COMMITS, an_epoch(group=G2, resume=3), Fail(node=0)], a_local(2, 25, G2), False),
        ([FIRST], a_local(1, 5), True),
    ],
)  # fmt: skip
def test_local_step_counts_only_if_it_continues_what_the_log_would_resume_from(
    bodies: list[Body], local: LocalStep, is_used: bool
) -> None:
    body = claim(fold(*bodies), group="5" * 32, local=local, allow_fresh=True, fail_limit=1)

    assert body.local == (local if is_used else None)


def test_local_step_is_not_used_against_the_operators_choice() -> None:
    body = claim(fold(*TWO_COMMITS), local=a_local(1, 25), resume_at=2)

    assert body.local is None


def test_a_job_without_commits_resumes_from_a_sound_local_step_and_from_nothing_else() -> None:
    sound = claim(fold(FIRST), local=a_local(1, 5))

    error = refusal(rules.claim(a_request(local=a_local(1, 5, G4))), fold(FIRST))

    assert (sound.resume, sound.local) == (None, a_local(1, 5))
    assert isinstance(error, NoCheckpointFound)


def test_starts_that_failed_from_a_local_set_say_nothing_against_the_newest_commit() -> None:
    bodies = [*TWO_COMMITS, LOCAL_EPOCH, Fail(node=0)]

    body = claim(fold(*bodies), group="5" * 32, local=a_local(1, 25), fail_limit=1)

    assert (body.resume, body.local, body.skip) == (3, None, ())


def commit_at(at_step: int, *, base: int | None = None, keep: int = 3) -> rules.Make:
    return rules.commit(
        at_step=at_step,
        parts=a_commit(at_step).parts,
        base=base,
        flags=(),
        retention=Retention(keep=keep),
    )


def test_commit_of_a_covered_step_is_done() -> None:
    state = fold(FIRST, a_commit(10))

    assert commit_at(10)(state, 3) == Done(2)
    assert commit_at(9)(state, 3) == Done(2)


def test_commit_on_a_retired_base_is_refused() -> None:
    assert isinstance(refusal(commit_at(11, base=9), fold(FIRST, a_commit(10))), AppendRefused)


def test_commit_carries_its_retention() -> None:
    state = fold(FIRST, *(a_commit(n) for n in range(1, 5)))  # slots 2 to 5; 2 is the anchor

    body = commit_at(5)(state, 6)

    assert isinstance(body, Commit)
    assert body.retire == (3,)


def test_retention_counts_good_commits_only() -> None:
    """Else poisoned ones would push out the last that can be resumed from."""
    state = fold(FIRST, *(a_commit(n) for n in range(1, 8)), *(Poison(commit=n) for n in (6, 7, 8)))

    assert excess(state, KEEP_3) == ()
    assert {c.seq for c in state.good} == {2, 3, 4, 5}


def test_retention_keeps_what_is_in_use_and_pinned() -> None:
    state = fold(FIRST, *(a_commit(n) for n in range(1, 8)), Pin(name="p", commit=4))

    assert excess(state, Retention(keep=1)) == (3, 5, 6, 7)
    later = step(state, an_epoch(group=G2, resume=8), seq=10)
    assert excess(later, Retention(keep=1)) == (2, 3, 5, 6, 7)


def test_retire_takes_only_what_retention_lets_go() -> None:
    state = fold(FIRST, *(a_commit(n) for n in range(1, 8)))

    body = rules.retire(None, retention=KEEP_3)(state, 9)
    assert body == Retire(commits=(3, 4, 5))
    for commits in ([2], [8], [7], [3, 7]):
        make = rules.retire(commits, retention=KEEP_3)
        assert isinstance(refusal(make, state), AppendRefused)
    assert rules.retire([77], retention=KEEP_3)(state, 9) == Done(0)


def test_operator_may_retire_bad_ones_but_not_those_in_use() -> None:
    state = fold(
        FIRST,
        *(a_commit(n) for n in range(1, 5)),
        *(Poison(commit=n) for n in (2, 4, 5)),
        Pin(name="p", commit=4),
    )

    make = rules.retire([4], retention=KEEP_3, by_operator=True)
    assert isinstance(refusal(make, state), AppendRefused)  # pinned
    for commit in (2, 5, 3):  # anchor, newest, the last good one
        make = rules.retire([commit], retention=KEEP_3, by_operator=True)
        assert isinstance(refusal(make, state), AppendRefused)
    unpinned = fold(FIRST, *(a_commit(n) for n in range(1, 5)), Poison(commit=4))
    make = rules.retire([4], retention=KEEP_3, by_operator=True)
    assert make(unpinned, 9) == Retire(commits=(4,))
    assert isinstance(refusal(rules.retire([4], retention=KEEP_3), unpinned), AppendRefused)


def test_marks_and_pins_are_done_when_they_are_there() -> None:
    state = fold(FIRST, a_commit(1), a_commit(2), Poison(commit=2), Pin(name="p", commit=3))

    assert rules.poison(2, why="", who="")(state, 6) == Done(0)
    assert rules.unpoison(3, why="", who="")(state, 6) == Done(0)
    assert rules.pin("p", 3)(state, 6) == Done(0)
    assert rules.unpin("q")(state, 6) == Done(0)
    assert rules.pin("p", 2)(state, 6) == Pin(name="p", commit=2)
    for make in (
        rules.poison(9, why="", who=""),
        rules.unpoison(9, why="", who=""),
        rules.pin("q", 9),
    ):
        assert isinstance(refusal(make, state), AppendRefused)


def test_failure_counts_once_and_only_before_the_first_commit() -> None:
    make = rules.fail(why="boom", node=0)

    assert isinstance(make(fold(FIRST), 2), Fail)
    assert make(fold(FIRST, Fail(node=1)), 3) == Done(0)
    assert make(fold(FIRST, a_commit(1)), 3) == Done(0)
    resumed = fold(FIRST, a_commit(1), an_epoch(group=G2, resume=2))
    assert isinstance(make(resumed, 4), Fail)


def test_finish_is_terminal_and_not_before_the_last_commit() -> None:
    state = fold(FIRST, a_commit(10))

    assert rules.finish(at_step=10)(state, 3) == Finish(step=10)
    assert isinstance(refusal(rules.finish(at_step=9), state), AppendRefused)
    done = step(state, Finish(step=10), seq=3)
    assert rules.finish(at_step=10)(done, 4) == Done(0)
    assert isinstance(refusal(commit_at(11), done), AppendRefused)


@pytest.mark.parametrize("changes", [{"nodes": 2, "world": 1}, {"nodes": 0}, {"fail_limit": 0}])
def test_impossible_requests_cannot_be_made(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        a_request(**changes)
