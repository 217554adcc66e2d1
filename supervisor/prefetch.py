"""Fetch what will most likely be restored while torchrun and torch still start."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from supervisor.checkpoint.fetch import Fetch, FetchedCheckpoint, FetchTools, Images
from supervisor.clock import Clock, Deadline
from supervisor.commit.log import CommitLog
from supervisor.commit.reader import read_manifest
from supervisor.errors import SupervisorError

LOOK_LIMIT_S = 60.0
TAKE_LIMIT_S = 3600.0


class Prefetch:
    """A guess that is only used if the claim names the same commit.

    A failure here is no failure of the job: the fetch after the claim tells what is wrong.
    """

    def __init__(self, log: CommitLog, tools: FetchTools, clock: Clock) -> None:
        self._log = log
        self._tools = tools
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._fetch: Fetch | None = None
        self._seq: int | None = None
        self._found: FetchedCheckpoint | None = None

    def start(self, in_memory: Sequence[Images]) -> None:
        """Begin with the newest good commit, in the background; what is in memory is used."""
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = self._seq = self._found = None
        self._thread = threading.Thread(
            target=self._run, args=(in_memory,), name="prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, in_memory: Sequence[Images]) -> None:
        try:
            deadline = Deadline.after(self._clock, LOOK_LIMIT_S)
            good = self._log.tail(deadline).state.good
            if not good:
                return
            seq = good[-1].seq
            manifest = read_manifest(self._log, seq, deadline)
            fetch = Fetch(self._tools, manifest, in_memory=in_memory)
            self._fetch, self._seq = fetch, seq
            self._found = fetch.run()
        except SupervisorError:
            return  # told by the fetch after the claim, with what is to be done about it

    def take(self, seq: int) -> FetchedCheckpoint | None:
        """The fetched checkpoint if it is this commit, waiting for the rest of it; else None."""
        thread = self._thread
        if thread is None:
            return None
        if self._seq is not None and self._seq != seq and self._fetch is not None:
            self._fetch.cancel()
            return None
        thread.join(TAKE_LIMIT_S)
        found = self._found if self._seq == seq else None
        self._found = None
        return found
