"""The socket to the supervisor, in one background thread that reconnects for ever.

The training thread only posts messages and looks at what arrived; it never touches the socket, so
a dead or slow supervisor costs it nothing.
"""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from trainer_sdk.errors import RejectedBySupervisor
from trainer_sdk.protocol.control_page import ControlPage
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.framing import (
    close_all,
    connect,
    receive_frame,
    send_frame,
)
from trainer_sdk.protocol.messages import (
    PROTOCOL_VERSION,
    FinishRecorded,
    Hello,
    Images,
    Order,
    RankMessage,
    Rejected,
    Replan,
    ShardRef,
    Slots,
    Welcome,
    decode_from_supervisor,
    encode,
)

log = logging.getLogger("trainer_sdk")

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_FRAME_TIMEOUT_S = 30.0
_MAX_OUTBOX = 256


@dataclass(slots=True)
class Inbox:
    """What the supervisor said; guarded by the link's condition."""

    is_connected: bool = False
    num_connections: int = 0
    welcome: Welcome | None = None
    page: ControlPage | None = None
    slots: Slots | None = None
    slot_fds: list[int] = field(default_factory=list)
    num_slot_grants: int = 0
    shards: list[tuple[ShardRef, int]] = field(default_factory=list)
    images_source: str = ""
    are_images_complete: bool = False
    orders: deque[Order] = field(default_factory=deque)
    finish: FinishRecorded | None = None
    replan_reason: str = ""
    rejected: Rejected | None = None


# A DataLoader's worker is forked with a copy of the socket, which would keep the connection open
# after the trainer is gone; so the copy is closed as soon as the worker starts.
_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_in_child() -> None:
    for link in list(_links):
        link.close_socket()


os.register_at_fork(after_in_child=_close_in_child)


class Link:
    """The rank's end of the socket.

    Invariant: descriptors of the page and the slots stay open here as long as the link lives, so
    that they can be handed to the next supervisor.
    """

    def __init__(self, path: str, hello: Hello, on_attention: Callable[[], None]) -> None:
        """Args:
        path: the supervisor's socket.
        hello: the first message; sent again, brought up to date, on each reconnect.
        on_attention: called from the link's thread when the training thread should look.
        """
        self.changed = threading.Condition()
        self.inbox = Inbox()
        self._path = path
        self._hello = hello
        self._on_attention = on_attention
        self._outbox: deque[RankMessage] = deque(maxlen=_MAX_OUTBOX)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sock: socket.socket | None = None
        self._stop = threading.Event()
        self._is_drained = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer-sdk-link", daemon=True)
        self._thread.start()
        _links.add(self)

    def close_socket(self) -> None:
        """Close this process's copy of the socket; only for a forked child."""
        sock, self._sock = self._sock, None
        if sock is not None and sock.fileno() >= 0:
            os.close(sock.detach())

    # ------------------------------------------------------------ training thread

    def post(self, message: RankMessage) -> None:
        """Send soon; dropped when the supervisor is gone before it was sent."""
        self._is_drained.clear()
        self._outbox.append(message)
        self._wake()

    def wait(self, is_ready: Callable[[Inbox], bool], timeout_s: float) -> bool:
        """Wait until the inbox satisfies a condition, or the supervisor rejected this rank.

        Raises:
            RejectedBySupervisor: no use to wait.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: is_ready(self.inbox) or self.inbox.rejected is not None, timeout_s
            )
            if is_ready(self.inbox):
                return True
            if self.inbox.rejected is not None:
                raise RejectedBySupervisor(self.inbox.rejected.error_id, self.inbox.rejected.reason)
            return False

    def update_hello(self, *, has_restored: bool) -> None:
        """Change what a reconnect says."""
        with self.changed:
            self._hello = replace_hello(self._hello, has_restored=has_restored)

    def close(self, *, drain_s: float = 2.0) -> None:
        """Send what is posted, then end the thread. Descriptors are closed."""
        if self._outbox and self.inbox.is_connected:
            self._is_drained.wait(drain_s)
        self._stop.set()
        self._wake()
        self._thread.join(drain_s)
        if not self._thread.is_alive():
            close_all(self.inbox.slot_fds)
            close_all([fd for _, fd in self.inbox.shards])
            os.close(self._wake_fd)
            if self.inbox.page is not None:
                self.inbox.page.close()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ link thread

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set() and self.inbox.rejected is None:
            connected_at = time.monotonic()
            try:
                with connect(self._path, timeout_s=_FRAME_TIMEOUT_S) as sock:
                    self._sock = sock
                    self._talk(sock)
            except (OSError, ProtocolError) as error:
                log.debug("link to the supervisor lost: %s", error)
            self._disconnected()
            if time.monotonic() - connected_at > _LONGEST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            self._stop.wait(backoff_s * (0.5 + random.Random().random()))
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    def _talk(self, sock: socket.socket) -> None:
        self._outbox.clear()  # written for a supervisor that is gone; slots and page tell the rest
        self._say_hello(sock)
        while not self._stop.is_set():
            self._drain_wake()
            while self._outbox:
                send_frame(sock, encode(self._outbox[0]))
                self._outbox.popleft()
            self._is_drained.set()
            ready = _readable(sock.fileno(), self._wake_fd)
            if sock.fileno() in ready:
                body, fds = receive_frame(sock)
                self._receive(body, fds)
        while self._outbox:
            send_frame(sock, encode(self._outbox.popleft()))

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _say_hello(self, sock: socket.socket) -> None:
        inbox, fds = self.inbox, []
        hello = self._hello
        if inbox.page is not None:
            generation = inbox.welcome.generation if inbox.welcome is not None else 0
            slot_bytes = inbox.slots.slot_bytes if inbox.slots is not None else 0
            fds = [inbox.page.fd, *inbox.slot_fds]
            hello = replace_hello(
                hello,
                generation=generation,
                num_slots=len(inbox.slot_fds),
                slot_bytes=slot_bytes,
            )
        send_frame(sock, encode(hello), fds)

    def _receive(self, body: bytes, fds: list[int]) -> None:
        message = decode_from_supervisor(body)
        with self.changed:
            unused = self._take(message, fds)
            self.changed.notify_all()
        close_all(unused)
        if isinstance(message, Welcome | Slots | Replan):
            self._on_attention()

    def _take(self, message: object, fds: list[int]) -> list[int]:
        inbox = self.inbox
        if isinstance(message, Welcome):
            if message.protocol != PROTOCOL_VERSION:
                raise ProtocolError(f"the supervisor speaks protocol {message.protocol}")
            if fds:
                inbox.page = ControlPage(fds.pop(0))
            close_all([fd for _, fd in inbox.shards])
            inbox.shards.clear()  # images that are still wanted are sent again
            inbox.are_images_complete = False
            inbox.welcome, inbox.is_connected = message, True
            inbox.num_connections += 1
        elif isinstance(message, Slots):
            if len(fds) != message.num_slots:
                raise ProtocolError(f"{len(fds)} descriptors for {message.num_slots} slots")
            close_all(inbox.slot_fds)
            inbox.slots, inbox.slot_fds, fds = message, fds, []
            inbox.num_slot_grants += 1
        elif isinstance(message, Images):
            if len(fds) != len(message.shards):
                raise ProtocolError(f"{len(fds)} descriptors for {len(message.shards)} images")
            inbox.shards += zip(message.shards, fds, strict=True)
            inbox.images_source = message.source
            inbox.are_images_complete, fds = message.is_last, []
        elif isinstance(message, Order):
            inbox.orders.append(message)
        elif isinstance(message, FinishRecorded):
            inbox.finish = message
        elif isinstance(message, Replan):
            inbox.replan_reason = message.reason or "replicas differ"
        elif isinstance(message, Rejected):
            inbox.rejected = message
            log.warning("the supervisor refused this rank: %s", message.reason)
        return fds

    def _disconnected(self) -> None:
        with self.changed:
            self.inbox.is_connected = False
            self.inbox.orders.clear()
            if not self.inbox.are_images_complete:
                close_all([fd for _, fd in self.inbox.shards])
                self.inbox.shards.clear()
            self.changed.notify_all()


def _readable(*fds: int) -> list[int]:
    """Which of these can be read, after 5 s at the latest.

    poll, not select: a process with a thousand open files has descriptors that select refuses.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(5000)]


def replace_hello(hello: Hello, **changes: object) -> Hello:
    """A Hello with some fields changed."""
    return msgspec.structs.replace(hello, **changes)
