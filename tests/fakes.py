"""Fakes of the outside world: a supervisor that speaks the real protocol on a real socket."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer_sdk.protocol.control_page import ControlPage
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.framing import close_all, receive_frame, send_frame
from trainer_sdk.protocol.messages import (
    PROTOCOL_VERSION,
    Boundary,
    Finished,
    FinishRecorded,
    Hello,
    Images,
    Order,
    Planned,
    RankMessage,
    Rejected,
    Resume,
    Sealed,
    ShardRef,
    Slots,
    Welcome,
    decode_from_client,
    encode,
)

_M = TypeVar("_M")


class FakeSupervisor:
    """A supervisor of one rank, in a thread. Attributes set before `start()` script it.

    It answers Planned with memfd slots, Finished with FinishRecorded, and each Boundary with the
    next entries of `orders` (a list a boundary). Images sealed in slots are kept in `images`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.schedule = "boundary"
        self.staging = "memory"
        self.generation = 1
        self.hold_timeout_s = 10.0
        self.plan_timeout_s = 5.0
        self.resume_images: list[bytes] | None = None
        self.resume_step = 0
        self.rejects = False
        self.gives_slots = True
        self.holds_from_start = False
        self.orders: deque[list[Order]] = deque()
        self.on_boundary: Callable[[FakeSupervisor, int], list[Order]] | None = None
        self.messages: list[RankMessage] = []
        self.hellos: list[tuple[Hello, int]] = []
        self.images: dict[int, bytes] = {}
        self.page: ControlPage | None = None
        self.slot_fds: list[int] = []
        self.slot_bytes = 0
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection: socket.socket | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="fake-supervisor", daemon=True)

    # ------------------------------------------------------------ what tests call

    def start(self) -> FakeSupervisor:
        """Listen; returns itself."""
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen(4)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Die: close the socket; page and slots live on in the rank."""
        self._is_stopping = True
        for sock in (self._listener, self._connection):
            if sock is not None:
                with contextlib.suppress(OSError):  # the other side was faster
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
        self._thread.join(5)
        self._listener.close()

    def dispose(self) -> None:
        """Stop, and close every descriptor."""
        self.stop()
        close_all(self.slot_fds)
        self.slot_fds = []

    def wait_for(self, kind: type[_M], *, count: int = 1, timeout_s: float = 20.0) -> _M:
        """The `count`-th message of a kind, once it came."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.all_of(kind)) >= count, timeout_s)
            assert came, f"no {kind.__name__} number {count} among {self.messages}"
            return self.all_of(kind)[count - 1]

    def all_of(self, kind: type[_M]) -> list[_M]:
        """Every message of a kind so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    def wait_for_slots(self) -> None:
        """Until slots were granted."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.slot_fds), 20)

    def send(self, message: object, fds: list[int] | None = None) -> None:
        """Say something unasked."""
        assert self._connection is not None
        send_frame(self._connection, encode(message), fds or [])  # type: ignore[arg-type]

    def image_in_slot(self, slot: int) -> bytes | None:
        """The sealed image of a slot."""
        assert self.page is not None
        seal = self.page.read_seal(slot)
        return None if seal is None else os.pread(self.slot_fds[slot], seal.image_bytes, 0)

    # ------------------------------------------------------------ thread

    def _serve(self) -> None:
        while not self._is_stopping:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            with self._connection:
                try:
                    self._talk(self._connection)
                except (ProtocolError, OSError):
                    continue

    def _talk(self, sock: socket.socket) -> None:
        body, fds = receive_frame(sock)
        hello = decode_from_client(body)
        assert isinstance(hello, Hello)
        self.hellos.append((hello, len(fds)))
        self._record(hello)
        if self.rejects:
            send_frame(sock, encode(Rejected(error_id="fenced", reason="another generation")))
            return
        page_fds = self._take_page(hello, fds)
        send_frame(sock, encode(self._welcome(hello)), page_fds)
        if self.resume_images is not None and not hello.has_restored:
            self._send_images(sock)
        while True:
            body, fds = receive_frame(sock)
            assert not fds
            message = decode_from_client(body)
            self._answer(sock, message)  # type: ignore[arg-type]

    def _take_page(self, hello: Hello, fds: list[int]) -> list[int]:
        if fds:
            self.page = ControlPage(fds[0])
            self.slot_fds, self.slot_bytes = fds[1:], hello.slot_bytes
            return []
        if self.page is not None:
            self.page.close()
        self.page = ControlPage.create("page")
        if self.holds_from_start:
            self.page.ask_hold(0)
        return [self.page.fd]

    def _welcome(self, hello: Hello) -> Welcome:
        resume = None
        if self.resume_images is not None:
            resume = Resume(
                generation=self.generation - 1,
                step=self.resume_step,
                world_size=len(self.resume_images),
            )
        return Welcome(
            protocol=PROTOCOL_VERSION,
            job_id="job",
            generation=self.generation,
            epoch=1,
            resume=resume,
            num_slots=2,
            schedule=self.schedule,  # type: ignore[arg-type]
            hold_timeout_s=self.hold_timeout_s,
            plan_timeout_s=self.plan_timeout_s,
        )

    def _send_images(self, sock: socket.socket) -> None:
        assert self.resume_images is not None
        for rank, image in enumerate(self.resume_images):
            fd = os.memfd_create("image")
            os.write(fd, image)
            shard = ShardRef(rank=rank, name=f"{rank}", size_bytes=len(image))
            is_last = rank == len(self.resume_images) - 1
            send_frame(
                sock, encode(Images(source="memory", shards=(shard,), is_last=is_last)), [fd]
            )
            os.close(fd)

    def _answer(self, sock: socket.socket, message: RankMessage) -> None:
        if isinstance(message, Sealed):
            image = self.image_in_slot(message.slot)
            assert image is not None
            self.images[message.step] = image
        if isinstance(message, Planned) and self.gives_slots:
            self._grant(sock, message)
        if isinstance(message, Finished):
            send_frame(sock, encode(FinishRecorded(is_durable=True)))
        if isinstance(message, Boundary):
            orders = self.orders.popleft() if self.orders else []
            if self.on_boundary is not None:
                orders = self.on_boundary(self, message.step)
            for order in orders:
                send_frame(sock, encode(order))
        self._record(message)

    def _grant(self, sock: socket.socket, message: Planned) -> None:
        close_all(self.slot_fds)
        self.slot_fds = [os.memfd_create(f"slot{index}") for index in range(2)]
        for fd in self.slot_fds:
            os.ftruncate(fd, message.slot_bytes)
        self.slot_bytes = message.slot_bytes
        slots = Slots(slot_bytes=message.slot_bytes, num_slots=2, staging=self.staging)  # type: ignore[arg-type]
        send_frame(sock, encode(slots), self.slot_fds)

    def _record(self, message: RankMessage) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()


def wait_until(is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for another thread, within a bound."""
    limit = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < limit, "it did not come true in time"
        time.sleep(0.002)


def count_by_kind(messages: list[RankMessage]) -> dict[str, int]:
    """How many messages of each kind."""
    counts: dict[str, int] = defaultdict(int)
    for message in messages:
        counts[type(message).__name__] += 1
    return dict(counts)


# Perl, since every Debian has it where every user may run it; ours may be below /root.
_CONNECT = """
use Socket; $SIG{ALRM} = sub { print "kept waiting"; exit };
socket(my $s, PF_UNIX, SOCK_STREAM, 0);
if (!connect($s, sockaddr_un($ARGV[0]))) { print "$!"; exit }
alarm 5; print sysread($s, my $byte, 1) ? "answered" : "closed at once";
"""


def connect_as_nobody(path: str) -> str:
    """What another user (uid 65534) gets from a unix socket; only root can try it."""
    done = subprocess.run(
        ["perl", "-e", _CONNECT, path],
        user=65534, capture_output=True, text=True, check=True, cwd="/", timeout=30,
    )  # fmt: skip
    return done.stdout
