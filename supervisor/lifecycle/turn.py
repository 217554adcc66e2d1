"""One call of `step`: the state as it changes, and the actions it asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from supervisor.lifecycle.inputs import Moment
from supervisor.lifecycle.outputs import Action, Exit, Report
from supervisor.lifecycle.state import JobState, Phase

Level: TypeAlias = Literal["debug", "info", "warning", "error"]


class Turn:
    """What a handler works on. Made and thrown away inside `step`, so `step` stays pure."""

    def __init__(self, state: JobState, moment: Moment) -> None:
        self.state = state
        self.moment = moment
        self.actions: list[Action] = []

    @property
    def now(self) -> float:
        return self.moment.now

    def set(self, **changes: object) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def do(self, *actions: Action) -> None:
        """Ask for actions, in this order."""
        self.actions.extend(actions)

    def report(self, level: Level, event: str, **fields: object) -> None:
        """Ask for a line in the log."""
        self.actions.append(Report(level=level, event=event, fields=fields))

    def exit(self, phase: Phase, code: int) -> None:
        """End the daemon in a terminal phase."""
        self.set(phase=phase, exit_code=code)
        self.do(Exit(code=code))
