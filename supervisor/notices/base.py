"""What a notice source is, and the thread that watches one for ever.

A source that fails never ends the daemon: it is asked again with growing waits, and its failure is
a metric, a log line (once, until it recovers) and part of the status.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from supervisor.clock import Clock
from supervisor.errors import SupervisorError
from supervisor.lifecycle.inputs import Notice

# Deadlines are computed anew at each look, so they wander by how long a look takes.
SOONER_S = 3.0
MAX_WAIT_S = 30.0


class SourceFailed(SupervisorError):
    """The source did not answer, or answered something that cannot be understood."""

    error_id = "notice_source_failed"
    mend = "see the message; `lastgasp doctor` tries the source; SIGTERM and `notify` still work"
    is_retryable = True

    def __init__(self, message: str, *, hint: str = "", wait_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.wait_s = wait_s


class NoticeSource(Protocol):
    """One place to look for notices."""

    @property
    def name(self) -> str: ...

    @property
    def poll_s(self) -> float:
        """Seconds between two looks while all is well."""
        ...

    def look(self) -> tuple[Notice, ...]:
        """The notices that stand now; empty if there are none.

        Raises:
            SourceFailed: it could not be told.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """How a source is doing, for the status."""

    name: str
    num_polls: int = 0
    num_failures: int = 0
    last_error: str = ""


class NoticeWatcher:
    """Looks at one source until stopped and tells what begins and what ends.

    Invariant: a notice is told once, however often the source repeats it, and again only when its
    deadline has come nearer.
    """

    def __init__(
        self,
        source: NoticeSource,
        *,
        clock: Clock,
        on_notice: Callable[[Notice], None],
        on_withdrawn: Callable[[str], None],
        on_health: Callable[[SourceHealth, SourceFailed | None], None],
        stop: threading.Event | None = None,
    ) -> None:
        """`stop` is what it waits on between two looks and what ends it; its own if not given."""
        self._source = source
        self._clock = clock
        self._on_notice = on_notice
        self._on_withdrawn = on_withdrawn
        self._on_health = on_health
        self._standing: dict[tuple[str, str], float] = {}
        self._stop = stop or threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"notice-{source.name}", daemon=True
        )
        self.health = SourceHealth(name=source.name)

    def start(self) -> None:
        """Begin to look; the first look is at once, so that no notice set before us is missed."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; does not wait for a request that hangs."""
        self._stop.set()

    def _watch(self) -> None:
        num_in_a_row = 0
        while not self._stop.is_set():
            failure: SourceFailed | None = None
            try:
                self._tell(self._source.look())
                num_in_a_row = 0
            except SourceFailed as error:
                failure = error
                num_in_a_row += 1
            except Exception as error:  # noqa: BLE001 - a dead watcher misses the notice
                failure = SourceFailed(
                    f"{self._source.name}: {type(error).__name__}: {error}",
                    hint="this is a bug of lastgasp: please report it; the source is asked again",
                )
                num_in_a_row += 1
            self._note(failure)
            self._stop.wait(self._wait_s(failure, num_in_a_row))

    def _wait_s(self, failure: SourceFailed | None, num_in_a_row: int) -> float:
        """Until the next look; never so long that a notice of two minutes would be over."""
        if failure is None:
            return self._source.poll_s
        grown_s = self._source.poll_s * 2.0 ** min(num_in_a_row - 1, 10)
        return min(MAX_WAIT_S, grown_s if failure.wait_s is None else failure.wait_s)

    def _note(self, failure: SourceFailed | None) -> None:
        self.health = SourceHealth(
            name=self._source.name,
            num_polls=self.health.num_polls + 1,
            num_failures=self.health.num_failures + (failure is not None),
            last_error=failure.message if failure else "",
        )
        self._on_health(self.health, failure)

    def _tell(self, notices: tuple[Notice, ...]) -> None:
        found = {(notice.source, notice.kind.value): notice for notice in notices}
        for key, notice in found.items():
            told_at = self._standing.get(key)
            if told_at is None or notice.deadline_at < told_at - SOONER_S:
                self._on_notice(notice)
                self._standing[key] = notice.deadline_at
        for key in self._standing.keys() - found.keys():
            self._on_withdrawn(key[0])
            del self._standing[key]
