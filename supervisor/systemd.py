"""Tell systemd how we are: sd_notify over $NOTIFY_SOCKET. Does nothing outside a unit.

Source: sd_notify(3): datagrams of VARIABLE=VALUE lines; an abstract socket's name begins with "@".
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from supervisor.clock import Clock
from supervisor.lifecycle import JobState
from supervisor.lifecycle.state import TERMINAL, Phase

EXTEND_S = 30
ENDED = TERMINAL | {Phase.EVACUATED}
WORKING_AGAINST_TIME = frozenset(
    {Phase.EVACUATING, Phase.UPLOADING, Phase.STOPPING, Phase.EVACUATED}
)


class ServiceManager:
    """Speaks to systemd from the main thread, so the watchdog proves that the loop turns."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._clock = clock
        usec = environ.get("WATCHDOG_USEC", "")
        self._every_s = int(usec) / 1e6 / 2 if usec.isdigit() else 10.0
        self._is_watched = usec.isdigit()
        self._next_at = 0.0
        self._phase: Phase | None = None

    def ready(self) -> None:
        """The service is up."""
        self._send("READY=1")

    def turned(self, state: JobState) -> None:
        """Ping the watchdog, show the phase, and ask for more time while evacuating."""
        now = self._clock.monotonic()
        if now < self._next_at and state.phase is self._phase:
            return
        self._next_at = now + min(self._every_s, 5.0)
        lines = [f"STATUS={state.phase.value}, generation {state.generation}"]
        if self._is_watched:
            lines.append("WATCHDOG=1")
        # Not before the end is certain: systemd kills a unit that said STOPPING and goes on, as
        # after a drill or a withdrawn notice.
        if state.phase in ENDED and self._phase not in ENDED:
            lines.append("STOPPING=1")
        if state.phase in WORKING_AGAINST_TIME:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}")
        self._phase = state.phase
        self._send("\n".join(lines))

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        with sock, contextlib.suppress(OSError):  # systemd is gone: there is nobody to tell
            sock.settimeout(1.0)
            sock.sendto(text.encode(), address)
