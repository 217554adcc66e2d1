"""One connection to the supervisor's socket: a rank, or the command line."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from supervisor.clock import Clock, Deadline
from trainer_sdk.protocol import framing
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.messages import (
    ClientMessage,
    Reply,
    SupervisorMessage,
    decode_from_client,
    encode,
)

# A frame that has begun must end within this; a peer that dribbles is dropped.
FRAME_TIMEOUT_S = 10.0
# A peer that connects and says nothing takes a place that a rank may need.
FIRST_FRAME_TIMEOUT_S = 60.0
# A rank sends a handful a step at most; a flood would fill the one queue that all share.
MAX_MESSAGES = 10_000
MESSAGES_WINDOW_S = 10.0
# Messages are small and the ranks' link threads only read: a send that blocks means a stuck peer.
SEND_TIMEOUT_S = 1.0
POLL_MS = 500


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A message with the descriptors that came with it; whoever handles it owns them."""

    link: Link
    message: ClientMessage
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LinkClosed:
    """A connection ended; `reason` is empty when the peer simply closed it."""

    link: Link
    reason: str


class Link:
    """A connected peer with a reader thread of its own.

    Invariant: after `LinkClosed` was posted nothing more comes from this link.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer_pid: int,
        clock: Clock,
        post: Callable[[Incoming | LinkClosed], None],
    ) -> None:
        self.peer_pid = peer_pid
        self._clock = clock
        self._has_spoken = False
        self.rank: int | None = None
        self._sock = sock
        self._post = post
        self._send_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"link-{peer_pid}", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can come or go."""
        return self._stop.is_set()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, message: SupervisorMessage | Reply, fds: Sequence[int] = ()) -> bool:
        """Send one message; False if the peer is gone, which its LinkClosed tells in full."""
        try:
            with self._send_lock:
                self._sock.settimeout(SEND_TIMEOUT_S)
                framing.send_frame(self._sock, encode(message), fds)
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """End the connection; the reader thread notices and posts LinkClosed."""
        self._stop.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def _read(self) -> None:
        reason = ""
        limit = RateLimit(self._clock, MAX_MESSAGES, MESSAGES_WINDOW_S)
        try:
            while self._wait_readable():
                self._sock.settimeout(FRAME_TIMEOUT_S)
                body, fds = framing.receive_frame(self._sock)
                self._has_spoken = True
                if not limit.allows():
                    framing.close_all(fds)
                    raise ProtocolError(
                        f"more than {MAX_MESSAGES} messages in {MESSAGES_WINDOW_S:g} s"
                    )
                self._post(Incoming(self, self._decode(body, fds), tuple(fds)))
        except framing.ConnectionClosed:
            pass
        except (ProtocolError, OSError) as error:
            reason = str(error)
        finally:
            self._stop.set()
            self._sock.close()
            self._post(LinkClosed(self, reason))

    def _decode(self, body: bytes, fds: Sequence[int]) -> ClientMessage:
        try:
            return decode_from_client(body)
        except ProtocolError:
            framing.close_all(fds)
            raise

    def _wait_readable(self) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        silence = Deadline.after(self._clock, FIRST_FRAME_TIMEOUT_S)
        while not self._stop.is_set():
            if poller.poll(POLL_MS):
                return True
            if not self._has_spoken and silence.is_over:
                raise ProtocolError(f"no message within {FIRST_FRAME_TIMEOUT_S:g} s of connecting")
        return False


class RateLimit:
    """At most `limit` passes in each window of `window_s` seconds. One thread."""

    def __init__(self, clock: Clock, limit: int, window_s: float) -> None:
        self._clock = clock
        self._limit = limit
        self._window_s = window_s
        self._began_at = clock.monotonic()
        self._count = 0

    def allows(self) -> bool:
        """Whether one more may pass now."""
        now = self._clock.monotonic()
        if now - self._began_at >= self._window_s:
            self._began_at, self._count = now, 0
        self._count += 1
        return self._count <= self._limit
