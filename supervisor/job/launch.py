"""Start torchrun, or take up one that an earlier supervisor started, and tell of its end.

The job inherits our standard output and error: no pipe of ours can fill up or break, so its output
flows whatever becomes of us.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from supervisor.errors import UsageError

POLL_MS = 500


class CommandNotFound(UsageError):
    """The command after `--` does not exist."""

    error_id = "command_not_found"
    mend = "activate the environment of the training, or give the command's path"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written down so that a restarted supervisor knows the job again.

    A pid alone proves nothing: it may have been given to another process since.
    """

    fmt: int
    submission: str
    launch: str
    round: int
    pid: int
    started_at: float
    argv: tuple[str, ...]


def check_command(argv: Sequence[str]) -> None:
    """Refuse a command that cannot be started, before anything else is touched.

    Raises:
        CommandNotFound: no such program.
    """
    if shutil.which(argv[0]) is None:
        hint = "give the path of the program after `--`"
        if argv[0] in ("torchrun", "python"):
            hint = "activate the environment in which torch is installed, or give the full path"
        raise CommandNotFound(f"no program {argv[0]!r} on PATH", hint=hint)


def start_time(pid: int) -> float | None:
    """When the process began, as the kernel counts it; None if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except psutil.Error:
        return None


def is_same_process(record: JobRecord) -> bool:
    """Whether the recorded torchrun still runs."""
    found = start_time(record.pid)
    return found is not None and abs(found - record.started_at) < 0.05


class JobProcess:
    """A running torchrun. Its end is told once, from a thread of its own."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self._child = child
        self._has_ended = threading.Event()

    @classmethod
    def start(cls, argv: Sequence[str], env: Mapping[str, str]) -> JobProcess:
        """Start the command in a session of its own.

        Raises:
            OSError: the command cannot be executed.
        """
        child = subprocess.Popen(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True
        )
        return cls(child.pid, child)

    @classmethod
    def take_up(cls, pid: int) -> JobProcess:
        """Watch a process that is not our child; its exit code will not be known."""
        return cls(pid, None)

    def watch(self, on_exit: Callable[[int | None], None]) -> None:
        """Call `on_exit` with the exit code (negative for a signal, None if unknown) once."""
        threading.Thread(
            target=self._wait, args=(on_exit,), name=f"job-{self.pid}", daemon=True
        ).start()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come in time."""
        return self._has_ended.wait(timeout_s)

    def _wait(self, on_exit: Callable[[int | None], None]) -> None:
        code = None
        if self._child is not None:
            code = self._child.wait()
        else:
            self._wait_stranger()
        self._has_ended.set()
        on_exit(code)

    def _wait_stranger(self) -> None:
        """Source: pidfd_open(2): readable when the process has terminated."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            while not poller.poll(POLL_MS):
                continue
        finally:
            os.close(pidfd)
