"""Fetch what will most likely be restored while torchrun and torch still start."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.checkpoint.fetch import Fetch, FetchedCheckpoint, FetchTools, Images
from supervisor.clock import Clock, Deadline
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import read_manifest
from supervisor.errors import SupervisorError

LOOK_LIMIT_S = 60.0
TAKE_LIMIT_S = 3600.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One guess. A thread writes to its own attempt only, so a late one harms no newer one."""

    thread: threading.Thread | None = None
    fetch: Fetch | None = None
    seq: int | None = None
    found: FetchedCheckpoint | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.fetch is not None:
            self.fetch.cancel()


class Prefetch:
    """A guess that is only used if the claim names the same commit.

    A failure here is no failure of the job: the fetch after the claim tells what is wrong.
    """

    def __init__(self, log: CommitLog, tools: FetchTools, clock: Clock) -> None:
        self._log = log
        self._tools = tools
        self._clock = clock
        self._attempt = _Attempt()

    def start(self, in_memory: Sequence[Images]) -> None:
        """Begin with the newest good commit, in the background; what is in memory is used."""
        self._attempt.cancel()
        self._attempt = attempt = _Attempt()
        attempt.thread = threading.Thread(
            target=self._run, args=(attempt, in_memory), name="prefetch", daemon=True
        )
        attempt.thread.start()

    def _run(self, attempt: _Attempt, in_memory: Sequence[Images]) -> None:
        try:
            deadline = Deadline.after(self._clock, LOOK_LIMIT_S)
            good = self._log.tail(deadline).state.good
            if not good:
                return
            attempt.seq = good[-1].seq
            manifest = read_manifest(self._log, attempt.seq, deadline)
            attempt.fetch = Fetch(self._tools, manifest, in_memory=in_memory)
            if not attempt.is_cancelled:
                attempt.found = attempt.fetch.run()
        except SupervisorError:
            return  # told by the fetch after the claim, with what is to be done about it

    def forget(self) -> None:
        """Let go of what was fetched and of the slots it was compared with."""
        self._attempt.cancel()
        self._attempt = _Attempt()

    def take(self, seq: int) -> FetchedCheckpoint | None:
        """The fetched checkpoint if it is this commit, waiting for the rest of it; else None."""
        attempt = self._attempt
        if attempt.thread is None:
            return None
        if attempt.seq is not None and attempt.seq != seq:
            attempt.cancel()
            return None
        attempt.thread.join(TAKE_LIMIT_S)
        found = attempt.found if attempt.seq == seq else None
        attempt.found = None
        return found
