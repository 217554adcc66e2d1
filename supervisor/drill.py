"""Rehearse an evacuation on the true path and follow it to the first step of the next life."""

from __future__ import annotations

from typing import Any

from supervisor.clock import Clock, Deadline, SystemClock
from supervisor.control import SupervisorNotRunning, ask
from supervisor.errors import UsageError

POLL_S = 0.2


class DrillRefused(UsageError):
    """The job is not in a state in which a drill means anything."""

    error_id = "drill_refused"
    mend = "wait until `lastgasp status` says training"


def rehearse(
    directory: str, *, deadline_s: float, timeout_s: float, clock: Clock | None = None
) -> dict[str, Any]:
    """Give a false notice and watch.

    Returns:
        The evacuation's milestones in seconds since the notice, `is_in_time`, and the steps before
        and after.

    Raises:
        DrillRefused: the job does not train.
        SupervisorNotRunning: nobody answers.
    """
    clock = clock or SystemClock()
    answer = ask(directory, "drill", reason="drill", deadline_s=deadline_s)
    if not answer["is_ok"]:
        raise DrillRefused(f"no drill now: {answer['said']}", hint="wait until the job trains")
    give_up = Deadline.after(clock, timeout_s)
    document: dict[str, Any] = {}
    while not give_up.is_over:
        clock.sleep(POLL_S)
        try:
            status = ask(directory, "status")["status"]
        except SupervisorNotRunning:
            break
        document = status.get("evacuation") or {}
        if document.get("is_complete"):
            break
    milestones = document.get("milestones_s", {})
    committed_s = milestones.get("committed")
    return {
        "deadline_s": deadline_s,
        "milestones_s": milestones,
        "result": document.get("result", "unknown"),
        "committed_step": document.get("committed_step"),
        "resume_step": document.get("resume_step"),
        "margin_s": None if committed_s is None else round(deadline_s - committed_s, 3),
        "is_in_time": committed_s is not None
        and committed_s <= deadline_s
        and document.get("resume_step") == document.get("committed_step"),
    }
