"""The unix socket of a job on this node: bound under a lock, owner only, peers checked."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from supervisor.clock import Clock
from supervisor.errors import AlreadyRunningError, ExitCode, SupervisorError
from supervisor.private_dirs import make_private
from supervisor.ranks.link import Incoming, Link, LinkClosed
from trainer_sdk.protocol.framing import short_socket_path

ACCEPT_TIMEOUT_S = 0.5
MAX_LINKS = 1024


class RuntimeDirError(SupervisorError):
    """The directory of the socket cannot be used safely."""

    error_id = "runtime_dir_unsafe"
    mend = "set [job] runtime_dir to a directory of this user's own"
    exit_code = ExitCode.CONFIG


@dataclass(frozen=True, slots=True)
class PeerDenied:
    """Somebody who may not talk to us tried to: another user, or one connection too many."""

    pid: int
    uid: int
    reason: str


class RuntimeDir:
    """The job's directory for socket, lock and state file: ours alone, mode 0700.

    Invariant: while this object is open, no other supervisor of this job runs on this node.
    """

    def __init__(self, path: str) -> None:
        """Create or check the directory and take the lock.

        Raises:
            RuntimeDirError: it belongs to someone else, or others may write to it.
            AlreadyRunningError: another supervisor holds the lock; nothing was touched.
        """
        self.path = path
        _make_private(path)
        self._lock_fd = os.open(
            os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            raise AlreadyRunningError(
                f"another supervisor (pid {holder}) runs this job on this node; it holds "
                f"{os.path.join(path, 'lock')}",
                hint="see `lastgasp status`; give the other job another [job] id",
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    @property
    def socket_path(self) -> str:
        return os.path.join(self.path, "supervisor.sock")

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock_fd)


def _make_private(path: str) -> None:
    try:
        make_private(path)
        found = os.stat(path, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            os.chmod(path, 0o700)  # a umask of 0 must not open it
            return
    except OSError as error:
        raise RuntimeDirError(
            f"the runtime directory {path} cannot be made: {error.strerror}",
            hint="set [job] runtime_dir to a directory that this user may write to",
        ) from error
    raise RuntimeDirError(
        f"the runtime directory {path} is not a directory of uid {os.getuid()}",
        hint="remove it, or set [job] runtime_dir",
    )


class RankServer:
    """Accepts connections and hands each a reader thread."""

    def __init__(
        self,
        runtime_dir: RuntimeDir,
        *,
        clock: Clock,
        post: Callable[[Incoming | LinkClosed | PeerDenied], None],
    ) -> None:
        self._path = runtime_dir.socket_path
        self._clock = clock
        self._post = post
        self._stop = threading.Event()
        self._links: set[Link] = set()
        self._thread = threading.Thread(target=self._accept, name="rank-server", daemon=True)

    def start(self) -> None:
        """Bind and listen. A socket left by a killed supervisor is replaced: we hold the lock.

        Raises:
            RuntimeDirError: something else stands in the socket's place.
        """
        path, directory = short_socket_path(self._path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            if _is_own_socket(path):
                os.unlink(path)
            self._sock.bind(path)
            os.chmod(path, 0o600)
        except OSError as error:
            self._sock.close()
            raise RuntimeDirError(
                f"the socket {self._path} cannot be made: {error.strerror}",
                hint="remove what stands there, or set [job] runtime_dir",
            ) from error
        finally:
            if directory is not None:
                os.close(directory)
        self._sock.listen(128)
        self._sock.settimeout(ACCEPT_TIMEOUT_S)
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and every connection."""
        self._stop.set()
        self._thread.join()
        self._sock.close()
        for link in list(self._links):
            link.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    self._stop.wait(ACCEPT_TIMEOUT_S)
                    continue
                raise
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Source: unix(7), SO_PEERCRED: the credentials are those at connect()."""
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        self._links = {link for link in self._links if not link.is_closed}
        refusal = ""
        if uid not in (os.getuid(), 0):
            refusal = f"it belongs to uid {uid}, this supervisor to uid {os.getuid()}"
        elif len(self._links) >= MAX_LINKS:
            refusal = f"there are {MAX_LINKS} connections already"
        if refusal:
            sock.close()
            self._post(PeerDenied(pid=pid, uid=uid, reason=refusal))
            return
        link = Link(sock, peer_pid=pid, clock=self._clock, post=self._post)
        self._links.add(link)
        link.start()


def _is_own_socket(path: str) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()
