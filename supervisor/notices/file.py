"""A watched file: it appears = a notice, it goes = the notice is withdrawn.

For node agents, schedulers and people. The file may be empty, or hold one line of JSON such as
{"lead_time_s": 30, "reason": "drain"}; anything else in it is taken as the reason.
"""

from __future__ import annotations

import json
import os
from typing import TypeGuard

from supervisor.clock import Clock
from supervisor.lifecycle.inputs import Notice, NoticeKind
from supervisor.notices.base import SourceFailed

MAX_FILE_BYTES = 4096
MAX_LEAD_S = 7 * 86400.0


class FileSource:
    """One path on this node."""

    name = "file"

    def __init__(self, *, path: str, lead_s: float, clock: Clock, poll_s: float) -> None:
        self.poll_s = min(poll_s, 1.0)
        self._path = path
        self._lead_s = lead_s
        self._clock = clock
        self._notice: Notice | None = None

    def look(self) -> tuple[Notice, ...]:
        """The notice, as long as the file is there.

        Raises:
            SourceFailed: the path cannot be looked at.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self._notice = None
            return ()
        except OSError as error:
            raise SourceFailed(
                f"the notice file {self._path} cannot be read: {error.strerror}",
                hint="its existence alone is not enough: the supervisor must be able to read it",
            ) from error
        try:
            text = os.read(fd, MAX_FILE_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise SourceFailed(f"the notice file {self._path}: {error.strerror}") from error
        finally:
            os.close(fd)
        if self._notice is None:
            self._notice = self._parse(text)
        return (self._notice,)

    def _parse(self, text: str) -> Notice:
        lead_s, reason = self._lead_s, text
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            reason = str(document.get("reason", ""))
            given = document.get("lead_time_s")
            if _is_number(given) and 0 <= given <= MAX_LEAD_S:
                lead_s = float(given)
        return Notice(
            source=self.name,
            kind=NoticeKind.RECLAIM,
            deadline_at=self._clock.monotonic() + lead_s,
            reason=reason[:500],
        )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
