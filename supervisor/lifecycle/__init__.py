"""The pure heart of the daemon: `step(state, event, moment) -> (state, actions)`.

No clock, file, socket or thread is touched here; time and the ranks' progress are arguments. The
daemon's main thread is the only caller.
"""

from supervisor.lifecycle.machine import ILLEGAL, IllegalTransition, step
from supervisor.lifecycle.state import JobState, Phase, Policy

__all__ = ["ILLEGAL", "IllegalTransition", "JobState", "Phase", "Policy", "step"]
