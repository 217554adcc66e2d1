"""Frames on a unix stream socket: u32 length, JSON body, descriptors with the first bytes."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.messages import MAX_FDS, MAX_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
# sockaddr_un.sun_path holds 108 bytes with the terminating NUL. Source: unix(7).
MAX_SOCKET_PATH_BYTES = 107


class ConnectionClosed(ProtocolError):
    """The peer closed the connection between two frames."""


def send_frame(sock: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send one frame whole; the descriptors stay open on this side.

    Raises:
        OSError: the peer is gone, or the socket's timeout passed; the stream is then unusable.
    """
    frame = memoryview(_LENGTH.pack(len(body)) + body)
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else sock.send(frame)
    if sent < len(frame):
        sock.sendall(frame[sent:])


def receive_frame(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one frame and the descriptors that came with it, which the caller then owns.

    Raises:
        ConnectionClosed: the peer closed between frames.
        ProtocolError: a frame over the limit, cut short, or with too many descriptors.
        OSError: the socket's timeout passed, or the connection broke.
    """
    fds: list[int] = []
    try:
        head = _receive_head(sock, fds)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a frame of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        return _receive_exactly(sock, length), fds
    except BaseException:
        close_all(fds)
        raise


def _receive_head(sock: socket.socket, fds: list[int]) -> bytes:
    head = b""
    while len(head) < _LENGTH.size:
        data, received, flags, _ = socket.recv_fds(sock, _LENGTH.size - len(head), MAX_FDS)
        fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"more than {MAX_FDS} descriptors in one frame")
        if not data:
            if head:
                raise ProtocolError("the peer closed in the middle of a frame")
            raise ConnectionClosed("the peer closed the connection")
        head += data
    return head


def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    body = bytearray(length)
    view = memoryview(body)
    done = 0
    while done < length:
        got = sock.recv_into(view[done:])
        if got == 0:
            raise ProtocolError("the peer closed in the middle of a frame")
        done += got
    return bytes(body)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody will use."""
    for fd in fds:
        os.close(fd)


def connect(path: str, *, timeout_s: float) -> socket.socket:
    """A connection to the socket at `path`, however long that is.

    Raises:
        OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    directory = None
    try:
        path, directory = short_socket_path(path)
        sock.settimeout(timeout_s)
        sock.connect(path)
        return sock
    except BaseException:
        sock.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)


def short_socket_path(path: str) -> tuple[str, int | None]:
    """A path that fits into sockaddr_un, and a directory descriptor to close after use.

    A longer path is reached through /proc/self/fd, so a deep directory is no obstacle.

    Raises:
        OSError: the directory of the socket does not exist.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path, None
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{os.path.basename(path)}", directory
