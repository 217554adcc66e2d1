"""Look at the log's tail now and then: a newer generation means that our trainers must stop.

Source: commit protocol, section 6: at least every 30 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from supervisor.clock import Clock, Deadline
from supervisor.commit.log import CommitLog
from supervisor.errors import Fenced, SupervisorError

PROBE_EVERY_S = 30.0
PROBE_LIMIT_S = 20.0


class FenceWatch:
    """Probes for the generation that `watch` named last, and tells once when it is over."""

    def __init__(self, log: CommitLog, clock: Clock, *, on_fenced: Callable[[int], None]) -> None:
        self._log = log
        self._clock = clock
        self._on_fenced = on_fenced
        self._generation = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="fence-watch", daemon=True).start()

    def watch(self, generation: int) -> None:
        """Probe for this generation from now on; 0 stops probing."""
        with self._changed:
            self._generation = generation
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(PROBE_EVERY_S)
                generation = self._generation
            if generation and self._is_over(generation):
                self._on_fenced(generation)
                with self._changed:
                    if self._generation == generation:
                        self._generation = 0

    def _is_over(self, generation: int) -> bool:
        try:
            self._log.check_not_fenced(generation, Deadline.after(self._clock, PROBE_LIMIT_S))
        except Fenced:
            return True
        except SupervisorError:
            return False  # the store is away: whoever writes to it next is told
        return False
