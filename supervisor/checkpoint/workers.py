"""A bounded pool of daemon threads: a hanging upload never keeps the daemon from exiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class WorkerPool:
    """`num_threads` named daemon threads that run calls in the order given.

    Unlike concurrent.futures its threads are not joined at interpreter exit.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call on some thread; its result or error is in the future."""
        future: Future[Result] = Future()
        self._queue.put((future, call))
        return future

    def close(self) -> None:
        """End the threads once what was submitted is done; does not wait."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _perform(*item)
            del item  # an idle thread would keep the images of its last call in memory


def _perform(future: Future[Result], call: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits on the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)
