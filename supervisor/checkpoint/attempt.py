"""One try at writing a set into the spool: its directory, its files, and the calls under way.

A call that hangs in the kernel cannot be stopped. So a try that is given up is only marked; the
last of its calls to come back removes what was written, whenever that is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from supervisor.checkpoint.image_file import ImageWriter
from supervisor.checkpoint.spool import Spool
from supervisor.checkpoint.workers import WorkerPool

Result = TypeVar("Result")


class AttemptDropped(Exception):
    """The try was given up before this call began."""


class Attempt:
    """Invariant: after `drop` no new call begins, and nothing of ours stays behind."""

    def __init__(self, spool: Spool, pool: WorkerPool) -> None:
        self._spool = spool
        self._pool = pool
        self._lock = threading.Lock()
        self._num_running = 0
        self._is_dropped = False
        self._directory: str | None = None
        self._writers: list[ImageWriter] = []
        self.cleaned: Future[None] = Future()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call on a thread for disk work."""
        return self._pool.submit(lambda: self._guarded(call))

    def open(self, images: dict[str, int]) -> list[ImageWriter]:
        """Make the directory and its files, named with their sizes in bytes.

        Raises:
            SpoolError, SpoolFull: `drop` takes away what is there.
        """
        self._directory = self._spool.begin()
        for name, size_bytes in images.items():
            path = os.path.join(self._directory, name)
            self._writers.append(ImageWriter(path, size_bytes=size_bytes))
        return self._writers

    @property
    def directory(self) -> str:
        assert self._directory is not None
        return self._directory

    def drop(self) -> None:
        """Give it up; `cleaned` is done when nothing is left of it. Never waits for the disk."""
        with self._lock:
            was_dropped, self._is_dropped = self._is_dropped, True
            is_last = self._is_last()
        if is_last and not was_dropped:
            self._pool.submit(self._clean)

    def _guarded(self, call: Callable[[], Result]) -> Result:
        with self._lock:
            if self._is_dropped:
                raise AttemptDropped
            self._num_running += 1
        try:
            return call()
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = self._is_last()
            if is_last:
                self._clean()

    def _is_last(self) -> bool:
        return self._is_dropped and self._num_running == 0

    def _clean(self) -> None:
        try:
            for writer in self._writers:
                writer.abandon()
            if self._directory is not None and os.path.isdir(self._directory):
                self._spool.discard(self._directory)
        finally:
            self.cleaned.set_result(None)
