"""What people see of an evacuation: its milestones, its result, and the metrics that alert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from supervisor.lifecycle import JobState, Phase, Policy, inputs
from supervisor.lifecycle.inputs import Moment, Notice, NoticeKind
from supervisor.lifecycle.outputs import Report
from supervisor.metrics import Metrics
from supervisor.observer import Observer
from supervisor.ranks.board import RankBoard


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.lines.append((level, event, fields))


class Stage:
    """An observer with the job it watches."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lines = Lines()
        self.num_lines_dropped = 0
        self.metrics = Metrics([phase.value for phase in Phase])
        self.observer = Observer(
            self.lines,
            self.metrics,
            self.clock,
            job_id="job",
            store_url="file:///s",
            spool_path=None,
            num_lines_dropped=lambda: self.num_lines_dropped,
        )
        self.state = JobState(policy=Policy(), phase=Phase.TRAINING, generation=3)

    def turn(self, event: Any, after_s: float = 0.0, **changes: Any) -> None:
        self.clock.now += after_s
        before, self.state = self.state, replace(self.state, **changes)
        self.observer.turned(before, event, self.state)

    def publish(self) -> dict[str, Any]:
        board = RankBoard(
            clock=self.clock, launch=lambda: "", make_slot=lambda *a: pytest.fail("no slot")
        )
        moment = Moment(now=self.clock.now, steps={0: 40, 1: 41})
        self.observer.publish(self.state, moment, board, {})
        return self.observer.snapshot

    def value(self, name: str, **labels: str) -> float | None:
        registry: CollectorRegistry = self.metrics.registry
        return registry.get_sample_value(name, labels)


NOTICE = Notice(source="ec2", kind=NoticeKind.RECLAIM, deadline_at=120.0)


def evacuate(stage: Stage, *, is_committed: bool) -> None:
    stage.turn(inputs.NoticeReceived(notice=NOTICE), notices=(NOTICE,), phase=Phase.EVACUATING)
    stage.turn(inputs.Tick(), 2.0, phase=Phase.UPLOADING)
    stage.turn(inputs.Spooled(job=1, slot=0, step=9), 1.0)
    if is_committed:
        committed = inputs.CheckpointCommitted(job=1, slot=0, step=9, generation=3, seq=7)
        stage.turn(committed, 4.0, last_commit_step=9)
    stage.turn(inputs.Tick(), 0.5, phase=Phase.EVACUATED, committed_since_notice=is_committed)


def test_the_milestones_of_an_evacuation_count_from_the_notice() -> None:
    stage = Stage()

    evacuate(stage, is_committed=True)

    evacuation = stage.publish()["evacuation"]
    assert evacuation["milestones_s"] == {
        "told": 0.0,
        "staged": 2.0,
        "spooled": 3.0,
        "committed": 7.0,
    }
    assert (evacuation["result"], evacuation["committed_step"]) == ("committed", 9)
    assert stage.value("lastgasp_emergency_margin_seconds") == 13.0
    assert stage.value("lastgasp_emergency_saves_total", result="committed") == 1.0


def test_an_evacuation_without_a_commit_is_counted_as_missed() -> None:
    stage = Stage()

    evacuate(stage, is_committed=False)

    assert stage.value("lastgasp_emergency_saves_total", result="missed") == 1.0
    assert stage.value("lastgasp_emergency_saves_total", result="committed") is None


def test_the_status_says_how_much_work_would_be_lost_now() -> None:
    stage = Stage()
    stage.state = replace(stage.state, resume_step=10, last_commit_step=30)

    document = stage.publish()

    assert document["step"] == 41
    assert document["would_lose_steps"] == 11
    assert stage.value("lastgasp_job_state", state="training") == 1.0
    assert stage.value("lastgasp_job_state", state="saving") == 0.0


def test_an_error_is_kept_for_the_status_and_counted() -> None:
    stage = Stage()

    stage.observer.report(
        Report(
            level="warning",
            event="checkpoint.persist_failed",
            fields={"step": 5, "error_id": "disk_full", "reason": "no space"},
        )
    )

    assert stage.publish()["last_error"]["reason"] == "no space"
    assert stage.value("lastgasp_checkpoint_save_failures_total", error="disk_full") == 1.0
    assert stage.lines.lines[0][:2] == ("warning", "checkpoint.persist_failed")


def test_lines_that_nobody_read_are_told_once_and_counted():
    stage = Stage()

    for count in (3, 3, 5):
        stage.num_lines_dropped = count
        stage.publish()

    told = [fields["num"] for _, event, fields in stage.lines.lines if "dropped" in event]
    assert told == [3, 2]
    assert stage.value("lastgasp_log_lines_dropped_total") == 5
