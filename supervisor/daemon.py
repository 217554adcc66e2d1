"""The loop: events in, `lifecycle.step`, actions out. One thread decides; everything else waits."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from supervisor.clock import Clock
from supervisor.lifecycle import JobState, inputs, outputs, step
from supervisor.lifecycle.inputs import Event, Moment, Notice, NoticeKind
from supervisor.lifecycle.state import TERMINAL, Phase
from supervisor.measure import Measurements
from supervisor.observer import Observer
from supervisor.performer import Parts, Performer
from supervisor.ranks.link import Incoming, Link, LinkClosed
from supervisor.ranks.server import PeerDenied
from trainer_sdk.protocol import messages
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.framing import close_all

# A tick costs about 0.2 ms; these keep an idle daemon far below one percent of a core.
TICK_S = 0.25
BUSY_TICK_S = 0.05
BUSY = frozenset({Phase.STARTING, Phase.EVACUATING, Phase.UPLOADING, Phase.RELAUNCHING})
ORDER_LEAD_S = 120.0
# A body is put into a frame as a JSON string, in which every quote takes two bytes.
MAX_REPLY_BYTES = messages.MAX_MESSAGE_BYTES // 2 - 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A fact for metrics and status, from a worker thread."""

    kind: str
    facts: dict[str, Any]


Item = Event | Incoming | LinkClosed | PeerDenied | Noted


class Mailbox:
    """The one queue. `put` may be called from any thread and from signal handlers."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so a signal handler cannot deadlock on it.
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def note(self, kind: str, **facts: Any) -> None:
        self._queue.put(Noted(kind=kind, facts=facts))

    def get(self, timeout_s: float) -> Item | None:
        """The next item, or None when the time is up."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


class Daemon:
    """Runs one job to its end. `run` is called once, on the main thread."""

    def __init__(
        self,
        state: JobState,
        parts: Parts,
        mailbox: Mailbox,
        observer: Observer,
        *,
        on_turn: Callable[[JobState], None] = lambda state: None,
    ) -> None:
        self._state = state
        self._parts = parts
        self._mailbox = mailbox
        self._observer = observer
        self._measurements = Measurements()
        self._performer = Performer(parts, post=mailbox.put, on_note=mailbox.note)
        self._clock: Clock = parts.clock
        self._on_turn = on_turn
        self._next_tick_at = 0.0

    def run(self, *, is_taken_up: bool) -> int:
        """Supervise until the job ended one way or another; returns the exit code."""
        self._handle(inputs.Started(is_taken_up=is_taken_up))
        while self._performer.exit_code is None:
            wait_s = max(0.0, self._next_tick_at - self._clock.monotonic())
            item = self._mailbox.get(wait_s)
            if item is not None:
                self._route(item)
            if self._clock.monotonic() >= self._next_tick_at:
                self._tick()
        self._publish()
        return self._performer.exit_code

    # ------------------------------------------------------------ in

    def _route(self, item: Item) -> None:
        match item:
            case Noted():
                self._observer.noted(item.kind, item.facts, self._measurements)
            case Incoming(message=messages.Control() as control, link=link, fds=fds):
                close_all(fds)
                self._answer(link, control)
            case Incoming():
                self._receive(item)
            case LinkClosed(link=link, reason=reason):
                if reason:
                    self._observer.dropped(link.peer_pid, reason)
                for event in self._parts.board.lost(link):
                    self._handle(event)
            case PeerDenied(pid=pid, uid=uid, reason=reason):
                self._observer.denied(pid, uid, reason)
            case _:
                self._handle(item)

    def _receive(self, incoming: Incoming) -> None:
        try:
            events = self._parts.board.receive(incoming)
        except ProtocolError as error:
            self._observer.dropped(incoming.link.peer_pid, str(error))
            incoming.link.close()
            return
        if isinstance(incoming.message, messages.Sealed):
            self._measurements.saw_staging(incoming.message.staged_s)
        self._observer.message(incoming.message, incoming.link.rank)
        for event in events:
            self._handle(event)

    def _tick(self) -> None:
        now = self._clock.monotonic()
        self._measurements.saw_steps(now, self._parts.board.steps())
        self._handle(inputs.Tick())
        self._publish()
        self._next_tick_at = now + (BUSY_TICK_S if self._state.phase in BUSY else TICK_S)

    def _moment(self) -> Moment:
        board = self._parts.board
        return Moment(
            now=self._clock.monotonic(),
            steps=board.steps(),
            beat_age_s=board.beat_age_s(),
            measured=self._measurements.summary(),
        )

    def _handle(self, event: Event) -> None:
        before = self._state
        self._state, actions = step(before, event, self._moment())
        self._observer.turned(before, event, self._state)
        for action in actions:
            if isinstance(action, outputs.Report):
                self._observer.report(action)
            else:
                self._perform(action)
        if self._state.phase is not before.phase:
            self._entered(self._state.phase)
        self._on_turn(self._state)

    def _perform(self, action: outputs.Action) -> None:
        """A failure of ours never kills a healthy run: it is told, and the loop goes on."""
        try:
            self._performer.perform(action)
        except Exception as error:  # noqa: BLE001
            self._observer.log.error(
                "action.failed",
                action=type(action).__name__,
                reason=f"{type(error).__name__}: {error}",
            )
            answer = self._performer.failed(action, error)
            if answer is not None:
                self._mailbox.put(answer)

    def _entered(self, phase: Phase) -> None:
        if phase is Phase.TRAINING:
            self._performer.forget_fetched()
        if phase in (Phase.STARTING, Phase.RESTORING):
            self._measurements.restart()
        if phase in TERMINAL or phase in BUSY:
            self._publish()

    # ------------------------------------------------------------ out

    def _publish(self) -> None:
        self._observer.publish(
            self._state, self._moment(), self._parts.board, self._performer.persists
        )

    def _answer(self, link: Link, control: messages.Control) -> None:
        """The command line asks; what it may ask for is what a person may do."""
        lead_s = control.deadline_s if control.deadline_s is not None else ORDER_LEAD_S
        now = self._clock.monotonic()
        is_ok, said = True, ""
        match control.verb:
            case "status":
                self._publish()
            case "save":
                self._handle(inputs.SaveRequested(source="command line"))
                said = "a checkpoint is asked for at the next boundary that all ranks can reach"
            case "notify" | "drill" | "stop":
                is_drill = control.verb == "drill"
                if is_drill and self._state.phase not in (Phase.TRAINING, Phase.SAVING):
                    is_ok, said = False, f"the job is {self._state.phase.value}, not training"
                else:
                    notice = Notice(
                        source=control.verb,
                        kind=NoticeKind.STOP if control.verb == "stop" else NoticeKind.RECLAIM,
                        deadline_at=now + lead_s,
                        reason=control.reason,
                        is_drill=is_drill,
                    )
                    self._handle(inputs.NoticeReceived(notice=notice))
                    said = f"notice taken, deadline in {lead_s:g} s"
            case "withdraw":
                for source in ("notify", "drill", "stop"):
                    self._handle(inputs.NoticeWithdrawn(source=source))
                said = "withdrawn"
        body = _reply_body(said, self._observer.snapshot)
        link.send(messages.Reply(is_ok=is_ok, body=body))


def _reply_body(said: str, snapshot: dict[str, Any]) -> str:
    """The answer as JSON; without the ranks' receipts where those would not fit into a frame."""
    body = json.dumps({"said": said, "status": snapshot})
    if len(body) <= MAX_REPLY_BYTES:
        return body
    ranks = {
        rank: {name: value for name, value in view.items() if name != "receipt"}
        for rank, view in snapshot.get("ranks", {}).items()
    }
    return json.dumps({"said": said, "status": {**snapshot, "ranks": ranks}})
