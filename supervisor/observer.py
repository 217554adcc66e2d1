"""What people and machines see of the daemon: log lines, metrics, the status document.

Written by the main thread; the status server reads the finished document. A failure here must
never touch the job, so nothing here blocks or decides.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from supervisor.checkpoint.persist import Committed, PersistJob
from supervisor.clock import Clock
from supervisor.errors import REPORTED
from supervisor.lifecycle import JobState, inputs
from supervisor.lifecycle.decision import decide
from supervisor.lifecycle.inputs import Event, Moment
from supervisor.lifecycle.outputs import Report
from supervisor.lifecycle.state import PersistState, Phase
from supervisor.measure import Measurements
from supervisor.metrics import Metrics
from supervisor.notices.base import SourceFailed, SourceHealth
from supervisor.ranks.board import RankBoard
from trainer_sdk.protocol import messages

STATUS_FORMAT = 1
MAX_DENIED_TOLD = 20
# The parts of an evacuation, in order, as drill and status show them.
MILESTONES = ("told", "staged", "spooled", "committed", "stopped", "relaunched", "training")


class Observer:
    """Keeps the newest status document in `snapshot`."""

    def __init__(
        self,
        log: Any,
        metrics: Metrics,
        clock: Clock,
        *,
        job_id: str,
        store_url: str,
        spool_path: str | None,
        num_lines_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_lines_dropped`: of our own log, so far; 0 while it could not be told."""
        self.log = log
        self._num_lines_dropped = num_lines_dropped
        self._num_lines_told = 0
        self.metrics = metrics
        self._clock = clock
        self._fixed = {
            "format": STATUS_FORMAT,
            "job_id": job_id,
            "store": store_url,
            "spool": spool_path,
        }
        self.snapshot: dict[str, Any] = dict(self._fixed)
        self._spool: dict[str, Any] = {
            "last_step": None,
            "last_error_id": None,
            "is_failing": False,
            "is_suspect": False,
        }
        self._sources: dict[str, SourceHealth] = {}
        self._failing: set[str] = set()
        self._denied_uids: set[int] = set()
        self._last_commit: dict[str, Any] | None = None
        self._evacuation: dict[str, Any] | None = None
        self._evacuation_began_at = 0.0
        self._launched_at: float | None = None
        self._notes: list[dict[str, Any]] = []
        self._last_error: dict[str, Any] | None = None
        self._lost_steps: dict[str, int] | None = None
        self.published_at = 0.0

    # ------------------------------------------------------------ lines

    def report(self, report: Report) -> None:
        """Write a line that the lifecycle asked for."""
        getattr(self.log, report.level)(report.event, **report.fields)
        if report.level == "error" or report.event == "checkpoint.persist_failed":
            self._last_error = {"event": report.event, "at": self._clock.wall(), **report.fields}
        if report.event == "checkpoint.persist_failed":
            self.metrics.save_failures.labels(str(report.fields["error_id"])).inc()
        if report.event == "job.crashed":
            self.metrics.restarts.labels("crash").inc()

    def message(self, message: messages.ClientMessage, rank: int | None) -> None:
        """A rank said something worth counting."""
        match message:
            case messages.Sealed(blocked_s=blocked_s):
                self.metrics.blocked.labels("save").inc(max(0.0, blocked_s))
            case messages.Note(event=event, text=text):
                self.log.warning("rank.note", rank=rank, note=event, text=text)
                self._notes = [*self._notes[-19:], {"rank": rank, "event": event, "text": text}]
            case messages.Hello(world_size=world_size):
                self.metrics.ranks_expected.set(world_size)
            case _:
                return

    def dropped(self, pid: int, reason: str) -> None:
        """A connection broke the protocol and was ended; the others go on."""
        self.log.warning("peer.dropped", pid=pid, error_id="protocol_error", reason=reason)
        self.metrics.peers_refused.labels("protocol_error").inc()

    def denied(self, pid: int, uid: int, reason: str) -> None:
        """Somebody was not let in. Each user is told of once, or anybody could fill the log."""
        self.metrics.peers_refused.labels("peer_denied").inc()
        if uid not in self._denied_uids and len(self._denied_uids) < MAX_DENIED_TOLD:
            self._denied_uids.add(uid)
            self.log.warning(
                "peer.denied",
                pid=pid,
                error_id="peer_denied",
                reason=reason,
                hint=REPORTED["peer_denied"][1],
            )

    def noted(self, kind: str, facts: dict[str, Any], measurements: Measurements) -> None:
        """A worker thread has a fact to tell."""
        match kind:
            case "committed":
                self._committed(facts["done"], measurements)
            case "fetched":
                self.log.info("fetch.completed", **facts)
                self.metrics.restore_duration.labels(facts["source"]).observe(facts["seconds"])
                self.metrics.restore_bytes.labels(facts["source"]).inc(facts["size_bytes"])
            case "uploaded":
                self.metrics.upload_bytes.inc(facts["size_bytes"])
            case "retry":
                self.metrics.upload_retries.labels(facts["error_id"]).inc()
            case "health":
                self._health(facts["health"], facts["failure"])
            case "spooled":
                self.metrics.spool_duration.observe(facts["seconds"])
                self._spool |= {"last_step": facts["step"], "is_failing": False}
            case "spool_failed":
                self._spool_failed(facts)
            case "spool_rejected":
                self.log.warning("spool.rejected", error_id="shard_corrupt_local", **facts)
            case "thread_refused":
                self.log.error("thread.refused", **facts)
            case "slots_failed":
                self.log.error("slots.failed", **facts)
            case "record_failed":
                self.log.warning("record.failed", **facts)
            case "reaped":
                self.log.info("uploads.reaped", **facts)
            case "reap_failed":
                self.log.info("uploads.left", **facts)
            case "strays":
                self.log.error("job.strays_left", pids=facts["pids"])
            case _:
                raise AssertionError(kind)

    def _spool_failed(self, facts: dict[str, Any]) -> None:
        """A checkpoint without a local copy; the store gets it all the same."""
        told = {name: facts[name] for name in ("error_id", "reason", "hint")}
        self.log.error("spool.failed", **told)
        self.metrics.spool_failures.labels(facts["error_id"]).inc()
        self._last_error = {"event": "spool.failed", "at": self._clock.wall(), **told}
        self._spool |= {"is_failing": True, "last_error_id": facts["error_id"]}
        if facts["is_suspect"]:
            self._spool["is_suspect"] = True
            self.metrics.spool_suspect.set(1)

    def _committed(self, done: Committed, measurements: Measurements) -> None:
        measurements.saw_persist(
            size_bytes=done.size_bytes, transfer_s=done.upload_s, commit_s=done.commit_s
        )
        self._last_commit = {
            "seq": done.seq,
            "step": done.step,
            "at": self._clock.wall(),
            "size_bytes": done.size_bytes,
            "spool_s": done.spool_s and round(done.spool_s, 3),
            "upload_s": round(done.upload_s, 3),
            "commit_s": round(done.commit_s, 3),
            "total_s": round(done.total_s, 3),
        }
        self.log.info(
            "checkpoint.committed", **{k: v for k, v in self._last_commit.items() if k != "at"}
        )
        self.metrics.committed_step.set(done.step)
        self.metrics.committed_at.set(self._clock.wall())
        self.metrics.size.set(done.size_bytes)
        self.metrics.save_duration.observe(done.total_s)

    def _health(self, health: SourceHealth, failure: SourceFailed | None) -> None:
        self._sources[health.name] = health
        result = "error" if failure else "ok"
        self.metrics.polls.labels(health.name, result).inc()
        if failure is not None and health.name not in self._failing:
            self._failing.add(health.name)
            self.log.warning(
                "notice.source_failed",
                source=health.name,
                reason=failure.message,
                hint=failure.hint,
            )
        elif failure is None and health.name in self._failing:
            self._failing.discard(health.name)
            self.log.info("notice.source_recovered", source=health.name)

    # ------------------------------------------------------------ evacuations

    def turned(self, before: JobState, event: Event, after: JobState) -> None:
        """Follow an evacuation from the notice to the first step after it."""
        now = self._clock.monotonic()
        self._follow_launch(before, event, after, now)
        if isinstance(event, inputs.Spooled):
            self.metrics.local_at.set(self._clock.wall())
        if before.notice is None and after.notice is not None:
            self._begin_evacuation(after, now)
        evacuation = self._evacuation
        if evacuation is None:
            return
        if isinstance(event, inputs.Spooled):
            self._milestone("spooled", now)
        elif isinstance(event, inputs.CheckpointCommitted):
            self._milestone("committed", now)
            evacuation["committed_step"] = after.last_commit_step
        elif isinstance(event, inputs.JobLaunched):
            self._milestone("relaunched", now)
        if before.phase is not after.phase:
            self._phase_of_evacuation(after, now)

    def _follow_launch(self, before: JobState, event: Event, after: JobState, now: float) -> None:
        """Time from the launch until every rank said hello, and until training began."""
        if isinstance(event, inputs.JobLaunched):
            self._launched_at = now
        if self._launched_at is None or before.phase is after.phase:
            return
        took_s = now - self._launched_at
        if after.phase is Phase.RESTORING:
            self.metrics.relaunch_duration.labels("joined").observe(took_s)
        elif after.phase is Phase.TRAINING:
            self.metrics.relaunch_duration.labels("training").observe(took_s)
            self._launched_at = None

    def _begin_evacuation(self, state: JobState, now: float) -> None:
        notice = state.notice
        assert notice is not None
        self._evacuation_began_at = now
        self._evacuation = {
            "source": notice.source,
            "lead_time_s": round(notice.deadline_at - now, 3),
            "milestones_s": {},
        }
        self.metrics.notices.labels(_label(notice.source)).inc()
        self.metrics.deadline.set(self._clock.wall() + notice.deadline_at - now)

    def _phase_of_evacuation(self, state: JobState, now: float) -> None:
        assert self._evacuation is not None
        self._evacuation["phase"] = state.phase.value
        if state.phase is Phase.EVACUATING:
            self._milestone("told", now)
        elif state.phase is Phase.UPLOADING:
            self._milestone("staged", now)
        elif state.phase is Phase.EVACUATED:
            self._end_evacuation(state)
        elif state.phase in (Phase.RELAUNCHING, Phase.STARTING):
            self._milestone("stopped", now)
        elif state.phase is Phase.TRAINING:
            self._milestone("training", now)
            self._evacuation["resume_step"] = state.resume_step
            self._evacuation["is_complete"] = True

    def _milestone(self, name: str, now: float) -> None:
        assert self._evacuation is not None
        milestones = self._evacuation["milestones_s"]
        if name in milestones:
            return
        took_s = now - self._evacuation_began_at
        milestones[name] = round(took_s, 3)
        self.metrics.emergency_phase.labels(name).observe(took_s)
        if name == "committed":
            self.metrics.emergency_margin.set(self._evacuation["lead_time_s"] - took_s)

    def _end_evacuation(self, state: JobState) -> None:
        assert self._evacuation is not None
        result = "committed" if state.committed_since_notice else "missed"
        self._evacuation["result"] = result
        self.metrics.emergency.labels(result).inc()
        self.metrics.deadline.set(0)

    # ------------------------------------------------------------ the document

    def publish(
        self,
        state: JobState,
        moment: Moment,
        board: RankBoard,
        persists: dict[int, PersistJob],
    ) -> None:
        """Build the status document anew."""
        at_step = max(moment.steps.values(), default=None)
        running = [
            persists[slot].progress
            for slot, column in enumerate(state.columns)
            if column.persist is PersistState.RUNNING and slot in persists
        ]
        prediction = decide(
            moment.measured,
            time_left_s=0.0,
            state_bytes=max((column.size_bytes for column in state.columns), default=0),
            staged_remaining_bytes=None,
        )
        committed = state.last_commit_step
        self.snapshot = {
            **self._fixed,
            "phase": state.phase.value,
            "generation": state.generation,
            "world_size": state.world_size,
            "step": at_step,
            "resume_step": state.resume_step,
            "last_commit": self._last_commit,
            "would_lose_steps": None
            if at_step is None
            else at_step - max(committed or 0, state.resume_step or 0),
            "ranks": {
                str(rank): {
                    "is_connected": view.is_connected,
                    "has_restored": view.has_restored,
                    "step": moment.steps.get(rank),
                    "receipt": board.seats[rank].receipt if rank in board.seats else "",
                }
                for rank, view in sorted(state.ranks.items())
            },
            "uploads": [
                {
                    "total_bytes": p.total_bytes,
                    "uploaded_bytes": p.uploaded_bytes,
                    "spooled_bytes": p.spooled_bytes,
                }
                for p in running
            ],
            "notice": None
            if state.notice is None
            else {
                "source": state.notice.source,
                "reason": state.notice.reason,
                "deadline_in_s": round(state.notice.deadline_at - moment.now, 3),
            },
            "predicted_emergency_s": round(prediction.fresh_needs_s, 3),
            "evacuation": self._evacuation,
            "num_crashes": state.num_crashes,
            "spool_state": dict(self._spool),
            "notice_sources": [
                {
                    "name": health.name,
                    "num_polls": health.num_polls,
                    "num_failures": health.num_failures,
                    "last_error": health.last_error,
                }
                for health in self._sources.values()
            ],
            "rank_notes": self._notes,
            "last_error": self._last_error,
        }
        self._gauges(state, moment, running, at_step)
        self._tell_dropped_lines()
        self.published_at = moment.now

    def _tell_dropped_lines(self) -> None:
        count = self._num_lines_dropped() - self._num_lines_told
        if count > 0:
            self.metrics.log_lines_dropped.inc(count)
            self._num_lines_told += count
            self.log.warning("log.lines_dropped", num=count)

    def _gauges(
        self, state: JobState, moment: Moment, running: list[Any], at_step: int | None
    ) -> None:
        metrics = self.metrics
        metrics.set_phase(state.phase.value)
        metrics.predicted.set(self.snapshot["predicted_emergency_s"])
        metrics.ranks_connected.set(sum(v.is_connected for v in state.ranks.values()))
        metrics.heartbeat_age.set(moment.beat_age_s or 0.0)
        metrics.upload_pending.set(sum(p.total_bytes - p.uploaded_bytes for p in running))
        if at_step is not None:
            metrics.training_step.set(at_step)
        if self._fixed["spool"]:
            try:
                metrics.disk_free.set(shutil.disk_usage(str(self._fixed["spool"])).free)
            except OSError:
                metrics.disk_free.set(0)


def _label(source: str) -> str:
    known = ("ec2", "ec2-rebalance", "file", "sigterm", "sigint", "notify", "drill", "stop")
    return source if source in known else "other"
