"""The unix socket: one supervisor a job, ours alone; a peer that misbehaves loses only itself."""

from __future__ import annotations

import gc
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.clock import SystemClock
from supervisor.errors import AlreadyRunningError, ExitCode
from supervisor.lifecycle import inputs
from supervisor.ranks.board import RankBoard
from supervisor.ranks.link import Incoming, LinkClosed
from supervisor.ranks.server import PeerDenied, RankServer, RuntimeDir, RuntimeDirError
from supervisor.ranks.slots import SlotBuffer
from tests.fakes import connect_as_nobody, wait_until
from trainer_sdk.protocol import framing, messages
from trainer_sdk.protocol.control_page import ControlPage
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.messages import MAX_FDS, MAX_MESSAGE_BYTES, encode

LAUNCH = "launch-1"


@pytest.fixture(autouse=True)
def _quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long `stop` may take is how often the thread that accepts looks up."""
    monkeypatch.setattr("supervisor.ranks.server.ACCEPT_TIMEOUT_S", 0.02)


class Server:
    """A listening supervisor whose posts are kept in order."""

    def __init__(self, path: str) -> None:
        self.runtime = RuntimeDir(path)
        self.posts: list[Incoming | LinkClosed | PeerDenied] = []
        self._server = RankServer(self.runtime, clock=SystemClock(), post=self.posts.append)
        self._server.start()

    def connect(self) -> socket.socket:
        short, directory = framing.short_socket_path(self.runtime.socket_path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(5)
        sock.connect(short)
        if directory is not None:
            os.close(directory)
        return sock

    def messages(self) -> list[messages.ClientMessage]:
        return [post.message for post in self.posts if isinstance(post, Incoming)]

    def closed(self) -> list[LinkClosed]:
        return [post for post in self.posts if isinstance(post, LinkClosed)]

    def stop(self) -> None:
        self._server.stop()
        self.runtime.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    opened = Server(str(tmp_path / "run"))
    yield opened
    opened.stop()


def open_fds() -> dict[str, str]:
    gc.collect()
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


def a_hello(**changes: object) -> messages.Hello:
    fields: dict[str, object] = {
        "protocol": messages.PROTOCOL_VERSION,
        "launch": LAUNCH,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "pid": os.getpid(),
        "incarnation": "1" * 32,
    }
    return messages.Hello(**(fields | changes))  # type: ignore[arg-type]


SAVE = encode(messages.SaveRequested())


# ---------------------------------------------------------------- one supervisor a job


def test_a_second_supervisor_of_the_job_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = Server(str(path))
    try:
        before = {p.name: (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in path.iterdir()}

        with pytest.raises(AlreadyRunningError) as caught:
            RuntimeDir(str(path))

        assert str(os.getpid()) in caught.value.message
        assert caught.value.exit_code is ExitCode.ALREADY_RUNNING
        after = {p.name: (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in path.iterdir()}
        assert after == before
        first.connect().close()
    finally:
        first.stop()


def test_when_the_first_is_gone_the_next_may_run(tmp_path: Path) -> None:
    RuntimeDir(str(tmp_path / "run")).close()

    RuntimeDir(str(tmp_path / "run")).close()


def test_a_socket_that_a_killed_supervisor_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path / "supervisor.sock"))
    stale.close()

    server = Server(str(path))
    try:
        with server.connect() as sock:
            framing.send_frame(sock, SAVE)
            wait_until(lambda: len(server.messages()) == 1)
    finally:
        server.stop()


def test_a_file_in_place_of_the_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / "supervisor.sock").write_text("precious")
    runtime = RuntimeDir(str(path))
    server = RankServer(runtime, clock=SystemClock(), post=lambda post: None)

    with pytest.raises(RuntimeDirError, match="cannot be made"):
        server.start()

    runtime.close()
    assert (path / "supervisor.sock").read_text() == "precious"


# ---------------------------------------------------------------- ours alone


@pytest.fixture
def open_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_nobody_else_may_enter_whatever_the_umask(tmp_path: Path, open_umask: None) -> None:
    server = Server(str(tmp_path / "run"))
    try:
        modes = {
            path.name: stat.S_IMODE(path.lstat().st_mode)
            for path in [tmp_path / "run", *(tmp_path / "run").iterdir()]
        }
        assert modes == {"run": 0o700, "supervisor.sock": 0o600, "lock": 0o600}
    finally:
        server.stop()


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)

    RuntimeDir(str(tmp_path / "run")).close()

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "target")

    with pytest.raises(RuntimeDirError) as caught:
        RuntimeDir(str(tmp_path / "run"))

    assert caught.value.hint
    assert list((tmp_path / "target").iterdir()) == []


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 12345, 12345)

    with pytest.raises(RuntimeDirError, match="is not a directory of uid"):
        RuntimeDir(str(tmp_path / "run"))


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RuntimeDirError) as caught:
        RuntimeDir(str(tmp_path / "file" / "run"))

    assert "runtime_dir" in caught.value.hint


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 100) / ("b" * 100)
    before = open_fds()
    server = Server(str(path))
    try:
        with server.connect() as sock:
            framing.send_frame(sock, SAVE)
            wait_until(lambda: len(server.messages()) == 1)
    finally:
        server.stop()

    wait_until(lambda: open_fds().keys() == before.keys())


# ---------------------------------------------------------------- good peers


def test_messages_of_one_peer_come_in_order(server: Server) -> None:
    with server.connect() as sock:
        for step in range(50):
            framing.send_frame(sock, encode(messages.Boundary(step=step)))
        wait_until(lambda: len(server.messages()) == 50)

    steps = [
        message.step for message in server.messages() if isinstance(message, messages.Boundary)
    ]
    assert steps == list(range(50))


def test_a_frame_in_many_small_pieces_is_one_message(server: Server) -> None:
    frame = struct.pack("<I", len(SAVE)) + SAVE
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for byte in frame:
            sock.sendall(bytes([byte]))
        wait_until(lambda: len(server.messages()) == 1)


def test_descriptors_arrive_with_their_message(server: Server) -> None:
    page = ControlPage.create("page")
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello()), [page.fd])
        wait_until(lambda: len(server.messages()) == 1)

    (incoming,) = [post for post in server.posts if isinstance(post, Incoming)]
    assert len(incoming.fds) == 1
    assert os.fstat(incoming.fds[0]).st_ino == os.fstat(page.fd).st_ino
    framing.close_all(incoming.fds)
    page.close()


def test_the_kernel_says_which_process_is_at_the_other_end(server: Server) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, SAVE)
        wait_until(lambda: bool(server.posts))

    assert server.posts[0].link.peer_pid == os.getpid()


def test_a_peer_that_just_leaves_has_no_reason(server: Server) -> None:
    server.connect().close()

    wait_until(lambda: len(server.closed()) == 1)
    assert server.closed()[0].reason == ""


def test_a_send_to_a_peer_that_left_is_false_and_no_error(server: Server) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, SAVE)
        wait_until(lambda: bool(server.posts))
    wait_until(lambda: len(server.closed()) == 1)

    assert server.posts[0].link.send(messages.Replan(reason="x")) is False


def test_nothing_comes_after_the_end_of_a_link(server: Server) -> None:
    with server.connect() as sock:
        for _ in range(20):
            framing.send_frame(sock, SAVE)
    wait_until(lambda: len(server.closed()) == 1)

    assert isinstance(server.posts[-1], LinkClosed)
    assert len(server.messages()) == 20


# ---------------------------------------------------------------- bad peers


def _too_long(sock: socket.socket) -> None:
    sock.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))


def _hugest(sock: socket.socket) -> None:
    sock.sendall(b"\xff\xff\xff\xff" + b"x" * 100)


def _garbage(sock: socket.socket) -> None:
    framing.send_frame(sock, b"{{{{")


def _not_utf8(sock: socket.socket) -> None:
    framing.send_frame(sock, b'{"type":"note","event":"\xff\xfe","text":"x"}')


def _nesting_bomb(sock: socket.socket) -> None:
    framing.send_frame(sock, b'{"type":' + b"[" * 100_000)


def _unknown(sock: socket.socket) -> None:
    framing.send_frame(sock, b'{"type":"launch_missiles"}')


def _unknown_field(sock: socket.socket) -> None:
    framing.send_frame(sock, b'{"type":"boundary","step":1,"extra":2}')


def _out_of_bounds(sock: socket.socket) -> None:
    framing.send_frame(sock, b'{"type":"boundary","step":-1}')


def _empty(sock: socket.socket) -> None:
    framing.send_frame(sock, b"")


def _message_of_the_other_side(sock: socket.socket) -> None:
    framing.send_frame(sock, encode(messages.Replan(reason="x")))


def _truncated_body(sock: socket.socket) -> None:
    sock.sendall(struct.pack("<I", 100) + b"half")
    sock.shutdown(socket.SHUT_WR)


def _truncated_head(sock: socket.socket) -> None:
    sock.sendall(b"\x05\x00")
    sock.shutdown(socket.SHUT_WR)


def _too_many_descriptors(sock: socket.socket) -> None:
    framing.send_frame(sock, SAVE, [0] * (MAX_FDS + 1))


def _descriptors_with_garbage(sock: socket.socket) -> None:
    framing.send_frame(sock, b"not json", [0] * MAX_FDS)


def _descriptors_and_a_cut(sock: socket.socket) -> None:
    socket.send_fds(sock, [struct.pack("<I", 100) + b"half"], [0] * MAX_FDS)
    sock.shutdown(socket.SHUT_WR)


BAD = [
    _too_long, _hugest, _garbage, _not_utf8, _nesting_bomb, _unknown, _unknown_field,
    _out_of_bounds, _empty, _message_of_the_other_side, _truncated_body, _truncated_head,
    _too_many_descriptors, _descriptors_with_garbage, _descriptors_and_a_cut,
]  # fmt: skip


@pytest.mark.parametrize("misbehave", BAD, ids=lambda call: call.__name__.strip("_"))
def test_a_peer_that_breaks_the_protocol_is_dropped_alone_and_leaks_nothing(
    server: Server, misbehave: Callable[[socket.socket], None]
) -> None:
    good = server.connect()
    framing.send_frame(good, SAVE)
    wait_until(lambda: len(server.messages()) == 1)
    before = open_fds()

    bad = server.connect()
    misbehave(bad)
    wait_until(lambda: len(server.closed()) == 1)
    bad.close()

    assert server.closed()[0].reason != ""
    wait_until(lambda: open_fds().keys() == before.keys())
    framing.send_frame(good, SAVE)
    wait_until(lambda: len(server.messages()) == 2)
    good.close()


def test_a_peer_that_does_not_end_its_frame_is_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.ranks.link.FRAME_TIMEOUT_S", 0.1)
    with server.connect() as slow, server.connect() as good:
        slow.sendall(struct.pack("<I", 100) + b"half")
        framing.send_frame(good, SAVE)
        wait_until(lambda: len(server.messages()) == 1)

        wait_until(lambda: len(server.closed()) == 1)

        assert "timed out" in server.closed()[0].reason


def test_f62_a_peer_that_says_nothing_gives_its_place_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.ranks.link.FIRST_FRAME_TIMEOUT_S", 0.1)
    with server.connect(), server.connect() as good:
        framing.send_frame(good, SAVE)

        wait_until(lambda: len(server.closed()) == 1)

        assert "no message within" in server.closed()[0].reason
        assert len(server.messages()) == 1


def test_f62_a_peer_that_floods_is_dropped_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.ranks.link.MAX_MESSAGES", 10)
    with server.connect() as flooding, server.connect() as good:
        for _ in range(11):
            framing.send_frame(flooding, SAVE)
        wait_until(lambda: len(server.closed()) == 1)

        framing.send_frame(good, SAVE)
        wait_until(lambda: len(server.messages()) == 11)

        assert "more than 10 messages" in server.closed()[0].reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_f63_a_peer_of_another_user_is_not_let_in() -> None:
    """Even where the directory and the socket were opened to all by hand."""
    with tempfile.TemporaryDirectory() as home:  # short, and below directories that all may enter
        server = Server(f"{home}/run")
        for path in (home, server.runtime.path, server.runtime.socket_path):
            os.chmod(path, 0o777)

        told = connect_as_nobody(server.runtime.socket_path)
        wait_until(lambda: len(server.posts) == 1)

        denied = server.posts[0]
        assert told == "closed at once"
        assert isinstance(denied, PeerDenied)
        assert denied.uid == 65534
        assert "uid 65534" in denied.reason
        server.stop()


def test_missing_parents_of_the_directory_are_ours_alone_too(
    tmp_path: Path, open_umask: None
) -> None:
    runtime = RuntimeDir(str(tmp_path / "some" / "where" / "run"))

    for directory in ("some", "some/where", "some/where/run"):
        assert stat.S_IMODE((tmp_path / directory).stat().st_mode) == 0o700
    runtime.close()


def test_stopping_ends_every_connection_and_thread(tmp_path: Path) -> None:
    server = Server(str(tmp_path / "run"))
    socks = [server.connect() for _ in range(3)]
    for sock in socks:
        framing.send_frame(sock, SAVE)
    wait_until(lambda: len(server.messages()) == 3)

    server.stop()

    for sock in socks:
        assert sock.recv(1) == b""
        sock.close()
    wait_until(lambda: not any(t.name.startswith("link-") for t in threading.enumerate()))


# ---------------------------------------------------------------- order of messages


class Board:
    """A board fed by real links."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._done = 0
        self.board = RankBoard(
            clock=SystemClock(),
            launch=lambda: LAUNCH,
            make_slot=lambda rank, slot, size, *rest: SlotBuffer.in_memory(f"{rank}-{slot}", size),
        )

    def receive(self) -> list[inputs.Event]:
        """Handle the next message as the daemon does."""
        wait_until(lambda: len(self._server.posts) > self._done)
        post = self._server.posts[self._done]
        self._done += 1
        assert isinstance(post, Incoming)
        return self.board.receive(post)

    def skip(self) -> None:
        """Pass over what came meanwhile."""
        self._done = len(self._server.posts)


@pytest.fixture
def board(server: Server) -> Board:
    return Board(server)


def test_a_hello_seats_the_rank(server: Server, board: Board) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello(rank=3, world_size=8)))

        (event,) = board.receive()

        assert isinstance(event, inputs.RankJoined)
        assert (event.rank, event.world_size, event.has_slots) == (3, 8, False)


@pytest.mark.parametrize(
    "message",
    [
        messages.Boundary(step=1),
        messages.Planned(slot_bytes=1, plan="p"),
        messages.Finished(step=1),
        messages.SaveRequested(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_before_hello_breaks_the_protocol_and_its_descriptors_are_closed(
    server: Server, board: Board, message: messages.RankMessage
) -> None:
    with server.connect() as sock:
        before = open_fds()
        framing.send_frame(sock, encode(message), [0, 0])

        with pytest.raises(ProtocolError, match="before Hello"):
            board.receive()

        assert len(open_fds()) <= len(before) + 1  # our own end of the new connection


def test_a_rank_that_claims_a_slot_it_did_not_seal_breaks_the_protocol(
    server: Server, board: Board
) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello()))
        board.receive()
        board.board.allocate(0, 4096)
        sealed = messages.Sealed(slot=0, step=5, image_bytes=4096, staged_s=0.1, blocked_s=0.1)
        framing.send_frame(sock, encode(sealed))

        with pytest.raises(ProtocolError, match="commit word"):
            board.receive()


@pytest.mark.parametrize("slot", [2, 7])
def test_a_slot_that_does_not_exist_breaks_the_protocol(
    server: Server, board: Board, slot: int
) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello()))
        board.receive()
        framing.send_frame(sock, encode(messages.Unsealed(slot=slot, step=5, reason="x")))

        with pytest.raises(ProtocolError, match="does not exist"):
            board.receive()


@pytest.mark.parametrize(
    ("changes", "error_id"),
    [({"launch": "another"}, "launch_unknown"), ({"protocol": 999}, "version_mismatch")],
)
def test_a_process_of_another_launch_or_version_is_told_so(
    server: Server, board: Board, changes: dict[str, object], error_id: str
) -> None:
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello(**changes)), [0])

        events = board.receive()

        body, _ = framing.receive_frame(sock)
        reply = messages.decode_from_supervisor(body)
        assert events == []
        assert isinstance(reply, messages.Rejected)
        assert reply.error_id == error_id
        assert board.board.seats == {}


def _a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def _a_page_to_read_only() -> int:
    page = ControlPage.create("page")
    fd = os.open(f"/proc/self/fd/{page.fd}", os.O_RDONLY)
    page.close()
    return fd


def _zeros() -> int:
    fd = os.memfd_create("zeros")
    os.ftruncate(fd, 4096)
    return fd


@pytest.mark.parametrize("make", [_a_pipe, _a_page_to_read_only, _zeros])
def test_something_else_in_place_of_the_control_page_breaks_the_protocol_and_leaks_nothing(
    server: Server, board: Board, make: Callable[[], int]
) -> None:
    fd = make()
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello(num_slots=2, slot_bytes=4096)), [fd, fd, fd])
        wait_until(lambda: bool(server.posts))
        received = set(server.posts[0].fds)  # type: ignore[union-attr]

        with pytest.raises(ProtocolError):
            board.receive()

        assert not received & {int(name) for name in open_fds()}
    os.close(fd)


def test_a_number_of_descriptors_that_is_not_what_hello_says_breaks_the_protocol(
    server: Server, board: Board
) -> None:
    page = ControlPage.create("page")
    with server.connect() as sock:
        framing.send_frame(sock, encode(a_hello(num_slots=2)), [page.fd])

        with pytest.raises(ProtocolError, match="descriptors"):
            board.receive()
    page.close()


def test_a_newer_connection_of_a_rank_replaces_the_older(server: Server, board: Board) -> None:
    with server.connect() as old, server.connect() as new:
        framing.send_frame(old, encode(a_hello()))
        board.receive()
        framing.send_frame(new, encode(a_hello()))
        board.receive()

        assert old.recv(1) == b""
        assert board.board.send(0, messages.Replan(reason="x"))
        body, _ = framing.receive_frame(new)
        assert isinstance(messages.decode_from_supervisor(body), messages.Replan)


def test_a_second_process_of_a_rank_is_refused_while_the_first_is_there(
    server: Server, board: Board
) -> None:
    """A child of the rank that attaches as well must not pass for the rank started anew."""
    with server.connect() as first:
        framing.send_frame(first, encode(a_hello()))
        board.receive()
        second = {"pid": os.getpid() + 1, "incarnation": "2" * 32}
        with server.connect() as child:
            framing.send_frame(child, encode(a_hello(**second)))
            assert board.receive() == []
            body, _ = framing.receive_frame(child)
        assert board.board.send(0, messages.Replan(reason="x"))
        framing.receive_frame(first)

    refused = messages.decode_from_supervisor(body)
    assert isinstance(refused, messages.Rejected)
    assert refused.error_id == "duplicate_rank"


def test_a_rank_started_anew_takes_the_place_of_the_one_that_died(
    server: Server, board: Board
) -> None:
    with server.connect() as first:
        framing.send_frame(first, encode(a_hello()))
        board.receive()
    wait_until(lambda: board.board.seats[0].link.is_closed)
    wait_until(lambda: bool(server.closed()))
    board.skip()
    with server.connect() as anew:
        framing.send_frame(anew, encode(a_hello(pid=os.getpid() + 1, incarnation="2" * 32)))

        (event,) = board.receive()

    assert isinstance(event, inputs.RankJoined)
    assert event.incarnation == "2" * 32
