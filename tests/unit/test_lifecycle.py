"""The pure heart: every phase answers every event, and whole lives go as the architecture says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.lifecycle import (
    ILLEGAL,
    IllegalTransition,
    JobState,
    Phase,
    Policy,
    inputs,
    outputs,
)
from supervisor.lifecycle import step as turn
from supervisor.lifecycle.decision import Measured
from supervisor.lifecycle.inputs import Event, Moment, Notice, NoticeKind
from supervisor.lifecycle.machine import HANDLERS
from supervisor.lifecycle.state import TERMINAL, Column, PersistState, RankView

WORLD = 2
FAST = Policy(every_steps=5, max_crashes=2)


class Life:
    """A job driven by events over a scripted clock; keeps every action."""

    def __init__(self, policy: Policy = FAST) -> None:
        self.state = JobState(policy=policy)
        self.now = 100.0
        self.steps: dict[int, int] = {}
        self.measured = Measured()
        self.beat_age_s: float | None = 0.0
        self.actions: list[Any] = []

    def feed(self, *events: Event) -> list[Any]:
        """The actions of these events."""
        found: list[Any] = []
        for event in events:
            moment = Moment(
                now=self.now,
                steps=dict(self.steps),
                measured=self.measured,
                beat_age_s=self.beat_age_s,
            )
            self.state, actions = turn(self.state, event, moment)
            found += actions
        self.actions += found
        return [action for action in found if not isinstance(action, outputs.Report)]

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.feed(inputs.Tick())

    def reported(self, event: str) -> list[dict[str, object]]:
        return [
            action.fields
            for action in self.actions
            if isinstance(action, outputs.Report) and action.event == event
        ]

    # ------------------------------------------------------------ stages of a life

    def launch(self) -> None:
        self.feed(inputs.Started(is_taken_up=False), inputs.JobLaunched(pid=7))

    def join(self, incarnation: str = "a", generation: int = 0) -> list[Any]:
        return self.feed(
            *(
                inputs.RankJoined(
                    rank=rank,
                    world_size=WORLD,
                    incarnation=f"{incarnation}{rank}",
                    generation=generation,
                    has_restored=generation > 0,
                )
                for rank in range(WORLD)
            )
        )

    def claim(self, generation: int = 1, resume_step: int | None = None, **more: Any) -> list[Any]:
        options = {
            "is_local": False,
            "is_adopted": False,
            "incarnation": self.state.incarnation or "",
            **more,
        }
        return self.feed(inputs.Claimed(generation=generation, resume_step=resume_step, **options))

    def train(self, step: int = 0, *, keeps_slots: bool = False) -> list[Any]:
        found = []
        for rank in range(WORLD):
            found += self.feed(inputs.RankRestored(rank=rank, step=step))
        for rank in range(WORLD):
            found += self.feed(
                inputs.RankPlanned(rank=rank, slot_bytes=4096, keeps_slots=keeps_slots)
            )
        return found

    def to_training(self) -> None:
        self.launch()
        self.join()
        self.claim()
        self.train()

    def seal(
        self, slot: int, step: int, *, replicas: str = "", is_final: bool = False
    ) -> list[Any]:
        return self.feed(
            *(
                inputs.RankSealed(
                    rank=rank,
                    slot=slot,
                    step=step,
                    image_bytes=1000,
                    replicas=f"{replicas}{rank}" if replicas else "",
                    is_final=is_final,
                )
                for rank in range(WORLD)
            )
        )

    def commit(self, slot: int, step: int) -> list[Any]:
        return self.feed(
            inputs.CheckpointCommitted(
                job=self.state.columns[slot].job,
                slot=slot,
                step=step,
                generation=self.state.generation,
                seq=step,
            )
        )

    def fail_persist(self, slot: int, step: int, *, is_cancelled: bool = False) -> list[Any]:
        return self.feed(
            inputs.PersistFailed(
                job=self.state.columns[slot].job,
                slot=slot,
                step=step,
                error_id="store_unreachable",
                reason="x",
                is_cancelled=is_cancelled,
            )
        )

    def bring_images(self) -> list[Any]:
        return self.feed(inputs.ImagesReady(generation=self.state.generation))

    def notice(self, lead_s: float = 30.0, **options: Any) -> list[Any]:
        values = {"source": "ec2", "kind": NoticeKind.RECLAIM, **options}
        notice = Notice(deadline_at=self.now + lead_s, **values)
        return self.feed(inputs.NoticeReceived(notice=notice))

    def hold(self, step: int, **options: Any) -> list[Any]:
        found = []
        for rank in range(WORLD):
            found += self.feed(inputs.RankAtBoundary(rank=rank, step=step, **options))
        return found


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# ---------------------------------------------------------------- every pair

NOTICE = Notice(source="ec2", kind=NoticeKind.RECLAIM, deadline_at=130.0)
EVERY_EVENT: list[Event] = [
    inputs.Started(is_taken_up=False),
    inputs.JobLaunched(pid=1),
    inputs.JobExited(code=1),
    inputs.JobExited(code=0),
    inputs.JobExited(code=None),
    inputs.JobStopped(),
    inputs.LaunchFailed(reason="x"),
    inputs.RankJoined(rank=0, world_size=2, incarnation="z", generation=0, has_restored=False),
    inputs.RankJoined(rank=1, world_size=2, incarnation="a1", generation=1, has_restored=True),
    inputs.RankLost(rank=0),
    inputs.Claimed(incarnation="a0", generation=2, resume_step=3, is_local=False, is_adopted=False),
    inputs.ClaimFailed(incarnation="a0", error_id="fenced", reason="x", exit_code=77),
    inputs.ImagesReady(generation=1),
    inputs.FetchFailed(generation=1, reason="x", is_checkpoint_bad=True),
    inputs.FetchFailed(generation=1, reason="x", is_checkpoint_bad=False),
    inputs.RankRestored(rank=0, step=3),
    inputs.RankRestoreFailed(rank=0, reason="x", is_checkpoint_bad=True),
    inputs.RankRestoreFailed(rank=0, reason="x", is_checkpoint_bad=False),
    inputs.RankPlanned(rank=0, slot_bytes=10, keeps_slots=False),
    inputs.RankAtBoundary(rank=0, step=9),
    inputs.RankSealed(rank=0, slot=0, step=9, image_bytes=5, replicas="", is_final=False),
    inputs.RankUnsealed(rank=0, slot=0, step=9, reason="x"),
    inputs.RankFinished(rank=0, step=9),
    inputs.SaveRequested(source="x"),
    inputs.NoticeReceived(notice=NOTICE),
    inputs.NoticeReceived(notice=replace(NOTICE, kind=NoticeKind.ADVICE)),
    inputs.NoticeReceived(notice=replace(NOTICE, kind=NoticeKind.STOP, source="sigterm")),
    inputs.NoticeWithdrawn(source="ec2"),
    inputs.Spooled(job=1, slot=0, step=9),
    inputs.CheckpointCommitted(job=1, slot=0, step=9, generation=1, seq=4),
    inputs.PersistFailed(job=1, slot=0, step=9, error_id="x", reason="x"),
    inputs.PersistFailed(job=1, slot=0, step=9, error_id="x", reason="x", is_cancelled=True),
    inputs.FinishRecorded(is_durable=True),
    inputs.FinishRecorded(is_durable=False, reason="x"),
    inputs.FencedOff(generation=3),
    inputs.Tick(),
]


def a_state(phase: Phase) -> JobState:
    """A job of two ranks in this phase, with one set on its way and one committed."""
    ranks = {
        rank: RankView(incarnation=f"a{rank}", has_restored=True, has_slots=True, is_welcomed=True)
        for rank in range(WORLD)
    }
    sealed = frozenset(range(WORLD))
    column = Column(step=9, generation=1, sealed=sealed, persist=PersistState.RUNNING, job=1)
    done = Column(step=5, generation=1, sealed=sealed, persist=PersistState.COMMITTED)
    is_leaving = phase in (Phase.EVACUATING, Phase.UPLOADING, Phase.EVACUATED)
    return JobState(
        policy=FAST,
        phase=phase,
        is_job_alive=phase not in (*TERMINAL, Phase.RELAUNCHING),
        world_size=WORLD,
        incarnation="a0",
        generation=1,
        is_claimed=phase is not Phase.STARTING,
        ranks=ranks,
        columns=(column, done),
        notices=(NOTICE,) if is_leaving else (),
        evacuate_until=125.0 if is_leaving else None,
    )


def test_every_kind_of_event_is_in_the_enumeration():
    assert {type(event) for event in EVERY_EVENT} == set(HANDLERS)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_step_answers_every_phase_and_event(phase: Phase, event: Event):
    """Each pair either moves the job or is listed as illegal; none is forgotten."""
    state = a_state(phase)
    moment = Moment(now=110.0, steps={0: 9, 1: 9})

    if (phase, type(event)) in ILLEGAL:
        with pytest.raises(IllegalTransition):
            turn(state, event, moment)
        return
    after, actions = turn(state, event, moment)

    assert after.policy is state.policy
    if phase in TERMINAL:
        assert (after, actions) == (state, [])
    for action in of(outputs.Exit, actions):
        assert after.phase in (*TERMINAL, Phase.EVACUATED)
        assert after.exit_code == action.code
    if after.phase is Phase.STOPPING and phase is not Phase.STOPPING:
        assert of(outputs.StopJob, actions), "whoever begins to stop must order the stop"


# ---------------------------------------------------------------- a life without trouble


def test_the_first_rank_brings_the_claim_and_all_are_welcomed():
    life = Life()
    life.launch()

    claims = of(outputs.ClaimGeneration, life.join())
    welcomed = of(outputs.WelcomeRank, life.claim())

    assert [claim.incarnation for claim in claims] == ["a0"]
    assert [welcome.rank for welcome in welcomed] == [0, 1]
    assert life.state.phase is Phase.RESTORING


def test_images_are_fetched_once_and_sent_to_every_rank():
    life = Life()
    life.launch()
    life.join()

    fetches = of(outputs.FetchImages, life.claim(resume_step=10))
    sent = of(outputs.SendImages, life.bring_images())
    life.train(10)

    assert len(fetches) == 1
    assert [action.rank for action in sent] == [0, 1]
    assert life.state.phase is Phase.TRAINING


def test_a_save_is_asked_for_at_the_next_multiple_that_all_can_reach():
    life = Life()
    life.to_training()
    life.steps = {0: 6, 1: 5}

    life.state = replace(life.state, columns=(Column(), Column()))
    asked = of(outputs.AskSave, life.wait(1))

    assert [(action.step, action.slot) for action in asked] == [(10, 0)]


def test_a_whole_set_is_persisted_and_the_other_slot_is_asked_for_next():
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}

    found = life.seal(0, 5)

    assert [action.slot for action in of(outputs.Persist, found)] == [0]
    assert [(a.step, a.slot) for a in of(outputs.AskSave, found)] == [(10, 1)]
    assert life.state.phase is Phase.SAVING


def test_the_newest_whole_set_is_never_given_away():
    """Slot 1 holds step 10 and waits; slot 0 is being uploaded: there is no slot to write."""
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}
    life.seal(0, 5)
    life.steps = {0: 10, 1: 10}

    found = life.seal(1, 10)

    assert of(outputs.AskSave, found) == []
    assert of(outputs.Persist, found) == [], "one upload at a time"
    persisted = of(outputs.Persist, life.commit(0, 5))
    assert [action.step for action in persisted] == [10]


def test_replicas_that_differ_are_dropped_and_proved_anew():
    life = Life()
    life.to_training()

    found = life.seal(0, 5, replicas="x")

    assert of(outputs.Persist, found) == []
    assert len(of(outputs.Replan, found)) == 1


def test_a_rank_that_did_not_stage_voids_the_set_and_the_save_is_asked_again():
    life = Life()
    life.to_training()
    life.feed(inputs.RankSealed(rank=0, slot=0, step=5, image_bytes=9, replicas="", is_final=False))
    life.steps = {0: 6, 1: 6}

    found = life.feed(inputs.RankUnsealed(rank=1, slot=0, step=5, reason="passed"))

    assert [action.step for action in of(outputs.AskSave, found)] == [10]


def test_a_failed_persist_is_retried_and_training_goes_on():
    life = Life()
    life.to_training()
    life.seal(0, 5)

    life.fail_persist(0, 5)
    at_once = of(outputs.Persist, life.wait(1))
    later = of(outputs.Persist, life.wait(FAST.persist_retry_s))

    assert at_once == []
    assert [action.step for action in later] == [5]
    assert life.state.phase is Phase.SAVING


# ---------------------------------------------------------------- notices


def test_a_notice_brings_all_ranks_to_one_boundary_stages_and_lets_them_go():
    life = Life()
    life.to_training()
    life.steps = {0: 7, 1: 7}

    holds = of(outputs.AskHold, life.notice())
    orders = of(outputs.SendOrder, life.hold(8))
    slot = orders[0].slot
    found = life.seal(slot, 8)
    left = life.commit(slot, 8)
    gone = life.feed(inputs.JobExited(code=0), inputs.JobStopped())

    assert len(holds) == 1
    assert [(o.rank, o.action, o.step) for o in orders] == [(0, "stage", 8), (1, "stage", 8)]
    assert [o.action for o in of(outputs.SendOrder, found)] == ["exit", "exit"]
    assert [p.step for p in of(outputs.Persist, found)] == [8]
    assert len(of(outputs.StopJob, left)) == 1
    assert [action.code for action in of(outputs.Exit, gone)] == [75]


def test_a_rank_behind_is_sent_on_to_where_the_other_stands():
    life = Life()
    life.to_training()
    life.steps = {0: 8, 1: 7}
    life.notice()

    first = life.feed(inputs.RankAtBoundary(rank=0, step=8))
    second = life.feed(inputs.RankAtBoundary(rank=1, step=7))
    third = life.feed(inputs.RankAtBoundary(rank=1, step=8))

    assert of(outputs.SendOrder, first) == []
    assert [(o.rank, o.action, o.step) for o in of(outputs.SendOrder, second)] == [
        (1, "proceed", 8)
    ]
    assert [o.action for o in of(outputs.SendOrder, third)] == ["stage", "stage"]


def test_a_rank_that_passed_the_boundary_makes_the_others_take_one_step_more():
    life = Life()
    life.to_training()
    life.steps = {0: 8, 1: 8}
    life.notice()

    life.feed(inputs.RankAtBoundary(rank=0, step=8))
    orders = of(outputs.SendOrder, life.wait(0.1))

    assert [(o.rank, o.action, o.step) for o in orders] == [(0, "proceed", 9)]


def test_the_earliest_deadline_wins_and_a_repetition_changes_nothing():
    life = Life()
    life.to_training()
    life.notice(lead_s=100)

    life.notice(lead_s=100)
    life.notice(lead_s=20, source="sigterm", kind=NoticeKind.STOP)

    assert life.state.notice is not None
    assert life.state.notice.deadline_at == pytest.approx(life.now + 20)
    assert len(life.reported("notice.received")) == 1


def test_ranks_that_do_not_come_in_time_leave_the_newest_staged_image_to_be_committed():
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}
    life.seal(0, 5)
    life.fail_persist(0, 5)
    life.notice(lead_s=20)

    found = life.wait(16)
    left = life.commit(0, 5)
    gone = life.feed(inputs.JobStopped())

    assert [action.step for action in of(outputs.Persist, found)] == [5]
    assert life.reported("deadline.missed")
    assert of(outputs.StopJob, left)
    assert [action.code for action in of(outputs.Exit, gone)] == [75]


def test_without_anything_staged_the_older_checkpoint_stands():
    life = Life()
    life.to_training()
    life.notice(lead_s=20)

    life.wait(16)
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [76]


def test_a_fresh_stop_that_does_not_fit_commits_what_is_staged_while_training_goes_on():
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}
    life.seal(0, 5)
    life.measured = Measured(step_s=60.0, durable_bytes_per_s=1e6)

    found = life.notice(lead_s=20)

    assert of(outputs.AskHold, found) == []
    assert life.state.phase is Phase.UPLOADING
    assert life.reported("evacuation.decided")[0]["choice"] == "staged"


def test_a_withdrawn_notice_lets_waiting_ranks_train_on():
    life = Life()
    life.to_training()
    life.steps = {0: 8, 1: 7}
    life.notice()
    life.feed(inputs.RankAtBoundary(rank=0, step=8))

    found = life.feed(inputs.NoticeWithdrawn(source="ec2"))

    assert of(outputs.ClearHold, found)
    assert [(o.rank, o.action) for o in of(outputs.SendOrder, found)] == [(0, "resume")]
    assert life.state.phase is Phase.SAVING
    life.wait(1)
    assert life.state.notice is None


def test_an_advice_causes_a_checkpoint_and_nothing_else():
    life = Life(Policy(every_steps=1000))
    life.to_training()
    life.steps = {0: 7, 1: 7}
    life.state = replace(life.state, columns=(Column(), Column()))

    found = life.notice(kind=NoticeKind.ADVICE)

    assert [action.step for action in of(outputs.AskSave, found)] == [8]
    assert life.state.phase is Phase.TRAINING
    assert life.state.notice is None


def test_c100_an_advice_before_training_is_heeded_at_the_first_step():
    life = Life(Policy(every_steps=1000))
    life.launch()
    life.notice(kind=NoticeKind.ADVICE)
    life.join()
    life.claim()

    found = life.train()

    assert [action.step for action in of(outputs.AskSave, found)] == [1]
    assert life.state.notice is None


def test_c100_an_advice_takes_the_slot_of_a_periodic_save_that_is_far_away():
    life = Life(Policy(every_steps=1000))
    life.to_training()
    life.feed(inputs.Tick())

    found = life.notice(kind=NoticeKind.ADVICE)

    assert [action.step for action in of(outputs.AskSave, found)] == [1]


def test_a_notice_before_training_says_that_the_last_checkpoint_stands():
    life = Life()
    life.launch()
    life.join()
    life.claim(resume_step=40)

    found = life.notice()
    gone = life.feed(inputs.JobStopped())

    assert of(outputs.StopJob, found)
    assert life.reported("evacuation.nothing_to_save")[0]["resume_step"] == 40
    assert [action.code for action in of(outputs.Exit, gone)] == [75]


def test_an_interrupt_by_a_person_exits_with_130_after_the_save():
    life = Life()
    life.to_training()
    life.notice(source="sigint", kind=NoticeKind.STOP)
    orders = of(outputs.SendOrder, life.hold(3))
    life.seal(orders[0].slot, 3)
    life.commit(orders[0].slot, 3)

    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [130]


def test_a_drill_relaunches_on_the_same_machine():
    life = Life()
    life.to_training()
    life.notice(source="drill", is_drill=True)
    orders = of(outputs.SendOrder, life.hold(3))
    life.seal(orders[0].slot, 3)
    life.commit(orders[0].slot, 3)

    life.feed(inputs.JobStopped())
    launched = of(outputs.LaunchJob, life.wait(0))

    assert len(launched) == 1
    assert life.state.notice is None


# ---------------------------------------------------------------- crashes and ends


def test_a_crash_backs_off_and_counts_and_the_limit_ends_it_with_trainings_own_code():
    life = Life()
    life.launch()
    waits = []
    for _ in range(FAST.max_crashes):
        life.feed(inputs.JobExited(code=3), inputs.JobStopped())
        waits.append(life.reported("relaunch.scheduled")[-1]["wait_s"])
        assert of(outputs.LaunchJob, life.wait(100))
        life.feed(inputs.JobLaunched(pid=1))

    life.feed(inputs.JobExited(code=3))
    gone = life.feed(inputs.JobStopped())

    assert waits == [1.0, 2.0]
    assert [action.code for action in of(outputs.Exit, gone)] == [3]
    assert life.reported("job.crash_loop")


def test_a_commit_forgives_earlier_crashes():
    life = Life()
    life.launch()
    life.feed(inputs.JobExited(code=1), inputs.JobStopped())
    life.wait(10)
    life.feed(inputs.JobLaunched(pid=1))
    life.join("b")
    life.claim()
    life.train()
    life.seal(0, 5)

    life.commit(0, 5)

    assert life.state.num_crashes == 0


def test_a_crash_before_the_first_commit_is_recorded_and_one_after_it_is_not():
    early = Life()
    early.to_training()
    late = Life()
    late.to_training()
    late.seal(0, 5)
    late.commit(0, 5)

    assert of(outputs.RecordFail, early.feed(inputs.JobExited(code=1)))
    assert of(outputs.RecordFail, late.feed(inputs.JobExited(code=1))) == []


def test_after_a_crash_the_whole_set_in_memory_is_offered_and_flushed_anew():
    life = Life()
    life.to_training()
    life.seal(0, 5)
    life.feed(inputs.JobExited(code=-9), inputs.JobStopped())
    life.wait(10)
    life.feed(inputs.JobLaunched(pid=2))

    claims = of(outputs.ClaimGeneration, life.join("b"))
    claimed = life.claim(generation=2, resume_step=5, is_local=True, local_generation=1)
    cancelled = of(outputs.CancelPersist, claimed)
    life.bring_images()
    persisted = of(outputs.Persist, life.train(5, keeps_slots=True))

    assert claims[0].in_memory == (1, 5, 0)
    assert [action.slot for action in cancelled] == [0]
    assert [action.step for action in persisted] == [5]
    assert life.state.columns[0].generation == 2


def test_a_checkpoint_that_cannot_be_read_is_set_aside_and_the_job_relaunched():
    life = Life()
    life.launch()
    life.join()
    life.claim(resume_step=10)

    found = life.feed(
        inputs.FetchFailed(generation=1, reason="flipped byte", is_checkpoint_bad=True)
    )
    life.feed(inputs.JobStopped())

    assert of(outputs.SetAside, found)
    assert life.state.phase is Phase.RELAUNCHING
    assert life.state.num_crashes == 0, "not the training's fault"


def test_a_script_that_does_not_fit_its_checkpoint_ends_instead_of_looping():
    life = Life()
    life.launch()
    life.join()
    life.claim(resume_step=10)

    life.feed(
        inputs.RankRestoreFailed(rank=1, reason="shape of model/w", is_checkpoint_bad=False),
        inputs.JobExited(code=1),
    )
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [1]


def test_the_end_is_recorded_after_the_final_image_is_committed():
    life = Life()
    life.to_training()
    life.steps = {0: 12, 1: 12}

    orders = of(outputs.SendOrder, life.hold(12, is_ending=True))
    slot = orders[0].slot
    life.seal(slot, 12, is_final=True)
    early = life.feed(*(inputs.RankFinished(rank=rank, step=12) for rank in range(WORLD)))
    recorded = life.commit(slot, 12)
    told = life.feed(inputs.FinishRecorded(is_durable=True))
    gone = life.feed(inputs.JobExited(code=0), inputs.JobStopped())

    assert [order.action for order in orders] == ["stage", "stage"]
    assert of(outputs.RecordFinish, early) == []
    assert [action.step for action in of(outputs.RecordFinish, recorded)] == [12]
    assert of(outputs.TellFinished, told)
    assert [action.code for action in of(outputs.Exit, gone)] == [0]
    assert life.state.phase is Phase.FINISHED


def test_a_script_that_never_attaches_is_told_so_and_its_success_passed_on():
    life = Life()
    life.launch()
    life.wait(FAST.attach_warning_s + 1)

    life.feed(inputs.JobExited(code=0))
    gone = life.feed(inputs.JobStopped())

    assert len(life.reported("rank.never_attached")) == 2
    assert [action.code for action in of(outputs.Exit, gone)] == [0]


def test_a_job_without_progress_for_the_limit_is_restarted():
    life = Life(Policy(hang_limit_s=60))
    life.to_training()
    life.beat_age_s = 61.0

    found = life.wait(1)

    assert of(outputs.StopJob, found)
    assert life.reported("job.hung")
    assert life.state.after_stop == "relaunch"


def test_a_fenced_group_is_stopped_and_not_started_again():
    life = Life()
    life.to_training()

    found = life.feed(inputs.FencedOff(generation=1))
    gone = life.feed(inputs.JobStopped())

    assert [action.patience_s for action in of(outputs.StopJob, found)] == [0.0]
    assert [action.code for action in of(outputs.Exit, gone)] == [77]


def test_workers_that_torchrun_restarted_by_itself_form_a_new_group():
    life = Life()
    life.to_training()
    life.seal(0, 5)

    claims = of(outputs.ClaimGeneration, life.join("b"))

    assert [claim.incarnation for claim in claims] == ["b0"]
    assert claims[0].in_memory == (1, 5, 0)


def test_ranks_that_reconnect_to_a_new_supervisor_train_on():
    life = Life()
    life.feed(inputs.Started(is_taken_up=True))

    life.join("a", generation=4)
    welcomed = of(outputs.WelcomeRank, life.claim(generation=4, resume_step=3, is_adopted=True))

    assert [action.rank for action in welcomed] == [0, 1]
    assert life.state.phase is Phase.TRAINING
    assert of(outputs.FetchImages, life.actions) == []


# ---------------------------------------------------------------- several notices, bad ends


def test_a_true_notice_during_a_drill_wins_over_it():
    """The drill's deadline is nearer, but the machine really goes: no relaunch here."""
    life = Life()
    life.to_training()
    life.notice(source="drill", is_drill=True, lead_s=10)
    orders = of(outputs.SendOrder, life.hold(3))

    life.notice(source="sigterm", kind=NoticeKind.STOP, lead_s=60)
    life.seal(orders[0].slot, 3)
    life.commit(orders[0].slot, 3)
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [75]
    assert life.reported("notice.sooner")[0]["source"] == "sigterm"


def test_withdrawing_one_notice_leaves_the_others_standing():
    life = Life()
    life.to_training()
    life.notice(source="sigterm", kind=NoticeKind.STOP, lead_s=60)
    life.notice(source="notify", lead_s=20)

    found = life.feed(inputs.NoticeWithdrawn(source="notify"))

    assert of(outputs.ClearHold, found) == []
    assert life.state.phase is Phase.EVACUATING
    assert life.state.notice is not None
    assert life.state.notice.source == "sigterm"


def test_success_without_finish_is_not_recorded_as_the_end():
    """A script that leaves early with code 0 must be able to go on when started again."""
    life = Life()
    life.to_training()
    life.steps = {0: 7, 1: 7}

    found = life.feed(inputs.JobExited(code=0))
    gone = life.feed(inputs.JobStopped())

    assert of(outputs.RecordFinish, found) == []
    assert life.reported("finish.missing")
    assert [action.code for action in of(outputs.Exit, gone)] == [0]


def test_success_without_finish_waits_for_the_upload_under_way():
    life = Life()
    life.to_training()
    life.seal(0, 5)

    life.feed(inputs.JobExited(code=0))
    waiting = life.state.phase
    left = life.commit(0, 5)

    assert waiting is Phase.SAVING
    assert of(outputs.StopJob, left)


def test_a_final_image_that_cannot_be_had_is_no_success():
    life = Life()
    life.to_training()
    orders = of(outputs.SendOrder, life.hold(12, is_ending=True))

    found = life.feed(
        inputs.RankUnsealed(rank=0, slot=orders[0].slot, step=12, reason="state_dict() raised")
    )
    gone = life.feed(inputs.JobStopped())

    assert [told.is_durable for told in of(outputs.TellFinished, found)] == [False]
    assert {order.action for order in of(outputs.SendOrder, found)} == {"proceed"}
    assert [action.code for action in of(outputs.Exit, gone)] == [70]


def test_an_end_that_cannot_be_recorded_is_no_success():
    life = Life()
    life.to_training()

    life.feed(inputs.FinishRecorded(is_durable=False, reason="store away"))
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [70]


def test_another_world_size_is_told():
    life = Life()
    life.launch()
    life.join()

    life.claim(resume_step=10, resume_world=WORLD + 2)

    assert life.reported("world.changed")[0]["saved_world_size"] == WORLD + 2


@pytest.mark.parametrize("is_failed", [True, False])
def test_a_set_that_the_claim_did_not_name_is_never_committed_under_it(is_failed: bool):
    """It may stem from what was marked bad meanwhile, though its slots are still whole."""
    life = Life()
    life.to_training()
    life.seal(0, 5)
    if is_failed:
        life.fail_persist(0, 5)
    life.feed(inputs.JobExited(code=-9), inputs.JobStopped())
    life.wait(10)
    life.feed(inputs.JobLaunched(pid=2))
    life.join("b")
    before = len(life.actions)

    life.claim(generation=2, resume_step=3)
    life.bring_images()
    life.train(3, keeps_slots=True)
    life.wait(60)
    life.notice(lead_s=20)
    life.wait(16)

    assert of(outputs.Persist, life.actions[before:]) == []


def test_a_local_set_from_the_spool_is_flushed_under_the_new_generation():
    """After a restart of the daemon no slot holds it, so it is made durable from what was read."""
    life = Life()
    life.launch()
    life.join()

    life.claim(generation=2, resume_step=5, is_local=True, local_generation=1)
    life.bring_images()
    found = life.train(5)
    after = life.feed(inputs.CheckpointCommitted(job=1, slot=None, step=5, generation=2, seq=9))

    assert len(of(outputs.PersistFetched, found)) == 1
    assert life.state.last_commit_step == 5
    assert of(outputs.Persist, after) == []


def test_a_notice_before_a_local_set_is_committed_tells_that_the_older_one_stands():
    life = Life()
    life.launch()
    life.join()
    life.claim(generation=2, resume_step=5, is_local=True, local_generation=1)

    life.notice()
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [76]


# ---------------------------------------------------------------- answers that come too late


def next_life(life: Life, **claim: Any) -> None:
    """The trainers died, and the next group is being claimed as generation 2."""
    life.feed(inputs.JobExited(code=-9), inputs.JobStopped())
    life.wait(10)
    life.feed(inputs.JobLaunched(pid=2))
    life.join("b")
    if claim:
        life.claim(generation=2, **claim)


LATE: list[Event] = [
    inputs.FencedOff(generation=1),
    inputs.ClaimFailed(incarnation="a0", error_id="fenced", reason="x", exit_code=77),
    inputs.Claimed(incarnation="a0", generation=1, resume_step=1, is_local=False, is_adopted=False),
    inputs.ImagesReady(generation=1),
    inputs.FetchFailed(generation=1, reason="flipped byte", is_checkpoint_bad=True),
    inputs.FetchFailed(generation=1, reason="store away", is_checkpoint_bad=False),
]


@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("is_claimed", [False, True])
def test_an_answer_meant_for_the_generation_before_does_nothing(event: Event, is_claimed: bool):
    life = Life()
    life.to_training()
    next_life(life, **({"resume_step": 3} if is_claimed else {}))
    before = life.state

    found = life.feed(event)

    assert found == []
    assert life.state == before


def test_a_cancelled_upload_that_ends_late_does_not_free_the_slot_that_is_uploaded_anew():
    """Its slot holds the set that was resumed from, and the new generation is reading it."""
    life = Life()
    life.to_training()
    life.seal(0, 5)
    old_job = life.state.columns[0].job
    next_life(life, resume_step=5, is_local=True, local_generation=1)
    life.bring_images()
    life.train(5, keeps_slots=True)

    life.feed(
        inputs.PersistFailed(
            job=old_job, slot=0, step=5, error_id="x", reason="x", is_cancelled=True
        )
    )

    assert life.state.columns[0].persist is PersistState.RUNNING
    assert life.state.columns[0].job != old_job


def test_a_notice_at_the_boundary_of_a_periodic_save_uploads_that_save():
    """Staging the same step again would cost lead time and bring nothing."""
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}
    life.seal(0, 5)
    life.notice()

    orders = of(outputs.SendOrder, life.hold(5))
    left = life.commit(0, 5)

    assert [order.action for order in orders] == ["exit", "exit"]
    assert of(outputs.StopJob, left)
    assert life.state.committed_since_notice


def test_a_second_seal_of_one_rank_starts_no_second_upload():
    life = Life()
    life.to_training()
    life.seal(0, 5)

    found = life.feed(
        inputs.RankSealed(rank=0, slot=0, step=5, image_bytes=1000, replicas="", is_final=False)
    )

    assert of(outputs.Persist, found) == []


def test_a_rank_that_outgrew_its_slots_takes_a_waiting_set_with_it():
    """An incomplete set must never be uploaded."""
    life = Life()
    life.to_training()
    life.seal(0, 5)
    life.seal(1, 10)
    life.feed(inputs.RankPlanned(rank=1, slot_bytes=9999, keeps_slots=False))

    found = life.commit(0, 5)

    assert of(outputs.Persist, found) == []


def test_an_older_upload_that_lands_after_the_notice_is_not_what_the_notice_brought():
    life = Life()
    life.to_training()
    life.seal(0, 5)
    life.notice()
    orders = of(outputs.SendOrder, life.hold(8))
    life.seal(orders[0].slot, 8)

    life.feed(inputs.CheckpointCommitted(job=1, slot=None, step=5, generation=1, seq=5))

    assert not life.state.committed_since_notice


def test_a_rank_that_holds_without_a_notice_is_sent_on():
    """It saw the hold of an earlier supervisor, or of a notice that was withdrawn meanwhile."""
    life = Life()
    life.to_training()

    found = life.feed(inputs.RankAtBoundary(rank=0, step=4))

    assert [(o.rank, o.action) for o in of(outputs.SendOrder, found)] == [(0, "resume")]
    assert life.state.finish_step is None


def test_ranks_that_never_come_to_training_are_started_again_after_the_hang_limit():
    life = Life(Policy(hang_limit_s=60))
    life.launch()
    life.join()
    life.claim(resume_step=3)
    life.bring_images()

    life.wait(61)

    assert life.reported("job.hung")
    assert life.state.after_stop == "relaunch"


def test_a_long_download_of_ours_is_not_taken_for_ranks_that_hang():
    life = Life(Policy(hang_limit_s=60))
    life.launch()
    life.join()
    life.claim(resume_step=3)

    life.wait(600)
    life.bring_images()
    life.wait(59)

    assert life.reported("job.hung") == []
    assert life.state.phase is Phase.RESTORING


def test_a_notice_withdrawn_after_the_fall_back_lets_ranks_that_still_hold_train_on():
    """Their hold was raised before the fall-back, and nobody else would answer them."""
    life = Life()
    life.to_training()
    life.steps = {0: 5, 1: 5}
    life.seal(0, 5)
    life.fail_persist(0, 5)
    life.notice(lead_s=20)
    life.feed(inputs.RankAtBoundary(rank=0, step=8))
    life.wait(16)

    found = life.feed(inputs.NoticeWithdrawn(source="ec2"))

    assert of(outputs.ClearHold, found)
    assert [(o.rank, o.action) for o in of(outputs.SendOrder, found)] == [(0, "resume")]
    assert life.state.phase is Phase.SAVING


def test_a_script_that_misuses_the_sdk_while_it_trains_ends_instead_of_looping():
    life = Life()
    life.to_training()

    life.feed(
        inputs.RankRestoreFailed(rank=0, reason="restore() twice", is_checkpoint_bad=False),
        inputs.JobExited(code=1),
    )
    gone = life.feed(inputs.JobStopped())

    assert [action.code for action in of(outputs.Exit, gone)] == [1]
    assert life.state.num_crashes == 0
