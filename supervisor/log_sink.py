"""Where log lines go without anybody waiting: a reader that stops reading must not stop a save.

A pipe that is full, a full disk behind a redirect, a slow journal: a line that finds no room is
dropped and counted; the observer tells the count, in a metric and in a line once there is room.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from typing import Final

MAX_LINES: Final = 10_000
CLOSE_LIMIT_S: Final = 2.0


class LineSink:
    """A text file to structlog; one thread of its own does the writing."""

    def __init__(self, fd: int, *, max_lines: int = MAX_LINES) -> None:
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._lock = threading.Lock()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Lines that are not written yet, but for the one in hand."""
        return self._lines.qsize()

    @property
    def has_room(self) -> bool:
        """Whether a line that is written now will not be dropped."""
        return not self._lines.full()

    def write(self, text: str) -> int:
        """Take a line; never waits."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back; whoever wants to wait calls `close`."""

    def close(self) -> None:
        """Write what is left, for two seconds at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_LIMIT_S)
        self._thread.join(CLOSE_LIMIT_S)

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(errors="replace"))
        try:
            while data:
                data = data[self._write_some(data) :]
        except OSError:  # EPIPE, ENOSPC: there is no other place to tell it than the count
            self._drop()

    def _write_some(self, data: memoryview) -> int:
        """As much as there is room for; a descriptor that does not wait is waited for here."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            select.select([], [self._fd], [])
            return 0
